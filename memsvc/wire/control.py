"""Workers -> supervisor, and supervisor -> front."""

from memsvc.wire.base import Msg


class Ready(Msg, frozen=True):
    """The process serves now; a draft says it once a target has found it.

    lines: what an operator should read at start, one fact a line. device_bytes: what it holds of a CUDA device beside
    the arena and its context.
    """

    role: str
    pid: int
    lines: list[str] = []
    device_bytes: int = 0


class Fatal(Msg, frozen=True):
    """The process cannot go on, and a restart would not help."""

    role: str
    pid: int
    message: str


class Alive(Msg, frozen=True):
    """The loop of the process goes round: about once a second from Ready on, and during long work as it moves on."""

    role: str
    pid: int


class PeerList(Msg, frozen=True):
    """All other processes of the run as they are now: what a front is told first, before it answers anybody.

    generations: how often each was started, 0 if never. up: those that serve. silent: of these, those that give no sign
    of life.
    """

    generations: dict[str, int]
    up: list[str]
    silent: list[str]


class PeerUp(Msg, frozen=True):
    """role serves. generation counts its starts; after a change requests in flight must be sent again."""

    role: str
    generation: int


class PeerDown(Msg, frozen=True):
    """role is gone. PeerUp follows, or the server stops; without the draft, which is optional, it may go on for good."""

    role: str


class PeerSilent(Msg, frozen=True):
    """role runs but gives no sign of life. PeerUp with the same generation follows when it does, else PeerDown."""

    role: str


ToLaunch = Ready | Fatal | Alive
ToFront = PeerList | PeerUp | PeerDown | PeerSilent
