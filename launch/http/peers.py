"""Which processes serve, as the supervisor tells it."""

from memsvc.wire.control import PeerUp


class Peers:
    """Starts and ends of the other processes. A generation counts the starts of one of them."""

    def __init__(self, roles: tuple[str, ...], needs: tuple[str, ...]) -> None:
        self._needs = needs
        self._up: set[str] = set()
        self._silent: set[str] = set()
        self.generations = dict.fromkeys(roles, 0)
        """Newest known generation by role; 0 until it serves for the first time."""

    def up(self, msg: PeerUp) -> bool:
        """Note a start; True if this generation was not known before."""
        self._up.add(msg.role)
        self._silent.discard(msg.role)
        is_new = self.generations.get(msg.role) != msg.generation
        self.generations[msg.role] = msg.generation
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
