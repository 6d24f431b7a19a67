"""The Plan message: what the draft is told after a step was put on the device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from memsvc.wire.base import FinishReason, PageId
from memsvc.wire.spec import Plan, SlotOpen
from target_worker.cuda.executor import Flight
from target_worker.req import Req


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What a plan is made of."""

    number: int
    after: int
    """Value of F behind the flight."""
    closes: Sequence[int]
    """Slots that were given up."""
    clear: Sequence[PageId]
    flight: Flight | None
    """The newest step, whose features are told; None if there was none since the last plan."""
    known: Sequence[Req]
    """Everybody the draft is to know."""
    blocks: Collection[Req]
    """Those that decode in the step behind."""
    late: Sequence[Req]
    """Of these, those whose prompt ended in a flight before, and that got no drafts then."""


def told_of(facts: PlanFacts) -> list[Req]:
    """Whose features the plan brings: also those of requests that have ended, which the next turn needs."""
    if facts.flight is None:
        return []
    known = set(facts.known)
    reqs = [*facts.flight.blocks, *facts.flight.chunks]
    return [req for req in reqs if req in known and req.finish is not FinishReason.ABORT]


def members_of(facts: PlanFacts) -> list[Req]:
    """Whose slots the flight has moved on; after a prompt a request gets drafts in time for its first block."""
    if facts.flight is None:
        return list(facts.late)
    starting = {req for req in facts.flight.ending if req in facts.blocks}
    moved = starting.union(facts.flight.blocks)
    return [*(req for req in told_of(facts) if req in moved), *facts.late]


def make_plan(facts: PlanFacts, num_drafts: int) -> Plan:
    """Everything that is new, and num_drafts drafts for the step behind the flight."""
    members = [req.row for req in members_of(facts)]
    msg = Plan(
        number=facts.number, after=facts.after, closes=list(facts.closes),
        opens=[SlotOpen(req.row, list(req.draft.pages)) for req in facts.known if not req.draft.is_open],
        page_slots=[], page_idxs=[], page_ids=[], clear_pages=list(facts.clear),
        write_slots=[], write_starts=[], write_lens=[], write_rows=[],
        members=members, num_drafts=num_drafts if members else 0,
    )  # fmt: skip
    return _with_writes(_with_pages(msg, facts), facts)


def _with_pages(msg: Plan, facts: PlanFacts) -> Plan:
    """New pages of those that are open."""
    changes = [(req, idx) for req in facts.known if req.draft.is_open for idx in req.draft.changed]
    return msgspec.structs.replace(
        msg,
        page_slots=[req.row for req, _ in changes],
        page_idxs=[idx for _, idx in changes],
        page_ids=[req.draft.pages[idx] for req, idx in changes],
    )


def _with_writes(msg: Plan, facts: PlanFacts) -> Plan:
    """Features of prompt chunks."""
    features = facts.flight.features if facts.flight is not None else {}
    chunks = [(req, features[req]) for req in told_of(facts) if req in features]
    return msgspec.structs.replace(
        msg,
        write_slots=[req.row for req, _ in chunks],
        write_starts=[rows.start for _, rows in chunks],
        write_lens=[rows.num for _, rows in chunks],
        write_rows=[rows.row for _, rows in chunks],
    )


def book(known: Sequence[Req]) -> None:
    """The draft has been sent a plan that was made of `known`."""
    for req in known:
        req.draft.is_open = True
        req.draft.changed.clear()
