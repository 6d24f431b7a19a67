"""Tokens sampled by kernels, all rows of a verify at once, against the host's sampling row after row."""

from typing import Any

import numpy as np
import pytest
import torch

from memsvc.device.noise import block_noise, exponential_noise, seed_words, uniform_noise
from memsvc.device.sampling import sample_rows
from tests.support.slot_rig import SlotRig

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from memsvc.device.kernels import noise as kernels
from memsvc.device.kernels.sample import SampleScratch, SampleTile, sample_rows_device

SMALL = SampleTile(
    summary_blocks=2, summary_width=64, penalty_blocks=1, cut_blocks=2, cut_room=64, cut_warps=4, max_splits=4
)
"""Several programs, tiles and lists even for a small vocabulary."""

FILTERS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 90},
    {"top_k": 4000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"top_p": 1 - 1e-9, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "seed": -5},
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4, "temperature": 0.0},
    {"min_tokens": 4, "stop_token_ids": [1, 3, 4, 5, 6]},
    {"min_tokens": 5, "temperature": 0.0, "ignore_eos": True, "repetition_penalty": 0.6},
]


@triton.jit
def _draw(smallest, owner, noise, chance, key, position, num, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    low, high, position = tl.load(key), tl.load(key + 1), tl.load(position)
    least, owns = kernels.block_noise(ids // 256, position, low, high)
    tl.store(smallest + ids, least, mask=ids < num)
    tl.store(owner + ids, owns, mask=ids < num)
    tl.store(noise + ids, kernels.token_noise(ids, least, owns, position, low, high), mask=ids < num)
    tl.store(chance, kernels.decision(position, low, high))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-5, 77), (2**63 + 12345, 300_000)])
def test_noise_is_the_hosts_bit_for_bit(device, seed, position):
    num = 1000
    ids = np.arange(num)
    smallest, noise = (torch.zeros(num, device=device) for _ in range(2))
    owner = torch.zeros(num, dtype=torch.int32, device=device)
    chance = torch.zeros(1, dtype=torch.float64, device=device)
    words = np.array([seed % 2**64], dtype=np.uint64).view(np.int32)
    place = torch.tensor([position], dtype=torch.int32, device=device)
    _draw[(1,)](smallest, owner, noise, chance, torch.from_numpy(words).to(device), place, num, BLOCK=1024)
    key = seed_words([seed])
    want, owns = block_noise(key, np.uint64(position), ids // 256)
    assert (smallest.cpu().numpy() == want).all()
    assert (owner.cpu().numpy() == owns).all()
    assert (noise.cpu().numpy() == exponential_noise(key, np.uint64(position), ids)).all()
    assert chance.item() == uniform_noise(key, np.uint64(position))[0]


def test_one_logarithm_of_an_exact_number_stands_for_log1p():
    words = np.concatenate((np.arange(100_000), 2**32 - 1 - np.arange(100_000), np.arange(0, 2**32, 9973)))
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    assert ((-np.log(1.0 - u)).astype(np.float32) == (-np.log1p(-u)).astype(np.float32)).all()


def compare(rig: SlotRig, logits: torch.Tensor, num_rows: int, tile: SampleTile = SMALL) -> None:
    """logits [places * num_rows, vocab] on the host; drafts of the slots are tokens that rows 1 and on follow."""
    members = rig.flush()
    drafts = rig.slots.drafts.cpu()
    want = []
    for index, (sampler, slot) in enumerate(zip(rig.samplers, rig.members, strict=True)):
        ahead = sampler.fork()
        for row in range(num_rows):
            at = index * num_rows + row
            want.append(sample_rows(logits[at : at + 1].float(), [ahead])[0])
            if row < num_rows - 1:
                ahead.push(int(drafts[slot, row]))
    scratch = SampleScratch(len(want), rig.vocab, rig.device, tile=tile)
    for tensor in (scratch.maxima, scratch.smallest, scratch.owned, scratch.times, scratch.least, scratch.weight):
        tensor.fill_(torch.nan)
    got = sample_rows_device(logits.to(rig.device), members, rig.slots, scratch)
    assert got.shape == (len(rig.members), num_rows)
    assert got.flatten().tolist() == want
    assert not scratch.arrived.any()


def opened(kinds: list[dict[str, Any]], vocab: int, device: str, block_size: int = 3) -> SlotRig:
    rig = SlotRig(vocab, block_size, len(kinds) + 3, device, seed=vocab)
    for kind in kinds:
        rig.open(drafts=rig.tokens(block_size - 1), **kind)
    return rig


@pytest.mark.parametrize(("vocab", "spread"), [(7, 1.0), (700, 3.0)])
def test_rows_are_sampled_as_on_the_host_after_each_of_their_drafts(device, vocab, spread):
    rig = opened(OTHERS, vocab, device)
    compare(rig, rig.logits(2 * len(OTHERS), spread), 2)


def test_each_row_is_penalised_for_the_drafts_before_it(device):
    rig = SlotRig(300, 4, 4, device)
    for kind in ({"frequency_penalty": 0.3}, {"presence_penalty": 0.7}, {"repetition_penalty": 1.2}):
        rig.open(drafts=[270, 270, 271], num_output=0, temperature=0.0, **kind)
    logits = torch.zeros(12, 300)
    logits[:, 270:274] = torch.tensor([5.0, 4.5, 4.0, 3.5])
    compare(rig, logits, 4)
    scratch = SampleScratch(12, 300, device, tile=SMALL)
    got = sample_rows_device(logits.to(device), rig.flush(), rig.slots, scratch)
    assert got.tolist() == [[270, 270, 271, 270], [270, 271, 271, 270], [270, 271, 271, 270]]


@pytest.mark.parametrize(("vocab", "spread"), [(257, 0.1), (1283, 3.0)])
def test_filters_leave_what_they_leave_on_the_host(device, vocab, spread):
    rig = opened(FILTERS, vocab, device, block_size=2)
    compare(rig, rig.logits(len(FILTERS), spread), 1)


def test_equal_logits_are_cut_by_id(device):
    kinds: list[dict[str, Any]] = [{"top_p": 0.34}, {"top_k": 2}, {"top_k": 1, "top_p": 0.5}, {}, {"temperature": 0.0}]
    vocab = 600
    for seed, levels in ((0, 1), (1, 5)):
        rig = SlotRig(vocab, 2, 9, device, seed=seed)
        for kind in kinds:
            rig.open(**kind)
        logits = torch.randint(0, levels, (len(kinds), vocab), generator=rig.generator).float()
        compare(rig, logits, 1)


@pytest.mark.parametrize("case", ["nan", "inf", "-inf", "one is left", "all nan", "huge"])
def test_logits_that_are_no_numbers_give_the_hosts_token(device, case):
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.5}]
    rig = SlotRig(520, 2, 6, device, seed=4)
    for kind in kinds:
        rig.open(**kind)
    logits = rig.logits(len(kinds), 2.0)
    if case == "nan":
        logits[:, [300, 17, 519]] = torch.nan
    elif case == "inf":
        logits[:, [400, 30]] = torch.inf
        logits[:, 5] = torch.nan
    elif case == "huge":
        logits *= 1e38
    else:
        logits[:] = torch.nan if case == "all nan" else -torch.inf
        if case == "one is left":
            logits[:, 277] = -3.0
    compare(rig, logits, 1)


