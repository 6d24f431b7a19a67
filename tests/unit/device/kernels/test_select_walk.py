"""Drafts chosen by kernels against the host's selector, choice and walk."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from draft_worker.choice import CoupledChoice, walk
from draft_worker.selector import CandidateSelector
from tests.support.slot_rig import SlotRig

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels.select_walk import SelectorTables, select_walk

VOCAB = 90
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": -3},
    {"temperature": 1.3, "top_k": 4},
    {"top_p": 0.8},
    {"top_p": 0.0},
    {"min_p": 0.2, "top_k": 9, "top_p": 0.95},
    {"temperature": 0.8, "repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.0, "frequency_penalty": 3.0},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": list(range(60))},
]


def host_drafts(rig: SlotRig, lattice: torch.Tensor, ids: torch.Tensor) -> list[list[int]]:
    """Row by row on the host."""
    return walk(lattice.numpy(), ids.numpy(), CoupledChoice(rig.samplers, ids.numpy())).tolist()


def candidates(rig: SlotRig, num: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(unary, ids) [places, num, k]: ids distinct in a row."""
    n = len(rig.samplers)
    order = torch.rand(n * num, VOCAB, generator=rig.generator).argsort(1)[:, :k].contiguous()
    return torch.randn(n, num, k, generator=rig.generator) * 2, order.reshape(n, num, k)


def opened(kinds: list[dict[str, Any]], device: str, block_size: int = 5) -> SlotRig:
    rig = SlotRig(VOCAB, block_size, len(kinds) + 2, device, seed=1)
    for kind in kinds:
        rig.open(**kind)
    return rig


def check(rig: SlotRig, want: list[list[int]]) -> None:
    num = len(want[0])
    assert rig.slots.drafts[rig.members, :num].tolist() == want
    assert (rig.slots.num_drafts[rig.members] == num).all()


@pytest.mark.parametrize(("num", "k", "rank"), [(4, 16, 24), (3, 5, 300)])
def test_the_walk_follows_the_selector_and_the_slots_parameters(device, num, k, rank):
    rig = opened(KINDS, device)
    members = rig.flush()
    unary, ids = candidates(rig, num, k)
    hidden = torch.randn(rank, 20, generator=rig.generator)
    before, after = (torch.randn(VOCAB, rank, generator=rig.generator) for _ in range(2))
    z = torch.randn(len(KINDS), num, 20, generator=rig.generator) / 20
    anchors = rig.slots.anchor.cpu()[rig.members]
    want = host_drafts(rig, CandidateSelector(hidden, before, after).lattice(z, anchors, unary, ids), ids)
    tables = SelectorTables(F.linear(z, hidden).to(device), before.to(device), after.to(device))
    select_walk(unary.to(device), ids.int().to(device), members, rig.slots, tables)
    check(rig, want)


@pytest.mark.parametrize("k", [1, 16])
def test_without_a_selector_candidates_are_ranked_by_their_logits(device, k):
    rig = opened(KINDS, device)
    members = rig.flush()
    unary, ids = candidates(rig, 4, k)
    select_walk(unary.to(device), ids.to(device), members, rig.slots)
    check(rig, host_drafts(rig, unary[:, :, None], ids))


def test_equal_scores_are_cut_and_chosen_as_on_the_host(device):
    rig = opened(
        [
            {"temperature": 0.0},
            {"top_p": 0.4},
            {"top_k": 2},
            {"top_p": 0.5},
            {"top_p": 0.625, "seed": 3},
            {"top_p": 0.5, "top_k": 3},
            {},
        ],
        device,
    )
    members = rig.flush()
    unary, ids = candidates(rig, 3, 8)
    unary = unary.sign()
    unary[:, 1] = 0.0
    select_walk(unary.to(device), ids.int().to(device), members, rig.slots)
    check(rig, host_drafts(rig, unary[:, :, None], ids))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_give_the_hosts_choice(device, value):
    rig = opened([{"temperature": 0.0}, {}, {"top_p": 0.4}, {"top_k": 2}], device)
    members = rig.flush()
    unary, ids = candidates(rig, 3, 6)
    unary[:, 0, 2] = value
    unary[:, 1] = value
    select_walk(unary.to(device), ids.int().to(device), members, rig.slots)
    check(rig, host_drafts(rig, unary[:, :, None], ids))


def test_a_slot_that_is_done_and_the_dummy_get_no_drafts(device):
    rig = opened([{}, {}], device)
    rig.flush()
    rig.writer.close(rig.members[1])
    members = torch.cat((rig.flush(), torch.zeros(1, dtype=torch.int32, device=device)))
    unary, ids = candidates(rig, 2, 4)
    unary, ids = torch.cat((unary, unary[:1])), torch.cat((ids, ids[:1]))
    before = rig.slots.drafts.clone()
    select_walk(unary.to(device), ids.to(device), members, rig.slots)
    changed = (rig.slots.drafts != before).any(1).nonzero().flatten().tolist()
    assert changed == [rig.members[0]]
    assert rig.slots.num_drafts.nonzero().flatten().tolist() == [rig.members[0]]


def test_more_drafts_than_a_block_holds_are_refused():
    rig = opened([{}], "cpu")
    with pytest.raises(ValueError, match="5 drafts for blocks of 5"):
        select_walk(torch.zeros(1, 5, 2), torch.zeros(1, 5, 2).int(), torch.ones(1).int(), rig.slots)
