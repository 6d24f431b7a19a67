"""Models read and checked, and the arena sized from them, without loading a weight."""

from pathlib import Path
from typing import Any

import pytest

from launch.config import LaunchConfig
from launch.models import read_models
from launch.planner import DEFAULT_LIMIT, make_plan
from launch.run_dir import run_directory
from memsvc.core.manager import MemoryManager
from memsvc.transport import check_run_dir
from tests.support.model_folders import DRAFT, HYBRID, folder, models_of, with_draft

GIB = 1 << 30


def test_kinds_of_both_models_with_their_bytes(tmp_path: Path):
    models = models_of(tmp_path, with_draft(tmp_path))
    assert [(kind.name, kind.page_bytes) for kind in models.kinds] == [
        ("target_kv", 16 * 23_040),
        ("draft_kv", 16 * 2 * 2 * 3 * 64 * 2),
    ]
    assert (models.num_drafts, models.block_size, models.context_len) == (7, 8, 4096)
    assert models.feature_row_bytes == 3 * 576 * 2


def test_float32_doubles_pages_and_features(tmp_path: Path):
    models = models_of(tmp_path, with_draft(tmp_path, dtype="float32"))
    assert models.kinds[0].page_bytes == 16 * 46_080
    assert models.feature_row_bytes == 3 * 576 * 4


