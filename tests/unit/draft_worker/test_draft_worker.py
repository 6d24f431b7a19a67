"""The draft worker as the target talks to it: hello, whole conversations, and refusals that change nothing."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from draft_worker.requests import Requests
from draft_worker.worker import DraftWorker, Memory
from memsvc.device.page_table import PageTables
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch, PageId, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.mem import Layout
from memsvc.wire.spec import Drafted, DraftHello, DraftOpen, DraftReady, Propose
from memsvc.wire.text import Sampling
from tests.support.draft_rig import EXCHANGE_ROWS, GREEDY, NUM_PAGES, PAGE_SIZE, PAGES_PER_FRAME, DraftRig
from tests.support.make_drafter import V1, V2

MAX_REQS = 3
MAX_PAGES = 20
EMPTY = Propose([], [], [], [], [], [], [], [], [], [], 0, [], [], [], [])


class WorkerRig:
    """A worker over a DraftRig's arena, and the target's side of the conversation."""

    def __init__(self, folder: Path, version: int = V2, config_changes: dict[str, Any] | None = None) -> None:
        self.rig = DraftRig(folder, version)
        kind = self.rig.pool.kind
        layout = Layout(
            arena_bytes=len(self.rig.arena),
            frame_bytes=kind.stride_bytes * PAGES_PER_FRAME,
            num_frames=NUM_PAGES // PAGES_PER_FRAME,
            page_size=PAGE_SIZE,
            kinds=[kind],
            exchange_offset=kind.num_pages * kind.stride_bytes,
            exchange_bytes=EXCHANGE_ROWS * self.rig.shape.feature_width * 4,
        )
        self.tables = PageTables(max_reqs=MAX_REQS, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
        self.acks: list[Epoch] = []
        self.worker = DraftWorker(
            replace(self.rig.config, **(config_changes or {})),
            self.rig.model,
            Memory(arena=self.rig.arena, layout=layout, pool=self.rig.pool),
            Requests(self.tables, [2]),
            self.acks.append,
        )
        self.tokens: dict[int, list[int]] = {}
        self.features: dict[int, dict[int, torch.Tensor]] = {}
        self._pages = iter(self.rig.rng.permutation(np.arange(PAGES_PER_FRAME, NUM_PAGES)).tolist())
        self._row = 0

    def hello(self, epoch: int = 1, **changes: Any) -> Any:
        msg = DraftHello(WIRE_VERSION, "main", Epoch(epoch), self.rig.shape.target_hidden_size, "float32")
        return self.worker.handle(msgspec.structs.replace(msg, **changes))

    def pages(self, num: int) -> list[PageId]:
        return [PageId(next(self._pages)) for _ in range(num)]

    def open(self, rid: int, prompt_len: int, num_pages: int, sampling: Sampling = GREEDY) -> DraftOpen:
        """The message that opens rid with a random prompt and its first token, nothing written yet."""
        self.tokens[rid] = self.rig.rng.integers(0, 211, prompt_len + 1).tolist()
        self.features[rid] = {}
        return DraftOpen(ReqId(rid), 0, 0, self.pages(num_pages), prompt_len, pack_tokens(self.tokens[rid]), sampling)

    def write(self, rid: int, num: int) -> tuple[ReqId, int, int, int]:
        """One entry of the write columns: features of the next num tokens, placed in the exchange."""
        start, row = len(self.features[rid]), self._row
        self._row = (row + num) % (EXCHANGE_ROWS - 40)
        made = torch.from_numpy(self.rig.rng.standard_normal((num, self.rig.shape.feature_width))).float()
        self.rig.exchange[row : row + num] = made
        self.features[rid] |= {start + index: made[index] for index in range(num)}
        return ReqId(rid), start, num, row

    def message(self, rids: list[int], writes: list[tuple[ReqId, int, int, int]], **more: Any) -> Propose:
        """A Propose of full blocks for rids."""
        columns = [list(column) for column in zip(*writes, strict=True)] or [[], [], [], []]
        msg = msgspec.structs.replace(
            EMPTY,
            write_rids=columns[0], write_starts=columns[1], write_lens=columns[2], write_rows=columns[3],
            num_drafts=7,
            rids=[ReqId(rid) for rid in rids],
            anchors=[self.tokens[rid][-1] for rid in rids],
            anchor_pos=[len(self.tokens[rid]) - 1 for rid in rids],
            new_tokens=[b""] * len(rids),
        )  # fmt: skip
        return msgspec.structs.replace(msg, **more)

    def expected(self, rid: int, num_drafts: int = 7) -> list[int]:
        tokens = self.tokens[rid]
        return self.rig.oracle.propose(self.features[rid], tokens[-1], len(tokens) - 1, num_drafts)

    def state(self) -> tuple[Any, ...]:
        """Everything a refused message must leave alone."""
        reqs = self.worker._requests
        fields = [
            (req.rid, req.row, req.valid_from, req.context_len, req.last_token, req.sampler.num_tokens)
            for req in (reqs[rid] for rid in sorted(self.tokens) if rid in reqs)
        ]
        return self.rig.arena.clone().numpy().tobytes(), self.tables.table.clone().numpy().tobytes(), fields


@pytest.fixture
def ready(tmp_path: Path) -> WorkerRig:
    rig = WorkerRig(tmp_path)
    assert isinstance(rig.hello(), DraftReady)
    return rig


def drafts(reply: Any, num: int) -> list[list[int]]:
    assert isinstance(reply, Drafted), reply
    ids = unpack_tokens(reply.token_ids)
    k = reply.num_drafts
    return [ids[index * k : (index + 1) * k] for index in range(num)]


def test_hello_says_what_the_drafter_wants_and_gives(tmp_path):
    rig = WorkerRig(tmp_path)
    reply = rig.hello(epoch=4)
    assert (reply.block_size, reply.target_layer_ids) == (8, list(rig.rig.shape.target_layer_ids))
    assert rig.acks == [4]
    assert rig.hello(epoch=4).instance == reply.instance
    assert rig.acks == [4], "one acknowledgement for each epoch"
    assert rig.hello(epoch=6).instance == reply.instance
    assert rig.acks == [4, 6]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wire_version": 99}, "wire version 99"),
        ({"engine": "other"}, "engine 'other'"),
        ({"feature_dim": 47}, "features of 47 numbers a tap, the drafter takes 48"),
        ({"feature_dtype": "int8"}, "feature dtype 'int8'"),
        ({"epoch": 0}, "epoch 0"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_with_the_numbers(changes, reason, tmp_path):
    reply = WorkerRig(tmp_path).hello(**changes)
    assert isinstance(reply, BadRequest)
    assert reason in reply.reason


def test_an_older_epoch_is_refused_and_a_propose_before_hello_too(tmp_path):
    rig = WorkerRig(tmp_path)
    assert "before DraftHello" in rig.worker.handle(EMPTY).reason
    rig.hello(epoch=5)
    assert "registered as 5" in rig.hello(epoch=4).reason


@pytest.mark.parametrize("version", [V1, V2])
def test_a_conversation_over_several_steps_drafts_what_the_oracle_does(version, tmp_path):
    rig = WorkerRig(tmp_path, version)
    rig.hello()
    first = rig.open(1, prompt_len=9, num_pages=4)
    msg = rig.message([1], [rig.write(1, 9)], opens=[first])
    assert drafts(rig.worker.handle(msg), 1) == [rig.expected(1)]
    # A second request joins in two prompt chunks while the first one goes on with what was accepted.
    second = rig.open(2, prompt_len=11, num_pages=2)
    for step, (accepted, chunk) in enumerate([(3, 4), (0, 7), (6, 0)]):
        anchor = len(rig.tokens[1]) - 1
        written = rig.write(1, accepted + 1)
        new = rig.rig.rng.integers(0, 211, accepted + 1).tolist()
        rig.tokens[1] += new
        grown = rig.pages(2)
        pages = {
            "page_rids": [ReqId(1), ReqId(2)] if step else [ReqId(1)],
            "page_idxs": [4 + step, 1 + step] if step else [4],
            "page_ids": grown if step else grown[:1],
        }
        writes = [written] + ([rig.write(2, chunk)] if chunk else [])
        both = [1, 2] if step == 2 else [1]
        msg = rig.message(both, writes, opens=[second] if step == 0 else [], **pages)
        msg = msgspec.structs.replace(msg, new_tokens=[pack_tokens(new)] + [b""] * (len(both) - 1))
        assert written[1] == anchor
        got = drafts(rig.worker.handle(msg), len(both))
        assert got == [rig.expected(rid) for rid in both]
    # Fewer drafts for one step, then a close.
    msg = msgspec.structs.replace(rig.message([2], []), num_drafts=3)
    assert drafts(rig.worker.handle(msg), 1) == [rig.expected(2, 3)]
    reply = rig.worker.handle(msgspec.structs.replace(EMPTY, closes=[ReqId(1), ReqId(2)]))
    assert drafts(reply, 0) == []
    assert len(rig.worker._requests) == 0


def test_a_message_closes_then_opens_then_sets_pages_then_clears_then_writes(ready):
    opened = ready.open(1, prompt_len=5, num_pages=2)
    ready.worker.handle(ready.message([1], [ready.write(1, 5)], opens=[opened]))
    for rid in (2, 3):
        ready.worker.handle(ready.message([], [], opens=[ready.open(rid, prompt_len=5, num_pages=0)]))
    # All rows are taken, so the open fits only after the close; rid 1 comes back with other tokens; its
    # last page comes by the page columns, is cleared first, and is written in the same message.
    opened = ready.open(1, prompt_len=6, num_pages=1)
    page = ready.pages(1)
    msg = ready.message(
        [1], [ready.write(1, 6)],
        closes=[ReqId(1)], opens=[opened], page_rids=[ReqId(1)], page_idxs=[1], page_ids=page, clear_pages=page,
    )  # fmt: skip
    assert drafts(ready.worker.handle(msg), 1) == [ready.expected(1)]
    untouched = ready.rig.pool.k(0)[page[0], 2:]
    assert torch.equal(untouched, torch.zeros_like(untouched)), "slots past the written ones were cleared"


def test_a_request_may_open_with_context_that_is_there_already(ready):
    opened = ready.open(1, prompt_len=10, num_pages=3)
    ready.worker.handle(ready.message([1], [ready.write(1, 10)], opens=[opened]))
    again = DraftOpen(ReqId(2), 10, 8, [PageId(0), PageId(0), opened.pages[2]], 10, opened.tokens, GREEDY)
    ready.tokens[2] = ready.tokens[1]
    ready.features[2] = {position: ready.features[1][position] for position in (8, 9)}
    msg = ready.message([2], [], opens=[again])
    assert drafts(ready.worker.handle(msg), 1) == [ready.expected(2)]


def test_hello_drops_every_request(ready):
    ready.worker.handle(ready.message([], [], opens=[ready.open(1, prompt_len=5, num_pages=2)]))
    ready.hello()
    assert len(ready.worker._requests) == 0
    assert not ready.tables.table.any()
    opened = ready.open(1, prompt_len=5, num_pages=2)
    msg = ready.message([1], [ready.write(1, 5)], opens=[opened])
    assert drafts(ready.worker.handle(msg), 1) == [ready.expected(1)]


def test_blocks_without_drafts_still_write_and_take_the_new_tokens(ready):
    opened = ready.open(1, prompt_len=5, num_pages=3)
    msg = ready.message([1], [ready.write(1, 5)], opens=[opened], num_drafts=0)
    reply = ready.worker.handle(msg)
    assert (reply.num_drafts, reply.token_ids) == (0, b"")
    ready.tokens[1].append(17)
    msg = ready.message([1], [ready.write(1, 1)], new_tokens=[pack_tokens([17])])
    assert drafts(ready.worker.handle(msg), 1) == [ready.expected(1)]


def test_after_plain_steps_whose_features_come_together_the_drafts_are_those_of_a_draft_that_was_always_fed(ready):
    """Two requests with the same tokens: one is told after every token, the other once, in runs far apart."""
    opened = [ready.open(1, 6, 6), ready.open(2, 6, 6)]
    ready.tokens[2] = list(ready.tokens[1])
    opened[1] = msgspec.structs.replace(opened[1], tokens=opened[0].tokens)
    writes = [ready.write(1, 6)]
    rows = [(ReqId(2), 0, 6, writes[0][3])]
    assert isinstance(ready.worker.handle(ready.message([], writes, opens=opened, num_drafts=0)), Drafted)
    new = ready.rig.rng.integers(0, 211, 5).tolist()
    for token in new:
        entry = ready.write(1, 1)
        ready._row += 3
        rows.append((ReqId(2), *entry[1:]))
        ready.tokens[1].append(token)
        ready.tokens[2].append(token)
        assert isinstance(ready.worker.handle(ready.message([], [entry], num_drafts=0)), Drafted)
    reply = ready.worker.handle(ready.message([1, 2], rows, new_tokens=[pack_tokens(new)] * 2))
    fed, told_once = drafts(reply, 2)
    assert told_once == fed == ready.expected(1)


def test_the_trace_prints_one_line_a_step(tmp_path, caplog):
    rig = WorkerRig(tmp_path, config_changes={"spec_trace": 1})
    rig.hello()
    opened = rig.open(1, prompt_len=5, num_pages=2)
    with caplog.at_level(logging.INFO):
        rig.worker.handle(rig.message([1], [rig.write(1, 5)], opens=[opened]))
    lines = [record.getMessage() for record in caplog.records if "spec-phase-dev" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("[spec-phase-dev] n=1 ctx=5 fwd=")
    assert [part.split("=")[0] for part in lines[0].split()[1:]] == ["n", "ctx", "fwd", "head", "select", "mem"]


def other_open(rig: WorkerRig, **changes: Any) -> dict[str, Any]:
    opened = DraftOpen(ReqId(9), 0, 0, [], 3, pack_tokens([1, 2, 3, 4]), GREEDY)
    return {"opens": [msgspec.structs.replace(opened, **changes)]}


REFUSED: dict[str, tuple[Any, str]] = {
    "columns of unequal length": (lambda rig: {"anchors": []}, "[1, 0, 1, 1] entries"),
    "close of an unknown request": (lambda rig: {"closes": [ReqId(77)]}, "close of rid 77"),
    "close twice": (lambda rig: {"closes": [ReqId(2), ReqId(2)]}, "close of rid 2"),
    "block of a closed request": (lambda rig: {"closes": [ReqId(1)]}, "of rid 1, which is not open"),
    "open twice": (lambda rig: other_open(rig, rid=ReqId(2)), "rid 2, which is open already"),
    "too many requests": (
        lambda rig: {"opens": other_open(rig)["opens"] + other_open(rig, rid=ReqId(8))["opens"]},
        "4 requests would be open, the draft was started for 3",
    ),
    "context past the tokens": (lambda rig: other_open(rig, context_len=5), "context_len 5"),
    "valid_from past the context": (lambda rig: other_open(rig, context_len=2, valid_from=3), "valid_from 3"),
    "no prompt": (lambda rig: other_open(rig, prompt_len=0), "prompt_len 0 of 4"),
    "torn tokens": (lambda rig: other_open(rig, tokens=b"123"), "3 bytes"),
    "token outside the vocabulary": (
        lambda rig: other_open(rig, tokens=pack_tokens([1, 2, 211])), "rid 9: 1 of 3 tokens lie outside the vocabulary",
    ),
    "too many pages": (lambda rig: other_open(rig, pages=[PageId(5)] * 21), "21 pages, a row holds 20"),
    "page that does not exist": (lambda rig: other_open(rig, pages=[PageId(1)]), "page id 1 is outside [3, 240)"),
    "page set of an unknown request": (
        lambda rig: {"page_rids": [ReqId(5)], "page_idxs": [0], "page_ids": [PageId(5)]}, "page of rid 5",
    ),
    "page index": (
        lambda rig: {"page_rids": [ReqId(1)], "page_idxs": [20], "page_ids": [PageId(5)]}, "index 20 of rid 1",
    ),
    "page id past the pool": (
        lambda rig: {"page_rids": [ReqId(1)], "page_idxs": [1], "page_ids": [PageId(240)]}, "page id 240",
    ),
    "page taken away under the context": (
        lambda rig: {"page_rids": [ReqId(1)], "page_idxs": [0], "page_ids": [PageId(0)]}, "none at index 0",
    ),
    "clearing the dummy page": (lambda rig: {"clear_pages": [PageId(0)]}, "page 0"),
    "clearing a page of nobody": (lambda rig: {"clear_pages": [PageId(-1)]}, "page id -1"),
    "features out of order": (lambda rig: writes(rig, 1, 7, 1, 0), "start at 7, its context ends at 6"),
    "features of an unknown request": (lambda rig: writes(rig, 6, 0, 1, 0), "features of rid 6"),
    "features past the exchange": (lambda rig: writes(rig, 2, 0, 2, 95), "rows [95, 97), the exchange has 96"),
    "features of negative length": (lambda rig: writes(rig, 2, 0, -1, 0), "rows [0, -1)"),
    "features without a page": (lambda rig: writes(rig, 2, 0, 5, 0), "tokens [0, 5) need pages, none at index 1"),
    "features past the row": (lambda rig: writes(rig, 2, 0, 81, 0), "token 80 is past a row of 20 pages"),
    "more drafts than trained": (lambda rig: {"num_drafts": 8}, "num_drafts is 8, this draft gives at most 7"),
    "negative drafts": (lambda rig: {"num_drafts": -1}, "num_drafts is -1"),
    "anchor that is not the last token": (lambda rig: {"anchors": [210 - rig.tokens[1][-1]]}, "anchor at 6 is not the last of its tokens"),
    "position that is not the last": (lambda rig: {"anchor_pos": [5]}, "at 5, its tokens end"),
    "context not written yet": (
        lambda rig: {"new_tokens": [pack_tokens([7])], "anchors": [7], "anchor_pos": [7]}, "at 7, its context ends at 6",
    ),
    "new token outside the vocabulary": (
        lambda rig: {"new_tokens": [pack_tokens([-1])]}, "1 of 1 tokens lie outside the vocabulary of 211",
    ),
    "new token past the vocabulary, told without its id": (
        lambda rig: {"new_tokens": [pack_tokens([5, 987_654_321])]}, "rid 1: 1 of 2 tokens lie outside",
    ),
}  # fmt: skip


def writes(rig: WorkerRig, rid: int, start: int, num: int, row: int) -> dict[str, Any]:
    return {"write_rids": [ReqId(rid)], "write_starts": [start], "write_lens": [num], "write_rows": [row]}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_propose_says_the_numbers_and_changes_nothing(name, ready):
    opened = [ready.open(1, prompt_len=6, num_pages=2), ready.open(2, prompt_len=9, num_pages=1)]
    written = [ready.write(1, 6)]
    ready.worker.handle(ready.message([1], written, opens=opened))
    change, reason = REFUSED[name]
    before = ready.state()
    # A valid part in front of the wrong one must not take effect either.
    msg = msgspec.structs.replace(ready.message([1], []), clear_pages=[opened[0].pages[0]])
    msg = msgspec.structs.replace(msg, **change(ready))
    reply = ready.worker.handle(msg)
    assert isinstance(reply, BadRequest), reply
    assert reason in reply.reason
    assert "987654321" not in reply.reason
    assert ready.state() == before
    assert drafts(ready.worker.handle(ready.message([1], [])), 1) == [ready.expected(1)]


def test_the_same_block_twice_is_refused(ready):
    opened = ready.open(1, prompt_len=6, num_pages=2)
    ready.worker.handle(ready.message([1], [ready.write(1, 6)], opens=[opened]))
    reply = ready.worker.handle(ready.message([1, 1], []))
    assert "2 blocks for 1 requests" in reply.reason


def test_penalties_see_the_tokens_of_every_message(ready):
    """The candidate set of a strongly penalised greedy request changes with what was said before."""
    sampling = Sampling(seed=1, max_tokens=64, temperature=0.0, frequency_penalty=50.0)
    opened = ready.open(1, prompt_len=6, num_pages=4, sampling=sampling)
    first = drafts(ready.worker.handle(ready.message([1], [ready.write(1, 6)], opens=[opened])), 1)[0]
    assert len(set(first)) == 7, "a draft counts for the rows after it"
    said = first[:3]
    ready.tokens[1] += said
    msg = ready.message([1], [ready.write(1, 3)], new_tokens=[pack_tokens(said)])
    second = drafts(ready.worker.handle(msg), 1)[0]
    assert not set(second) & set(said)
