"""Target KV in e4m3 on a device: the tokens, features and pages of the CPU's runner over such pages."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kv_dtype import AUTO, FP8_E4M3
from memsvc.wire.text import Sampling
from target_worker.cuda import work
from target_worker.cuda.prefill_backends import PrefillMemory, _TorchPrefill
from target_worker.runner import Segment
from tests.support import kernel_bounds
from tests.support.device_target import DeviceTarget
from tests.support.hybrid_memory import check_memory
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import TargetRig, make_target, tokens_of

E4M3 = torch.float8_e4m3fn
TAPS = (1, 0)
BLOCK_SIZE = 3
NUM_NEW = 6
SIZES = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 61,
}  # fmt: skip
PROMPTS = {1: tokens_of(1, 9, 61), 2: tokens_of(2, 2, 61), 3: tokens_of(3, 5, 61)}
GREEDY = Sampling(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_target(folder, "Qwen3", num_hidden_layers=2, **SIZES)
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, list[int]]:
    """What the CPU's runner gives after each prompt, a token at a time."""
    rig, found = TargetRig(folder, kv=FP8_E4M3), {}
    for rid, prompt in PROMPTS.items():
        row, tokens = rig.open(rid, 60), list(prompt)
        for _ in range(NUM_NEW + BLOCK_SIZE):
            start = len(tokens) - 1 if len(tokens) > len(prompt) else 0
            tokens.append(int(rig.runner.forward([Segment(row, start, tokens[start:], 1)])[0].argmax()))
        found[rid] = tokens[len(prompt) :]
    return found


def features(folder: Path, tokens: list[int], kv: str) -> torch.Tensor:
    """Of these tokens, by the CPU's runner at once."""
    rig = TargetRig(folder, taps=TAPS, kv=kv)
    rig.runner.forward([Segment(rig.open(1, 60), 0, tokens, 1)])
    return rig.features[: len(tokens)]


@pytest.mark.parametrize("mixed", [1, 1000])
def test_blocks_and_chunks_give_the_tokens_of_the_cpu(
    folder: Path, wanted: dict[int, list[int]], device: str, mixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MIXED_ROWS", mixed)
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, kv=FP8_E4M3)
    assert target.memory.pool.shape.dtype == E4M3
    reqs = {rid: target.open(rid, prompt, 60, GREEDY) for rid, prompt in PROMPTS.items()}
    one, two, three = reqs.values()
    target.step([], {one: 4})
    target.step([], {one: 5, two: 2})
    target.draft(one, [wanted[1][1], (wanted[1][2] + 1) % 61])
    target.step([one, two], {three: 5})
    while left := [rid for rid, req in reqs.items() if req.n_out < NUM_NEW]:
        for rid in left:
            target.draft(reqs[rid], wanted[rid][reqs[rid].n_out :][: BLOCK_SIZE - 1])
        target.step([reqs[rid] for rid in left])
    for rid, req in reqs.items():
        assert req.tokens[len(PROMPTS[rid]) :][:NUM_NEW] == wanted[rid][:NUM_NEW]


@pytest.mark.parametrize("torch_prefill", [False, True])
def test_a_block_sees_of_itself_what_the_next_step_reads(
    folder: Path, wanted: dict[int, list[int]], device: str, torch_prefill: bool
) -> None:
    """Rows of a block come from registers, those of a chunk from pages: both have the features of one pass."""
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=TAPS, kv=FP8_E4M3)
    if torch_prefill:
        memory = target.memory
        asked = PrefillMemory(
            pool=memory.pool, tables=target.tables, page_table=memory.page_table, dtype=target.model.dtype
        )
        target.tables.device = torch.device(device)
        target.work._parts.prompts._plan_attention = _TorchPrefill(asked, target.shape.num_heads)
    req, num = target.open(1, PROMPTS[1], 60, GREEDY), len(PROMPTS[1])
    target.step([], {req: num})
    assert target.features is not None
    of_prompt = target.features[:num].cpu().clone()
    target.draft(req, wanted[1][1:3])
    target.step([req])
    of_block = target.features[int(target.slots.feature_row[req.row]) :][:3].cpu()
    tokens = PROMPTS[1] + wanted[1][:3]
    want, plain = (features(folder, tokens, kv) for kv in (FP8_E4M3, AUTO))
    for got, start, end in ((of_prompt, 0, num), (of_block, num, num + 3)):
        moved = (plain[start:end] - want[start:end]).norm()
        assert moved > 1e-3 * want.norm() * ((end - start) / len(tokens)) ** 0.5
        assert (got - want[start:end]).norm() < moved / (50 if device == "cpu" else 4)


def test_pages_hold_the_codes_of_the_cpu(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, kv=FP8_E4M3)
    req = target.open(1, PROMPTS[1], 60, GREEDY)
    target.step([], {req: len(PROMPTS[1])})
    target.draft(req, wanted[1][1:3])
    target.step([req])
    rig = TargetRig(folder, kv=FP8_E4M3)
    row = rig.open(1, 60)
    num = len(PROMPTS[1]) + 3
    rig.runner.forward([Segment(row, 0, PROMPTS[1] + wanted[1][:3], 1)])
    for layer in range(2):
        for mine, theirs in (
            (target.memory.pool.k(layer), rig.pool.k(layer)), (target.memory.pool.v(layer), rig.pool.v(layer)),
        ):  # fmt: skip
            got, want = (
                pages.view(torch.uint8).cpu()[table.long()].flatten(0, 1)[:num].int()
                for pages, table in ((mine, target.tables.table[req.row]), (theirs, rig.tables.table[row]))
            )
            # Beside a tie a number may be rounded to the other side.
            assert int((got - want).abs().max()) <= 1
            assert int((got != want).sum()) <= want.numel() // 200


def test_a_hybrids_blocks_and_chunks_are_those_of_the_cpu(device: str, tmp_path: Path) -> None:
    make_hybrid(
        tmp_path, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, **SIZES,
    )  # fmt: skip
    rig = HybridRig(tmp_path, kv=FP8_E4M3)
    cpu, tokens = rig.open(1, 60), list(PROMPTS[1])
    for _ in range(NUM_NEW + BLOCK_SIZE):
        tokens.append(int(rig.chunk(cpu, tokens[len(cpu.tokens) :])[-1].argmax()))
    texts = tokens[len(PROMPTS[1]) :]
    target = DeviceTarget(tmp_path, device, block_size=BLOCK_SIZE, kv=FP8_E4M3)
    req = target.open(1, PROMPTS[1], 60, GREEDY)
    target.step([], {req: 5})
    target.step([], {req: 4})
    while req.n_out < NUM_NEW:
        target.draft(req, texts[req.n_out :][: BLOCK_SIZE - 1])
        target.step([req])
    assert req.tokens[len(PROMPTS[1]) :][:NUM_NEW] == texts[:NUM_NEW]
    check_memory(target, req, tmp_path)
