"""Slots as kernels read them: scalar fields by name, and logits as penalties and min_tokens leave them."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc import slot_layout
from memsvc.device.slots import SlotState


def _number(name: str) -> tl.constexpr:
    return tl.constexpr(slot_layout.SCALARS.index(name))


LENGTH = _number("length")
ANCHOR = _number("anchor")
NUM_ROWS = _number("num_rows")
FEATURE_ROW = _number("feature_row")
FEATURE_START = _number("feature_start")
DONE = _number("done")
NUM_DRAFTS = _number("num_drafts")
NUM_EMITTED = _number("num_emitted")
N_OUT = _number("n_out")
NUM_TOKENS = _number("num_tokens")
MAX_TOKENS = _number("max_tokens")
MIN_TOKENS = _number("min_tokens")
NUM_STOP_IDS = _number("num_stop_ids")
NUM_WITHHELD_IDS = _number("num_withheld_ids")
TEMPERATURE = _number("temperature")
TOP_K = _number("top_k")
TOP_P_LOW = _number("top_p_low")
TOP_P_HIGH = _number("top_p_high")
MIN_P = _number("min_p")
REPETITION = _number("repetition_penalty")
FREQUENCY = _number("frequency_penalty")
PRESENCE = _number("presence_penalty")
SEED_LOW = _number("seed_low")
SEED_HIGH = _number("seed_high")

DONE_STOP = tl.constexpr(slot_layout.DONE_STOP)
DONE_LENGTH = tl.constexpr(slot_layout.DONE_LENGTH)
MAX_STOP_IDS = tl.constexpr(slot_layout.MAX_STOP_IDS)

_SCALARS_AT = tl.constexpr(slot_layout.SCALARS_AT // 4)


@dataclass(frozen=True, slots=True)
class SlotOperands:
    """What a kernel gets of the slots."""

    words: torch.Tensor
    """int32, the region."""
    counts: torch.Tensor
    """int16"""
    sizes: dict[str, int]
    """constexpr arguments, by the names of Sizes in capitals."""

    @classmethod
    def of(cls, slots: SlotState) -> "SlotOperands":
        """Of the slots' region."""
        layout = slots.layout
        sizes = {
            "STRIDE": layout.stride,
            "DRAFTS_AT": layout.drafts_at // 4,
            "DRAFT_WIDTH": layout.draft_width,
            "STOPS_AT": layout.stop_ids_at // 4,
            "SEEN_AT": layout.prompt_seen_at // 4,
            "COUNT_WIDTH": layout.count_width,
        }
        return cls(slots.words, slots.counts, sizes)


class Sizes(NamedTuple):
    """Elements of int32 (counts: int16): STRIDE between scalars; where lists begin; widths of rows."""

    stride: tl.constexpr
    drafts_at: tl.constexpr
    draft_width: tl.constexpr
    stops_at: tl.constexpr
    seen_at: tl.constexpr
    count_width: tl.constexpr


class Slot(NamedTuple):
    """A slot inside a kernel."""

    words: tl.tensor
    """Address of the region."""
    counts: tl.tensor
    number: tl.tensor
    sizes: Sizes


@triton.jit
def field(slot, FIELD: tl.constexpr):
    """An int32 field of a slot."""
    return tl.load(slot.words + (_SCALARS_AT + FIELD * slot.sizes.stride) + slot.number)


@triton.jit
def float_field(slot, FIELD: tl.constexpr):
    """A float32 field of a slot."""
    return field(slot, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def set_field(slot, value, FIELD: tl.constexpr):
    """An int32 field of a slot becomes value."""
    tl.store(slot.words + (_SCALARS_AT + FIELD * slot.sizes.stride) + slot.number, value)


@triton.jit
def top_p_of(slot):
    """float64"""
    low = field(slot, TOP_P_LOW).to(tl.int64) & 0xFFFFFFFF
    return ((field(slot, TOP_P_HIGH).to(tl.int64) << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def has_filter(slot):
    """top_k, top_p or min_p cut the distribution."""
    return (field(slot, TOP_K) > 0) | (float_field(slot, MIN_P) > 0.0) | (top_p_of(slot) < 1.0)


@triton.jit
def has_penalty(slot):
    """Logits depend on the tokens so far."""
    frequency, presence = float_field(slot, FREQUENCY), float_field(slot, PRESENCE)
    return (float_field(slot, REPETITION) != 1.0) | (frequency != 0.0) | (presence != 0.0)


@triton.jit
def withholds(slot, row):
    """min_tokens is not reached before the token of this row of the block."""
    return field(slot, N_OUT) + row < field(slot, MIN_TOKENS)


@triton.jit
def changes_logits(slot, row):
    """Something comes before temperature in this row."""
    return has_penalty(slot) | withholds(slot, row)


@triton.jit
def penalise(x, ids, inside, slot, more):
    """Logits x float32 of ids after the penalties, as RowSampler.penalise.

    more: how often each id came after the tokens that the slot has counted.
    """
    # A row of counts begins at no more than 2^31 elements in no layout, its bytes may go beyond.
    far = slot.number.to(tl.int64) * slot.sizes.count_width
    count = tl.load(slot.counts + far + ids, mask=inside, other=0).to(tl.int32) + more
    bits = tl.load(slot.words + slot.sizes.seen_at + far // 32 + ids // 32, mask=inside, other=0)
    repetition = tl.zeros_like(x) + float_field(slot, REPETITION)
    repeated = ((count > 0) | (((bits >> (ids % 32)) & 1) != 0)) & (repetition != 1.0)
    scaled = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
    x = tl.where(repeated, scaled, x)
    x = x - float_field(slot, FREQUENCY) * count.to(tl.float32)
    return x - float_field(slot, PRESENCE) * (count > 0).to(tl.float32)


@triton.jit
def withhold(x, ids, slot):
    """Logits x of ids, -inf for those that min_tokens withholds."""
    stops = slot.words + slot.sizes.stops_at + slot.number * MAX_STOP_IDS
    for i in range(0, field(slot, NUM_WITHHELD_IDS)):
        x = tl.where(ids == tl.load(stops + i), float("-inf"), x)
    return x


@triton.jit
def adjust(x, ids, inside, slot, row):
    """Logits x of ids in a row of a verify: after the slot's tokens come drafts 1 to row."""
    if has_penalty(slot):
        more = tl.zeros_like(ids)
        drafts = slot.words + slot.sizes.drafts_at + slot.number * slot.sizes.draft_width
        for i in range(0, tl.minimum(row, slot.sizes.draft_width)):
            more += (ids == tl.load(drafts + i)).to(tl.int32)
        x = penalise(x, ids, inside, slot, more)
    if withholds(slot, row):
        x = withhold(x, ids, slot)
    return x
