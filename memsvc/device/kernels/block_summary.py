"""The one pass over the logits of a verify: what each block of 256 tokens may contribute to its row's token."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from memsvc.device.kernels.noise import BLOCK_SIZE, block_noise
from memsvc.device.kernels.row_tiles import Row, block_maxima, row_logits, store_adjusted_maxima
from memsvc.device.kernels.slot_fields import (
    DONE,
    NUM_TOKENS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    Sizes,
    Slot,
    changes_logits,
    field,
    float_field,
)


@triton.jit(do_not_specialize=["rows_each"])
def summarise(logits, row_stride, col_stride, vocab, members, words, counts, maxima, smallest, owned, num_blocks,
              rows_each, STRIDE: tl.constexpr, DRAFTS_AT: tl.constexpr, DRAFT_WIDTH: tl.constexpr,
              STOPS_AT: tl.constexpr, SEEN_AT: tl.constexpr, COUNT_WIDTH: tl.constexpr, NUM: tl.constexpr,
              WIDTH: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Program (c, r): blocks [c * NUM, (c + 1) * NUM) of row r. Rows of slots that are done are left out.

    maxima: largest logit of each block. Rows that sample also get smallest, the first level of the noise, and
    owned, the logit of the token that has it. All float32 [rows, num_blocks]. The logits are those after
    penalties and min_tokens.
    """
    index = tl.program_id(1)
    slot = Slot(words, counts, tl.load(members + index // rows_each),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    if field(slot, DONE) == 0:
        row = Row(logits + index.to(tl.int64) * row_stride, col_stride, vocab, slot, index % rows_each)
        first = tl.program_id(0) * NUM
        blocks = first + tl.arange(0, NUM)
        out, inside = index.to(tl.int64) * num_blocks + blocks, blocks < num_blocks
        if changes_logits(slot, row.place):
            own = maxima + index.to(tl.int64) * num_blocks
            store_adjusted_maxima(row, own, first, num_blocks, BLOCK_SIZE, NUM, STEP)
        else:
            top = block_maxima(row.logits, col_stride, vocab, blocks, BLOCK_SIZE, WIDTH, NUM)
            tl.store(maxima + out, top, mask=inside)
        if float_field(slot, TEMPERATURE) > 0.0:
            position = field(slot, NUM_TOKENS) + row.place
            least, owner = block_noise(blocks, position, field(slot, SEED_LOW), field(slot, SEED_HIGH))
            tl.store(smallest + out, least, mask=inside)
            tl.store(owned + out, row_logits(row, owner, owner < vocab), mask=inside)
