"""Rows that enter or leave a forward: embeddings of blocks, features out of the exchange, rows that want logits."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import cut, launch, padded

BLOCK, WARPS = 2048, 4
"""Columns of one program at most, and warps."""


@triton.jit
def _embed(anchors, drafts, members, embedding, mask_row, out, scale, vocab, row_stride, drafts_stride,
           B: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, step = tl.program_id(0), tl.program_id(0) % B
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = cols < WIDTH
    member = tl.load(members + row // B)
    token = tl.load(anchors + member).to(tl.int64)
    if drafts is not None:
        draft = tl.load(drafts + member.to(tl.int64) * drafts_stride + step - 1, mask=step > 0, other=0)
        token = tl.where(step > 0, draft.to(tl.int64), token)
    # Drafts that do not count may be anything.
    token = tl.where((token >= 0) & (token < vocab), token, 0)
    if mask_row is not None:
        value = tl.load(embedding + token * row_stride + cols, mask=seen & (step == 0), other=0.0).to(tl.float32)
        value += tl.load(mask_row + cols, mask=seen & (step > 0), other=0.0).to(tl.float32)
    else:
        value = tl.load(embedding + token * row_stride + cols, mask=seen, other=0.0).to(tl.float32)
    value *= scale
    tl.store(out + row.to(tl.int64) * WIDTH + cols, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _gather(out, source, members, first_rows, counts, source_stride, place_stride,
            SKIP: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, step = row // B, row % B
    seen = cols < WIDTH
    wanted = seen
    if members is not None:
        member = tl.load(members + place)
        wanted = seen & (step < tl.load(counts + member))
        at = (tl.load(first_rows + member).to(tl.int64) + step) * source_stride
    else:
        at = place * place_stride + (step + SKIP) * source_stride
    value = tl.load(source + at + cols, mask=wanted, other=0.0)
    tl.store(out + row * WIDTH + cols, value, mask=seen)


def embed_block(
    anchors: torch.Tensor,
    members: torch.Tensor,
    embedding: torch.Tensor,
    mask_row: torch.Tensor,
    block_size: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """x [N, B, H] of a propose: row 0 is the anchor's embedding, the others are mask_row, all times scale.

    anchors: token ids int32 [num_slots + 1] by slot; members: int32 [N]; embedding [V, H]; mask_row [H].
    """
    out = torch.empty((len(members), block_size, embedding.shape[1]), dtype=embedding.dtype, device=embedding.device)
    _launch_embed((anchors, None, members, embedding, mask_row), out, scale)
    return out


def embed_verify(
    anchors: torch.Tensor, drafts: torch.Tensor, members: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """x [N, B, H] of a verify: row 0 embeds the anchor, row j > 0 draft j - 1.

    drafts: int32 [num_slots + 1, B - 1] by slot; one that is no token id embeds token 0.
    """
    block_size = drafts.shape[1] + 1
    out = torch.empty((len(members), block_size, embedding.shape[1]), dtype=embedding.dtype, device=embedding.device)
    _launch_embed((anchors, drafts, members, embedding, None), out, 1.0)
    return out


def gather_rows(x: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """Rows skip.. of each block of x [N, B, H], contiguous [N * (B - skip), H]: those whose logits are wanted."""
    n, block_size, width = x.shape
    out = torch.empty((n * (block_size - skip), width), dtype=x.dtype, device=x.device)
    assert x.stride(2) == 1, f"strides {x.stride()}: rows are not contiguous"
    sizes = {"SKIP": skip, "B": block_size - skip, "WIDTH": width}
    _launch_gather((x, None, None, None, x.stride(1), x.stride(0)), out, sizes)
    return out


def gather_features(
    exchange: torch.Tensor,
    members: torch.Tensor,
    first_rows: torch.Tensor,
    num_rows: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """[N * B, width]: row j of place i is exchange row first_rows[m] + j, m = members[i]; zeros from num_rows[m] on.

    exchange [rows, width]; the others int32, [N] and [num_slots + 1].
    """
    out = torch.empty((len(members) * block_size, exchange.shape[1]), dtype=exchange.dtype, device=exchange.device)
    assert exchange.stride(1) == 1, f"strides {exchange.stride()}: rows are not contiguous"
    sizes = {"SKIP": 0, "B": block_size, "WIDTH": exchange.shape[1]}
    _launch_gather((exchange, members, first_rows, num_rows, exchange.stride(0), 0), out, sizes)
    return out


def _launch_embed(tensors: tuple[torch.Tensor | None, ...], out: torch.Tensor, scale: float) -> None:
    n, block_size, width = out.shape
    drafts, embedding = tensors[1], tensors[3]
    assert embedding is not None
    assert embedding.stride(1) == 1, f"strides {embedding.stride()}: rows are not contiguous"
    block = min(BLOCK, padded(width))
    launch(
        _embed, (n * block_size, cut(width, block)), WARPS, *tensors, out, scale, len(embedding), embedding.stride(0),
        0 if drafts is None else drafts.stride(0), B=block_size, WIDTH=width, BLOCK=block,
    )  # fmt: skip


def _launch_gather(operands: tuple[torch.Tensor | int | None, ...], out: torch.Tensor, sizes: dict[str, int]) -> None:
    block = min(BLOCK, padded(sizes["WIDTH"]))
    grid = len(out), cut(sizes["WIDTH"], block)
    launch(_gather, grid, WARPS, out, *operands, **sizes, BLOCK=block)
