"""The row kernels at the sizes of two models, each with its operands and the bytes it has to move."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memsvc.device.hf_config import rope_spec
from memsvc.device.kernels import context_write, conv, embed, heads, mlp, norm
from memsvc.device.kernels.places import BlockRows
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.layers import RMSNorm, Rotary
from memsvc.wire.mem import KindLayout

DTYPE, ITEM = torch.bfloat16, 2
PAGE, MAX_PAGES, CONTEXT = 16, 128, 1300
VOCAB, EPS = 4096, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of a model; heads as all models here have them: 32 of queries, 8 of keys and values, of 128."""

    hidden: int
    mlp: int
    num_taps: int
    block: int
    conv_groups: int = 0
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_draft_layers: int = 5


GEOMETRIES = {
    "qwen3-8b": Geometry(hidden=4096, mlp=12288, num_taps=5, block=9),
    "qwen38-27b-dflash2": Geometry(hidden=5120, mlp=17408, num_taps=5, block=8, conv_groups=320),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One launch of one kernel."""

    name: str
    num_rows: int
    num_bytes: int
    """Every operand read or written once, of pages those that are touched."""
    call: Callable[[], object]


class Buffers:
    """Operands of all kernels for n requests. On a CPU they are never filled: there they are compiled for only."""

    def __init__(self, size: Geometry, num: int, device: str) -> None:
        self.size, self.num, self.rows, self.device = size, num, num * size.block, device
        self.width = (size.num_heads + 2 * size.num_kv_heads) * size.head_dim
        self.x, self.residual = self.make(self.rows, size.hidden), self.make(self.rows, size.hidden)
        self.weight = self.make(size.hidden)
        rope = rope_spec({"rope_theta": 1e6, "max_position_embeddings": 40960}, size.head_dim)
        self.rotary = Rotary(rope, device)
        self.head_weight = RMSNorm(self.make(size.head_dim), EPS)
        self.members = torch.arange(1, num + 1, dtype=torch.int32, device=device)
        self.lengths = torch.full((num + 1,), CONTEXT, dtype=torch.int32, device=device)
        pages = torch.arange(num * MAX_PAGES, dtype=torch.int32, device=device).view(num, -1) + 1
        self.table = torch.cat((torch.zeros_like(pages[:1]), pages))
        self.pool = self._pool()
        self.counts = torch.full_like(self.lengths, size.block)

    def make(self, *shape: int) -> torch.Tensor:
        """Random, of DTYPE."""
        made = torch.empty(shape, dtype=DTYPE, device=self.device)
        return made if self.device == "cpu" else made.normal_()

    def _pool(self) -> KvPool:
        size = self.size
        shape = KvShape(
            num_layers=size.num_draft_layers, num_kv_heads=size.num_kv_heads, head_dim=size.head_dim, dtype=DTYPE
        )
        page_bytes, num_pages = shape.token_bytes * PAGE, self.num * MAX_PAGES + 1
        kind = KindLayout(
            name="kv", page_bytes=page_bytes, tokens_per_page=PAGE, pages_per_req=0, window=0, pages_per_frame=1,
            stride_bytes=page_bytes, num_pages=num_pages,
        )  # fmt: skip
        return KvPool(torch.empty(num_pages * page_bytes, dtype=torch.uint8, device=self.device), kind, shape)

    def block_rows(self) -> BlockRows:
        """All requests in order."""
        return BlockRows(
            members=self.members, lengths=self.lengths, block_size=self.size.block, page_table=self.table,
            done=torch.zeros_like(self.lengths),
        )  # fmt: skip


def make_cases(name: str, num: int, device: str) -> list[Case]:
    """One case a kernel for n requests of a geometry."""
    at = Buffers(GEOMETRIES[name], num, device)
    cases = [*_row_cases(at), *_head_cases(at), *_edge_cases(at)]
    return cases if not at.size.conv_groups else [*cases, *_conv_cases(at)]


def _case(at: Buffers, name: str, elements: int, call: Callable[[], object]) -> Case:
    """elements: moved for each row."""
    return Case(name=name, num_rows=at.rows, num_bytes=elements * at.rows * ITEM, call=call)


def _row_cases(at: Buffers) -> list[Case]:
    hidden, inner = at.size.hidden, at.size.mlp
    gate_up = at.make(at.rows, 2 * inner)
    features = at.make(at.rows + 8, at.size.num_taps * hidden)
    tap = norm.Tap(features=features[:, hidden : 2 * hidden], first_row=at.counts[:1])
    plain = RMSNorm(at.weight, EPS)
    return [
        _case(at, "rms_norm", 2 * hidden, lambda: norm.rms_norm(at.x, plain)),
        _case(at, "add_rms_norm", 4 * hidden, lambda: norm.add_rms_norm(at.x, at.residual, plain)),
        _case(at, "add_rms_norm+tap", 5 * hidden, lambda: norm.add_rms_norm(at.x, at.residual, plain, tap)),
        _case(at, "silu_mul", 3 * inner, lambda: mlp.silu_mul(gate_up)),
    ]


def _head_cases(at: Buffers) -> list[Case]:
    size = at.size
    qk, kv = (size.num_heads + size.num_kv_heads) * size.head_dim, 2 * size.num_kv_heads * size.head_dim
    qkv, rows = at.make(at.rows, at.width), at.block_rows()
    spec = heads.HeadSpec(
        num_heads=size.num_heads, num_kv_heads=size.num_kv_heads, head_dim=size.head_dim, rotary=at.rotary,
        q_norm=at.head_weight, k_norm=at.head_weight,
    )  # fmt: skip
    k, v = (qkv[:, i * 128 : i * 128 + kv // 2].view(at.rows, -1, size.head_dim) for i in (0, 8))
    pages = at.pool.k(1), at.pool.v(1)
    raw = at.make(at.rows, size.num_draft_layers, 2, size.num_kv_heads, size.head_dim)
    context = context_write.ContextRows(
        members=at.members, num_rows=at.counts, block_size=size.block, page_table=at.table, ends=at.lengths
    )
    context_spec = context_write.ContextSpec(
        k_norm=RMSNorm(at.make(size.num_draft_layers, 1, size.head_dim), EPS), rotary=at.rotary
    )
    return [
        _case(at, "rotate_heads", 2 * qk, lambda: heads.rotate_heads(qkv, rows, spec)),
        _case(
            at, "rotate_heads_into_pages", 2 * qk + kv + kv // 2,
            lambda: heads.rotate_heads_into_pages(qkv, rows, spec, pages),
        ),
        _case(at, "write_block_kv", 2 * kv, lambda: context_write.write_block_kv(k, v, *pages, rows)),
        _case(
            at, "write_context_kv", 2 * kv * size.num_draft_layers,
            lambda: context_write.write_context_kv(raw, context_spec, at.pool, context),
        ),
    ]  # fmt: skip


def _edge_cases(at: Buffers) -> list[Case]:
    hidden, block = at.size.hidden, at.size.block
    embedding = at.make(VOCAB, hidden)
    exchange = at.make(at.rows + block, at.size.num_taps * hidden)
    anchors = torch.arange(at.num + 1, dtype=torch.int32, device=at.device)
    drafts = anchors[:, None].repeat(1, block - 1)
    first_rows = anchors * block
    x = at.x.view(at.num, block, hidden)
    return [
        _case(at, "embed_block", 2 * hidden, lambda: embed.embed_block(anchors, at.members, embedding, at.weight, block)),
        _case(at, "embed_verify", 2 * hidden, lambda: embed.embed_verify(anchors, drafts, at.members, embedding)),
        _case(at, "gather_rows", 2 * hidden, lambda: embed.gather_rows(x, 1)),
        _case(
            at, "gather_features", 2 * at.size.num_taps * hidden,
            lambda: embed.gather_features(exchange, at.members, first_rows, at.counts, block),
        ),
    ]  # fmt: skip


def _conv_cases(at: Buffers) -> list[Case]:
    hidden, groups = at.size.hidden, at.size.conv_groups
    taps = conv.ConvTaps(base=at.make(2, 2, hidden), dynamic=at.make(at.rows, 4 * groups), block_size=at.size.block)
    plain = at.residual, RMSNorm(at.weight, EPS)
    return [
        _case(at, "conv_prepare", 2 * hidden + 2 * groups, lambda: conv.conv_prepare(at.x, taps)),
        _case(at, "conv_finish", 2 * hidden + 2 * groups, lambda: conv.conv_finish(at.x, taps)),
        _case(
            at, "conv_finish_add_rms_norm", 4 * hidden + 2 * groups,
            lambda: conv.conv_finish_add_rms_norm(at.x, taps, *plain),
        ),
    ]  # fmt: skip
