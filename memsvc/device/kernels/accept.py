"""The accept rule on the device: what each member of a verify emits, and how its slot goes on."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from math import ceil

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import launch, padded
from memsvc.device.kernels.noise import decision
from memsvc.device.kernels.row_tiles import INT_MAX
from memsvc.device.kernels.slot_fields import (
    ANCHOR,
    DONE,
    DONE_LENGTH,
    DONE_STOP,
    FEATURE_ROW,
    FEATURE_START,
    LENGTH,
    MAX_STOP_IDS,
    MAX_TOKENS,
    N_OUT,
    NUM_DRAFTS,
    NUM_EMITTED,
    NUM_ROWS,
    NUM_STOP_IDS,
    NUM_TOKENS,
    SEED_HIGH,
    SEED_LOW,
    Sizes,
    Slot,
    SlotOperands,
    field,
    has_penalty,
    set_field,
)
from memsvc.device.slots import SlotState

RESULT_EXTRA = 2
"""Numbers of a result before its tokens: how many there are, and `done` after them."""


@triton.jit
def chosen_tokens(slot, sampled, drafts, rows, num_drafts, whole, limit, SIMULATED: tl.constexpr):
    """(token of each row, which drafts are accepted): the sampled ones, or drafts while simulated steps force them."""
    if SIMULATED:
        chance = decision(field(slot, NUM_TOKENS), field(slot, SEED_LOW), field(slot, SEED_HIGH))
        forced = tl.minimum(num_drafts, whole + (chance * 4294967296.0 < limit).to(tl.int32))
        return tl.where(rows < forced, drafts, sampled), rows < forced
    else:
        return sampled, (rows < num_drafts) & (drafts == sampled)


@triton.jit
def ends(slot, tokens, rows, PADDED: tl.constexpr):
    """Which tokens are the last of their request, if they are emitted: (by a stop id, by the length)."""
    at = tl.arange(0, PADDED)
    stops = tl.load(slot.words + slot.sizes.stops_at + slot.number * MAX_STOP_IDS + at,
                    mask=at < field(slot, NUM_STOP_IDS), other=-1)  # fmt: skip
    stopped = tl.max((tokens[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    return stopped, field(slot, N_OUT) + rows + 1 >= field(slot, MAX_TOKENS)


@triton.jit
def count_tokens(slot, tokens, emitted):
    """Add emitted tokens to the slot's counts. Equal ones store the same sum."""
    same = (tokens[:, None] == tokens[None, :]) & emitted[None, :]
    at = slot.counts + slot.number.to(tl.int64) * slot.sizes.count_width + tokens
    count = tl.load(at, mask=emitted, other=0).to(tl.int32) + tl.sum(same.to(tl.int32), 1)
    # Every thread must have read before one stores.
    tl.debug_barrier()
    tl.store(at, tl.minimum(count, 32767).to(tl.int16), mask=emitted)