def test_a_hybrid_has_states_and_rings_for_every_linear_layer(tmp_path: Path):
    config = LaunchConfig(context_len=4096, max_running_requests=60, mem_bytes=60 * GIB)
    models = read_models(config, folder(tmp_path / "target", HYBRID))
    state, ring = 48 * 128 * 128 * 4 + 3 * 10_240 * 2, 9 * (10_240 * 2 + 2 * 48 * 4)
    assert [(kind.name, kind.page_bytes, kind.pages_per_req) for kind in models.kinds] == [
        ("target_kv", 16 * 64 * 1024, 0),
        ("state", state, 48),
        ("ring", ring, 96),
    ]
    pool, plan = make_plan(config, models, available=64 * GIB)
    one = (4096 + pool.slack_tokens) * 64 * 1024 + 48 * (state + 2 * ring)
    assert one < plan.one_request_bytes < 1.2 * one
    frames = plan.num_frames - 1 - sum(-(-kind.pages_per_req // kind.pages_per_frame) for kind in plan.kinds[1:])
    assert plan.pool_tokens == frames * plan.kinds[0].pages_per_frame * 16
    assert MemoryManager(pool).layout.num_frames == plan.num_frames


def test_states_may_be_kept_in_half_the_bytes(tmp_path: Path):
    target, dense = folder(tmp_path / "hybrid", HYBRID), models_of(tmp_path, with_draft(tmp_path))
    whole, half = (read_models(LaunchConfig(mamba_ssm_dtype=name), target).kinds for name in ("float32", "bfloat16"))
    assert whole[1].page_bytes - half[1].page_bytes == 48 * 128 * 128 * 2
    assert (whole[0], whole[2]) == (half[0], half[2])
    assert dense.target.linear is None
    with pytest.raises(ValueError, match="--mamba-ssm-dtype is bfloat16, but target has no recurrent layers"):
        models_of(tmp_path, with_draft(tmp_path, mamba_ssm_dtype="bfloat16"))


def test_rings_grow_with_the_block_and_nothing_else_does(tmp_path: Path):
    sizes = {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    text = {**HYBRID["text_config"], **sizes, "vocab_size": 49152, "num_hidden_layers": 30}
    target = folder(tmp_path / "target", HYBRID, text_config=text)
    folder(tmp_path / "draft", DRAFT)
    plain = read_models(LaunchConfig(), target).kinds
    drafting = read_models(with_draft(tmp_path), target).kinds
    assert [kind.name for kind in drafting] == ["target_kv", "state", "ring", "draft_kv"]
    assert drafting[:2] == plain[:2]
    assert drafting[2].page_bytes * (16 + 2) == plain[2].page_bytes * (16 + 2 * 8)


def test_exchange_holds_the_rows_of_the_largest_step(tmp_path: Path):
    config = with_draft(tmp_path, max_running_requests=100, max_prefill_tokens=512)
    _pool, plan = make_plan(config, models_of(tmp_path, config), available=64 * GIB)
    assert plan.exchange_bytes == 800 * 3 * 576 * 2
    config = LaunchConfig()
    assert make_plan(config, models_of(tmp_path, config), available=64 * GIB)[1].exchange_bytes == 0


def test_the_default_is_a_share_of_what_is_there_and_never_more_than_can_be_used(tmp_path: Path):
    config = LaunchConfig()
    models = models_of(tmp_path, config)
    _pool, plan = make_plan(config, models, available=64 * GIB)
    assert plan.arena_bytes == DEFAULT_LIMIT
    assert make_plan(config, models, available=8 * GIB)[1].arena_bytes == 2 * GIB
    few = LaunchConfig(max_running_requests=1, context_len=1024)
    plan = make_plan(few, models_of(tmp_path, few), available=64 * GIB)[1]
    assert plan.arena_bytes == plan.all_requests_bytes == plan.one_request_bytes < 30_000_000


def test_an_arena_for_one_request_of_the_whole_context_really_opens_it(tmp_path: Path):
    config = with_draft(tmp_path, context_len=700, max_running_requests=2)
    models = models_of(tmp_path, config)
    size = make_plan(config, models, available=GIB)[1].one_request_bytes
    pool, plan = make_plan(with_draft(tmp_path, context_len=700, max_running_requests=2, mem_bytes=size), models, GIB)
    assert plan.pool_tokens >= 700
    layout = MemoryManager(pool).layout
    pages = [-(-(700 + pool.slack_tokens) // 16)] * 2
    frames = sum(-(-num // kind.pages_per_frame) for num, kind in zip(pages, layout.kinds, strict=True))
    exchange = -(-plan.exchange_bytes // layout.frame_bytes)
    assert frames + exchange + 1 == layout.num_frames


def test_an_arena_too_small_names_the_smallest_that_works(tmp_path: Path):
    config = with_draft(tmp_path, mem_bytes=100_000)
    models = models_of(tmp_path, config)
    with pytest.raises(ValueError, match="--mem-bytes is 100000, the smallest that works is") as caught:
        make_plan(config, models, available=GIB)
    smallest = int(str(caught.value).split()[-1])
    pool, _plan = make_plan(with_draft(tmp_path, mem_bytes=smallest), models, available=GIB)
    MemoryManager(pool)
    with pytest.raises(ValueError, match="smallest"):
        make_plan(with_draft(tmp_path, mem_bytes=smallest - 1), models, available=GIB)


def test_an_arena_larger_than_the_memory_is_refused(tmp_path: Path):
    config = LaunchConfig(mem_bytes=2 * GIB)
    with pytest.raises(ValueError, match=f"only {GIB} bytes"):
        make_plan(config, models_of(tmp_path, config), available=GIB)


def test_an_arena_below_one_context_is_told_to_the_operator(tmp_path: Path):
    config = LaunchConfig(mem_bytes=50_000_000)
    _pool, plan = make_plan(config, models_of(tmp_path, config), available=GIB)
    assert any("context_len 8192" in line for line in plan.lines)


@pytest.mark.parametrize(
    ("context_len", "lengths"), [(700, []), (1024, ["1k"]), (4096, ["1k", "4k"]), (8192, ["1k", "4k"])]
)
def test_the_plan_tells_how_many_requests_fit_of_no_longer_ones_than_there_can_be(
    tmp_path: Path, context_len: int, lengths: list[str]
):
    config = LaunchConfig(context_len=context_len, mem_bytes=GIB)
    _pool, plan = make_plan(config, models_of(tmp_path, config), available=GIB)
    told = [line for line in plan.lines if line.startswith("requests that fit")]
    assert [word.strip(",:") for line in told for word in line.split() if word.endswith("k:")] == lengths
    assert len(told) == bool(lengths)
    assert any(line.startswith("arena ") for line in plan.lines)


def test_how_long_and_how_densely_text_is_cached_reaches_the_pool(tmp_path: Path):
    config = LaunchConfig(eviction_policy="ttl", ttl_s=60.0, checkpoint_interval=256)
    pool, _plan = make_plan(config, models_of(tmp_path, config), available=GIB)
    assert (pool.eviction_policy, pool.ttl_s, pool.checkpoint_interval) == ("ttl", 60.0, 256)
    default, _plan = make_plan(LaunchConfig(), models_of(tmp_path, LaunchConfig()), available=GIB)
    assert (default.ttl_s, default.checkpoint_interval) == (3600.0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 1000}, "vocabulary is 1000 there and 49152 here"),
        ({"hidden_size": 512, "head_dim": 64}, "width of a tapped layer is 512 there and 576 here"),
        ({"num_target_layers": 12, "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1]}}, "depth"),
        ({"num_target_layers": 0, "dflash_config": {"mask_token_id": 16, "target_layer_ids": [30]}}, "layer 30"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        models_of(tmp_path, with_draft(tmp_path), **changes)


def test_more_drafts_than_trained_and_too_long_a_context_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="8 drafts"):
        models_of(tmp_path, with_draft(tmp_path, num_drafts=8))
    assert models_of(tmp_path, with_draft(tmp_path, num_drafts=3)).block_size == 4
    with pytest.raises(ValueError, match="8193, the model has 8192"):
        models_of(tmp_path, LaunchConfig(context_len=8193))
    with pytest.raises(ValueError, match="between 1 and 8"):
        models_of(tmp_path, with_draft(tmp_path, simulate_accept_length=9.0))


def test_run_directories_are_private_short_and_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with run_directory() as first, run_directory() as second:
        assert first != second
        check_run_dir(first)
        (first / "mem.sock").touch()
    assert not first.exists()
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with run_directory() as path:
        assert deep not in path.parents


def test_an_asked_run_directory_must_be_empty(tmp_path: Path):
    with run_directory(str(tmp_path / "run")) as path:
        check_run_dir(path)
        (path / "file").touch()
        with pytest.raises(ValueError, match="not empty"), run_directory(str(path)):
            pass
    assert not path.exists()
    with pytest.raises(ValueError, match="the system allows 107"), run_directory(str(tmp_path / ("y" * 120))):
        pass
