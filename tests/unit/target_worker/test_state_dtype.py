"""States of a hybrid that are kept in bfloat16: chunks and blocks on a device beside the CPU's states in float32."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.wire.text import Sampling
from tests.support import kernel_bounds
from tests.support.device_target import DeviceTarget
from tests.support.tiny_hybrid import SMALLER, HybridRig, make_hybrid

PROMPT = [5, 9, 33, 2, 17, 40, 8, 21, 3, 60]


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid(folder, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, **SMALLER)
    return folder


def state_of(target: DeviceTarget, row: int) -> torch.Tensor:
    """Of the one linear layer."""
    tables = target.memory.states.memory.tables
    return target.linear.states.read(tables.state_in[row, :1].long())


def test_what_is_read_and_written_is_rounded_and_no_more(folder: Path, device: str) -> None:
    found = []
    for states in ("float32", "bfloat16"):
        target = DeviceTarget(folder, device, block_size=3, states=states)
        req = target.open(1, PROMPT, 40, Sampling(temperature=0.0, seed=1, max_tokens=24, ignore_eos=True))
        target.step([], {req: len(PROMPT)})
        kept = [state_of(target, req.row)]
        while req.n_out < 12:
            target.step([req])
        kept.append(state_of(target, req.row))
        assert target.linear.states.shape.recurrent_dtype == getattr(torch, states)
        found.append((kept, req.tokens))
    (whole, tokens), (half, half_tokens) = found
    # After the prompt it is the rounded state itself, after blocks what came of it: as far off as a few roundings are.
    assert torch.equal(half[0], whole[0].bfloat16().float())
    assert half_tokens == tokens
    assert torch.equal(half[1], half[1].bfloat16().float())
    assert not torch.equal(half[1], whole[1])
    assert torch.allclose(half[1], whole[1], rtol=0.02, atol=0.02 * whole[1].abs().max())


def test_the_cpu_keeps_them_so_too(folder: Path) -> None:
    rigs = [HybridRig(folder, states=states) for states in ("float32", "bfloat16")]
    logits, kept = [], []
    for rig in rigs:
        req = rig.open(1, 40)
        logits.append(rig.chunk(req, PROMPT[:8]))
        page = torch.tensor([rig.linear.table.state_in[req.row, 0]])
        kept.append(rig.linear.states.read(page))
        logits.append(rig.chunk(req, PROMPT[8:]))
    assert torch.equal(kept[1], kept[0].bfloat16().float())
    assert torch.equal(logits[2], logits[0])
    assert not torch.equal(logits[3], logits[1])
    assert torch.allclose(logits[3], logits[1], rtol=0.02, atol=0.02)
