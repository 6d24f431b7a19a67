"""What must hold after a soak, each as one line that says why or why not, and the table of the run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draft_worker.train.evaluate import length, length_error
from tests.bench.soak_requests import Ended
from tests.bench.soak_watch import HELD_STATES, Reading, Window
from tests.load.answers import Check as Audit
from tests.load.call import Outcome

NUM_ERRORS = 4.0
"""Standard errors by which the acceptance of both halves may differ."""
_FINISHES = ("stop", "length")
_LEAST_ANSWERS = 10
"""Of a half, for its acceptance to have an error."""
_SHOWN = 3
_COLUMNS = "{:>7} {:>8} {:>9} {:>8} {:>10} {:>9} {:>9} {:>11}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that was seen."""

    wanted_steps: int
    ended: list[Ended]
    """In order of index."""
    readings: list[Reading]
    """The first before any request, the last after all."""
    audit: Audit | None
    """Of the memory service after the last answer; None if it did not answer."""
    audit_flushed: Audit | None
    """After the prefix cache was emptied."""
    health: int
    """Status of /health at the end, 0 if there is no server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One of the things that must hold."""

    name: str
    is_ok: bool
    detail: str


def check_all(run: Run, log: Sequence[str], stopped: str) -> list[Check]:
    """stopped: what was wrong with the end of the server, empty if it ended by Ctrl-C as it should."""
    return [
        check_steps(run), check_answers(run.ended), check_ends(run.ended), check_books(run), check_halves(run.ended),
        check_pool(run), check_alive(run, stopped), check_log(log),
    ]  # fmt: skip


def check_steps(run: Run) -> Check:
    """As many as were wanted."""
    steps = run.readings[-1].steps - run.readings[0].steps
    return Check(name="verify steps", is_ok=steps >= run.wanted_steps, detail=f"{steps} of {run.wanted_steps}")


def check_answers(ended: Sequence[Ended]) -> Check:
    """No request failed: HTTP 200, no error in the answer, no connection lost, an end in time."""
    failed = [one for one in ended if one.outcome is Outcome.FAILED]
    outcomes = Counter(one.outcome.value for one in ended)
    text = ", ".join(f"{num} {name}" for name, num in sorted(outcomes.items())) or "no request was sent"
    return Check(
        name="answers", is_ok=bool(ended) and not failed,
        detail="; ".join([text, *(f"request {one.index}: {one.error}" for one in failed[:_SHOWN])]),
    )  # fmt: skip


def check_ends(ended: Sequence[Ended]) -> Check:
    """Who stayed got one finish reason, one end, and no more tokens than asked for; who left got one at most."""
    wrong = [one for one in ended if one.outcome is not Outcome.FAILED and not _ends_well(one)]
    reasons = Counter(one.finishes[0] for one in ended if one.outcome is Outcome.COMPLETED and one.finishes)
    text = ", ".join(f"{num} by {reason}" for reason, num in sorted(reasons.items()))
    shown = [f"request {one.index}: {one.finishes}, {one.num_ends} ends, {one.output_tokens} tokens of {one.max_tokens}"
             for one in wrong[:_SHOWN]]  # fmt: skip
    return Check(name="ended once", is_ok=not wrong, detail="; ".join([text, *shown]))


def _ends_well(one: Ended) -> bool:
    if one.outcome is Outcome.DISCONNECTED:
        return len(one.finishes) <= 1 and one.num_ends <= 1
    is_one = len(one.finishes) == one.num_ends == 1 and one.finishes[0] in _FINISHES
    full = one.finishes != ["length"] or one.output_tokens == one.max_tokens
    return is_one and full and 1 <= one.output_tokens <= one.max_tokens


def check_books(run: Run) -> Check:
    """The server counts the same ends: ours, and those of clients that left before they read them."""
    before, after = run.readings[0].finished, run.readings[-1].finished
    counted = {reason: num - before.get(reason, 0) for reason, num in after.items() if num != before.get(reason, 0)}
    outcomes = Counter(one.outcome for one in run.ended)
    done, left = outcomes[Outcome.COMPLETED], outcomes[Outcome.DISCONNECTED]
    answered = sum(counted.get(reason, 0) for reason in _FINISHES)
    others = set(counted) - {*_FINISHES, "abort"}
    total = answered + counted.get("abort", 0)
    is_ok = not others and done <= answered <= done + left and total <= len(run.ended)
    return Check(name="server's count", is_ok=is_ok, detail=f"{counted} for {done} answers and {left} that were left")


