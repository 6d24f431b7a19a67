"""Figures of a run: the JSON report and the table for people."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.load.answers import Check
from tests.load.call import Call, Outcome
from tests.load.options import LoadOptions
from tests.load.run import RunResult

# Not idle pages: whatever is in one of these states while no request runs is held by somebody.
_HELD_STATES = ("private", "limbo", "quarantine")


def percentile(values: list[float], q: float) -> float | None:
    """The q-quantile of values, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _times(name: str, seconds: list[float]) -> dict[str, float | None]:
    """name_p50, name_p90 and name_p99 in milliseconds."""
    values = [s * 1e3 for s in seconds]
    points = {f"{name}_p{percent}": percentile(values, percent / 100) for percent in (50, 90, 99)}
    return {key: None if value is None else round(value, 3) for key, value in points.items()}


def accept_length(result: RunResult) -> float | None:
    """Mean tokens a verify step, the bonus token included.

    From the answers that carry it; else from the server's counters, which also see other clients;
    None if the server says nothing.
    """
    told = [call for call in result.calls if call.spec_steps]
    if told:
        steps = sum(call.spec_steps or 0 for call in told)
        return round(1.0 + sum(call.spec_accepted for call in told) / steps, 4)
    if result.counters_before is not None and result.counters_after is not None:
        return round(result.counters_after.accept_length_since(result.counters_before), 4)
    return None


def _errors(calls: list[Call]) -> list[dict[str, Any]]:
    """Failures by kind with their number and one example, most frequent first."""
    failed = [call for call in calls if call.outcome is Outcome.FAILED]
    examples = {call.error: call.detail for call in reversed(failed)}
    return [
        {"kind": kind, "count": count, "example": examples[kind]}
        for kind, count in Counter(call.error for call in failed).most_common()
    ]


def _memory(check: Check | None) -> dict[str, Any]:
    if check is None:
        return {"leaked_bytes": None, "held_pages": None, "idle_at_end": None, "problems": None}
    held = sum(states.get(state, 0) for states in check.pages.values() for state in _HELD_STATES)
    return {
        "leaked_bytes": check.leaked_bytes,
        "held_pages": held,
        "idle_at_end": check.idle,
        "problems": check.problems,
        "pages": check.pages,
    }


def without_folders(info: Any) -> Any:
    """info with the last part of each absolute path alone: the folders are one machine's."""
    match info:
        case dict():
            return {key: without_folders(value) for key, value in info.items()}
        case list():
            return [without_folders(value) for value in info]
        case str():
            flag, equals, value = info.rpartition("=")
            return flag + equals + Path(value).name if value.startswith("/") else info
        case _:
            return info


def make_report(result: RunResult, options: LoadOptions) -> dict[str, Any]:
    """The report as it goes into the JSON file. Figures that could not be had are None."""
    done = [call for call in result.calls if call.outcome is Outcome.COMPLETED]
    outcomes = Counter(call.outcome for call in result.calls)
    output_tokens = sum(call.output_tokens for call in done)
    num_chunks = sum(call.num_chunks for call in result.calls)
    return {
        "completed": outcomes[Outcome.COMPLETED],
        "failed": outcomes[Outcome.FAILED],
        "disconnected": outcomes[Outcome.DISCONNECTED],
        "output_tok_s": round(output_tokens / result.wall_s, 3),
        **_times("ttft_ms", [call.ttft_s for call in done if call.ttft_s is not None]),
        **_times("tpot_ms", [call.tpot_s for call in done if call.tpot_s is not None]),
        **_times("e2e_ms", [call.e2e_s for call in done]),
        "accept_length": accept_length(result),
        "cached_tokens": sum(call.cached_tokens for call in done),
        **_memory(result.check),
        "prompt_tokens": sum(call.usage.prompt_tokens for call in done if call.usage is not None),
        "output_tokens": output_tokens,
        "without_usage": sum(call.usage is None for call in done),
        "errors": _errors(result.calls),
        "wall_s": round(result.wall_s, 3),
        "client_cpu_s": round(result.client_cpu_s, 3),
        "client_cpu_us_per_chunk": round(result.client_cpu_s * 1e6 / num_chunks, 1) if num_chunks else None,
        "model": result.model,
        "concurrency": options.concurrency,
        "server_info": without_folders(result.server_info),
    }


def verdict(report: dict[str, Any]) -> str:
    """Why the run is not a success, empty if it is.

    Failed requests, leaked bytes, broken invariants, or a server that goes on working for clients that left.
    """
    reasons = []
    if report["failed"]:
        reasons.append(f"{report['failed']} requests failed")
    if report["leaked_bytes"]:
        reasons.append(f"{report['leaked_bytes']} bytes leaked")
    if report["problems"]:
        reasons.append(f"the service's check found {len(report['problems'])} problems")
    if report["idle_at_end"] is False:
        reasons.append("the server did not become idle after the last answer")
    return ", ".join(reasons)


def table(report: dict[str, Any]) -> str:
    """The report for people: one figure a line, errors and problems at the end."""
    nested = ("errors", "problems", "pages", "server_info")
    rows = [f"{key:<24}{'-' if value is None else value}" for key, value in report.items() if key not in nested]
    rows += [f"error {e['count']}x {e['kind']}: {e['example']}" for e in report["errors"]]
    rows += [f"problem {problem}" for problem in report["problems"] or []]
    return "\n".join(rows)


def save_texts(path: Path, calls: list[Call]) -> None:
    """One JSON object a line with index, prompt, text, finish_reason and outcome, for tests.load.compare."""
    with path.open("w", encoding="utf-8") as file:
        for call in calls:
            record = {
                "index": call.index,
                "prompt": call.prompt,
                "text": call.text,
                "finish_reason": call.finish_reason,
                "outcome": call.outcome,
                "output_tokens": call.output_tokens,
            }
            file.write(json.dumps(record) + "\n")
