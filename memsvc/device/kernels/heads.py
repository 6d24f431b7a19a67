"""Heads between their projection and attention: norm of q and k, rotation, and k and v into pages. One launch."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.fp8_rows import cut_to_fp8
from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.kernels.norm import rounded, scaled_norm
from memsvc.device.kernels.places import Rows, TokenRows, cos_and_sin, find_page, find_row, row_arguments
from memsvc.device.layers import RMSNorm, Rotary, ZeroCentredRMSNorm

MAX_HEAD_DIM = 256

ELEMENTS, WARPS = 1024, 2
"""Of one program: elements of its heads, padded, and warps. At 16 elements a thread each half of a head is read
16 bytes a thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What a layer does to its heads before attention."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """The same for q, k and v; at most MAX_HEAD_DIM."""
    rotary: Rotary
    """Its frequencies lie where the heads do."""
    q_norm: RMSNorm | None = None
    """weight [d] or [heads, d]"""
    k_norm: RMSNorm | None = None
    """weight [d] or [kv_heads, d]; there is one if there is a q_norm, and of the same kind."""
    value_scale: float = 1.0
    """Multiplies v."""


@triton.jit
def turn(lo, hi, cos, sin, like):
    """Both halves turned. float32 in and out, each product and the sum rounded as rope.Rotary.rotate rounds them."""
    cos, sin = rounded(cos, like), rounded(sin, like)
    return (
        rounded(rounded(hi * -sin, like) + rounded(lo * cos, like), like),
        rounded(rounded(lo * sin, like) + rounded(hi * cos, like), like),
    )


@triton.jit
def load_part(base, at, seen):
    """A tile in float32, zeros where it is not seen."""
    return tl.load(base + at, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def store_part(base, at, value, seen):
    """A tile, rounded to what lies there."""
    if base.dtype.element_ty == tl.float8e4nv:
        tl.store(base + at, cut_to_fp8(value.to(tl.float32)), mask=seen)
    else:
        tl.store(base + at, value.to(base.dtype.element_ty), mask=seen)


@triton.jit
def kept(value, pages, like):
    """value float32 as it will be read from `pages`. What rows are computed in, `like`, is rounded to before e4m3."""
    if pages.dtype.element_ty == tl.float8e4nv:
        return cut_to_fp8(rounded(value, like)).to(tl.float32)
    else:
        return value


@triton.jit
def turn_heads(source, out, pages, weight, eps, position, frequencies, scale, head, COUNT: tl.constexpr,
               page_head_stride, weight_stride, D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
               REST_PAD: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    """Some heads of one row, normed if there is a weight and turned: from `source` to `out`, and `pages` if given.

    All is rounded as `source` is. `out` gets what `pages` will give, or is a page itself.
    """
    dims, rest = tl.arange(0, PAD), tl.arange(0, REST_PAD) + 2 * HALF
    seen = (head < COUNT)[:, None] & (dims < HALF)[None, :]
    seen_rest = (head < COUNT)[:, None] & (rest < D)[None, :]
    at, at_rest = head[:, None] * D + dims[None, :], head[:, None] * D + rest[None, :]
    lo, hi = load_part(source, at, seen), load_part(source + HALF, at, seen)
    tail = load_part(source, at_rest, seen_rest) if 2 * HALF < D else None
    if weight is not None:
        total = tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)
        if 2 * HALF < D:
            total += tl.sum(tail * tail, 1)
        mean = (total / D)[:, None]
        at_w = head[:, None] * weight_stride + dims[None, :]
        lo = rounded(scaled_norm(lo, mean, load_part(weight, at_w, seen), source, eps, CENTRED), source)
        hi = rounded(scaled_norm(hi, mean, load_part(weight + HALF, at_w, seen), source, eps, CENTRED), source)
        if 2 * HALF < D:
            w = load_part(weight, head[:, None] * weight_stride + rest[None, :], seen_rest)
            tail = rounded(scaled_norm(tail, mean, w, source, eps, CENTRED), source)
    cos, sin = cos_and_sin(position, frequencies, scale, HALF, PAD)
    lo, hi = turn(lo, hi, cos[None, :], sin[None, :], source)
    if pages is not None:
        lo, hi = kept(lo, pages, source), kept(hi, pages, source)
        if 2 * HALF < D:
            tail = kept(tail, pages, source)
    store_part(out, at, lo, seen)
    store_part(out + HALF, at, hi, seen)
    if 2 * HALF < D:
        store_part(out, at_rest, tail, seen_rest)
    if pages is not None:
        at_page = head[:, None] * page_head_stride + dims[None, :]
        store_part(pages, at_page, lo, seen)
        store_part(pages + HALF, at_page, hi, seen)
        if 2 * HALF < D:
            store_part(pages, head[:, None] * page_head_stride + rest[None, :], tail, seen_rest)


@triton.jit(do_not_specialize_on_alignment=["positions", "members", "slots"])
def _rotate(qkv, q, k, v, k_pages, v_pages, positions, members, done, page_table, slots, frequencies, q_weight,
            k_weight, eps, rope_scale, value_scale, qkv_stride, table_stride, table_width, page_stride, token_stride,
            page_head_stride, weight_stride, B: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
            D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, REST_PAD: tl.constexpr, D_PAD: tl.constexpr,
            CHUNK: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    Q_CHUNKS: tl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    KV_CHUNKS: tl.constexpr = (KV + CHUNK - 1) // CHUNK
    position, member = find_row(row, positions, members, B)
    wide = row.to(tl.int64)
    source = qkv + wide * qkv_stride
    some = tl.arange(0, CHUNK)
    if chunk < Q_CHUNKS:
        turn_heads(source, q + wide * HEADS * D, None, q_weight, eps, position, frequencies, rope_scale,
                   some + chunk * CHUNK, HEADS, 0, weight_stride, D, HALF, PAD, REST_PAD, CENTRED)  # fmt: skip
    else:
        at_page = wide * 0
        if PAGE:
            if slots is not None:
                slot = tl.load(slots + row).to(tl.int64)
                page, offset = slot // PAGE, slot % PAGE
            else:
                page, offset = find_page(position, member, done, page_table, table_stride, table_width, PAGE)
            at_page = page * page_stride + offset * token_stride
        if chunk < Q_CHUNKS + KV_CHUNKS:
            head = some + (chunk - Q_CHUNKS) * CHUNK
            turn_heads(source + HEADS * D, k + wide * KV * D, k_pages + at_page if PAGE else None, k_weight, eps,
                       position, frequencies, rope_scale, head, KV, page_head_stride, weight_stride, D, HALF, PAD,
                       REST_PAD, CENTRED)  # fmt: skip
        else:
            head, dims = some + (chunk - Q_CHUNKS - KV_CHUNKS) * CHUNK, tl.arange(0, D_PAD)
            seen = (head < KV)[:, None] & (dims < D)[None, :]
            at = head[:, None] * D + dims[None, :]
            value = load_part(source + (HEADS + KV) * D, at, seen) * value_scale
            if PAGE:
                value = kept(value, v_pages, qkv)
            if v is not None:
                store_part(v + wide * KV * D, at, value, seen)
            if PAGE:
                store_part(v_pages + at_page, head[:, None] * page_head_stride + dims[None, :], value, seen)


def rotate_heads(
    qkv: torch.Tensor, positions: torch.Tensor | Rows, spec: HeadSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [n, H, d], k [n, KV, d] and v [n, KV, d] of qkv [n, (H + 2 KV) d], or wider (a gate may follow).

    q and k are normed as layers.RMSNorm does it and turned as Rotary.rotate does it. v is a view of qkv if its scale
    is 1. positions: int32 or int64 [n], or rows that have some.
    """
    rows = TokenRows(positions=positions) if isinstance(positions, torch.Tensor) else positions
    return _launch(qkv, rows, spec, None)


