"""A draft that takes Plans for a ToyDevice, checks them as the real one does, and finds fault with what it reads."""

import os
import random
from collections.abc import Callable

import numpy as np

from draft_worker.checks import Limits
from draft_worker.cuda.checks import PlanCheck
from draft_worker.cuda.slot_tables import SlotTables
from memsvc.wire import links
from memsvc.wire.base import BadRequest
from memsvc.wire.codec import decoder, encode
from memsvc.wire.mem import Layout
from memsvc.wire.spec import DraftHello, DraftReady, Plan, Planned
from target_worker.cuda.plan_link import PlanLink
from tests.support.toy_device import DRAFT, RUNNING, TARGET, ToyDevice
from tests.support.toy_server import VOCAB, next_token


class ToyPlanDraft:
    """One draft after another: die and come_back. Every wrong_every-th draft is wrong, by its context."""

    def __init__(self, device: ToyDevice, layout: Layout, k: int, wrong_every: int, max_pages: int) -> None:
        kind = next(kind for kind in layout.kinds if kind.name == "draft_kv")
        self._device = device
        self._page_size = layout.page_size
        self._window = kind.window
        self._num_drafts = k
        self._wrong_every = wrong_every
        self._max_pages = max_pages
        self._limits = Limits(
            max_drafts=k, vocab_size=VOCAB, window=kind.window, first_page=kind.pages_per_frame,
            num_pages=kind.num_pages, num_rows=len(device.exchange),
        )  # fmt: skip
        self.alive = True
        self.instance = 1
        self.refuses = False
        """The next plan is refused."""
        self.num_context_tokens = 0
        self.contexts: list[tuple[int, int]] = []
        """Positions [from, to) that the block of each member was drafted from."""
        self.num_refused = 0
        self.is_wanted: Callable[[int], bool] = lambda _slot: True
        """The request in a slot still runs. One that was aborted may read what was taken from it."""
        self._number = 0
        self._tables = self._new_tables()

    def _new_tables(self) -> SlotTables:
        return SlotTables(len(self._device.slots) - 1, self._max_pages, self._page_size, "cpu")

    def die(self) -> None:
        """At any moment, with any part of its work done."""
        self.alive = False
        self._device.tear_down(DRAFT)

    def come_back(self) -> None:
        """Another process."""
        if not self.alive:
            self.alive = True
            self.instance += 1

    def handle(self, msg: DraftHello | Plan) -> DraftReady | Planned | BadRequest:
        if isinstance(msg, DraftHello):
            self._device.drain(DRAFT)
            self._tables = self._new_tables()
            self._number = max(self._device.words.values())
            return DraftReady(os.getpid(), self.instance, 1 + self._num_drafts, [0], plans=True, number=self._number)
        if self.refuses:
            self.refuses = False
            self.num_refused += 1
            return BadRequest("by chance")
        PlanCheck(self._limits, self._tables, self._number, msg).run()
        self._number = msg.number
        self._device.put_wait(DRAFT, TARGET, msg.after)
        self._tables.update(msg)
        table = self._tables.host.table.numpy().copy()
        for work in (self._write_prompts, self._write_rows, self._propose):
            self._device.put(DRAFT, lambda work=work: work(msg, table))
        self._device.put_word(DRAFT, msg.number)
        return Planned(msg.number)

    def _write(self, table: np.ndarray, slot: int, start: int, row: int, num: int) -> None:
        for index in range(num):
            position = start + index
            page = int(table[slot, position // self._page_size])
            assert page, f"slot {slot} has no draft page at {position}"
            self._device.write("draft_kv", page, position % self._page_size, self._device.exchange[row + index])

    def _write_prompts(self, msg: Plan, table: np.ndarray) -> None:
        self._device.clear("draft_kv", msg.clear_pages)
        columns = (msg.write_slots, msg.write_starts, msg.write_rows, msg.write_lens)
        for slot, start, row, num in zip(*columns, strict=True):
            self._write(table, slot, start, row, num)

    def _write_rows(self, msg: Plan, table: np.ndarray) -> None:
        for index in msg.members:
            slot = self._device.slots[index]
            self._write(table, index, slot.feature_start, slot.feature_row, slot.num_rows)

    def _propose(self, msg: Plan, table: np.ndarray) -> None:
        for index in msg.members if msg.num_drafts else ():
            slot = self._device.slots[index]
            if slot.done == RUNNING:
                first = max(slot.valid_from, slot.length - self._window + 1 if self._window else 0)
                self.contexts.append((first, slot.length))
                for position in range(first, slot.length):
                    place = int(table[index, position // self._page_size]), position % self._page_size
                    found = self._device.read("draft_kv", *place)
                    if self.is_wanted(index):
                        self._device.watch.read("draft_kv", place[0])
                    assert found == slot.tokens[position], f"draft of slot {index} reads {found} at {position}"
                    self.num_context_tokens += 1
                slot.drafts = self._drafts(slot.tokens)
                slot.num_drafts = msg.num_drafts

    def _drafts(self, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(self._num_drafts):
            token = next_token(tokens + drafts)
            is_wrong = self._wrong_every and sum(tokens[-3:] + drafts) % self._wrong_every == 0
            drafts.append((token + 1) % VOCAB if is_wrong else token)
        return drafts


class ToyRpc:
    """Rpc to a ToyPlanDraft. Answers take a while at random."""

    def __init__(self, draft: ToyPlanDraft, rng: random.Random | None) -> None:
        self._draft = draft
        self._rng = rng
        self._replies: list[bytes] = []

    def send(self, msg: DraftHello | Plan) -> None:
        self._replies.clear()
        if self._draft.alive:
            request = decoder(links.SPEC.there).decode(encode(msg))
            self._replies.append(encode(self._draft.handle(request)))

    def recv(self, _timeout_s: float) -> object:
        if not self._draft.alive:
            self._replies.clear()
        if not self._replies or (self._rng is not None and self._rng.random() < 0.3):
            raise TimeoutError("nothing")
        return decoder(links.SPEC.back).decode(self._replies.pop())


class ToyPlanLink(PlanLink):
    """A PlanLink that asks a ToyPlanDraft whether it lives, and greets as often as it is polled."""

    draft: ToyPlanDraft

    def poll(self) -> bool:
        self._hello_at = 0.0
        return super().poll()

    def _kill(self) -> None:
        self.draft.die()

    def _is_alive(self) -> bool:
        return self._ready is not None and self.draft.alive and self._ready.instance == self.draft.instance
