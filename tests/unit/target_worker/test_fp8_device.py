"""A target in fp8 on a device: the tokens and features of the CPU's reference."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.fp8 import QuantRows
from memsvc.wire.text import Sampling
from target_worker.cuda import network
from target_worker.runner import Segment
from tests.support import kernel_bounds
from tests.support.device_target import DeviceTarget
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import TargetRig, make_target, tokens_of

FP8 = "fp8"
TAPS = (0, 1)
PROMPT = tokens_of(1, 9, 61)
DRAFTS = [7, 9]
NUM_ROWS = len(PROMPT) + 1 + len(DRAFTS)


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


def make_folder(kind: str, folder: Path) -> Path:
    sizes = {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32,
        "intermediate_size": 48, "vocab_size": 61,
    }  # fmt: skip
    if kind == "dense":
        make_target(folder, "Qwen3", **sizes)
    else:
        make_hybrid(
            folder, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
            linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=8, **sizes,
        )  # fmt: skip
    return folder


def reference(kind: str, folder: Path, quantization: str = FP8) -> tuple[int, torch.Tensor]:
    """The token after the prompt, and features of it, of the prompt and of the drafts, in order."""
    if kind == "dense":
        dense = TargetRig(folder, taps=TAPS, quantization=quantization)
        row = dense.open(1, 60)
        first = int(dense.runner.forward([Segment(row, 0, PROMPT, 1)])[0].argmax())
        dense.runner.forward([Segment(dense.open(2, 60), 0, [*PROMPT, first, *DRAFTS], 1)])
        return first, dense.features[:NUM_ROWS].clone()
    hybrid = HybridRig(folder, taps=TAPS, quantization=quantization)
    first = int(hybrid.chunk(hybrid.open(1, 60), PROMPT)[-1].argmax())
    hybrid.chunk(hybrid.open(2, 60), [*PROMPT, first, *DRAFTS])
    return first, hybrid.features[:NUM_ROWS].clone()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_features_of_a_prompt_and_a_block_are_the_references(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(kind, tmp_path)
    first, wanted = reference(kind, folder)
    _, plain = reference(kind, folder, "")
    seen: list[type] = []
    linear_for = network.linear_for
    monkeypatch.setattr(
        network, "linear_for", lambda following, x, *rest: seen.append(type(x)) or linear_for(following, x, *rest)
    )
    target = DeviceTarget(folder, device, block_size=3, taps=TAPS, quantization=FP8)
    req = target.open(1, PROMPT, 60, Sampling(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True))
    target.step([], {req: len(PROMPT)})
    assert target.features is not None
    of_prompt = target.features[: len(PROMPT)].cpu().clone()
    assert req.tokens[len(PROMPT)] == first
    target.draft(req, DRAFTS)
    target.step([req])
    of_block = target.features[int(target.slots.feature_row[req.row]) :][:3].cpu()
    found = torch.cat((of_prompt, of_block))
    apart, moved = float((found - wanted).norm() / wanted.norm()), float((plain - wanted).norm() / wanted.norm())
    assert moved > 2e-3
    # A number next to a tie may be rounded to the other side; the device's products are in bfloat16 besides.
    assert apart < moved / (50 if device == "cpu" else 2)
    # Into the MLP and out of it rows come in 8 bits, and out of a gated attention.
    assert seen[:3] == [torch.Tensor, QuantRows, QuantRows]
    assert seen[3:6] == [torch.Tensor if kind == "dense" else QuantRows, QuantRows, QuantRows]