def rotate_heads_into_pages(
    qkv: torch.Tensor, rows: Rows, spec: HeadSpec, pages: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rotate_heads, and k and v are written into the pages where rows stand: pages = KvPool.k(layer) and .v(layer).

    Of e4m3 pages the k and v returned are what those hold, in the dtype of qkv: so rows see the same of each other,
    whether they come in one block or in several.
    """
    return _launch(qkv, rows, spec, pages)


def half_sizes(rotary_dim: int, head_dim: int) -> dict[str, int]:
    """D, HALF of what is turned, PAD for it, and REST_PAD for what is not."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {head_dim} are wider than {MAX_HEAD_DIM}")
    pad, rest_pad = padded(half), padded(max(rest, 1))
    return {"D": head_dim, "HALF": half, "PAD": pad, "REST_PAD": rest_pad}


def _launch(
    qkv: torch.Tensor, rows: Rows, spec: HeadSpec, pages: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k_pages, v_pages = (None, None) if pages is None else pages
    n, d, heads, kv_heads = len(qkv), spec.head_dim, spec.num_heads, spec.num_kv_heads
    assert rows.num_rows == n, f"{n} rows of qkv stand at {rows.num_rows} places"
    q = torch.empty((n, heads, d), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((n, kv_heads, d), dtype=qkv.dtype, device=qkv.device)
    is_view = spec.value_scale == 1.0 and (v_pages is None or v_pages.dtype == qkv.dtype)
    v = qkv[:, (heads + kv_heads) * d : (heads + 2 * kv_heads) * d].view(n, kv_heads, d)
    if not is_view:
        v = torch.empty(v.shape, dtype=qkv.dtype, device=qkv.device)
    width = padded(d)
    chunk = max(1, min(padded(heads), ELEMENTS // width))
    num_v_chunks = 0 if is_view and k_pages is None else cut(kv_heads, chunk)
    grid = (n, cut(heads, chunk) + cut(kv_heads, chunk) + num_v_chunks)
    launch(
        _rotate, grid, WARPS, qkv, q, k, None if is_view else v, k_pages, v_pages,
        frequencies=spec.rotary.frequencies, rope_scale=spec.rotary.scale, value_scale=spec.value_scale,
        qkv_stride=qkv.stride(0), **row_arguments(rows, 0 if k_pages is None else k_pages.shape[1]),
        **_page_strides(k_pages, v_pages), **_norm_arguments(spec),
        HEADS=heads, KV=kv_heads, D_PAD=width, CHUNK=chunk, **half_sizes(spec.rotary.rotary_dim, d),
    )  # fmt: skip
    return q, k, v


def _page_strides(k_pages: torch.Tensor | None, v_pages: torch.Tensor | None) -> dict[str, int]:
    if k_pages is None or v_pages is None:
        return {"page_stride": 0, "token_stride": 0, "page_head_stride": 0}
    assert k_pages.stride() == v_pages.stride(), f"pages of k and v differ: {k_pages.stride()}, {v_pages.stride()}"
    page, token, head, _ = k_pages.stride()
    return {"page_stride": page, "token_stride": token, "page_head_stride": head}


def _norm_arguments(spec: HeadSpec) -> dict[str, object]:
    q_norm, k_norm = spec.q_norm, spec.k_norm
    if q_norm is None or k_norm is None:
        return {"q_weight": None, "k_weight": None, "eps": 0.0, "weight_stride": 0, "CENTRED": False}
    assert q_norm.eps == k_norm.eps, f"eps {q_norm.eps} of q, {k_norm.eps} of k"
    return {
        "q_weight": q_norm.weight,
        "k_weight": k_norm.weight,
        "eps": q_norm.eps,
        "weight_stride": spec.head_dim if q_norm.weight.dim() == 2 else 0,
        "CENTRED": isinstance(q_norm, ZeroCentredRMSNorm),
    }
