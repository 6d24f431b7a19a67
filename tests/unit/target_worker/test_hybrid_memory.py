"""States and rings of a hybrid target under rollback, prefix hits, freezing and catching up, against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from target_worker.req import state_reach
from tests.support.tiny_hybrid import HybridReq, HybridRig, make_hybrid
from tests.support.tiny_target import oracle_logits, tokens_of

PAGE = 4


@pytest.fixture(scope="module", params=[{}, {"linear_conv_kernel_dim": 6, "full_attention_interval": 2}])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return make_hybrid(folder, **request.param), folder


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= 1e-4


class Pages:
    """Bytes of pages before and after."""

    def __init__(self, rig: HybridRig, req: HybridReq) -> None:
        table = rig.linear.table
        self.rig, self.row = rig, req.row
        self.ids = {"in": table.state_in[req.row].copy(), "out": table.state_out[req.row].copy()}
        self.states = {name: self.copy("state", ids.tolist()) for name, ids in self.ids.items()}
        self.ring = self.ring_rows()

    def copy(self, kind: str, ids: list[int]) -> torch.Tensor:
        """uint8 [pages, page_bytes]"""
        layout = self.rig.frames.kinds[kind]
        begins = [page * layout.stride_bytes for page in ids]
        return torch.stack([self.rig.arena[begin : begin + layout.page_bytes] for begin in begins])

    def ring_rows(self) -> torch.Tensor:
        """uint8 [layers, ring rows, bytes of gates and of raw inputs]"""
        shape = self.rig.linear.rings.shape
        pages = self.copy("ring", self.rig.linear.table.ring[self.row].flatten().tolist())
        parts = pages[:, : shape.gate_bytes], pages[:, shape.gate_bytes :]
        rows = torch.cat([part.reshape(len(pages), shape.page_rows, -1) for part in parts], dim=2)
        return rows.view(-1, shape.num_rows, rows.shape[2])

    def changed(self, name: str) -> bool:
        """Whether any byte of the states that were read ("in") or to be written ("out") differs now."""
        return not torch.equal(self.copy("state", self.ids[name].tolist()), self.states[name])

    def changed_rows(self) -> set[int]:
        """Places of the ring that differ now."""
        return set((self.ring_rows() != self.ring).any(2).any(0).nonzero()[:, 0].tolist())


class Machine:
    """Random requests over one rig; every forward's logits and every byte of state and ring are checked."""

    def __init__(self, oracle: Any, folder: Path, seed: int) -> None:
        self.oracle, self.rig, self.dice = oracle, HybridRig(folder, num_frames=1200), random.Random(seed)
        self.running: list[HybridReq] = []
        self.num_opened = 0
        self.rejected: dict[int, int] = {}
        """Of each request, the token of its first row that did not become final."""

    def open(self) -> None:
        """Half of them hit the aligned state of another one, brought up to its last page edge or not."""
        self.num_opened += 1
        hit = self.dice.choice(self.running) if self.running and self.dice.random() < 0.6 else None
        if hit is not None and self.dice.random() < 0.5:
            self.catch_up(hit)
        hit = hit if hit is not None and hit.state_len else None
        self.running.append(self.rig.open(self.num_opened, 120, hit))

    def catch_up(self, req: HybridReq) -> None:
        before, state_len = Pages(self.rig, req), req.state_len
        self.rig.catch_up(req)
        assert req.state_len == len(req.tokens) // PAGE * PAGE
        assert before.changed("out") == (req.state_len > state_len)
        assert before.changed_rows() == set()

    def forward(self) -> None:
        """Some requests at once, each with a prompt chunk or a block of which a random part is accepted."""
        some = self.dice.sample(self.running, self.dice.randint(1, len(self.running)))
        segments, final = [], {}
        for i, req in enumerate(some):
            is_block = bool(req.tokens) and self.dice.random() < 0.7
            num = self.rig.block if is_block else self.dice.choice([1, 2, 3, 5, 9, 20, 33])
            certain = 1
            if not is_block:
                # Half of them end on an edge, and half of all end a prompt.
                num += self.dice.choice([0, -(len(req.tokens) + num) % PAGE])
                certain = state_reach(num, is_last=self.dice.random() < 0.5)
            tokens = tokens_of(self.dice.randrange(1 << 30), num)
            if tokens[0] == self.rejected.get(req.rid):  # else the same row would be written again
                tokens[0] = 99 - tokens[0]
            segments.append(self.rig.segment(req, tokens, certain=certain))
            final[i] = req, self.dice.randint(1, num) if is_block else num
            self.rejected[req.rid] = [*tokens, -1][final[i][1]]
        before = [
            (Pages(self.rig, req), req.state_len, req.tokens + seg.token_ids)
            for req, seg in zip(some, segments, strict=True)
        ]
        got = self.rig.forward(segments, final)
        for (pages, state_len, tokens), req, segment in zip(before, some, segments, strict=True):
            own, got = got[: len(segment.token_ids)], got[len(segment.token_ids) :]
            close(own, oracle_logits(self.oracle, tokens)[segment.start :])
            self.check(pages, state_len, req, segment.start, len(tokens))

    def check(self, pages: Pages, state_len: int, req: HybridReq, start: int, end: int) -> None:
        rows = self.rig.linear.rings.shape.num_rows
        assert pages.changed("out") == (req.state_len > state_len)
        if list(pages.ids["in"]) != list(pages.ids["out"]):
            assert not pages.changed("in")
        assert pages.changed_rows() == {p % rows for p in range(max(start, req.state_len), end)}

    def step(self) -> None:
        if not self.running or (len(self.running) < 6 and self.dice.random() < 0.25):
            self.open()
        if any(len(req.tokens) > 80 for req in self.running) or (len(self.running) > 3 and self.dice.random() < 0.1):
            self.running.sort(key=lambda req: -len(req.tokens))
            self.rig.close(self.running.pop(0), poison=True)
        if self.running:
            self.forward()
        dummy = self.rig.arena[: self.rig.frame_bytes]
        assert bool((dummy == 0xFF).all()), "the dummy frame was written"


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_chunks_blocks_rollbacks_hits_and_catching_up(hybrid: tuple[Any, Path], seed: int) -> None:
    machine = Machine(*hybrid, seed)
    for _ in range(30):
        machine.step()
    assert machine.num_opened > 3


