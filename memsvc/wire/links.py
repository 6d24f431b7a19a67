"""The links between processes as data: who binds, which sockets, which messages each way."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsvc.wire import admin, control, mem, spec, text

MAX_MSG_BYTES = 64 << 20
"""ZMQ MAXMSGSIZE of every socket: tokens of all requests of a batch, 16 million of them, and below harm."""


@dataclass(frozen=True, slots=True)
class Link:
    """`name` is also the socket's file in the run directory. Frames: see docs/protocol.md."""

    name: str
    binder: str
    sockets: str
    there: Any
    """Union of messages to the binder."""
    back: Any = None
    """Union of messages from the binder, None on one-way links."""

    def endpoint(self, run_dir: Path) -> str:
        """The ZMQ address of this link in a run's directory (mode 0700)."""
        return f"ipc://{run_dir / self.name}.sock"


MEM = Link("mem", "memsvc", "DEALER/ROUTER", mem.MemRequest, mem.MemReply)
MEM_ADMIN = Link("mem-admin", "memsvc", "DEALER/ROUTER", admin.AdminRequest, admin.AdminReply)
SPEC = Link("spec", "draft", "DEALER/ROUTER", spec.SpecRequest, spec.SpecReply)
FRONT_TOK = Link("front-tok", "tokenizer", "PUSH/PULL", text.FrontToTok)
TARGET_TOK = Link("target-tok", "tokenizer", "PUSH/PULL", text.TargetToTok)
TOK_TARGET = Link("tok-target", "target", "PUSH/PULL", text.TokToTarget)
TOK_FRONT = Link("tok-front", "front", "PUSH/PULL", text.TokToFront)
TARGET_FRONT = Link("target-front", "front", "PUSH/PULL", text.TargetToFront)
ALL_LAUNCH = Link("all-launch", "launch", "PUSH/PULL", control.ToLaunch)
LAUNCH_FRONT = Link("launch-front", "front", "PUSH/PULL", control.ToFront)

LINKS = [
    MEM, MEM_ADMIN, SPEC, FRONT_TOK, TARGET_TOK, TOK_TARGET, TOK_FRONT, TARGET_FRONT, ALL_LAUNCH, LAUNCH_FRONT,
]  # fmt: skip
