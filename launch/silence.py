"""How long each process has given no sign of life. No processes and no clock here: the supervisor looks once a second.

Counted in looks, not by the clock: while the supervisor itself is stopped or starved nobody can be heard, and that
time must not be held against the others.
"""

LOOK_S = 1.0
"""Between two looks."""
SILENT_LOOKS = 10
"""Looks without a sign of life after which a process counts as silent. Beats come every second, or with every layer
of a model; the shortest patience of a worker with a memory service that does not answer is longer."""


LOADING_LOOKS = 10
"""Looks between two lines about a process that still loads. Large models are read, and kernels compiled, for minutes."""


class Loading:
    """Who has been started and is not ready yet."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}

    def begin(self, role: str) -> None:
        """role has been started."""
        self._looks[role] = 0

    def end(self, role: str) -> None:
        """It is ready, or has ended."""
        self._looks.pop(role, None)

    def look(self) -> list[tuple[str, int]]:
        """Time for a look: about whom there is something to say, and after how many looks."""
        for role in self._looks:
            self._looks[role] += 1
        return [(role, looks) for role, looks in self._looks.items() if looks % LOADING_LOOKS == 0]


class Silence:
    """Processes are watched from Ready on: before it they load, and the supervisor has another limit for that."""

    def __init__(self, hang_looks: int) -> None:
        """hang_looks: silence after which a process is said to hang. 0 = never."""
        self._hang_looks = hang_looks
        self._looks: dict[str, int] = {}

    def heard(self, role: str) -> bool:
        """Note a sign of life, and watch role from now on. True if it had been silent."""
        before = self._looks.get(role, 0)
        self._looks[role] = 0
        return before >= SILENT_LOOKS

    def end(self, role: str) -> None:
        """Watch role no more."""
        self._looks.pop(role, None)

    def look(self) -> tuple[list[str], list[str]]:
        """Time for a look: who counts as silent since now, and who hangs."""
        for role in self._looks:
            self._looks[role] += 1
        silent = [role for role, looks in self._looks.items() if looks == SILENT_LOOKS]
        hanging = [role for role, looks in self._looks.items() if 0 < self._hang_looks <= looks]
        return silent, hanging
