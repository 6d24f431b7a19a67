"""What a server's /metrics say in the course of a soak, and its windows of equally many verify steps."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_LINE = re.compile(r"^(memsvc_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
HELD_STATES = ("private", "limbo", "quarantine")
"""Pages in one of these are held by a request, a step or a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Counters since the server's start, and what is so now."""

    at_s: float
    steps: int
    """Steps of the target that verified drafts, of however many requests."""
    blocks: int
    """Blocks that were verified in them, one a request."""
    accepted: int
    tokens: int
    running: int
    """Requests that hold memory."""
    held_pages: int
    num_starts: int
    """Of processes."""
    down: tuple[str, ...]
    """Processes that do not serve."""
    finished: Mapping[str, int]
    """Requests by how they ended."""


def read_metrics(text: str, at_s: float) -> Reading:
    """Of Prometheus' text format; what is not there is 0."""
    samples = [(name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _LINE.findall(text)]

    def total(name: str, label: str = "", among: Sequence[str] = (), but: Sequence[str] = ()) -> int:
        return round(
            sum(
                value
                for found, labels, value in samples
                if found == name and (not among or labels[label] in among) and labels.get(label) not in but
            )
        )

    return Reading(
        at_s=at_s,
        steps=total("memsvc_spec_width_steps_total", "drafts", but=("0",)),
        blocks=total("memsvc_spec_steps_total"),
        accepted=total("memsvc_spec_accepted_tokens_total"),
        tokens=total("memsvc_generation_tokens_total"),
        running=total("memsvc_requests_running"),
        held_pages=total("memsvc_pages", "state", HELD_STATES),
        num_starts=total("memsvc_process_starts"),
        down=tuple(labels["role"] for name, labels, value in samples if name == "memsvc_process_up" and not value),
        finished={
            labels["finished_reason"]: round(value)
            for name, labels, value in samples
            if name == "memsvc_requests_finished_total"
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A part of the run."""

    steps: int
    blocks: int
    accept_length: float
    """The target's own token of each block included; 1 without blocks."""
    tokens_per_s: float
    ms_per_step: float
    most_running: int
    most_held_pages: int


def windows(readings: Sequence[Reading], num: int) -> list[Window]:
    """num of them, cut at the first reading past each part of the steps; fewer if readings are too far apart."""
    return [_window(readings[a : b + 1]) for a, b in pairwise(_cuts(readings, num))]


def _cuts(readings: Sequence[Reading], num: int) -> Iterator[int]:
    """Ascending places in readings: the first, and each that is the first with so many parts of all steps."""
    first, steps = readings[0].steps, readings[-1].steps - readings[0].steps
    part = 0
    for place, reading in enumerate(readings):
        done = reading.steps - first
        if steps and done >= steps * part / num:
            yield place
            part = done * num // steps + 1


def _window(readings: Sequence[Reading]) -> Window:
    a, b = readings[0], readings[-1]
    steps, blocks, seconds = b.steps - a.steps, b.blocks - a.blocks, b.at_s - a.at_s
    return Window(
        steps=steps,
        blocks=blocks,
        accept_length=round(1 + (b.accepted - a.accepted) / max(1, blocks), 4),
        tokens_per_s=round((b.tokens - a.tokens) / max(1e-9, seconds), 1),
        ms_per_step=round(1e3 * seconds / max(1, steps), 3),
        most_running=max(reading.running for reading in readings),
        most_held_pages=max(reading.held_pages for reading in readings),
    )