def test_stop_ids_that_are_withheld_leave_their_row_the_rest(device):
    rig = SlotRig(4, 2, 3, device)
    for temperature in (0.0, 1.0, 0.5):
        rig.open(min_tokens=9, stop_token_ids=[0, 1], temperature=temperature)
    compare(rig, rig.logits(3, 1.0), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_and_stride_count_as_their_float32_values(device, dtype):
    rig = opened([{}, {"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.3}], 515, device)
    logits = rig.logits(4, 3.0).to(dtype)
    compare(rig, logits.t().contiguous().t(), 1, SampleTile(summary_blocks=4, cut_blocks=4, max_splits=1))


def test_slots_that_are_done_and_the_dummy_get_zero_and_disturb_nobody(device):
    rig = opened([{}, {"top_p": 0.9}, {"temperature": 0.0}], 300, device)
    logits = rig.logits(6, 2.0)
    members = rig.flush()
    scratch = SampleScratch(6, 300, device, tile=SMALL)
    alone = sample_rows_device(logits[:3].to(device), members, rig.slots, scratch)
    rig.writer.close(rig.members[1])
    rig.flush()
    padded = torch.cat((members, torch.zeros(3, dtype=torch.int32, device=device)))
    logits[3:] = torch.nan
    got = sample_rows_device(logits.to(device), padded, rig.slots, scratch)
    assert got[[0, 2]].tolist() == alone[[0, 2]].tolist()
    assert not got[[1, 3, 4, 5]].any()


def test_scratch_that_does_not_fit_is_refused(device):
    rig = opened([{}], 300, device)
    with pytest.raises(ValueError, match=r"logits \[3, 299\] for 1 members, scratch is for 3 rows of 300"):
        sample_rows_device(torch.zeros(3, 299, device=device), rig.flush(), rig.slots, SampleScratch(3, 300, device))


def test_rows_are_shared_among_more_programs_when_there_are_few():
    tile = SampleTile(split_programs=1056, max_splits=8)
    assert [tile.splits(n) for n in (1, 8, 132, 133, 264, 265, 1024)] == [8, 8, 8, 4, 4, 2, 1]
