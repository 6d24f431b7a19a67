"""The plan of a server on a CUDA device: what is taken beside the arena, and the arena that is left."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from launch.__main__ import _prepare
from launch.card import Card, read_card, with_prefill_tokens
from launch.config import LaunchConfig
from launch.device_memory import CONTEXT_BYTES, device_parts
from launch.device_taken import taken_line
from launch.dtype import with_dtype
from launch.flags import parse_flags
from launch.models import read_models
from launch.planner import make_plan
from launch.weight_bytes import draft_weight_bytes, target_weight_bytes
from memsvc import cuda_driver
from memsvc.core.manager import MemoryManager
from memsvc.slot_layout import SlotLayout
from tests.bench.ladder_geometry import LADDERS
from tests.support.fake_cuda import CUresult, FakeCuda
from tests.support.model_folders import HYBRID, TARGET, folder, models_of, with_draft

GIB = 1 << 30
UNIT = 2 << 20
CARD = Card(name="cuda:0 (Made-up, GPU-1)", free=23 * GIB + 12345, total=24 * GIB, unit=UNIT)
ON_CUDA = {"device": "cuda", "dtype": "bfloat16"}


def test_the_arena_is_what_the_share_leaves(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA, mem_fraction_static=0.5)
    models = models_of(tmp_path, config)
    pool, plan = make_plan(config, models, card=CARD)
    assert plan.device is not None
    beside = sum(part.num_bytes for part in plan.device.parts)
    assert list(plan.device.parts) == device_parts(config, models)
    assert plan.arena_bytes % UNIT == 0
    assert 0 <= CARD.free // 2 - (plan.arena_bytes + beside) < UNIT
    assert plan.device.planned_bytes == plan.arena_bytes + beside
    assert MemoryManager(pool).layout.num_frames == plan.num_frames
    wider = make_plan(with_draft(tmp_path, **ON_CUDA, mem_fraction_static=0.9), models, card=CARD)[1]
    assert wider.arena_bytes - plan.arena_bytes == pytest.approx(0.4 * CARD.free, abs=2 * UNIT)


def test_embedding_and_head_are_counted_once_and_lie_in_the_arena(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA)
    models = models_of(tmp_path, config)
    pool, plan = make_plan(config, models, card=CARD)
    matrix = 49152 * 576 * 2
    assert pool.shared_bytes == plan.shared_bytes == matrix
    assert plan.device is not None
    parts = {part.name: part.num_bytes for part in plan.device.parts}
    assert parts["target weights"] == target_weight_bytes(models.target, "bfloat16") - matrix
    assert models.draft is not None
    assert parts["draft weights"] == draft_weight_bytes(models.draft, "bfloat16", None)
    layout = MemoryManager(pool).layout
    frames = -(-layout.exchange_bytes // layout.frame_bytes)
    assert (layout.shared_offset, layout.shared_bytes) == ((1 + frames) * layout.frame_bytes, matrix)


def test_an_untied_head_is_shared_too_and_nothing_without_a_drafter(tmp_path: Path):
    target = folder(tmp_path / "untied", TARGET, tie_word_embeddings=False)
    config = with_draft(tmp_path, **ON_CUDA)
    models_of(tmp_path, config)
    assert make_plan(config, read_models(config, target), card=CARD)[0].shared_bytes == 2 * 49152 * 576 * 2
    alone = LaunchConfig(**ON_CUDA)
    pool, plan = make_plan(alone, read_models(alone, target), card=CARD)
    assert pool.shared_bytes == plan.shared_bytes == 0
    assert plan.device is not None
    assert not [part for part in plan.device.parts if part.name.startswith("draft")]


def test_a_context_is_counted_for_each_worker(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA)
    parts = {part.name: part.num_bytes for part in device_parts(config, models_of(tmp_path, config))}
    assert parts["target context"] == parts["draft context"] == CONTEXT_BYTES
    alone = LaunchConfig(**ON_CUDA)
    assert sum("context" in part.name for part in device_parts(alone, models_of(tmp_path, alone))) == 1


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"max_prefill_tokens": 4096}, "target workspaces"),
        ({"max_prefill_tokens": 4096}, "draft workspaces"),
        ({"max_running_requests": 64}, "target graphs"),
        ({"max_running_requests": 64}, "draft graphs"),
        ({"num_drafts": 7}, "target graphs"),
    ],
)
def test_estimates_grow_with_what_they_depend_on(tmp_path: Path, settings: dict[str, int], part: str):
    few = with_draft(tmp_path, **ON_CUDA, **{"max_prefill_tokens": 512, "max_running_requests": 8, "num_drafts": 3})
    many = with_draft(
        tmp_path, **ON_CUDA, **{"max_prefill_tokens": 512, "max_running_requests": 8, "num_drafts": 3} | settings
    )
    small, large = (
        {part.name: part.num_bytes for part in device_parts(config, models_of(tmp_path, config))}
        for config in (few, many)
    )
    assert large[part] > small[part]


def test_weights_in_fp8_leave_more_for_the_arena(tmp_path: Path):
    target = folder(tmp_path / "target", HYBRID)
    plans, parts = [], []
    for quantization in ("", "fp8"):
        config = LaunchConfig(**ON_CUDA, quantization=quantization)
        models = read_models(config, target)
        plans.append(make_plan(config, models, card=replace(CARD, free=96 * GIB, total=96 * GIB))[1])
        parts.append({part.name: part.num_bytes for part in device_parts(config, models)})
    # 24.4e9 numbers in the layers' matrices, a byte less each, and a scale for each of their rows.
    saved = parts[0]["target weights"] - parts[1]["target weights"]
    assert saved == pytest.approx(24.35e9, rel=0.01)
    assert {name for name in parts[0] if parts[0][name] != parts[1][name]} == {"target weights"}
    assert plans[1].arena_bytes - plans[0].arena_bytes == pytest.approx(saved, abs=2 * UNIT)


def test_graphs_of_prompts_are_counted_where_there_are_any(tmp_path: Path):
    card = replace(CARD, free=139 * GIB, total=140 * GIB)
    target, drafter = LADDERS["qwen3-8b-dflash"].write(tmp_path)
    sizes = {}
    for name, changes in {
        "all": {}, "short": {"max_prefill_tokens": 100}, "eager": {"disable_cuda_graph": True},
        "named": {"attention_backend": "flashinfer"}, "triton": {"attention_backend": "triton"},
    }.items():  # fmt: skip
        config = LaunchConfig(**ON_CUDA, draft_model_path=str(drafter), load_format="dummy", **changes)
        parts = device_parts(with_prefill_tokens(config, card), read_models(config, target))
        sizes[name] = next(part.num_bytes for part in parts if part.name == "target graphs")
    assert sizes["eager"] == sizes["named"] < sizes["short"] < sizes["all"] == sizes["triton"]
    # 512 rows at the MLP, and logits of 32 prompts.
    own = 512 * (4 * 4096 + 4 * 12288) * 2 + 32 * 151936 * (2 + 4)
    assert sizes["all"] - sizes["named"] == pytest.approx(1.2 * own, abs=2)
    hybrid = folder(tmp_path / "hybrid", HYBRID)
    found = set()
    for backend in ("auto", "flashinfer"):
        config = LaunchConfig(**ON_CUDA, load_format="dummy", attention_backend=backend)
        parts = device_parts(config, read_models(config, hybrid))
        found.add(next(part.num_bytes for part in parts if part.name == "target graphs"))
    assert len(found) == 1


def test_batches_past_the_largest_graph_make_it_no_larger(tmp_path: Path):
    sizes = []
    for max_reqs in (16, 64):
        config = LaunchConfig(**ON_CUDA, max_running_requests=max_reqs, cuda_graph_max_bs=16)
        parts = {part.name: part.num_bytes for part in device_parts(config, models_of(tmp_path, config))}
        sizes.append(parts["target graphs"])
    assert sizes[0] == sizes[1]


def test_the_exchange_holds_features_and_slots(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA, max_running_requests=10, max_prefill_tokens=100)
    models = models_of(tmp_path, config)
    slots = SlotLayout(10, 8, 49152).num_bytes
    # Chunks stand behind the blocks, which are padded to a bucket: 10 requests to 12.
    rows = 12 * 8 + 100
    assert make_plan(config, models, card=CARD)[0].exchange_bytes == -(-rows * 3 * 576 * 2 // 256) * 256 + slots
    on_cpu = with_draft(tmp_path, dtype="bfloat16", max_running_requests=10, max_prefill_tokens=100)
    assert make_plan(on_cpu, models, available=64 * GIB)[0].exchange_bytes == 100 * 3 * 576 * 2


def test_a_step_takes_more_prompt_tokens_on_a_device(tmp_path: Path):
    on_cuda, on_cpu = with_draft(tmp_path, **ON_CUDA), with_draft(tmp_path, dtype="bfloat16")
    assert (on_cuda.prefill_tokens, on_cpu.prefill_tokens) == (2048, 512)
    assert with_draft(tmp_path, **ON_CUDA, max_prefill_tokens=100).prefill_tokens == 100
    models = models_of(tmp_path, on_cuda)
    slots = SlotLayout(32, 8, 49152).num_bytes
    rows = 32 * 8 + 2048
    assert make_plan(on_cuda, models, card=CARD)[0].exchange_bytes == rows * 3 * 576 * 2 + slots


@pytest.mark.parametrize(
    ("settings", "total", "tokens"),
    [
        ({}, 60 * GIB - 1, 2048),
        ({}, 60 * GIB, 8192),
        ({"max_prefill_tokens": 1024}, 139 * GIB, 1024),
        ({"max_prefill_tokens": 16384}, 24 * GIB, 16384),
    ],
)
def test_a_large_device_takes_longer_steps_of_prompts_unless_told(settings: dict[str, int], total: int, tokens: int):
    config = LaunchConfig(**ON_CUDA, **settings)
    assert with_prefill_tokens(config, replace(CARD, total=total)).prefill_tokens == tokens


def test_longer_steps_of_prompts_cost_an_h200_a_hundredth_of_its_pool_at_8b(tmp_path: Path):
    card = Card(name="cuda:0 (Made-up H200, GPU-2)", free=139 * GIB, total=140 * GIB, unit=UNIT)
    target, drafter = LADDERS["qwen3-8b-dflash"].write(tmp_path)
    short = LaunchConfig(**ON_CUDA, draft_model_path=str(drafter), load_format="dummy", max_prefill_tokens=2048)
    long = with_prefill_tokens(replace(short, max_prefill_tokens=0), card)
    models = read_models(long, target)
    (_, before), (_, after) = (make_plan(config, models, card=card) for config in (short, long))
    few, many = (
        next(part.num_bytes for part in device_parts(config, models) if part.name == "target workspaces")
        for config in (short, long)
    )
    # At its MLP a row holds 4 * 12288 numbers beside four of the model's 4096; 1.2 is for what cannot be used.
    assert many - few == pytest.approx(1.2 * 6144 * (4 * 12288 + 4 * 4096) * 2, abs=2)
    assert GIB < many < 2 * GIB
    # 5 layers of 4096 are tapped.
    assert after.exchange_bytes - before.exchange_bytes == 6144 * 5 * 4096 * 2
    assert after.device is not None
    assert after.device.planned_bytes <= 0.85 * card.free
    assert 0.98 * before.pool_tokens < after.pool_tokens < 0.99 * before.pool_tokens
    assert after.pool_tokens > 500_000


def test_features_of_long_prompts_are_projected_in_pieces(tmp_path: Path):
    sizes = []
    for tokens in (2048, 8192):
        config = with_draft(tmp_path, **ON_CUDA, max_prefill_tokens=tokens)
        parts = {part.name: part.num_bytes for part in device_parts(config, models_of(tmp_path, config))}
        sizes.append(parts["draft workspaces"])
    assert sizes[0] == sizes[1]


def test_a_hybrids_plan_holds_what_its_prompts_take(tmp_path: Path):
    card = replace(CARD, free=139 * GIB, total=140 * GIB)
    target = folder(tmp_path / "hybrid", HYBRID)
    sizes = []
    for tokens in (2048, 8192):
        config = LaunchConfig(**ON_CUDA, load_format="dummy", max_prefill_tokens=tokens)
        models = read_models(config, target)
        pool, plan = make_plan(config, models, card=card)
        assert [kind.name for kind in plan.kinds] == ["target_kv", "state", "ring"]
        assert plan.device is not None
        assert plan.device.planned_bytes <= 0.85 * card.free
        sizes.append({part.name: part.num_bytes for part in device_parts(config, models)}["target workspaces"])
        assert MemoryManager(pool).layout.num_frames == plan.num_frames
    # 48 heads of 128 x 128: 33 KB of projections, 41 KB convolved, and padded, 74 KB of outputs a row, by torch. Kernels
    # hold 102 KB at most.
    a_row = 1.2 * (4 * 5120 * 2 + 33_024 + 2 * 40_960 + 73_728)
    assert sizes[1] - sizes[0] == pytest.approx(6144 * a_row, rel=0.001)
    assert sizes[0] > 1.2 * 3 * 32 * 48 * 128 * 128 * 4


def test_a_hybrids_graphs_hold_the_rows_that_are_replayed(tmp_path: Path):
    target, sizes = folder(tmp_path / "hybrid", HYBRID), []
    for page in (16, 32):
        config = LaunchConfig(**ON_CUDA, load_format="dummy", page_size=page)
        models = read_models(config, target)
        sizes.append({part.name: part.num_bytes for part in device_parts(config, models)}["target graphs"])
    # 16 rows more of each of 32 requests: 8192 channels of keys and values, and 12 bytes of each of 48 heads.
    assert sizes[1] - sizes[0] == pytest.approx(1.2 * 32 * 16 * (8192 * 2 + 48 * 12), abs=2)


def test_pages_that_a_hybrids_kernels_cannot_have_are_refused(tmp_path: Path):
    target = folder(tmp_path / "hybrid", HYBRID)
    with pytest.raises(ValueError, match="--page-size is 128, 64 at most for a hybrid on a CUDA device"):
        read_models(LaunchConfig(**ON_CUDA, load_format="dummy", page_size=128), target)
    assert read_models(LaunchConfig(load_format="dummy", page_size=128), target).target.linear is not None


def test_what_is_taken_is_shown_beside_what_was_planned(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA, mem_bytes=GIB)
    plan = make_plan(config, models_of(tmp_path, config), card=CARD)[1]
    assert plan.device is not None
    planned = plan.device.planned_bytes
    line = taken_line(plan, replace(CARD, free=CARD.free - planned // 2), {"target": 300 << 20, "draft": 5})
    rest = planned // 2 - GIB - (300 << 20) - 5
    assert line == (
        f"device memory taken={planned // 2} planned={planned} (0.500 of it): arena={GIB}"
        f" draft=5 target={300 << 20} contexts={rest}"
    )


def test_mem_bytes_wins_and_is_rounded_up_to_the_devices_unit(tmp_path: Path):
    config = LaunchConfig(**ON_CUDA, mem_bytes=GIB + 1, mem_fraction_static=0.1)
    pool, plan = make_plan(config, models_of(tmp_path, config), card=CARD)
    assert pool.arena_bytes == plan.arena_bytes == GIB + UNIT


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path):
    config = LaunchConfig(**ON_CUDA, mem_fraction_static=0.02)
    models = models_of(tmp_path, config)
    with pytest.raises(
        ValueError, match=r"static 0.02 leaves 0 bytes .* smallest that works is \d+: \d+ of \d+ bytes of cuda:0"
    ):
        make_plan(config, models, card=CARD)
    with pytest.raises(ValueError, match=rf"--mem-bytes is {24 * GIB}, at most \d+ bytes can be had"):
        make_plan(LaunchConfig(**ON_CUDA, mem_bytes=24 * GIB), models, card=CARD)
    with pytest.raises(ValueError, match="--mem-bytes is 1000, the smallest that works is"):
        make_plan(LaunchConfig(**ON_CUDA, mem_bytes=1000), models, card=CARD)


def test_the_plan_names_every_part_and_the_device(tmp_path: Path):
    config = with_draft(tmp_path, **ON_CUDA)
    _pool, plan = make_plan(config, models_of(tmp_path, config), card=CARD)
    assert plan.device is not None
    for part in plan.device.parts:
        assert f"{part.name} {part.num_bytes} bytes, beside the arena" in plan.lines
    assert f"shared weights {plan.shared_bytes} bytes, in the arena" in plan.lines
    assert any(
        f"device {CARD.name}: {plan.device.planned_bytes} bytes at the peak, 0.850" in line for line in plan.lines
    )
    assert " shared weights, " in plan.lines[0]


def test_the_cards_numbers_come_from_driver_and_nvml(monkeypatch: pytest.MonkeyPatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "_module", fake.module)
    card = read_card("cuda:1")
    device = fake.devices[1]
    assert (card.free, card.total, card.unit) == (device.free, device.total, UNIT)
    assert card.name.startswith("cuda:1 (Fake H200, GPU-aaaa")
    fake.fail["cuMemGetAllocationGranularity"] = CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(ValueError, match=r"cuda:1 .*CUDA_ERROR_UNKNOWN"):
        read_card("cuda:1")


def test_the_device_is_asked_once_and_decides_how_long_steps_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    large = replace(CARD, free=80 * GIB, total=80 * GIB)
    monkeypatch.setattr("launch.__main__.read_card", lambda device: asked.append(device) or large)
    target = folder(tmp_path / "target", TARGET)
    config = LaunchConfig(**ON_CUDA | {"device": "cuda:3"}, model_path=str(target), load_format="dummy", port=0)
    with ExitStack() as stack:
        run = _prepare(config, (), stack)
    assert asked == ["cuda:3"]
    assert run.config.prefill_tokens == 8192
    assert run.pool.max_extend_tokens >= 2 * 8192


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_on_a_device_bfloat16_is_computed_in(tmp_path: Path, stored: str):
    model = folder(tmp_path / "model", TARGET, torch_dtype=stored)
    assert with_dtype(LaunchConfig(device="cuda:1"), model, set()).dtype == "bfloat16"
    assert with_dtype(LaunchConfig(device="cuda", dtype="float32"), model, set()).dtype == "float32"


def test_devices_and_their_flags(capsys: pytest.CaptureFixture[str]):
    config = parse_flags(
        ["--device=cuda", "--mem-fraction-static=0.7", "--cuda-graph-max-bs=8", "--disable-cuda-graph"]
    )
    assert (config.is_cuda, config.torch_device, config.mem_fraction_static) == (True, "cuda:0", 0.7)
    assert (config.cuda_graph_max_bs, config.disable_cuda_graph) == (8, True)
    assert parse_flags(["--device=cuda:2"]).torch_device == "cuda:2"
    assert (parse_flags([]).torch_device, parse_flags([]).is_cuda) == ("cpu", False)
    for device in ("cuda:", "gpu", "cuda:-1", "cpu:0"):
        with pytest.raises(SystemExit):
            parse_flags([f"--device={device}"])
        assert f"--device is '{device}', known are cpu, cuda and cuda:N" in capsys.readouterr().err
    for share in ("0", "1.01", "nan"):
        with pytest.raises(SystemExit):
            parse_flags([f"--mem-fraction-static={share}"])
        assert "--mem-fraction-static" in capsys.readouterr().err
