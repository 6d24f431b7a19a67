"""What bench.target_steps measures: steps put together as the engine's, here of a tiny target and interpreted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.checkpoint import RandomSource
from memsvc.wire.text import Sampling
from target_worker.model.config import TargetShape
from target_worker.model.weights import build
from tests.bench import target_states, target_steps, target_turns
from tests.bench.ladder_geometry import LADDERS, Ladder
from tests.bench.propose_geometry import BYTES_PER_S, FLOPS_PER_S, Floor
from tests.bench.target_floors import bound, num_params, prompt_floor, state_bytes, verify_floor
from tests.bench.target_pages import PAGE_SIZE
from tests.bench.target_setup import Job, Setup, Steps
from tests.support import kernel_bounds
from tests.support.device_target import DeviceTarget
from tests.support.kernels import is_interpreted

CONTEXT, BLOCK_SIZE = 9, 4
# As little as there can be of everything: each block of rows of an interpreted kernel takes milliseconds.
SMALL = replace(
    LADDERS["tiny"], prompt_tokens=8,
    target=LADDERS["tiny"].target
    | {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "vocab_size": 300},
)  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
HYBRID = replace(
    LADDERS["tiny-hybrid"], prompt_tokens=8,
    target=LADDERS["tiny-hybrid"].target
    | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_attention_heads": 2,
       "num_key_value_heads": 1, "hidden_size": 32, "vocab_size": 300, "linear_num_key_heads": 1,
       "linear_num_value_heads": 2, "linear_key_head_dim": 8},
)  # fmt: skip
PAST_EDGES = 2 * PAGE_SIZE + 2
"""A context with states, whose last page edge may have been passed by its newest block."""
JOB = Job(name="small", ladder=SMALL, concurrency=(2,), context=CONTEXT, prefill=(12,), accept_length=0.0)


class Recorded(RandomSource):
    """Keeps what it made."""

    def __init__(self, device: str) -> None:
        super().__init__(device=device)
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.tensors[name] = super().get(name, shape, dtype)
        return self.tensors[name].clone()


@pytest.fixture
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


def write_target(folder: Path, device: str = "cpu", ladder: Ladder = SMALL) -> dict[str, torch.Tensor]:
    """A checkpoint of the weights that the bench makes at random on that device."""
    (folder / "config.json").write_text(json.dumps(ladder.target), encoding="utf-8")
    source = Recorded(device)
    build(TargetShape.from_folder(folder), source, torch.float32, device)
    save_file({name: tensor.cpu() for name, tensor in source.tensors.items()}, str(folder / "model.safetensors"))
    return source.tensors


def executed(folder: Path, setup: Setup, device: str) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and features of a verify by DeviceExecutor, of requests with the contexts of setup.

    The first tokens and the drafts that it had go into setup: of slot 1 the first draft is right.
    """
    taps, context = setup.config.target_layer_ids, setup.job.context
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=taps)
    greedy = Sampling(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
    reqs = {
        rid: target.open(rid, setup.tokens[1 if rid == 3 else rid][:context], context + 2 * BLOCK_SIZE, greedy)
        for rid in (1, 2, 3)
    }
    first = target.step([], dict.fromkeys(reqs.values(), context))
    (right,) = target.step([reqs[3]])[reqs[3]]
    setup.drafts[1][0] = right
    for slot in (1, 2):
        (setup.tokens[slot][context],) = first[reqs[slot]]
        target.draft(reqs[slot], setup.drafts[slot])
    found = target.step([reqs[1], reqs[2]])
    assert target.features is not None
    return [found[reqs[slot]] for slot in (1, 2)], target.features[: 2 * BLOCK_SIZE].cpu()


def verified(steps: Steps) -> tuple[list[list[int]], torch.Tensor]:
    with steps.running:
        steps.reset()
        steps.choose(2)
        steps.verify(2)
    return steps.tokens(2), steps.features(2 * BLOCK_SIZE).cpu()


@pytest.mark.usefixtures("rows_of_one_load_lie_in_ring_and_block")
@pytest.mark.parametrize(("ladder", "context"), [(SMALL, CONTEXT), (HYBRID, PAST_EDGES)], ids=["dense", "hybrid"])
def test_a_verify_gives_what_the_executor_gives(
    ladder: Ladder, context: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target_states, "EVERY", 2)
    for name in ("bench", "checkpoint"):
        (tmp_path / name).mkdir()
    write_target(tmp_path / "checkpoint", device, ladder)
    with torch.inference_mode():
        setup = Setup(replace(JOB, ladder=ladder, context=context, device=device), tmp_path / "bench")
        wanted, features = executed(tmp_path / "checkpoint", setup, device)
        assert [len(tokens) for tokens in wanted] == [2, 1]
        steps, split = Steps(setup), Steps(setup, is_split=True)
        for one in (steps, split):
            one.capture()
        for one in (steps, split):
            one.open()
        steps.fill()
        tokens, found = verified(steps)
        assert tokens == wanted
        torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
        assert steps.exchange.slots.length[1:3].tolist() == [context + 2, context + 1]
        again, once_more = verified(steps)
        assert again == tokens
        assert torch.equal(once_more, found), "a slot that is reset stands where it stood"
        assert verified(split)[0] == tokens, "several take turns in one memory"


@pytest.mark.usefixtures("rows_of_one_load_lie_in_ring_and_block")
def test_a_verify_writes_states_of_requests_that_passed_a_page_edge(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target_states, "EVERY", 2)
    with torch.inference_mode():
        setup = Setup(replace(JOB, ladder=HYBRID, context=PAST_EDGES, device=device), tmp_path)
        assert [setup.writes_states(slot) for slot in (1, 2)] == [False, True]
        own = setup.pages[2]
        assert len({*own.states, *own.states_read}) == 4
        assert setup.pages[1].states == setup.pages[1].states_read
        steps = Steps(setup)
        steps.capture()
        steps.open()
        steps.fill()
        states = steps.parts.memory.states
        assert states is not None
        tables = states.mirror.tables

        def stand() -> tuple[list[int], list[list[int]]]:
            return tables.state_len[1:3].tolist(), tables.state_in[1:3].tolist()

        before = stand()
        assert before == ([2 * PAGE_SIZE, PAGE_SIZE], [setup.pages[1].states, own.states_read])
        verified(steps)
        assert stand() == ([2 * PAGE_SIZE] * 2, [setup.pages[1].states, own.states])
        steps.reset()
        assert stand() == before


def test_one_request_of_four_writes_its_states():
    lens = [target_states.state_len(slot, 1300, 9) for slot in range(1, 9)]
    assert lens == [1296, 1296, 1296, 1280] * 2
    assert target_states.state_len(4, 1305, 9) == 1296, "no block of nine rows has passed the edge just now"
    assert target_states.state_len(4, 9, 9) == 0


def test_prompts_are_cut_as_the_ladder_has_them():
    job = Job(name="", ladder=LADDERS["qwen3-8b-dflash"], concurrency=(1, 4), context=1300, prefill=(1024, 2048, 8192))
    assert [job.prompts(num) for num in (1024, 2500, 8192)] == [[1024], [1024, 1024, 452], [1024] * 8]
    assert (job.num_slots, job.max_prefill_tokens) == (8, 8192)
    assert [job.num_tokens(slot) for slot in (1, 2, 8)] == [8192, 1301, 1301]
    assert replace(job, prefill=()).num_tokens(1) == 1301


@pytest.mark.parametrize("ladder", [SMALL, HYBRID], ids=["dense", "hybrid"])
def test_parameters_are_those_of_the_matrices(ladder: Ladder, tmp_path: Path):
    tensors = write_target(tmp_path, ladder=ladder)
    matrices = {name: tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2}
    assert any(name.endswith("layers.1.self_attn.o_proj.weight") for name in matrices)
    head, embedding = (
        matrices.pop(next(name for name in matrices if name.endswith(end)))
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    assert head == embedding
    assert num_params(TargetShape.from_folder(tmp_path)) == (sum(matrices.values()), head)


def test_floors_are_bytes_for_few_rows_and_operations_for_many():
    shape = TargetShape.from_json(LADDERS["qwen3-8b-dflash"].target, {})
    params = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 4096 * 151936
    one, many = (verify_floor(shape, num, 9, 1300, 2) for num in (1, 32))
    assert bound(one) == "bytes"
    assert one.us == pytest.approx((2 * params + 1300 * 147456) / BYTES_PER_S * 1e6)
    assert bound(many) == "flops"
    # 1305 tokens are seen by the row in the middle of a block.
    attention = 4 * 288 * 1305 * 4096 * 36
    assert many.us == pytest.approx((2 * 288 * params + attention) / FLOPS_PER_S * 1e6)
    whole, parts = prompt_floor(shape, [2048], 2), prompt_floor(shape, [1024, 1024], 2)
    assert bound(whole) == "flops"
    head = 2 * 4096 * 151936
    assert isinstance(whole, Floor)
    assert isinstance(parts, Floor)
    assert whole.flops - parts.flops == pytest.approx(4 * 4096 * 36 * 1024 * 1024 - head)


def test_a_hybrids_floors_are_those_of_weights_and_of_what_requests_have():
    shape = TargetShape.from_json(LADDERS["qwen38-27b-dflash2"].target, {})
    assert 2 * sum(num_params(shape)) == pytest.approx(51.2e9, rel=2e-3)
    # 48 states of 48 x 128 x 128 numbers and three rows of 10240 channels; rings of 11.5 rows read and nine written.
    own = 48 * (1.25 * (48 * 128 * 128 * 4 + 3 * 10240 * 2) + 20.5 * (10240 * 2 + 48 * 8))
    assert state_bytes(shape, 9, 2) == pytest.approx(own)
    one, few, many = (verify_floor(shape, num, 9, 1300, 2) for num in (1, 4, 32))
    assert (bound(few), bound(many)) == ("bytes", "flops")
    kv = 16 * 2 * 4 * 256 * 2 * 1300
    assert few.us - one.us == pytest.approx(3 * (own + kv) / BYTES_PER_S * 1e6)
    assert many.us == pytest.approx((2 * 288 * 25.62e9 / FLOPS_PER_S + 32 * (own + kv) / BYTES_PER_S) * 1e6, rel=1e-3)
    # Of others, who count states as written in every step.
    for num, wanted_ms in {1: 11.9, 4: 12.3, 8: 12.7, 16: 13.4, 32: 21.6}.items():
        assert 0.96 < verify_floor(shape, num, 9, 1300, 2).us / 1e3 / wanted_ms < 1.01
    whole, parts = prompt_floor(shape, [2048], 2), prompt_floor(shape, [1024, 1024], 2)
    assert bound(whole) == bound(parts) == "flops"
    assert 0.95 < whole.us / parts.us < 1.05


def measured(
    monkeypatch: pytest.MonkeyPatch, file: Path, device: str, *flags: str, ladder: Ladder = SMALL
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command."""
    monkeypatch.setitem(LADDERS, "small", ladder)
    monkeypatch.setattr(target_turns, "WARM_UPS", 1)
    argv = ["--geometry", "small", "--device", device, "--context", str(CONTEXT), "--repeats", "1", "--json", str(file)]
    return target_steps.main([*argv, *flags]), json.loads(file.read_text())


def test_all_is_measured_of_every_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
):
    flags = ["--concurrency", "1", "--prefill", "6", "--rests", "3", "--kernels"]
    flags += ["--variants", "attention-tile=16,4,2,3", "nothing=1"]
    status, found = measured(monkeypatch, tmp_path / "steps.json", device, *flags)
    assert status == 1
    assert [failure["variant"] for failure in found["failures"]] == ["nothing=1"]
    prompts = [([num], start, route) for num, start in ((6, 0), (3, CONTEXT - 3)) for route in ("eager", "graph")]
    kinds = [("verify", 1, None, None), *(("prefill", *form) for form in prompts)]
    wanted = [(variant, *kind) for variant in ("base", "attention-tile=16,4,2,3") for kind in kinds]
    for lines in (found["rows"], found["kernels"]):
        assert [
            (row["variant"], row["step"], row.get("concurrency") or row["prompts"], row.get("start"), row.get("route"))
            for row in lines
        ] == wanted
    for row in found["rows"]:
        columns = target_steps.VERIFY_COLUMNS if row["step"] == "verify" else target_steps.PREFILL_COLUMNS
        assert set(columns) <= set(row)
        assert row["apart"] < 1e-5
        assert row["device_us"] > row["floor_us"]
        assert row.get("steady", True)
    assert found["config"]["geometry"] == "small"
    assert found["config"]["prefill_backend"] == "triton"
    printed = capsys.readouterr().out
    assert printed.count(" 1x6 ") == printed.count(" 1x3 ") == 4, "the short table is there"
    assert printed.splitlines()[-1].startswith("not measured: {'variant': 'nothing=1'")


def test_variants_of_a_hybrid_begin_where_base_began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str):
    monkeypatch.setattr(target_states, "EVERY", 1)
    flags = ["--concurrency", "1", "--prefill", "6", "--context", str(PAGE_SIZE + 1)]
    flags += ["--variants", "delta-tile=16,2", "--accept-length", "3"]
    status, found = measured(monkeypatch, tmp_path / "steps.json", device, *flags, ladder=HYBRID)
    assert (status, found["failures"]) == (0, [])
    assert [row["step"] for row in found["rows"]] == ["verify", "prefill"] * 2
    for row in found["rows"]:
        assert row["apart"] < 1e-5, "prompts of base have moved states"
        assert row.get("steady", True)


def test_a_table_has_what_is_there_and_a_line_for_each_row():
    rows = [
        {"variant": "base", "step": "prefill", "tokens": 2048, "prompts": [1024, 1024], "device_us": 30100.5},
        {"variant": "other=1", "step": "prefill", "tokens": 2048, "prompts": [2048]},
        {"variant": "base", "step": "verify", "concurrency": 4},
    ]
    lines = target_steps.lines_of(rows, "prefill", ("tokens", "prompts", "device_us"))
    assert [line.split() for line in lines] == [
        ["prefill", "tokens", "prompts", "device_us"],
        ["base", "2048", "2x1024", "30100.5"],
        ["other=1", "2048", "1x2048", "-"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert target_steps.lines_of(rows[2:], "prefill", ("tokens",)) == []


def test_nothing_is_begun_when_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if not is_interpreted():
        pytest.skip("kernels of this process are compiled")
    status, found = measured(monkeypatch, tmp_path / "steps.json", "cpu", "--concurrency", "1", "--seconds", "-1")
    assert (status, found["rows"]) == (1, [])
    assert found["failures"] == [{"variant": "base", "what": "capture", "why": "no time was left"}]


def test_a_machine_without_a_device_is_told_so(capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit):
        target_steps.main([])
    assert "nothing was measured" in capsys.readouterr().err
