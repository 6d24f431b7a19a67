"""The hand-over words as both sides see them; waiting and letting go are tested where a CUDA device is."""

import numpy as np
import pytest
import torch

from memsvc.device.lane import CudaLane, Words
from memsvc.device.slots import SlotState
from memsvc.slot_layout import WORDS_AT, SlotLayout

LAYOUT = SlotLayout(num_slots=2, block_size=3, vocab=40)


def make_slots(device: str) -> SlotState:
    slots = SlotState(LAYOUT, torch.full((LAYOUT.num_bytes,), 0xFF, dtype=torch.uint8, device=device))
    slots.reset()
    return slots


@pytest.fixture
def slots() -> SlotState:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    slots = make_slots("cuda")
    # A kernel's first launch may wait for the device, which stands still while a lane waits.
    slots.words[WORDS_AT // 4] = 0
    torch.zeros(2, device="cuda").index_fill_(0, torch.zeros(1, dtype=torch.int64, device="cuda").add_(1), 1.0)
    torch.cuda.synchronize()
    return slots


def test_each_side_writes_the_word_that_the_other_waits_for():
    slots = make_slots("cpu")
    target, draft = Words.of_target(slots), Words.of_draft(slots)
    target.own.fill_(7)
    draft.own.fill_(9)
    assert (int(draft.peer), int(target.peer)) == (7, 9)
    assert slots.words[WORDS_AT // 4].item() == 7, "F comes first"
    assert int(slots.words[1:32].abs().sum()) == 0, "D lies in another cache line"
    assert slots.length.tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_two_lanes_take_turns_enqueued_ahead(slots):
    target, draft = CudaLane(Words.of_target(slots)), CudaLane(Words.of_draft(slots))
    log, count = torch.zeros(40, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def write(value: float) -> None:
        log.index_fill_(0, count, value)
        count.add_(1)

    # The draft's turns first: none of them can run before the target's.
    for turn in range(1, 21):
        with draft.running():
            draft.await_peer(turn)
            write(2.0)
            draft.post(turn)
    for turn in range(1, 21):
        with target.running():
            target.await_peer(turn - 1)
            write(1.0)
            target.post(turn)
    target.drain(5.0)
    draft.drain(5.0)
    assert log.tolist() == [1.0, 2.0] * 20
    assert draft.words() == (20, 20)


@pytest.mark.gpu
def test_staged_values_are_those_of_the_moment(slots):
    lane = CudaLane(Words.of_draft(slots))
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    values = np.arange(4, dtype=np.int32)
    with lane.running():
        lane.await_peer(1)
        staged = lane.stage(values)
        lane.stage_into(out, values)
    values[:] = -1
    for _ in range(8):
        torch.from_numpy(np.full(4, -2, dtype=np.int32)).pin_memory()
    slots.words[WORDS_AT // 4] = 1
    lane.drain(5.0)
    assert staged.tolist() == out.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_lane_whose_peer_is_dead_is_let_go(slots):
    lane = CudaLane(Words.of_draft(slots))
    with lane.running():
        lane.await_peer(5)
        lane.post(6)
    assert not lane.stream.query()
    lane.drain(0.01)
    assert lane.words() == (6, 5)


@pytest.mark.gpu
def test_a_target_goes_on_without_drafts_when_the_draft_is_dead(slots):
    lane = CudaLane(Words.of_target(slots))
    slots.num_drafts.fill_(2)
    seen = torch.zeros_like(slots.num_drafts)
    torch.cuda.synchronize()
    with lane.running():
        lane.await_peer(3)
        seen.copy_(slots.num_drafts)
    lane.hand_over_without_peer(3, slots.num_drafts)
    lane.drain(5.0)
    assert seen.tolist() == [0, 0, 0]
