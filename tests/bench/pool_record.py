"""What the pool benchmark counts while a load saturates a memory."""

from typing import TYPE_CHECKING, Any

from tests.bench.pool_memory import Waste

if TYPE_CHECKING:
    from tests.bench.pool_engine import Engine, Run

WASTE_EVERY = 8
"""Steps between two looks at the waste."""


class Record:
    """Means over the steps of a window; sums over all requests that have arrived."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._num_steps = 0
        self._sum_running = 0
        self._running: list[int] = []
        """At every step from the first one on."""
        self._saturated_steps = 0
        self._memory_bound_steps = 0
        self._waste: Waste = {}
        self._num_looks = 0
        self._waited_s = 0.0
        self.max_running = 0
        self.num_opened = 0
        self.num_finished = 0
        self.num_gave_up = 0
        self.num_too_large = 0
        self.num_retracts = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0

    # --- events ---

    def opened(self, run: "Run", hit_len: int, waited_s: float) -> None:
        """A request holds memory from now on."""
        self.num_opened += 1
        self.hit_tokens += hit_len
        self.prompt_tokens += run.known
        self._waited_s += waited_s

    def finished(self, run: "Run") -> None:
        """A request has its whole answer."""
        self.num_finished += bool(run.computed)

    def gave_up(self, waited_s: float) -> None:
        """A request was not served in time."""
        self.num_gave_up += 1
        self._waited_s += waited_s

    def step(self, engine: "Engine") -> None:
        """A step is over."""
        self._running.append(len(engine.running))
        if engine.num_steps <= self._first_step:
            return
        num_running = len(engine.running)
        self._num_steps += 1
        self._sum_running += num_running
        self.max_running = max(self.max_running, num_running)
        self._saturated_steps += engine.num_waiting > 0
        self._memory_bound_steps += bool(engine.num_waiting and engine.refused)
        if self._num_steps % WASTE_EVERY == 0:
            self._num_looks += 1
            self._add(engine.memory.waste(num_running, engine.refused))

    def _add(self, waste: Waste) -> None:
        for cause, kinds in waste.items():
            total = self._waste.setdefault(cause, {})
            for kind, num_bytes in kinds.items():
                total[kind] = total.get(kind, 0) + num_bytes

    # --- figures ---

    def mean_running(self, first: float, last: float) -> float:
        """Over a part of all steps, as shares of them."""
        num = len(self._running)
        part = self._running[int(first * num) : int(last * num)]
        return sum(part) / max(1, len(part))

    def row(self, engine: "Engine", still_waiting_s: float, num_arrived: int) -> dict[str, Any]:
        """The figures. still_waiting_s is what those who wait at the end have waited since they last ran."""
        steps, looks = max(1, self._num_steps), max(1, self._num_looks)
        mean = {
            cause: {kind: num_bytes / looks for kind, num_bytes in kinds.items() if num_bytes}
            for cause, kinds in self._waste.items()
        }
        memory = engine.memory
        return {
            "mean_running": self._sum_running / steps,
            "max_running": self.max_running,
            "wait_s": (self._waited_s + still_waiting_s) / max(1, num_arrived),
            "hit_tokens": self.hit_tokens,
            "waste_bytes": sum(sum(kinds.values()) for kinds in mean.values()),
            "waste": {cause: kinds for cause, kinds in mean.items() if kinds},
            "arrived": num_arrived,
            "opened": self.num_opened,
            "finished": self.num_finished,
            "refused_too_large": self.num_too_large,
            "gave_up": self.num_gave_up,
            "retracts": self.num_retracts,
            "prompt_tokens": self.prompt_tokens,
            "saturated_share": self._saturated_steps / steps,
            "memory_bound_share": self._memory_bound_steps / steps,
            "manager_ops_per_s": memory.num_ops / memory.manager_s if memory.manager_s else 0.0,
        }
