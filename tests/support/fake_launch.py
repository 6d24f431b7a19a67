"""A supervisor over fake children: `python -m tests.support.fake_launch RUN_DIR ROLE[=BEHAVIOUR]... [--grace S]`.

Prints "all up first" and "all up again". A BEHAVIOUR of the form N:NAME holds from the N-th start on, one of the form NAME:N up to it.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from launch.child import ChildSpec
from launch.policy import AllUp, Policy
from launch.supervisor import Patience, Supervisor
from memsvc.process import setup_logging


def main() -> int:
    """Run until a signal or a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("roles", nargs="+")
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--ready-limit", type=float, default=60.0)
    parser.add_argument("--hang-timeout", type=float, default=0.0)
    parser.add_argument("--look", type=float, default=1.0)
    args = parser.parse_args()
    setup_logging("launch")
    behaviours = dict(item.partition("=")[::2] for item in args.roles)

    def spec_of(role: str, generation: int) -> ChildSpec:
        behaviour = _behaviour(behaviours[role], generation)
        command = [sys.executable, "-m", "tests.support.fake_child", role, str(args.run_dir), behaviour]
        return ChildSpec(command=command, env=dict(os.environ), grace_s=args.grace)

    def on_up(up: AllUp) -> None:
        print(f"all up {'first' if up.is_first else 'again'}", flush=True)

    patience = Patience(ready_s=args.ready_limit, hang_s=args.hang_timeout, look_s=args.look)
    supervisor = Supervisor(args.run_dir, Policy(tuple(behaviours)), spec_of, on_up, patience)
    return asyncio.run(supervisor.run())


def _behaviour(told: str, generation: int) -> str:
    before, separator, after = told.partition(":")
    if not separator:
        return told
    if before.isdigit():
        return after if generation >= int(before) else ""
    return before if generation <= int(after) else ""


if __name__ == "__main__":
    sys.exit(main())
