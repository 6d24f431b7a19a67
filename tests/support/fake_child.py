"""A tiny process in the place of a real one: `python -m tests.support.fake_child ROLE RUN_DIR [BEHAVIOUR]`.

It appends what happens to RUN_DIR/events ("ROLE ready PID", "ROLE stopped", "front PeerUp target 2")
and serves until SIGTERM, with signs of life. BEHAVIOUR: crash (ends at once), fatal (says Fatal), deaf (ignores SIGTERM),
mute (never says Ready), stuck (serves, but gives no sign of life).
"""

import os
import signal
import sys
from pathlib import Path

import zmq

from memsvc.heart import BEAT_S, Heart
from memsvc.inbox import PullInbox
from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm
from memsvc.transport import bind
from memsvc.wire.control import Fatal, PeerDown, PeerList, PeerSilent, PeerUp, Ready, ToFront
from memsvc.wire.links import LAUNCH_FRONT


def main(role: str, run_dir: Path, behaviour: str) -> int:
    """Play the role."""
    die_with_parent()
    events = run_dir / "events"
    note(events, f"{role} start")
    stop = StopFlag()
    install_sigterm(stop.set)
    if behaviour == "crash":
        return 7
    if behaviour == "fatal":
        announce(run_dir, Fatal(role, os.getpid(), "the model has no layers"))
        return 1
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context() as context:
        serve(role, run_dir, context, stop, behaviour)
    note(events, f"{role} stopped")
    return 0


def serve(role: str, run_dir: Path, context: zmq.Context, stop: StopFlag, behaviour: str) -> None:
    """Note what the supervisor says to a front, until stop."""
    poller = zmq.Poller()
    poller.register(stop.fd, zmq.POLLIN)
    inbox = None
    if role == "front":
        inbox = PullInbox(bind(context, LAUNCH_FRONT, run_dir), LAUNCH_FRONT)
        poller.register(inbox.socket, zmq.POLLIN)
    heart = Heart(run_dir, role)
    if behaviour != "mute":
        note(run_dir / "events", f"{role} ready {os.getpid()}")
        announce(run_dir, Ready(role, os.getpid(), [f"{role} is fake"]))
    while not stop.is_set:
        if behaviour not in ("mute", "stuck"):
            heart.beat()
        poller.poll(BEAT_S * 1000)
        while inbox is not None and (msg := inbox.recv()) is not None:
            for one in flat(msg):
                generation = f" {one.generation}" if isinstance(one, PeerUp) else ""
                note(run_dir / "events", f"front {type(one).__name__} {one.role}{generation}")
    heart.close()
    if inbox is not None:
        inbox.socket.close()


def flat(msg: ToFront) -> list[PeerUp | PeerDown | PeerSilent]:
    """A list of peers as a message each."""
    if not isinstance(msg, PeerList):
        return [msg]
    return [*(PeerUp(role, msg.generations[role]) for role in msg.up), *map(PeerSilent, msg.silent)]


def note(events: Path, line: str) -> None:
    """One line, written at once whatever else writes there."""
    fd = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or [""])[0]))
