"""Workers -> supervisor, and supervisor -> front."""

from memsvc.wire.base import Msg


class Ready(Msg, frozen=True):
    """The process serves now. lines: what an operator should read at start, one fact a line."""

    role: str
    pid: int
    lines: list[str] = []


class Fatal(Msg, frozen=True):
    """The process cannot go on, and a restart would not help."""

    role: str
    pid: int
    message: str


class PeerUp(Msg, frozen=True):
    """role serves. generation counts its starts; after a change requests in flight must be sent again."""

    role: str
    generation: int


class PeerDown(Msg, frozen=True):
    """role is gone; PeerUp follows, or the server stops."""

    role: str


ToLaunch = Ready | Fatal
ToFront = PeerUp | PeerDown
