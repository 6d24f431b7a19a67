"""What each process is handed: a config that it can read, and no secrets but to the front."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draft_worker.config import DraftConfig
from launch.__main__ import ready_line
from launch.card import Card
from launch.config import LaunchConfig
from launch.http.config import API_KEY_ENV, FrontConfig
from launch.http.listen import bind_tcp
from launch.models import read_models
from launch.mps import MpsDaemon
from launch.planner import make_plan, step_sizes
from launch.specs import PACKAGES, Run
from memsvc.config import MemConfig, read_config
from target_worker.config import TargetConfig
from tests.support.model_folders import HYBRID, folder, models_of, with_draft
from tests.unit.launch.test_device_plan import CARD
from tokenizer_proc.config import TokenizerConfig

CONFIGS = {
    "memsvc": MemConfig,
    "draft": DraftConfig,
    "target": TargetConfig,
    "tokenizer": TokenizerConfig,
    "front": FrontConfig,
}


def make_run(
    tmp_path: Path, config: LaunchConfig, card: Card | None = None, target: dict[str, Any] | None = None
) -> Run:
    """target: another config.json than models_of has."""
    models = read_models(config, folder(tmp_path / "target", target)) if target else models_of(tmp_path, config)
    pool, plan = make_plan(config, models, available=1 << 34, card=card)
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return Run(
        config=config,
        model_path=tmp_path / "target",
        models=models,
        pool=pool,
        plan=plan,
        run_dir=run_dir,
        listener=bind_tcp("127.0.0.1", 0),
        command=("python", "-m", "launch"),
    )


def test_every_process_can_read_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_ENV, "secret")
    config = with_draft(tmp_path, api_key="secret", max_running_requests=5, num_drafts=3, dtype="float32")
    run = make_run(tmp_path, config)
    assert run.roles == ("memsvc", "draft", "tokenizer", "target", "front")
    with run.listener:
        for role in run.roles:
            spec = run.spec(role, 4)
            assert list(spec.command[1:4]) == ["-m", PACKAGES[role], "--config"]
            data = Path(spec.command[4]).read_bytes()
            read = msgspec.json.decode(data, type=CONFIGS[role])
            assert read.run_dir == str(run.run_dir)
            assert b"secret" not in data
            assert (spec.env.get(API_KEY_ENV) == "secret") == (role == "front")
            assert bool(spec.pass_fds) == (role == "front")
        assert "speculation=dflash block=4" in ready_line(run)
        assert ready_line(run, without=("draft",)).endswith("speculation=off")
    target = msgspec.json.decode((run.run_dir / "target.json").read_bytes(), type=TargetConfig)
    assert (target.draft, target.num_draft_tokens, target.target_layer_ids) == (True, 3, (1, 14, 27))
    assert target.max_step_rows * run.models.feature_row_bytes == run.plan.exchange_bytes
    front = msgspec.json.decode((run.run_dir / "front.json").read_bytes(), type=FrontConfig)
    assert (front.generation, front.block_size, front.requires_key, front.plan) == (4, 4, True, run.plan)
    assert read_config(run.run_dir / "memsvc.json").pool == run.pool


def test_settings_of_a_device_reach_both_workers(tmp_path: Path):
    config = with_draft(
        tmp_path, device="cuda", dtype="bfloat16", cuda_graph_max_bs=8, disable_cuda_graph=True, spec_trace=2,
        attention_backend="triton", max_running_requests=5, kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    run = make_run(tmp_path, config, card=CARD)
    with run.listener:
        for role in ("target", "draft"):
            run.spec(role, 1)
    target = msgspec.json.decode((run.run_dir / "target.json").read_bytes(), type=TargetConfig)
    draft = msgspec.json.decode((run.run_dir / "draft.json").read_bytes(), type=DraftConfig)
    for worker in (target, draft):
        shown = (worker.device, worker.cuda_graph_max_bs, worker.disable_cuda_graph, worker.spec_trace)
        assert shown == ("cuda:0", 8, True, 2)
    assert (target.attention_backend, target.max_prefill_tokens) == ("triton", 2048)
    assert (target.kv_cache_dtype, draft.kv_cache_dtype) == ("fp8_e4m3", "auto")
    assert target.sizes == step_sizes(config, run.models)


def test_only_who_uses_the_device_runs_under_mps_and_a_later_memory_service_gets_a_fresh_daemon(tmp_path: Path):
    run = make_run(tmp_path, with_draft(tmp_path, device="cuda", mps="on", dtype="bfloat16"), card=CARD)
    daemon = FakeMps(run.run_dir)
    run = replace(run, mps=daemon)
    with run.listener:
        under = {role for role in run.roles if run.spec(role, 1).env.get("CUDA_MPS_PIPE_DIRECTORY")}
        assert under == {"memsvc", "target", "draft"}
        run.spec("target", 2)
        assert daemon.num_restarts == 0
        run.spec("memsvc", 2)
        assert daemon.num_restarts == 1


class FakeMps(MpsDaemon):
    """Counts."""

    num_restarts = 0

    def restart(self) -> None:
        self.num_restarts += 1


@pytest.mark.parametrize(
    ("settings", "num_drafts", "widths"),
    [
        ({}, 7, (0, 1, 2, 3, 5, 7)),
        ({"widths": (0, 2, 4)}, 4, (0, 2, 4)),
        ({"num_drafts": 7}, 7, ()),
        ({"block_size": 3}, 2, ()),
    ],
)
def test_the_target_is_told_the_widths_to_choose_from(
    tmp_path: Path, settings: dict[str, Any], num_drafts: int, widths: tuple[int, ...]
):
    run = make_run(tmp_path, with_draft(tmp_path, **settings))
    with run.listener:
        for role in ("target", "front", "draft"):
            run.spec(role, 1)
        block = f"block=auto,{num_drafts + 1}" if widths else f"block={num_drafts + 1}"
        assert f"speculation=dflash {block} drafter=" in ready_line(run)
    target = msgspec.json.decode((run.run_dir / "target.json").read_bytes(), type=TargetConfig)
    assert (target.num_draft_tokens, target.widths) == (num_drafts, widths)
    front = msgspec.json.decode((run.run_dir / "front.json").read_bytes(), type=FrontConfig)
    assert (front.block_size, front.widths) == (num_drafts + 1, widths)
    draft = msgspec.json.decode((run.run_dir / "draft.json").read_bytes(), type=DraftConfig)
    assert draft.num_draft_tokens == num_drafts


def test_widths_past_what_the_drafter_was_trained_for_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="9 drafts a block are asked for"):
        models_of(tmp_path, with_draft(tmp_path, widths=(0, 9)))


def test_a_drafter_of_another_length_may_draft_as_far_as_it_goes(tmp_path: Path):
    assert models_of(tmp_path, with_draft(tmp_path), block_size=5).widths == (0, 1, 2, 3, 4)
    assert models_of(tmp_path, with_draft(tmp_path), block_size=2).widths == (0, 1)


def test_the_ready_line_says_where_and_with_what(tmp_path: Path):
    run = make_run(tmp_path, LaunchConfig(served_model_name=("toy", "other")))
    with run.listener:
        port = run.listener.getsockname()[1]
        pool = f"{run.plan.arena_bytes} bytes ({run.plan.pool_tokens} tokens)"
        assert ready_line(run) == (
            f"ready http://127.0.0.1:{port} model=toy max_running=32 pool={pool} speculation=off"
        )
        assert run.roles == ("memsvc", "tokenizer", "target", "front")


def test_a_port_in_use_is_named():
    with bind_tcp("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind_tcp("127.0.0.1", port)


def test_the_target_is_told_what_its_states_are_kept_in(tmp_path: Path):
    config = LaunchConfig(mamba_ssm_dtype="bfloat16", context_len=512, max_running_requests=2, mem_bytes=8 << 30)
    run = make_run(tmp_path, config, target=HYBRID)
    with run.listener:
        run.spec("target", 1)
    target = msgspec.json.decode((run.run_dir / "target.json").read_bytes(), type=TargetConfig)
    assert target.mamba_ssm_dtype == "bfloat16"
    assert {kind.name: kind.page_bytes for kind in run.pool.kinds}["state"] == 48 * 128 * 128 * 2 + 3 * 10_240 * 2


@pytest.mark.parametrize(("flag", "kind"), [("kv_cache_dtype", "target_kv"), ("draft_kv_cache_dtype", "draft_kv")])
def test_pages_of_target_and_draft_are_made_smaller_apart(tmp_path: Path, flag: str, kind: str):
    whole = models_of(tmp_path, with_draft(tmp_path, dtype="float32"))
    run = make_run(tmp_path, with_draft(tmp_path, dtype="float32", **{flag: "fp8_e4m3"}))
    quarter = {spec.name: 1 + 3 * (spec.name == kind) for spec in whole.kinds}
    assert len(quarter) == 2
    for spec, small in zip(whole.kinds, run.models.kinds, strict=True):
        assert (small.name, quarter[spec.name] * small.page_bytes) == (spec.name, spec.page_bytes)
    with run.listener:
        for role in ("target", "draft"):
            run.spec(role, 1)
    found = [
        msgspec.json.decode((run.run_dir / f"{role}.json").read_bytes(), type=CONFIGS[role])
        for role in ("target", "draft")
    ]
    assert [config.kv_cache_dtype == "fp8_e4m3" for config in found] == [kind == "target_kv", kind == "draft_kv"]