def test_a_block_writes_the_state_only_when_its_anchor_reaches_the_page_edge(hybrid: tuple[Any, Path]) -> None:
    rig = HybridRig(hybrid[1])
    req = rig.open(1, 60)
    rig.chunk(req, tokens_of(1, 6))
    assert req.state_len == 4
    before = Pages(rig, req)
    rig.verify(req, tokens_of(2, 5), 1)  # the anchor is token 6, drafts reach token 10
    assert not before.changed("out")
    assert req.state_len == 4
    rig.verify(req, tokens_of(3, 5), 4)  # the anchor is token 7: 8 tokens are certain
    assert before.changed("out")
    assert req.state_len == 8
    assert len(req.tokens) == 11


def test_catching_up_gives_the_state_of_a_prompt_of_that_length(hybrid: tuple[Any, Path]) -> None:
    rig = HybridRig(hybrid[1])
    req, tokens = rig.open(1, 80), tokens_of(1, 43)
    rig.chunk(req, tokens[:30])
    for start in range(30, 43):
        rig.verify(req, [tokens[start], *tokens_of(start, 4)], 1)
    rig.verify(req, [*tokens_of(7, 5)], 5)
    assert req.state_len == 44
    rig.catch_up(req)
    assert req.state_len == 48
    other = rig.open(2, 80)
    rig.chunk(other, req.tokens[:48])
    for read in (rig.linear.states.read, rig.linear.states.read_conv):
        got, want = (read(torch.from_numpy(rig.linear.table.state_in[r.row]).long()) for r in (req, other))
        assert want.abs().max() > 0.1
        assert (got - want).abs().max() < 1e-5


def test_a_request_goes_on_from_a_frozen_state_and_leaves_it_as_it_is(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    first = rig.open(1, 80)
    rig.chunk(first, tokens_of(1, 22))
    rig.verify(first, tokens_of(2, 5), 5)
    rig.catch_up(first)
    second = rig.open(2, 80, hit=first)
    third = rig.open(3, 80, hit=first)
    frozen = Pages(rig, second)
    tokens = {req.rid: req.tokens + tokens_of(10 + req.rid, 30) for req in (first, second, third)}
    for req in (second, third, first):
        for begin in (0, 3, 11):
            start = len(req.tokens)
            block = tokens[req.rid][start : start + 5 + begin]
            close(rig.chunk(req, block), oracle_logits(oracle, req.tokens)[start:])
    assert not frozen.changed("in")
    assert rig.linear.table.state_in[second.row].tolist() == rig.linear.table.state_out[second.row].tolist()


def test_thirty_two_requests_share_a_forward(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder, num_frames=3000)
    reqs = [rig.open(rid, 40) for rid in range(32)]
    for req in reqs:
        rig.chunk(req, tokens_of(req.rid, 1 + req.rid % 11))
    for step in range(3):
        segments = [rig.segment(req, tokens_of(100 * step + req.rid, 5), certain=1) for req in reqs]
        want = [oracle_logits(oracle, r.tokens + s.token_ids)[s.start :] for r, s in zip(reqs, segments, strict=True)]
        got = rig.forward(segments, {i: (req, 1 + (req.rid + step) % 5) for i, req in enumerate(reqs)})
        close(got, torch.cat(want))


def test_a_state_at_zero_is_zero_whatever_its_page_holds(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    req = rig.open(1, 40)
    rig.linear.table.wrote(req.row)  # its own page, which holds NaN
    tokens = tokens_of(1, 9)
    got = torch.cat([rig.chunk(req, tokens[:2]), rig.chunk(req, tokens[2:])])
    close(got, oracle_logits(oracle, tokens))
