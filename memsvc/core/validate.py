"""Everything that can be wrong with a Step, found before anything is changed."""

from memsvc.core.config import PoolConfig
from memsvc.core.errors import RequestError
from memsvc.core.radix import TOKEN_BYTES
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.wire.base import ReqId
from memsvc.wire.mem import Commit, OpenReq, Reserve, Step


def check_step(client: Client, step: Step, config: PoolConfig) -> None:
    """Raise RequestError, with the numbers, unless every part of step can be carried out in order."""
    reqs = client.engine.reqs
    if client.role != "target":
        raise RequestError(f"a {client.role} does not step; requests belong to their target")
    if step.done_step >= step.num:
        raise RequestError(f"done_step {step.done_step} of step {step.num}: only earlier steps can be done")
    lens = check_commit(reqs, step.commit, config.page_size) if step.commit else {}
    if step.reset_draft:
        _check_rids("reset_draft", reqs, step.reset_draft.rids)
    closing: set[ReqId] = set()
    if step.closes:
        closing = _check_closes(reqs, step)
    if step.reserve:
        _check_reserve(reqs, step.reserve, closing, lens, config)
    if step.opens:
        _check_opens(reqs, step.opens, closing)


def check_commit(reqs: dict[ReqId, Req], part: Commit, page_size: int) -> dict[ReqId, int]:
    """The target lengths by rid."""
    lens = dict(zip(part.rids, part.target_lens, strict=False))
    if not len(part.rids) == len(part.target_lens) == len(part.draft_lens) == len(part.tokens) == len(lens):
        sizes = (len(part.rids), len(part.target_lens), len(part.draft_lens), len(part.tokens))
        raise RequestError(f"commit: columns of {sizes} entries for {len(lens)} different rids")
    for rid, target, draft, tokens in zip(part.rids, part.target_lens, part.draft_lens, part.tokens, strict=True):
        req = reqs.get(rid)
        if req is None:
            raise RequestError(f"commit: rid {rid} is not open")
        known = (len(req.tokens) + len(tokens)) // TOKEN_BYTES
        slots = len(req.tables[req.primary]) * page_size
        if not (req.target_len <= target <= min(known, slots) and req.draft_len <= draft <= target):
            raise RequestError(
                f"commit: rid {rid} from target {req.target_len}, draft {req.draft_len} to target {target}, "
                f"draft {draft} with {known} tokens known and {slots} slots reserved"
            )
        if req.missing and req.draft_len < draft and draft > (first := min(i for _, i in req.missing) * page_size):
            raise RequestError(f"commit: rid {rid} has no draft page from token {first} on, draft {draft} is past it")
        if len(tokens) % TOKEN_BYTES or known > req.limit:
            raise RequestError(
                f"commit: rid {rid} brings {len(tokens)} bytes of tokens; they are {TOKEN_BYTES} bytes each, "
                f"and {known} tokens would be known of at most {req.limit}"
            )
    return lens


def _check_rids(what: str, reqs: dict[ReqId, Req], rids: list[ReqId]) -> None:
    if len(set(rids)) != len(rids):
        raise RequestError(f"{what}: rids repeat: {rids}")
    for rid in rids:
        if rid not in reqs:
            raise RequestError(f"{what}: rid {rid} is not open")


def _check_closes(reqs: dict[ReqId, Req], step: Step) -> set[ReqId]:
    rids = [rid for part in step.closes for rid in part.rids]
    _check_rids("close", reqs, rids)
    for part in step.closes:
        if part.reason not in CLOSE_REASONS:
            raise RequestError(f"close: reason {part.reason!r}, must be one of {CLOSE_REASONS}")
    return set(rids)


CLOSE_REASONS = ("finish", "abort", "retract")


def _check_reserve(
    reqs: dict[ReqId, Req], part: Reserve, closing: set[ReqId], lens: dict[ReqId, int], config: PoolConfig
) -> None:
    if len(part.rids) != len(part.nums) or len(set(part.rids)) != len(part.rids):
        raise RequestError(f"reserve: {len(part.rids)} rids, {len(set(part.rids))} different, {len(part.nums)} nums")
    most = config.max_extend_tokens
    for rid, num in zip(part.rids, part.nums, strict=True):
        req = reqs.get(rid)
        if req is None or rid in closing:
            raise RequestError(f"reserve: rid {rid} is not open")
        committed = lens.get(rid, req.target_len)
        if num < 0 or committed + num > req.limit or (most and num > most):
            raise RequestError(
                f"reserve: rid {rid} asks for {num} slots past {committed}; at least 0, up to {req.limit} "
                f"(prompt + max_new + {config.slack_tokens}) and {most or 'any number'} at once are possible"
            )


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
