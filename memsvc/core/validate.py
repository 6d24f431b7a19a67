"""Everything that can be wrong with a Step, found before anything is changed."""

from typing import Final

from memsvc.core.config import PoolConfig
from memsvc.core.errors import RequestError
from memsvc.core.kinds import UNBOUNDED
from memsvc.core.radix import TOKEN_BYTES
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.wire.base import ReqId
from memsvc.wire.mem import Commit, Freeze, OpenReq, Reserve, Step

CommitRow = tuple[Req, int, int, bytes]
"""Request, target_len, draft_len, tokens."""
ReserveRow = tuple[Req, int]
"""Request, and the tokens it is to have slots for; those that have them already are left out."""
CLOSE_REASONS: Final = ("finish", "abort", "retract")


def check_step(client: Client, step: Step, config: PoolConfig) -> tuple[list[CommitRow], list[ReserveRow]]:
    """Raise RequestError, with the numbers, unless every part of step can be carried out in order.

    Returns the rows of its commit and its reservation, looked up.
    """
    reqs = client.engine.reqs
    if client.role != "target":
        raise RequestError(f"a {client.role} does not step; requests belong to their target")
    if step.done_step >= step.num:
        raise RequestError(f"done_step {step.done_step} of step {step.num}: only earlier steps can be done")
    commits = check_commit(reqs, step.commit, config.page_size) if step.commit else []
    if step.freeze:
        lens = {req.rid: target_len for req, target_len, _, _ in commits}
        _check_freeze(client, step.freeze, lens, config)
    if step.reset_draft:
        _check_rids("reset_draft", reqs, step.reset_draft.rids)
    closing: set[ReqId] = set()
    if step.closes:
        closing = _check_closes(reqs, step)
    reserves: list[ReserveRow] = []
    if step.reserve:
        lens = {req.rid: target_len for req, target_len, _, _ in commits}
        reserves = _check_reserve(reqs, step.reserve, lens, config)
        if closing and not closing.isdisjoint(step.reserve.rids):
            raise RequestError(f"reserve: rids {closing.intersection(step.reserve.rids)} are closed by the same step")
    if step.opens:
        _check_opens(reqs, step.opens, closing)
    return commits, reserves


def check_commit(reqs: dict[ReqId, Req], part: Commit, page_size: int) -> list[CommitRow]:
    """The rows, each with its request."""
    rids, targets, drafts, texts = part.rids, part.target_lens, part.draft_lens, part.tokens
    num = len(set(rids))
    if not num == len(rids) == len(targets) == len(drafts) == len(texts):
        sizes = {num, len(rids), len(targets), len(drafts), len(texts)}
        raise RequestError(f"commit: columns of unequal length or repeated rids: {sizes} entries")
    found = _look_up("commit", reqs, rids)
    rows: list[CommitRow] = []
    for place, req in enumerate(found):
        target, draft, tokens = targets[place], drafts[place], texts[place]
        known = len(req.tokens) + len(tokens)
        if (
            not req.target_len <= target <= req.slots
            or not req.draft_len <= draft <= target
            or not target * TOKEN_BYTES <= known <= req.limit * TOKEN_BYTES
            or known % TOKEN_BYTES
            or (req.missing and draft > req.draft_len and draft > _first_missing(req, page_size))
        ):
            raise RequestError(_commit_fault(req, (target, draft), tokens, page_size))
        rows.append((req, target, draft, tokens))
    return rows


def _look_up(what: str, reqs: dict[ReqId, Req], rids: list[ReqId]) -> list[Req]:
    try:
        return [reqs[rid] for rid in rids]
    except KeyError as missing:
        raise RequestError(f"{what}: rid {missing} is not open") from None


def _first_missing(req: Req, page_size: int) -> int:
    return min(index for _, index in req.missing) * page_size


