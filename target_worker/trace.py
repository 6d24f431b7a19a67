"""--spec-trace: where the host's time of a step goes, one line a step, microseconds."""

import logging
import time

from memsvc.wire.spec import Drafted
from target_worker.plan import StepPlan

logger = logging.getLogger(__name__)


class StepTrace:
    """Collects host times between marks; everything is a no-op at level 0."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._at = 0.0
        self._num = 0
        self._ctx = 0
        self._spans: dict[str, float] = {}

    def start(self, plan: StepPlan) -> None:
        """A step over `plan` begins."""
        if self._level:
            self._num = len(plan.decode)
            self._ctx = sum(req.computed_len for req in plan.decode)
            self._spans = {}
            self._at = time.perf_counter()

    def mark(self, name: str) -> None:
        """The span since the last mark was `name`."""
        if self._level:
            now = time.perf_counter()
            self._spans[name] = (now - self._at) * 1e6
            self._at = now

    def end(self, drafted: Drafted | None) -> None:
        """Print the line. fwd, head and select are the draft's own times."""
        if not self._level:
            return
        fwd, head, select = (drafted.fwd_us, drafted.head_us, drafted.select_us) if drafted else (0.0, 0.0, 0.0)
        spans = {name: round(self._spans.get(name, 0.0)) for name in ("draft", "verify", "accept")}
        logger.info(
            "[spec-phase] n=%d ctx=%d fwd=%d head=%d select=%d draft=%d verify=%d accept=%d",
            self._num, self._ctx, fwd, head, select,
            spans["draft"], spans["verify"], spans["accept"],
        )  # fmt: skip
