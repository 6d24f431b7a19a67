"""A supervisor over fake children: `python -m tests.support.fake_launch RUN_DIR ROLE[=BEHAVIOUR]... [--grace S]`.

Prints "all up first" and "all up again". A BEHAVIOUR of the form N:NAME holds from the N-th start on.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from launch.child import ChildSpec
from launch.policy import AllUp, Policy
from launch.supervisor import Supervisor
from memsvc.process import setup_logging


def main() -> int:
    """Run until a signal or a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("roles", nargs="+")
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--ready-limit", type=float, default=60.0)
    args = parser.parse_args()
    setup_logging("launch")
    behaviours = dict(item.partition("=")[::2] for item in args.roles)

    def spec_of(role: str, generation: int) -> ChildSpec:
        first, separator, name = behaviours[role].partition(":")
        behaviour = name if separator and generation >= int(first) else "" if separator else first
        command = [sys.executable, "-m", "tests.support.fake_child", role, str(args.run_dir), behaviour]
        return ChildSpec(command=command, env=dict(os.environ), grace_s=args.grace)

    def on_up(up: AllUp) -> None:
        print(f"all up {'first' if up.is_first else 'again'}", flush=True)

    supervisor = Supervisor(args.run_dir, Policy(tuple(behaviours)), spec_of, on_up, args.ready_limit)
    return asyncio.run(supervisor.run())


if __name__ == "__main__":
    sys.exit(main())