def _commit_fault(req: Req, lens: tuple[int, int], tokens: bytes, page_size: int) -> str:
    text = (
        f"commit: rid {req.rid} from target {req.target_len}, draft {req.draft_len} to {lens[0]}, {lens[1]} "
        f"with {req.num_known} + {len(tokens) / TOKEN_BYTES:g} tokens known of at most {req.limit}, {req.slots} slots"
    )
    return text + (f", and no draft pages from token {_first_missing(req, page_size)} on" if req.missing else "")


def _check_freeze(client: Client, part: Freeze, lens: dict[ReqId, int], config: PoolConfig) -> None:
    if not len(part.rids) == len(part.lens) == len(set(part.rids)):
        raise RequestError(f"freeze: {len(part.rids)} rids, {len(set(part.rids))} different, {len(part.lens)} lens")
    for req, length in zip(_look_up("freeze", client.engine.reqs, part.rids), part.lens, strict=True):
        committed = lens.get(req.rid, req.target_len)
        since = req.state_in.at * config.page_size if req.state_in is not None else 0
        if not req.has_state:
            raise RequestError(f"freeze: rid {req.rid} is of an engine without a kind of state")
        if length % config.page_size or not since < length <= committed:
            raise RequestError(
                f"freeze: rid {req.rid} at {length} tokens; it has to be a multiple of {config.page_size} above "
                f"{since}, where its state comes from, and at most {committed}, which are committed"
            )


def _check_rids(what: str, reqs: dict[ReqId, Req], rids: list[ReqId]) -> None:
    if len(set(rids)) != len(rids):
        raise RequestError(f"{what}: rids repeat: {rids}")
    _look_up(what, reqs, rids)


def _check_closes(reqs: dict[ReqId, Req], step: Step) -> set[ReqId]:
    rids = [rid for part in step.closes for rid in part.rids]
    _check_rids("close", reqs, rids)
    for part in step.closes:
        if part.reason not in CLOSE_REASONS:
            raise RequestError(f"close: reason {part.reason!r}, must be one of {CLOSE_REASONS}")
    return set(rids)


def _check_reserve(
    reqs: dict[ReqId, Req], part: Reserve, lens: dict[ReqId, int], config: PoolConfig
) -> list[ReserveRow]:
    nums = part.nums
    if not len(part.rids) == len(nums) == len(set(part.rids)):
        raise RequestError(f"reserve: {len(part.rids)} rids, {len(set(part.rids))} different, {len(nums)} nums")
    most = config.max_extend_tokens or UNBOUNDED
    rows: list[ReserveRow] = []
    for place, req in enumerate(_look_up("reserve", reqs, part.rids)):
        num = nums[place]
        if not 0 <= num <= most:
            raise RequestError(f"reserve: {nums} slots; at least 0 and at most {most} at once are possible")
        want = lens.get(req.rid, req.target_len) + num
        if want > req.limit and want > req.slots:
            raise RequestError(
                f"reserve: rid {req.rid} asks for slots up to {want}, its limit is {req.limit} "
                f"(prompt + max_new + {config.slack_tokens})"
            )
        if want > req.slots:
            rows.append((req, want))
    return rows


def _check_opens(reqs: dict[ReqId, Req], opens: list[OpenReq], closing: set[ReqId]) -> None:
    rids = {op.rid for op in opens}
    if len(rids) != len(opens):
        raise RequestError(f"open: rids repeat: {[op.rid for op in opens]}")
    for op in opens:
        if op.rid in reqs and op.rid not in closing:
            raise RequestError(f"open: rid {op.rid} is open already")
        if not op.tokens or len(op.tokens) % TOKEN_BYTES:
            raise RequestError(
                f"open: rid {op.rid} has a prompt of {len(op.tokens)} bytes; tokens are {TOKEN_BYTES} bytes each, "
                f"and at least one is needed"
            )
        if op.max_new < 0:
            raise RequestError(f"open: rid {op.rid} has max_new {op.max_new}, must not be negative")
