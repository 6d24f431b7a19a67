"""The draft step on kernels over e4m3 pages: the drafts and the draft KV of the torch worker over such pages."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.cuda.session import SessionMaker
from memsvc.device.kv_dtype import FP8_E4M3
from memsvc.wire.spec import Planned
from tests.support.make_drafter import V1, V2
from tests.support.plan_rig import merged
from tests.support.small_plans import assert_same_drafts, small_rig

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("version", "overrides"),
    [
        (V1, {}),
        (V2, {}),
        (V1, {"attention_sink_bias": True, "attention_value_scale": 0.7}),
        (V2, {"is_causal": True, "attention_value_scale": 900.0}),
    ],
    ids=["v1", "v2", "v1-scales", "v2-causal-past-448"],
)
def test_turns_give_the_drafts_of_the_torch_worker(
    version: int, overrides: dict[str, Any], tmp_path: Path, device: str
) -> None:
    rig = small_rig(tmp_path, version, device, kv=FP8_E4M3, **overrides)
    assert rig.pool.shape.dtype == E4M3
    assert_same_drafts(rig, [2, 1], **merged(rig.open(1, 0), rig.open(2, 10, valid_from=7)))
    rig.emit(1, 2)
    assert_same_drafts(rig, [1])


@pytest.mark.parametrize("route", ["materialized", "per_request"])
def test_the_other_routes_give_the_same_drafts(route: str, tmp_path: Path, device: str) -> None:
    rig = small_rig(tmp_path, V2, device, changes={"propose_route": route}, kv=FP8_E4M3)
    rig.plan([], **merged(rig.open(1, 7), rig.open(2, 1)))
    rig.emit(1, 2)
    rig.emit(2, 1)
    assert_same_drafts(rig, [2, 1])


def test_draft_kv_is_what_the_torch_worker_writes_and_nothing_else_changes(tmp_path: Path, device: str) -> None:
    rig = small_rig(tmp_path, V2, device, attention_value_scale=0.7, kv=FP8_E4M3)
    rig.plan([], **merged(rig.open(1, 9), rig.open(2, 5)))
    rig.emit(1, 3)
    rig.emit(2, 1)
    assert isinstance(rig.plan([1, 2]), Planned)
    rig.session.lane.drain(0.0)
    got, want = (pool.pages[1:].view(torch.uint8).cpu().int() for pool in (rig.pool, rig.cpu.pool))
    assert torch.equal(got & 0x7F == 0x7F, want & 0x7F == 0x7F)
    # Beside a tie a number may be rounded to the other side; page 0 is the dummy.
    assert int((got - want).abs().max()) <= 1
    assert int((got != want).sum()) <= 5


def test_a_device_that_cannot_read_the_pages_is_refused_by_the_flags_name(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = small_rig(tmp_path, V2, device, kv=FP8_E4M3)
    memory = rig.worker._memory
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: (8, 0))
    with pytest.raises(
        ValueError, match=r"--speculative-draft-kv-cache-dtype fp8_e4m3 needs compute capability 8.9, .* has 8\.0"
    ):
        SessionMaker(rig.worker._config, rig.cpu.model, _ElsewhereMemory(memory))


class _ElsewhereMemory:
    """A Memory whose arena says that it is on a CUDA device."""

    def __init__(self, memory: Any) -> None:
        self.pool = memory.pool
        self.arena = type("Arena", (), {"device": torch.device("cuda:0")})()
