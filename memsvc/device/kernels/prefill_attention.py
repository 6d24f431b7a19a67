"""Causal attention of prompt chunks over pages in Triton: for hosts without FlashInfer, and beside it.

The chunk's own keys and values are in the pages already. Planned on the host, run eagerly: a program has some tokens
of one request with all query heads of a key-value head, and reads the positions up to its last token.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.attention_backends import RowSpan
from memsvc.device.kernels.attention_tiles import MAX_ROWS, Tile
from memsvc.device.kernels.paged_tiles import LOG2_E, attend_context, reads

__all__ = ["PREFILL_TILES", "PrefillPlan", "prefill_attention"]

PREFILL_TILES = {64: Tile(64, 8, 3), 128: Tile(64, 8, 3), 256: Tile(32, 8, 3)}
"""head_dim -> tile, for 16-bit keys and MAX_ROWS rows. Others take the next larger entry."""

_WIDE = Tile(16, 8, 2)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What each program does, on the device."""

    tiles: torch.Tensor
    """int32 [tiles, 4]: page-table row, position of the first token, tokens, first row in the batch."""
    group: int
    """Query heads of a key-value head."""

    @classmethod
    def of(cls, spans: Sequence[RowSpan], group: int, device: torch.device | str) -> "PrefillPlan":
        """Spans cut into tiles of MAX_ROWS rows, the longest to read first: it ends last otherwise."""
        if not 1 <= group <= MAX_ROWS:
            raise ValueError(f"{group} query heads a key-value head; at most {MAX_ROWS} fit in a program")
        most = MAX_ROWS // group
        tiles = [
            (span.table_row, span.start + at, min(most, span.num - at), span.first + at)
            for span in spans
            for at in range(0, span.num, most)
        ]
        tiles.sort(key=lambda tile: -(tile[1] + tile[2]))
        table = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
        if torch.device(device).type == "cuda":
            table = table.pin_memory()
        return cls(table.to(device, non_blocking=True), group)


@triton.jit
def _attend_spans(
    q, k_pages, v_pages, page_table, tiles, out,
    q_row_stride, q_head_stride, page_stride, slot_stride, head_stride, table_stride, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program attends the tokens of one tile of the plan, in one key-value head."""
    head, tile = tl.program_id(0), tiles + 4 * tl.program_id(1)
    member, position = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    num, first_row = tl.load(tile + 2), tl.load(tile + 3)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    used = (rows < num * GROUP)[:, None] & (dims < DIM)[None, :]
    heads, row = head * GROUP + rows % GROUP, (first_row + rows // GROUP).to(tl.int64)
    queries = tl.load(
        q + (row * q_row_stride + heads * q_head_stride)[:, None] + dims[None, :], mask=used, other=0.0
    )  # fmt: skip
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    length = position + num
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    top, total, acc = attend_context(
        queries, position + rows // GROUP, top, total, acc,
        k_pages + head * head_stride, v_pages + head * head_stride, page_table + member * table_stride,
        page_stride, slot_stride, scale, first, length, 0, tl.cdiv(length - first, BLOCK),
        PAGE, BLOCK, WINDOW, True, DIM, PADDED, PRECISION,
    )  # fmt: skip
    to = (row * (KV_HEADS * GROUP) + heads)[:, None] * DIM + dims[None, :]
    tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)


def prefill_attention(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: PrefillPlan,
    *,
    window: int = 0,
    tile: Tile | None = None,
) -> torch.Tensor:
    """[rows, heads, d]: q [rows, heads, d] over pages of keys and values, each [pages, page, kv_heads, d].

    A token at position p sees positions (p - window, p], all up to p if window is 0. page_table int32 [slots,
    max_pages] on the device. Rows that are in no span of the plan are left as they come. Strided pages are fine, and
    e4m3 beside any q.
    """
    k_pages, v_pages = pages
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    if num_heads != num_kv_heads * plan.group or k_pages.stride() != v_pages.stride():
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} with a plan for {plan.group} each, "
            f"pages with strides {k_pages.stride()} and {v_pages.stride()}"
        )
    if not reads(q, k_pages, v_pages) or any(x.stride(-1) != 1 for x in (q, k_pages, v_pages)):
        raise ValueError(f"q {q.dtype} and pages {k_pages.dtype} must have one dtype, the last dimension contiguous")
    if tile is None:
        wide = dim > max(PREFILL_TILES) or q.dtype.itemsize > 2
        tile = _WIDE if wide else next(tile for least, tile in PREFILL_TILES.items() if dim <= least)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend_spans[(num_kv_heads, len(plan.tiles))](
        q, k_pages, v_pages, page_table, plan.tiles, out, *q.stride()[:2], *k_pages.stride()[:3],
        page_table.stride(0), dim**-0.5 * LOG2_E.value, GROUP=plan.group, KV_HEADS=num_kv_heads, DIM=dim,
        PADDED=max(16, triton.next_power_of_2(dim)), ROWS=MAX_ROWS, PAGE=k_pages.shape[1], BLOCK=tile.block,
        WINDOW=window, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
