"""The line that says how far a run is."""

import asyncio
import sys
from time import perf_counter

from tests.load.call import Call, Outcome


class Progress:
    """Counts calls as they end. On a terminal one line is rewritten, elsewhere a log line is printed now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = perf_counter()
        self._counts = dict.fromkeys(Outcome, 0)
        self._tokens = 0
        self.running = 0
        self._width = 0

    def ended(self, call: Call) -> None:
        """Count one call."""
        self._counts[call.outcome] += 1
        if call.outcome is Outcome.COMPLETED:
            self._tokens += call.output_tokens

    def line(self) -> str:
        """The state of the run in one line; tokens are those of completed requests."""
        elapsed = perf_counter() - self._start
        done = sum(self._counts.values())
        return (
            f"load done={done}/{self._total} running={self.running} completed={self._counts[Outcome.COMPLETED]}"
            f" failed={self._counts[Outcome.FAILED]} disconnected={self._counts[Outcome.DISCONNECTED]}"
            f" output_tok_s={self._tokens / max(elapsed, 1e-9):.1f} elapsed_s={elapsed:.1f}"
        )

    async def show(self) -> None:
        """Print until cancelled, on stderr so that the report on stdout stays clean."""
        tty = sys.stderr.isatty()
        try:
            while True:
                await asyncio.sleep(0.25 if tty else 5.0)
                self._print(tty)
        finally:
            self._print(tty)
            if tty:
                sys.stderr.write("\n")

    def _print(self, tty: bool) -> None:
        line = self.line()
        # A shorter line must wipe what is left of a longer one.
        sys.stderr.write(f"\r{line.ljust(self._width)}" if tty else f"{line}\n")
        sys.stderr.flush()
        self._width = len(line)
