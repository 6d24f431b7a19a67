"""Rows of prompts convolved over rows that lie in the batch, in the ring and with the state, against recurrence.convolved.

What nobody may read holds NaN. Float32: sums are in the same order, exp may differ in a few units.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import delta_inputs
from memsvc.device.kernels.delta_inputs import SequenceInputs, Sequences
from target_worker.recurrence import convolved
from tests.support import delta_rig as rig

DTYPES = [torch.float32, torch.bfloat16]
NEW = {1: 6, 2: 1, 3: 9, 4: 2}
"""Rows of the batch, by slot."""


def case_of(device, dtype, **spec):
    """(rig, inputs, spans) with a chunk of each slot behind what is in its ring; spans: (slot, s, start, first)."""
    case = rig.Rig(device, dtype, rig.spec_of(**spec), seed=3)
    case.poison()
    spans, first = [], 0
    for slot, num in NEW.items():
        request = case.requests[slot]
        spans.append((slot, request.state_len, request.length, first))
        first += num
    rows = case.inputs(first)
    inputs = SequenceInputs(memory=case.memory, layer=1, conv=case.conv, raw=rows.raw, gates=rows.gates)
    return case, inputs, spans


def ints(values, device):
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def whole(case, inputs, span):
    """All raw inputs of a sequence, those before its state in front, and its gates from the state on."""
    slot, state_len, start, first = span
    num, page = NEW[slot], ints([case.reference.table.state_in[slot, 1]], case.device)
    before = case.own.states.read_conv(page)[0] if state_len else case.own.states.read_conv(ints([0], case.device))[0]
    positions = np.arange(state_len, start)
    raw, gates = case.own.rings.read(case.ring_pages(slot, 1, positions), ints(positions, case.device))
    own = slice(first, first + num)
    return torch.cat((before, raw, inputs.raw[own])), torch.cat((gates, inputs.gates[own]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [{}, {"num_k_heads": 1, "group": 2, "kernel": 2}, {"num_k_heads": 1, "k_dim": 40}])
def test_rows_are_convolved_wherever_those_before_them_lie(device, dtype, spec):
    case, inputs, spans = case_of(device, dtype, **spec)
    facts = ints(np.array(spans).T, device)
    order = [(place, p) for place, (slot, s, start, _) in enumerate(spans) for p in range(s, start + NEW[slot])]
    case.dice.shuffle(order)
    owners, positions = (ints(column, device) for column in zip(*order, strict=True))
    sequences = Sequences(facts=facts, owners=owners, positions=positions)
    got = inputs.convolved(sequences, slice(2, len(order)), torch.float32)
    wide = [whole(case, inputs, span) for span in spans]
    want = [convolved(raw[None].float(), case.conv)[0] for raw, _ in wide]
    heads = case.spec.num_k_heads * case.spec.k_dim
    for row, (place, position) in enumerate(order[2:]):
        at = position - spans[place][1]
        q, k, v = want[place][at].split([heads, heads, case.spec.value_size])
        for mine, theirs in ((got.q, q), (got.k, k), (got.v, v)):
            torch.testing.assert_close(mine[0, row].flatten(), theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.stack((got.g[0, row], got.beta[0, row])), wide[place][1][at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("spec", [{}, {"num_k_heads": 1, "group": 2, "kernel": 2}])
def test_tiles_of_rows_give_the_same_bits(device, dtype, is_shuffled, spec, monkeypatch):
    monkeypatch.setattr(delta_inputs, "TILE_ROWS", 2)
    case, inputs, spans = case_of(device, dtype, **spec)
    order = [(place, p) for place, (slot, s, start, _) in enumerate(spans) for p in range(s, start + NEW[slot])]
    if is_shuffled:
        case.dice.shuffle(order)
    else:
        firsts = [i for i in range(2, len(order), 2) if len({place for place, _ in order[i : i + 2]}) == 1]
        behind = [order[i][1] - spans[order[i][0]][2] >= case.spec.conv_kernel - 1 for i in firsts]
        assert {*behind} == {False, True}, "some tiles reach into the ring, or hold two sequences' rows, others don't"
    owners, positions = (ints(column, device) for column in zip(*order, strict=True))
    sequences = Sequences(facts=ints(np.array(spans).T, device), owners=owners, positions=positions)
    found = []
    for least in (0, 1000):
        monkeypatch.setattr(delta_inputs, "TILED_ROWS", least)
        found.append(inputs.convolved(sequences, slice(2, len(order)), dtype))
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_rows_are_found_bit_for_bit(device, dtype):
    case, inputs, spans = case_of(device, dtype)
    order = [(place, p) for place, (slot, s, start, _) in enumerate(spans) for p in range(s, start + NEW[slot])]
    owners, positions = (ints(column, device) for column in zip(*order, strict=True))
    sequences = Sequences(facts=ints(np.array(spans).T, device), owners=owners, positions=positions)
    got = inputs.gathered(sequences)
    assert got.dtype == dtype
    before = case.spec.conv_kernel - 1
    assert torch.equal(got, torch.cat([whole(case, inputs, span)[0][before:] for span in spans]))


def test_kernels_compile_for_hopper_without_spills(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_hybrid"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(kernel["model"], kernel["kernel"]) for kernel in found} == {
        (model, kernel)
        for model in ("27b", "tiny-hybrid")
        for kernel in ("_gates", "_convolve", "_gather", "_gated_norm")
    }
    assert all(kernel["spilled"] == 0 for kernel in found), found
    wide = [kernel for kernel in found if kernel["model"] == "27b" and kernel["kernel"] != "_gates"]
    assert all(kernel["read_bytes"] == kernel["write_bytes"] == 16 for kernel in wide), wide
