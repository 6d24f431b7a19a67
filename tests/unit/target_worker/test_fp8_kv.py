"""Target KV in e4m3 on the CPU: attention over what the pages hold, and texts that do not depend on blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from memsvc.device.kv_dtype import AUTO, FP8_E4M3
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker.attention import PagedAttention, Span
from target_worker.runner import Segment
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import TargetRig, make_target, oracle_logits, tokens_of
from tests.unit.target_worker.test_attention import dense

E4M3 = torch.float8_e4m3fn
KV_HEADS, DIM, PAGE = 2, 64, 4
NUM_NEW = 12


def cut(x: torch.Tensor) -> torch.Tensor:
    """x as e4m3 pages give it back, in its own dtype."""
    return x.float().clamp(-448, 448).to(E4M3).to(x.dtype)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """So that compiled kernels would be used, were there any for such pages."""
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("without_gradients")
def test_rows_attend_the_numbers_of_the_pages(group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = KvShape(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=E4M3)
    page_bytes = shape.token_bytes * PAGE
    kind = KindLayout("target_kv", page_bytes, PAGE, 0, 0, 1, page_bytes + 64, 200)
    pool = KvPool(torch.full((kind.stride_bytes * 200,), 0x7F, dtype=torch.uint8), kind, shape)
    tables = PageTables(max_reqs=8, max_pages=60, page_size=PAGE)
    pages = iter((torch.randperm(199) + 1).tolist())
    spans, want, q_rows, first = [], [], [], 0
    for rid, (start, num) in enumerate([(0, 1), (3, 5), (4, 4), (117, 8), (0, 33), (55, 1)]):
        row = tables.add(ReqId(rid))
        tables.set_row(ReqId(rid), [PageId(next(pages)) for _ in range(-(-(start + num) // PAGE))])
        k, v = (torch.randn(2, start + num, KV_HEADS, DIM) * torch.tensor([1.0, 200.0])[:, None, None, None]).to(dtype)
        q = torch.randn(num, KV_HEADS * group_size, DIM).to(dtype)
        pool.write(1, tables.slots(row, 0, start + num), k, v)
        spans.append(Span(row, start, num, first))
        want.append(dense(q, cut(k), cut(v), start))
        q_rows.append(q)
        first += num
    got = PagedAttention(pool, tables, spans, KV_HEADS * group_size, dtype).run(1, torch.cat(q_rows))
    assert got.dtype == dtype
    assert got.isfinite().all()
    assert (got.double() - torch.cat(want)).abs().max() < (2e-3 if dtype == torch.float32 else 4.0)


def over_rounded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> Any:
    """The oracle's attention, over keys and values rounded on their way."""
    return sdpa_attention_forward(module, query, cut(key), cut(value), mask, **options)


transformers.AttentionInterface.register("over_rounded", over_rounded)
transformers.AttentionMaskInterface.register("over_rounded", sdpa_mask)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_are_those_of_a_model_over_rounded_keys_and_values(family: str, tmp_path: Path) -> None:
    oracle = make_target(tmp_path, family)
    plain = oracle_logits(oracle, tokens := tokens_of(5, 50))
    oracle.set_attn_implementation("over_rounded")
    want = oracle_logits(oracle, tokens)
    rig, moved = TargetRig(tmp_path, kv=FP8_E4M3), (plain - want).norm()
    assert moved > 1e-3 * want.norm()
    for rid, chunk in enumerate((0, 1, 7), start=1):
        got = rig.logits(rig.open(rid, 50), tokens, chunk)
        # Whoever computes K in another order may round a number beside a tie to the other side.
        assert (got - want).norm() < moved / 50
        rig.close(rid)


def test_blocks_give_the_tokens_of_one_by_one(tmp_path: Path) -> None:
    make_target(tmp_path, "Qwen3")
    rig, prompt = TargetRig(tmp_path, kv=FP8_E4M3), tokens_of(3, 9)
    row, tokens = rig.open(1, 60), list(prompt)
    while len(tokens) < len(prompt) + NUM_NEW:
        start = len(tokens) - 1 if len(tokens) > len(prompt) else 0
        tokens.append(int(rig.runner.forward([Segment(row, start, tokens[start:], 1)])[0].argmax()))
    for rid, block in enumerate((2, 3, 5, 8), start=2):
        other = rig.open(rid, 60)
        found = [int(rig.runner.forward([Segment(other, 0, prompt, 1)])[0].argmax())]
        while len(found) < NUM_NEW:
            start = len(prompt) + len(found) - 1
            # Drafts that are right, then one that is not: its K and V are written over by the next block.
            drafts = [*tokens[start : start + block - 1], 5][:block]
            logits = rig.runner.forward([Segment(other, start, drafts, len(drafts))])
            found += logits.argmax(-1).tolist()[: max(1, block - 1)]
        assert found[:NUM_NEW] == tokens[len(prompt) :]


def test_a_hybrid_has_full_layers_in_8_bits_and_states_as_before(tmp_path: Path) -> None:
    make_hybrid(tmp_path)
    tokens = tokens_of(2, 30)
    found = {}
    for kv in (AUTO, FP8_E4M3):
        for sizes in ([30], [11, *[1] * 19], [3, 8, 4, 4, 11]):
            rig = HybridRig(tmp_path, kv=kv)
            assert (rig.runner.pool.shape.dtype == E4M3) == (kv == FP8_E4M3)
            assert rig.linear.rings.shape.dtype == torch.float32
            req, parts = rig.open(1, 60), torch.tensor(tokens).split(sizes)
            found.setdefault(kv, []).append(torch.cat([rig.chunk(req, part.tolist()) for part in parts]))
    for whole, *others in found.values():
        assert all((other - whole).norm() < 1e-4 * whole.norm() for other in others)
    (plain, *_), (eight, *_) = found.values()
    assert (eight - plain).norm() > 1e-3 * plain.norm()
