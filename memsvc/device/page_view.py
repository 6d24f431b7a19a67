"""A kind's pages as strided tensors over the arena, for kinds whose pages hold several tensors one after another."""

import math

import torch

from memsvc.wire.mem import KindLayout


def page_view(
    arena: torch.Tensor, kind: KindLayout, offset_bytes: int, form: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """[num_pages, *form]: the contiguous tensor that starts offset_bytes into every page. Nothing is copied.

    arena: uint8 [arena_bytes]. Offsets are 64 bits wide, so arenas above 2^31 elements are fine.
    """
    item = dtype.itemsize
    if offset_bytes % item or kind.stride_bytes % item:
        raise ValueError(
            f"kind {kind.name}: offset {offset_bytes} or stride {kind.stride_bytes} is not a multiple of {item} bytes"
        )
    strides = [math.prod(form[i + 1 :]) for i in range(len(form))]
    flat = arena[: arena.numel() // item * item].view(dtype)[offset_bytes // item :]
    return flat.as_strided((kind.num_pages, *form), (kind.stride_bytes // item, *strides))


def check_req_kind(arena: torch.Tensor, kind: KindLayout, page_bytes: int, what: str) -> None:
    """Raise ValueError unless kind is a per-request kind whose pages hold page_bytes of `what` and lie in the arena."""
    if arena.dtype != torch.uint8 or arena.dim() != 1:
        raise ValueError(f"the arena must be uint8 [bytes], got {arena.dtype} {list(arena.shape)}")
    if kind.tokens_per_page:
        raise ValueError(f"kind {kind.name} holds {kind.tokens_per_page} tokens a page; {what} is per request")
    if kind.page_bytes != page_bytes:
        raise ValueError(f"kind {kind.name} has pages of {kind.page_bytes} bytes, {what} needs {page_bytes}")
    if kind.stride_bytes < page_bytes:
        raise ValueError(f"kind {kind.name} has a page stride of {kind.stride_bytes}, less than {page_bytes} bytes")
    end = (kind.num_pages - 1) * kind.stride_bytes + page_bytes
    if kind.num_pages < 1 or end > arena.numel():
        raise ValueError(f"kind {kind.name}: {kind.num_pages} pages end at byte {end}, the arena has {arena.numel()}")
