"""The accept rule of a kernel against the host's, over random blocks in a tiny vocabulary."""

import random
from typing import Any

import pytest
import torch

from memsvc.device.sampling import sample_rows
from memsvc.slot_layout import DONE_CLOSED, DONE_LENGTH, DONE_STOP
from memsvc.wire.base import FinishReason
from target_worker.verify import VerifyRow, verify_blocks
from tests.support.slot_rig import SlotRig

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels.accept import accept
from memsvc.device.kernels.sample import SampleScratch, SampleTile, sample_rows_device

VOCAB, BLOCK = 12, 5
DONE = {FinishReason.RUNNING: 0, FinishReason.STOP: DONE_STOP, FinishReason.LENGTH: DONE_LENGTH}


def random_request(dice: random.Random) -> dict[str, Any]:
    """Parameters that end blocks in every way."""
    params: dict[str, Any] = {"temperature": dice.choice([0.0, 0.4, 1.0]), "max_tokens": dice.randint(4, 12)}
    if dice.random() < 0.4:
        params["repetition_penalty"] = 1.6
    if dice.random() < 0.3:
        params["frequency_penalty"] = 1.2
    if dice.random() < 0.3:
        params |= {"min_tokens": dice.randint(3, 7), "stop_token_ids": [3, 4]}
    params["ignore_eos"] = dice.random() < 0.5
    return params


def host_rows(rig: SlotRig, logits: torch.Tensor, num_drafts: list[int], right: list[bool]) -> list[VerifyRow]:
    """The host's view: drafts that the target would choose itself, most often but the last; or random ones."""
    rows = []
    for index, sampler in enumerate(rig.samplers):
        ahead, drafts = sampler.fork(), rig.tokens(num_drafts[index])
        for j in range(num_drafts[index] - (index % 3 > 0) if right[index] else 0):
            drafts[j] = sample_rows(logits[index * BLOCK + j : index * BLOCK + j + 1], [ahead])[0]
            ahead.push(drafts[j])
        rows.append(VerifyRow(sampler, drafts))
    return rows


def sampled(rig: SlotRig, logits: torch.Tensor, rows: list[VerifyRow]) -> torch.Tensor:
    """Tokens [N, BLOCK] as the sampling kernels give them, computed on the host for speed."""
    tokens = []
    for index, row in enumerate(rows):
        ahead = row.sampler.fork()
        for j in range(BLOCK):
            tokens.append(sample_rows(logits[index * BLOCK + j : index * BLOCK + j + 1], [ahead])[0])
            ahead.push(row.drafts[j] if j < len(row.drafts) else 0)
    return torch.tensor(tokens, dtype=torch.int32, device=rig.device).view(-1, BLOCK)


def check(rig: SlotRig, rows: list[VerifyRow], emitted: list[list[int]], results: torch.Tensor, before: dict) -> None:
    """Every field of every slot, after rows' samplers were pushed what is emitted."""
    slots = rig.slots
    for index, (row, tokens, slot) in enumerate(zip(rows, emitted, rig.members, strict=True)):
        num, sampler = len(tokens), row.sampler
        done = DONE[sampler.finish]
        assert results[index].tolist() == [num, done, *tokens, *[-1] * (BLOCK - num)]
        assert slots.emitted[slot].tolist() == [*tokens, *[-1] * (BLOCK - num)]
        got = [int(getattr(slots, name)[slot]) for name in ("num_emitted", "num_rows", "num_drafts", "done")]
        assert got == [num, num, 0, done]
        got = [int(getattr(slots, name)[slot]) for name in ("n_out", "num_tokens", "length", "anchor")]
        assert got == [sampler.n_out, sampler.num_tokens, sampler.num_tokens - 1, tokens[-1]]
        assert slots.feature_start[slot] == before["length"][slot]
        assert slots.feature_row[slot] == 100 + index * BLOCK
        counts = {t: int(c) for t, c in enumerate(slots.counts[slot]) if c}
        assert counts == dict(sampler.counts)


def test_hundreds_of_random_blocks_end_as_the_rule_says(device):
    dice = random.Random(5)
    lengths = set()
    for seed in range(4):
        rig = SlotRig(VOCAB, BLOCK, 60, device, seed=seed)
        num_drafts = [dice.randint(0, BLOCK - 1) for _ in range(60)]
        for num in num_drafts:
            rig.open(drafts=[0] * num, num_output=dice.randint(0, 3), **random_request(dice))
        logits = rig.logits(60 * BLOCK, 3.0)
        rows = host_rows(rig, logits, num_drafts, [dice.random() < 0.8 for _ in range(60)])
        for row, slot in zip(rows, rig.members, strict=True):
            rig.slots.drafts[slot, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int32, device=device)
        members, tokens = rig.flush(), sampled(rig, logits, rows)
        before = {"length": rig.slots.length.clone()}
        wanted = torch.cat([logits[i * BLOCK : i * BLOCK + row.num_rows] for i, row in enumerate(rows)])
        emitted = verify_blocks(wanted, rows)
        results = accept(tokens, members, rig.slots, feature_base=100)
        check(rig, rows, emitted, results, before)
        lengths |= {len(tokens) for tokens in emitted}
    assert lengths == set(range(1, BLOCK + 1))