def check_halves(ended: Sequence[Ended]) -> Check:
    """Acceptance of the second half of the requests is that of the first, but for chance."""
    done = [one for one in sorted(ended, key=lambda one: one.index) if one.outcome is Outcome.COMPLETED and one.steps]
    halves = [done[: len(done) // 2], done[len(done) // 2 :]]
    (a, error_a), (b, error_b) = (_acceptance(half) for half in halves)
    error = float(np.hypot(error_a, error_b))
    is_ok = len(halves[0]) >= _LEAST_ANSWERS and abs(b - a) <= NUM_ERRORS * error
    return Check(
        name="acceptance", is_ok=is_ok,
        detail=f"{a:.4f} +- {error_a:.4f} then {b:.4f} +- {error_b:.4f} over {len(done)} answers, "
        f"apart {abs(b - a) / error if error else 0:.1f} standard errors",
    )  # fmt: skip


def _acceptance(ended: Sequence[Ended]) -> tuple[float, float]:
    """Accept length and its standard error over answers."""
    # For both figures a block that accepted two counts like two that accepted one.
    counts = np.array([[one.steps - one.accepted, one.accepted] for one in ended], dtype=float).reshape(-1, 2)
    return length(counts), length_error(counts)


def check_pool(run: Run) -> Check:
    """Idle, every byte accounted for, no page held; and once the cache is emptied, no page but free ones."""
    problems = [*_unsettled(run.audit, HELD_STATES, "at the end")]
    problems += _unsettled(run.audit_flushed, (*HELD_STATES, "tree"), "after the flush")
    cached = sum(states.get("tree", 0) for states in run.audit.pages.values()) if run.audit else 0
    return Check(name="pool", is_ok=not problems, detail="; ".join(problems) or f"no page held, {cached} cached")


def _unsettled(audit: Audit | None, states: Sequence[str], when: str) -> list[str]:
    if audit is None:
        return [f"no audit {when}"]
    found = [] if audit.idle else [f"not idle {when}"]
    found += [f"{audit.leaked_bytes} bytes leaked {when}"] if audit.leaked_bytes else []
    found += [f"{problem} {when}" for problem in audit.problems[:_SHOWN]]
    held = {kind: {s: pages[s] for s in states if pages.get(s)} for kind, pages in audit.pages.items()}
    return found + [f"{kind} pages {pages} {when}" for kind, pages in held.items() if pages]


def check_alive(run: Run, stopped: str) -> Check:
    """Healthy at the end, with the processes that it began with, and stopped when told to."""
    before, after = run.readings[0], run.readings[-1]
    problems = [] if run.health == 200 else [f"/health answered {run.health or 'nothing'}"]
    restarts = after.num_starts - before.num_starts
    problems += [f"{restarts} processes were started anew"] if restarts else []
    problems += [f"down: {', '.join(after.down)}"] if after.down else []
    problems += [stopped] if stopped else []
    return Check(name="alive", is_ok=not problems, detail="; ".join(problems) or "healthy, no restart, exit status 0")


def check_log(lines: Sequence[str]) -> Check:
    """Neither errors nor tracebacks."""
    bad = [line.strip() for line in lines if any(word in line for word in (" ERROR ", " CRITICAL ", "Traceback"))]
    warnings = sum(" WARNING " in line for line in lines)
    return Check(
        name="log", is_ok=not bad,
        detail="; ".join([f"{len(lines)} lines, {len(bad)} errors, {warnings} warnings", *bad[:_SHOWN]]),
    )  # fmt: skip


def table(parts: Sequence[Window], checks: Sequence[Check]) -> str:
    """Windows, then checks."""
    lines = [_COLUMNS.format("steps", "blocks", "accept", "tok/s", "ms a step", "running", "pages", "(most held)")]
    lines += [
        _COLUMNS.format(
            part.steps, part.blocks, f"{part.accept_length:.3f}", part.tokens_per_s, part.ms_per_step,
            part.most_running, part.most_held_pages, "",
        ).rstrip()
        for part in parts
    ]  # fmt: skip
    return "\n".join([*lines, *(f"{'ok  ' if c.is_ok else 'FAIL'} {c.name:<15} {c.detail}" for c in checks)])