@triton.jit
def accept_block(tokens, members, words, counts, results, whole, limit, feature_base, EMITTED_AT: tl.constexpr,
                 EMITTED_WIDTH: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, STOPS_PAD: tl.constexpr,
                 SIMULATED: tl.constexpr, WITH_FEATURES: tl.constexpr, STRIDE: tl.constexpr,
                 DRAFTS_AT: tl.constexpr, DRAFT_WIDTH: tl.constexpr, STOPS_AT: tl.constexpr, SEEN_AT: tl.constexpr,
                 COUNT_WIDTH: tl.constexpr):  # fmt: skip
    """Place i: its slot after tokens [i], and results [i] = (number, done, tokens, -1 behind them)."""
    place = tl.program_id(0)
    slot = Slot(words, counts, tl.load(members + place),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    rows = tl.arange(0, ROWS_PAD)
    done, num = field(slot, DONE), 0
    chosen = tl.full([ROWS_PAD], -1, tl.int32)
    if done == 0:
        num_drafts = tl.minimum(field(slot, NUM_DRAFTS), ROWS - 1)
        sampled = tl.load(tokens + place * ROWS + rows, mask=rows < ROWS, other=-1)
        drafts = tl.load(words + DRAFTS_AT + slot.number * DRAFT_WIDTH + rows, mask=rows < num_drafts, other=-1)
        chosen, accepted = chosen_tokens(slot, sampled, drafts, rows, num_drafts, whole, limit, SIMULATED)
        stopped, full = ends(slot, chosen, rows, STOPS_PAD)
        last = tl.min(tl.where((rows < ROWS) & ((accepted == 0) | stopped | full), rows, INT_MAX), 0)
        num = last + 1
        chosen = tl.where(rows < num, chosen, -1)
        done = tl.max(tl.where(rows == last, tl.where(stopped, DONE_STOP, tl.where(full, DONE_LENGTH, 0)), 0), 0)
        length = field(slot, LENGTH)
        if has_penalty(slot):
            count_tokens(slot, chosen, rows < num)
        set_field(slot, done, DONE)
        set_field(slot, length, FEATURE_START)
        set_field(slot, feature_base + place * ROWS, FEATURE_ROW)
        set_field(slot, length + num, LENGTH)
        set_field(slot, tl.max(tl.where(rows == last, chosen, -1), 0), ANCHOR)
        set_field(slot, field(slot, N_OUT) + num, N_OUT)
        set_field(slot, field(slot, NUM_TOKENS) + num, NUM_TOKENS)
        tl.store(words + EMITTED_AT + slot.number * EMITTED_WIDTH + rows, chosen, mask=rows < ROWS)
    set_field(slot, num, NUM_EMITTED)
    set_field(slot, num if WITH_FEATURES else 0, NUM_ROWS)
    set_field(slot, 0, NUM_DRAFTS)
    out = results + place * (ROWS + 2)
    tl.store(out, num)
    tl.store(out + 1, done)
    tl.store(out + 2 + rows, chosen, mask=rows < ROWS)


def accept(
    tokens: torch.Tensor,
    members: torch.Tensor,
    slots: SlotState,
    *,
    simulate: float = 0.0,
    feature_base: int | None = 0,
    results: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply verify.verify_blocks's rule to sampled tokens int32 [N, R] of members, with their slots' drafts.

    Draft j + 1 is accepted iff it is token j; a stop token or the max_tokens-th is the last one emitted. Writes all
    that follows of it into the slots. Of a slot that is done nothing changes but num_emitted, num_rows and
    num_drafts, which become 0. simulate: as in verify_blocks, a mean number of tokens a block.
    feature_base: exchange row where this verify's features begin; None if they are not the draft's to write (the
    last chunk of a prompt): num_rows is 0 then.
    Returns results int32 [N, R + 2]: number of tokens, done, then the tokens, -1 behind them.
    """
    num_places, rows = tokens.shape
    if simulate and simulate < 1.0:
        raise ValueError(f"a simulated accept length of {simulate} is below 1, the bonus token")
    if rows > slots.layout.block_size:
        raise ValueError(f"{rows} rows for blocks of {slots.layout.block_size}")
    if results is None:
        results = torch.empty((num_places, rows + RESULT_EXTRA), dtype=torch.int32, device=tokens.device)
    operands = SlotOperands.of(slots)
    # Of 2^32 equally likely words so many make one draft more: exact, where a fraction in float32 is not.
    limit = ceil((simulate - int(simulate)) * 2.0**32 - 0.5)
    launch(
        accept_block, (num_places,), 1, tokens, members, operands.words, operands.counts, results, int(simulate) - 1,
        limit, feature_base or 0, EMITTED_AT=slots.layout.emitted_at // 4,
        EMITTED_WIDTH=slots.layout.block_size, ROWS=rows, ROWS_PAD=max(2, padded(rows)),
        STOPS_PAD=padded(slots.stop_ids.shape[1]), SIMULATED=simulate != 0.0, WITH_FEATURES=feature_base is not None,
        **operands.sizes,
    )  # fmt: skip
    return results
