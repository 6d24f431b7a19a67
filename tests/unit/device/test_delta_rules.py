"""Sequences one after another are computed as each alone, and fla-core's kernels are called as they ask to be."""

import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from memsvc.device import delta_rules
from memsvc.device.delta_rules import FlaRule, TorchRule, choose_rule
from memsvc.device.gated_delta import DeltaRows, gated_delta_rule

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


def as_fla(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
           cu_seqlens=None, cu_seqlens_cpu=None):  # fmt: skip
    """chunk_gated_delta_rule by its documentation: g in log space, states [N, HV, K, V], sequences [1, T, ..]."""
    assert use_qk_l2norm_in_kernel
    assert output_final_state
    assert scale == q.shape[-1] ** -0.5
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    cuts, outs, ends = cu_seqlens.tolist(), [], []
    for place, (first, end) in enumerate(pairwise(cuts)):
        part = DeltaRows(q, k, v, g, beta).part(first, end)
        out, kept = gated_delta_rule(part, initial_state[place : place + 1].clone(), [end - first], 0)
        outs.append(out)
        ends.append(kept.states)
    return torch.cat(outs, dim=1), torch.cat(ends)


def test_fla_is_called_with_what_it_asks_for() -> None:
    lens = [3, 70, 1]
    rows, states = rows_of(sum(lens)), torch.randn(len(lens), HEADS, K_DIM, V_DIM)
    got = FlaRule(torch.bfloat16, as_fla)(lens, stage)(rows, states.clone())
    want = TorchRule()(lens, stage)(rows, states.clone())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fla_is_used_where_it_is_installed_and_numbers_have_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fla = ModuleType("fla.ops.gated_delta_rule")
    fla.chunk_gated_delta_rule = as_fla  # type: ignore[attr-defined]
    cuda, environ = torch.device("cuda"), {"FLA_CACHE_MODE": "strict"}
    monkeypatch.setattr(delta_rules.os, "environ", environ)
    monkeypatch.setattr(delta_rules.importlib.util, "find_spec", lambda name: None)
    assert choose_rule(torch.bfloat16, cuda).name == "torch"
    monkeypatch.setattr(delta_rules.importlib.util, "find_spec", lambda name: name == "fla" or None)
    monkeypatch.setattr(delta_rules.importlib, "import_module", lambda name: {fla.__name__: fla}[name])
    chosen = choose_rule(torch.bfloat16, cuda)
    assert (chosen.name, chosen.dtype) == ("fla", torch.bfloat16)
    assert choose_rule(torch.float32, cuda).name == "torch"
    assert choose_rule(torch.bfloat16, torch.device("cpu")).name == "torch"
    assert environ["FLA_CACHE_MODE"] == "strict", "what the user says holds"
    for file in Path(environ["FLA_CONFIG_DIR"]).glob("*.json"):
        found = json.loads(file.read_text())
        assert found["kernel_name"] == file.stem
        assert found["default_config"].keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"}
