"""A step's prompt chunks over pages: states and rows come out alike, whichever way the rule is computed."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device import delta_rules
from memsvc.device.delta_plan import PlanRule
from memsvc.device.delta_rules import PREFERRED, FlaRule, FlashInferRule, TorchRule, choose_rule, lacks
from target_worker.attention import Span
from target_worker.cuda.prompt_states import PromptStates
from target_worker.cuda.states import DeviceStates
from tests.support.delta_libraries import FakeLibrary, as_fla
from tests.support.delta_rig import LAYERS, PAGE, Rig, spec_of
from tests.support.kernel_bounds import allow_several_operands
from tests.support.never_waits import never_waits

SPEC = spec_of(num_k_heads=2, group=2, k_dim=128, v_dim=128)
NUM_SMS = 8
CHUNKS = {
    "to page edges": {1: 2 * PAGE, 3: PAGE},
    "past one, past none, past several": {1: PAGE + 1, 2: 1, 3: 3 * PAGE + 2, 4: 2},
    "one row": {1: 1},
}
"""New rows by slot."""


def by_flashinfer(piece: int) -> PlanRule:
    library = FakeLibrary(SPEC, NUM_SMS)
    return FlashInferRule(torch.device("cpu"), SPEC.num_v_heads, piece=piece, num_sms=NUM_SMS, library=library)


RULES: dict[str, Callable[[], PlanRule]] = {
    "fla": lambda: FlaRule(torch.bfloat16, as_fla),
    "flashinfer": lambda: by_flashinfer(0),
    "flashinfer in pieces": lambda: by_flashinfer(64),
}


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_several_operands(monkeypatch)


class Copies:
    """A Stage that counts."""

    def __init__(self, device: str) -> None:
        self.device, self.num = device, 0

    def __call__(self, values: np.ndarray) -> torch.Tensor:
        self.num += 1
        copy = torch.from_numpy(values.copy())
        return copy.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else copy


def run(
    rule: PlanRule,
    chunks: dict[int, int],
    device: str = "cpu",
    within: Callable[[], Any] = nullcontext,
    ending: Collection[int] = (),
) -> tuple[Rig, list[torch.Tensor]]:
    """Outputs of both layers, and where they have left the memory. within: what they are computed in."""
    rig = Rig(device, torch.bfloat16, SPEC, seed=5)
    states = DeviceStates(rig.own, rig.memory, None, [rig.site(layer) for layer in range(LAYERS)])  # type: ignore[arg-type]
    spans, first = [], 0
    for slot, num in chunks.items():
        # Slot 1 begins at token 0; of the others some rows are in the ring.
        spans.append(Span(slot, 0 if slot == 1 else rig.requests[slot].length, num, first, slot in ending))
        first += num
    copies, given = Copies(device), [rig.inputs(first) for _ in range(LAYERS)]
    with within():
        recur = PromptStates(states, rule, copies).plan(spans)
        planned = copies.num
        outs = [recur(layer, rows.raw, rows.gates) for layer, rows in enumerate(given)]
        recur.finish()
    assert copies.num == planned, "layers copy nothing to the device"
    assert all(out.shape == (first, SPEC.num_v_heads, SPEC.v_dim) for out in outs)
    return rig, outs


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_states_at_page_edges_are_those_of_torch(rule: Callable[[], PlanRule], chunks: dict[int, int]) -> None:
    check(run(rule(), chunks), run(TorchRule(), chunks), chunks)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_prompts_that_end_on_edges_have_their_states_a_page_behind(rule: Callable[[], PlanRule]) -> None:
    fresh = Rig("cpu", torch.bfloat16, SPEC, seed=5)
    to_edge = {slot: 2 * PAGE - fresh.requests[slot].length % PAGE for slot in (2, 3)}
    chunks = {1: 2 * PAGE, **to_edge, 4: PAGE - fresh.requests[4].length % PAGE}
    ending = (1, 3, 4)
    rig, outs = run(rule(), chunks, ending=ending)
    check((rig, outs), run(TorchRule(), chunks, ending=ending), chunks)
    ends = {slot: num + (slot > 1) * fresh.requests[slot].length for slot, num in chunks.items()}
    assert not any(end % PAGE for end in ends.values())
    assert {slot: int(rig.tables.state_len[slot]) for slot in ends} == {
        slot: end - PAGE * (slot in ending) for slot, end in ends.items()
    }
    # What comes out is what comes out of chunks whose prompts go on.
    for got, want in zip(outs, run(rule(), chunks)[1], strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=1e-2)


def test_rows_are_put_in_order_only_where_they_are_not() -> None:
    staged: list[int] = []

    def stage(values: np.ndarray) -> torch.Tensor:
        staged.append(values.size)
        return torch.from_numpy(values.copy())

    def order(*spans: Span) -> list[int] | None:
        staged.clear()
        rig = Rig("cpu", torch.bfloat16, SPEC, seed=5)
        states = DeviceStates(rig.own, rig.memory, None, [rig.site(layer) for layer in range(LAYERS)])  # type: ignore[arg-type]
        found = PromptStates(states, TorchRule(), stage).plan(spans)._order
        return None if found is None else found.tolist()

    assert order(Span(1, 0, PAGE, 0)) is None
    # Slot, whose state it is, and that it begins at the first token.
    assert staged[1] == 3
    # Up to the edge, and from it on.
    assert order(Span(1, 0, 2 * PAGE - 1, 0)) is None
    # One row is replayed before these.
    assert order(Span(1, 1, PAGE - 1, 0)) == [*range(1, PAGE)]
    # Both parts of two prompts: those up to edges stand before those behind them.
    assert order(Span(1, 0, PAGE + 1, 0), Span(2, 0, PAGE + 2, PAGE + 1)) == [
        *range(PAGE), 2 * PAGE, *range(PAGE, 2 * PAGE), 2 * PAGE + 1, 2 * PAGE + 2,
    ]  # fmt: skip


def check(
    run_one: tuple[Rig, list[torch.Tensor]], run_two: tuple[Rig, list[torch.Tensor]], chunks: dict[int, int]
) -> None:
    """What they computed is the same, and what they left, but for rounding."""
    (rig, got), (other, want) = run_one, run_two
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=3e-2, atol=1e-2)
    assert torch.equal(rig.tables.state_in, other.tables.state_in)
    assert torch.equal(rig.tables.state_len, other.tables.state_len)
    for slot in chunks:
        pages = rig.tables.state_in[slot].long()
        states, wanted = rig.own.states.read(pages), other.own.states.read(pages)
        assert states.isfinite().all()
        torch.testing.assert_close(states, wanted, rtol=3e-2, atol=1e-2)
        assert torch.equal(rig.own.states.read_conv(pages), other.own.states.read_conv(pages))
        ring = rig.tables.ring[slot].long()
        assert torch.equal(rig.own.rings._raw[ring].view(torch.uint8), other.own.rings._raw[ring].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", PREFERRED)
def test_the_host_never_waits_for_the_device(
    name: str, chunks: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    if reason := lacks(name, torch.bfloat16, device, SPEC):
        pytest.skip(reason)
    monkeypatch.setattr(delta_rules, "PREFERRED", (name,))
    rule = choose_rule(torch.bfloat16, device, SPEC)
    assert rule.name == name
    # Kernels are compiled and loaded first, which may wait.
    run(rule, chunks, "cuda")
    found = run(rule, chunks, "cuda", never_waits)
    check(found, run(TorchRule(), chunks, "cuda"), chunks)
