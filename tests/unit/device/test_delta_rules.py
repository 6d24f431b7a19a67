"""Sequences one after another are computed as each alone, by the first way of a list that can be had."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from memsvc.device import delta_rules
from memsvc.device.delta_rules import PREFERRED, TorchRule, choose_rule, lacks
from memsvc.device.gated_delta import DeltaRows, gated_delta_rule
from target_worker.model.linear_spec import LinearSpec

HEADS, K_HEADS, K_DIM, V_DIM = 4, 2, 16, 8


def stage(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


def rows_of(num: int) -> DeltaRows:
    torch.manual_seed(num)
    q, k = (torch.randn(1, num, K_HEADS, K_DIM) for _ in range(2))
    v, g = torch.randn(1, num, HEADS, V_DIM), -torch.rand(1, num, HEADS)
    return DeltaRows(q, k, v, g, torch.rand(1, num, HEADS))


@pytest.mark.parametrize("lens", [[1], [5], [1, 2, 3], [7, 130, 2, 40, 8, 33], [64, 64, 300]])
def test_each_sequence_comes_out_as_alone(lens: list[int]) -> None:
    rows, states = rows_of(sum(lens)), torch.randn(len(lens), HEADS, K_DIM, V_DIM)
    out, ends = TorchRule()(lens, stage)(rows, states.clone())
    first = 0
    for place, num in enumerate(lens):
        alone = rows.part(first, first + num)
        want, kept = gated_delta_rule(alone, states[place : place + 1].clone(), [num], 0)
        torch.testing.assert_close(out[:, first : first + num], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ends[place], kept.states[0], rtol=1e-4, atol=1e-5)
        first += num


LARGE = LinearSpec(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, conv_kernel=4)
CUDA = torch.device("cuda")


class Made:
    """Stands for a rule with what it was made of."""

    def __init__(self, name: str, *given: Any) -> None:
        self.name, self.given = name, given


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Packages and kernels that are there, on a Hopper device; empty is none."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(delta_rules.fla_delta.importlib.util, "find_spec", found.get)
    monkeypatch.setattr(delta_rules, "FlaRule", lambda *given: Made("fla", *given))
    monkeypatch.setattr(delta_rules, "FlashInferRule", lambda *given: Made("flashinfer", *given))
    monkeypatch.setattr(delta_rules.flashinfer_delta, "_load", lambda: object())
    return found


def add_library(installed: dict[str, Any], folder: Any) -> None:
    library = folder / "data" / "aot" / "gated_delta_prefill_sm90" / "gated_delta_prefill_sm90.so"
    library.parent.mkdir(parents=True)
    library.touch()
    installed["flashinfer"] = Made("package")
    installed["flashinfer"].origin = str(folder / "__init__.py")


def test_the_first_that_can_be_had_is_taken(installed: dict[str, Any], tmp_path: Any) -> None:
    assert choose_rule(torch.bfloat16, CUDA, LARGE).name == "torch"
    installed["fla"] = object()
    chosen = choose_rule(torch.bfloat16, CUDA, LARGE)
    assert isinstance(chosen, Made)
    assert (chosen.name, *chosen.given) == ("fla", torch.bfloat16)
    add_library(installed, tmp_path)
    chosen = choose_rule(torch.bfloat16, CUDA, LARGE)
    assert isinstance(chosen, Made)
    assert (chosen.name, *chosen.given) == ("flashinfer", CUDA, 48)
    assert choose_rule(torch.float16, CUDA, LARGE).name == "fla", "the other's kernels are for bfloat16"
    assert choose_rule(torch.float32, CUDA, LARGE).name == "torch"
    assert choose_rule(torch.bfloat16, torch.device("cpu"), LARGE).name == "torch"


def test_one_list_says_what_is_preferred(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["fla"] = object()
    monkeypatch.setattr(delta_rules, "PREFERRED", ("torch", "fla"))
    assert choose_rule(torch.bfloat16, CUDA, LARGE).name == "torch"


def test_a_library_that_does_not_load_is_passed_over_with_a_word(
    installed: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        raise AttributeError("Module has no function 'parts_fix_few'")

    monkeypatch.setattr(delta_rules.flashinfer_delta, "_load", load)
    installed["fla"] = object()
    add_library(installed, tmp_path)
    with caplog.at_level(logging.INFO):
        assert choose_rule(torch.bfloat16, CUDA, LARGE).name == "fla"
    assert [line for line in caplog.messages if "flashinfer" in line and "'parts_fix_few'" in line]


def test_each_says_why_it_cannot_be_had(installed: dict[str, Any]) -> None:
    reasons = {name: lacks(name, torch.bfloat16, CUDA, LARGE) for name in PREFERRED}
    assert reasons == {"flashinfer": "flashinfer is not installed", "fla": "fla-core is not installed", "torch": None}
    assert "two bytes a number" in str(lacks("fla", torch.float32, CUDA, LARGE))
