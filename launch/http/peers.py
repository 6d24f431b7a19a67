"""Which processes serve, as the supervisor tells it."""

from collections.abc import Mapping

from launch.policy import FRONT


class Peers:
    """Starts and ends of the processes. A generation counts the starts of one of them."""

    def __init__(self, needs: tuple[str, ...], front: int) -> None:
        """front: the generation of this process, which serves whenever anybody can ask."""
        self._needs = needs
        self._up: set[str] = {FRONT}
        self._silent: set[str] = set()
        self._served: dict[str, int] = {}
        """Generation that last served, by role."""
        self.generations: dict[str, int] = {FRONT: front}
        """Newest known generation by role, 0 if it was never started."""

    def know(self, generations: Mapping[str, int]) -> None:
        """Note which processes there are."""
        self.generations |= generations

    def up(self, role: str, generation: int) -> bool:
        """Note that role serves; True if this generation of it did not yet."""
        self._up.add(role)
        self._silent.discard(role)
        self.generations[role] = generation
        is_new = self._served.get(role) != generation
        self._served[role] = generation
        return is_new

    def down(self, role: str) -> None:
        """Note that role is gone."""
        self._up.discard(role)
        self._silent.discard(role)

    def silent(self, role: str) -> None:
        """Note that role gives no sign of life."""
        self._silent.add(role)

    def is_up(self, role: str) -> bool:
        """Whether role serves."""
        return role in self._up

    def report(self) -> dict[str, dict[str, bool | int]]:
        """Every role, whether it serves, and its newest known generation."""
        return {role: {"up": role in self._up, "generation": num} for role, num in self.generations.items()}

    @property
    def missing(self) -> list[str]:
        """Needed roles that do not serve."""
        return [role for role in self._needs if role not in self._up]

    @property
    def obstacles(self) -> list[str]:
        """Why a request would not be served now, for people; empty if it would."""
        # A draft that is down is done without, but one that hangs keeps every request waiting.
        return [f"{role} is not up" for role in self.missing] + [
            f"{role} gives no sign of life" for role in sorted(self._silent)
        ]