@pytest.mark.parametrize("length", [1.0, 2.6, 9.0])
def test_simulated_blocks_accept_what_the_host_accepts(device, length):
    rig = SlotRig(VOCAB, BLOCK, 40, device, seed=3)
    num_drafts = [index % BLOCK for index in range(40)]
    drafts = [rig.tokens(num) for num in num_drafts]
    for part in drafts:
        rig.open(drafts=part, ignore_eos=True, temperature=0.0)
    rows = [VerifyRow(sampler, part) for sampler, part in zip(rig.samplers, drafts, strict=True)]
    logits = rig.logits(40 * BLOCK, 3.0)
    tokens, members = sampled(rig, logits, rows), rig.flush()
    before = {"length": rig.slots.length.clone()}
    wanted = torch.cat([logits[i * BLOCK : i * BLOCK + row.num_rows] for i, row in enumerate(rows)])
    emitted = verify_blocks(wanted, rows, simulate=length)
    check(rig, rows, emitted, accept(tokens, members, rig.slots, simulate=length, feature_base=100), before)


def test_steps_of_sampling_and_accepting_give_the_hosts_text(device):
    """The slot goes on as the sampler does: counts, lengths and positions of one step are those of the next."""
    rig = SlotRig(VOCAB, 3, 4, device, seed=8)
    for kind in ({"repetition_penalty": 1.4}, {"temperature": 0.0, "frequency_penalty": 0.9}, {"min_tokens": 6}):
        rig.open(ignore_eos=True, **kind)
    members = rig.flush()
    scratch = SampleScratch(
        9, VOCAB, device, tile=SampleTile(summary_blocks=1, max_splits=1, cut_blocks=1, cut_room=16)
    )
    for _ in range(2):
        logits, drafts = rig.logits(9, 1.5), torch.randint(0, VOCAB, (3, 2), generator=rig.generator)
        rig.slots.drafts[members.long()] = drafts.int().to(device)
        rig.slots.num_drafts[members.long()] = 2
        tokens = sample_rows_device(logits.to(device), members, rig.slots, scratch)
        results = accept(tokens, members, rig.slots)
        rows = [VerifyRow(s, d) for s, d in zip(rig.samplers, drafts.tolist(), strict=True)]
        emitted = verify_blocks(logits, rows)
        assert [row[2 : 2 + row[0]] for row in results.tolist()] == emitted


def test_a_slot_that_is_done_and_the_dummy_emit_nothing_and_stand_still(device):
    rig = SlotRig(VOCAB, BLOCK, 3, device)
    rig.open(drafts=[1, 2], repetition_penalty=2.0)
    rig.flush()
    rig.slots.done[rig.members[0]] = DONE_STOP
    before = {name: getattr(rig.slots, name).clone() for name in ("length", "anchor", "n_out", "counts", "emitted")}
    tokens = torch.ones(2, BLOCK, dtype=torch.int32, device=device)
    results = accept(tokens, torch.tensor([rig.members[0], 0], dtype=torch.int32, device=device), rig.slots)
    assert results.tolist() == [[0, DONE_STOP, *[-1] * BLOCK], [0, DONE_CLOSED, *[-1] * BLOCK]]
    assert all(torch.equal(getattr(rig.slots, name), value) for name, value in before.items())
    assert not rig.slots.num_rows.any()
    assert not rig.slots.num_drafts.any()


def test_the_first_token_after_a_prompt_leaves_the_draft_no_rows_to_write(device):
    rig = SlotRig(VOCAB, BLOCK, 2, device)
    sampler = rig.open(num_output=0)
    members = rig.flush()
    results = accept(torch.tensor([[7]], dtype=torch.int32, device=device), members, rig.slots, feature_base=None)
    slot = rig.members[0]
    assert results.tolist() == [[1, 0, 7]]
    assert (rig.slots.num_emitted[slot], rig.slots.num_rows[slot], rig.slots.anchor[slot]) == (1, 0, 7)
    assert rig.slots.length[slot] == sampler.num_tokens == 5


def test_what_cannot_be_is_refused(device):
    rig = SlotRig(VOCAB, BLOCK, 2, device)
    tokens = torch.zeros(1, BLOCK + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="6 rows for blocks of 5"):
        accept(tokens, torch.zeros(1), rig.slots)
    with pytest.raises(ValueError, match=r"accept length of 0\.5 is below 1"):
        accept(tokens[:, :1], torch.zeros(1), rig.slots, simulate=0.5)
