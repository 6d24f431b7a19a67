"""The toy model's steps on a ToyDevice: what target_worker.cuda.work enqueues for the real one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memsvc.device.page_table import PageTables
from memsvc.wire.base import ReqId
from target_worker.cuda.executor import Wait
from target_worker.cuda.order import Chunk, Order
from target_worker.req import Req, state_reach
from tests.support.toy_device import CLOSED, RUNNING, STOPPED, TARGET, ToyDevice, ToySlot
from tests.support.toy_device_states import ToyDeviceStates
from tests.support.toy_server import EOS, next_token


class ToyWriter:
    """Changes of slots, made when the step they were flushed with begins."""

    def __init__(self, device: ToyDevice, req_of: Callable[[int], Req]) -> None:
        self._device = device
        self._req_of = req_of
        self._changes: list[Callable[[], None]] = []
        self.accepted: dict[ReqId, list[int]] = {}
        """What happened on the device to the drafts of each request."""

    def open(self, slot: int, sampler: Any, *, length: int, anchor: int, valid_from: int) -> None:
        req = self._req_of(slot)
        text = list(req.tokens)
        assert (len(text), text[-1], sampler.num_tokens) == (length + 1, anchor, length + 1)
        n_out, max_tokens = sampler.n_out, sampler.params.max_tokens

        def change() -> None:
            self._device.slots[slot] = ToySlot(text, n_out, max_tokens, RUNNING, valid_from)
            self._device.slots[slot].accepted = self.accepted.setdefault(req.rid, [])

        self._changes.append(change)

    def close(self, slot: int) -> None:
        assert slot > 0
        self._changes.append(lambda: self._device.slots.__setitem__(slot, ToySlot()))

    def set(self, slot: int, name: str, value: float) -> None:
        assert slot > 0
        self._changes.append(lambda: setattr(self._device.slots[slot], name, value))

    def take(self) -> list[Callable[[], None]]:
        """All changes since the last call."""
        changes, self._changes = self._changes, []
        return changes


class ToyResults:
    """Tokens that are there once the target's stream has come so far."""

    def __init__(self, device: ToyDevice) -> None:
        self._device = device
        self.is_over = False
        self.tokens: list[list[int]] = []

    def read(self, wait: Wait) -> list[list[int]]:
        wait(lambda: self._device.run_until(lambda: self.is_over))
        return self.tokens


class ToyWork:
    """See StepWork. A block has block_size rows on the device, however many of its drafts count."""

    def __init__(
        self,
        device: ToyDevice,
        tables: PageTables,
        block_size: int,
        req_of: Callable[[int], Req],
        states: ToyDeviceStates | None = None,
    ) -> None:
        """req_of: the request in a slot, as the host has it. states: of a hybrid target."""
        self._states = states
        self._device = device
        self._tables = tables
        self._block_size = block_size
        device.table = np.zeros_like(tables.table.numpy())
        self.writer = ToyWriter(device, req_of)
        self._req_of = req_of
        self._unread: list[ToyResults] = []

    def first_row(self, num_members: int) -> int:
        return (1 << (num_members - 1).bit_length()) * self._block_size if num_members else 0

    def put(self, order: Order, hand_over: Callable[[], None]) -> ToyResults:
        results = ToyResults(self._device)
        self._unread = [*[other for other in self._unread if not other.is_over], results]
        assert len(self._unread) <= 2, "three steps are out"
        changes = [*self.writer.take(), *([self._states.take()] if self._states else [])]
        rows = {row: self._tables.table[row].numpy().copy() for row in self._tables.take_changed()}
        self._device.put(TARGET, lambda: self._begin(order, changes, rows))
        self._device.put(TARGET, lambda: self._blocks(order.members, results))
        first, host = self.first_row(len(order.members)), self._tables.table.numpy().copy()
        for chunk in order.chunks:
            text = list(self._req_of(chunk.slot).tokens)
            self._device.put(
                TARGET, lambda chunk=chunk, first=first, text=text: self._chunk(chunk, first, host, text, results)
            )
            first += len(chunk.token_ids)
        hand_over()
        self._device.put(TARGET, lambda: setattr(results, "is_over", True))
        return results

    def catch_up(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        assert self._states is not None
        states, texts = (
            self._states,
            [self._req_of(slot).tokens[:end] for slot, end in zip(slots, lengths, strict=True)],
        )
        self._device.put(TARGET, states.take())
        self._device.put(TARGET, lambda: states.catch_up(slots, texts))

    def mark(self) -> Callable[[], bool]:
        results = ToyResults(self._device)
        self._device.put(TARGET, lambda: setattr(results, "is_over", True))
        return lambda: self._device.run_until(lambda: results.is_over)

    def _begin(self, order: Order, changes: list[Callable[[], None]], rows: dict[int, np.ndarray]) -> None:
        for row, pages in rows.items():
            self._device.table[row] = pages
        for change in changes:
            change()
        self._device.clear("target_kv", order.clear)

    def _place(self, table: np.ndarray, slot: int, position: int) -> tuple[int, int]:
        size = self._tables.page_size
        return int(table[slot, position // size]), position % size

    def _context(self, table: np.ndarray, slot: int, tokens: list[int]) -> None:
        found = [self._device.read("target_kv", *self._place(table, slot, p)) for p in range(len(tokens))]
        assert found == tokens, f"slot {slot} reads another text below {len(tokens)}"

    def _blocks(self, members: Sequence[int], results: ToyResults) -> None:
        device, size = self._device, self._block_size
        device.exchange[: self.first_row(len(members))] = [-2] * self.first_row(len(members))
        for place, index in enumerate(members):
            slot = device.slots[index]
            emitted = self._verify(index, slot, place * size) if slot.done == RUNNING else []
            slot.num_rows, slot.num_drafts = len(emitted), 0
            results.tokens.append(emitted)

    def _verify(self, index: int, slot: ToySlot, first_row: int) -> list[int]:
        device, length, text = self._device, slot.length, list(slot.tokens)
        block = [text[-1], *slot.drafts, *[0] * self._block_size][: self._block_size]
        for row, token in enumerate(block):
            page, offset = self._place(device.table, index, length + row)
            needed = row <= slot.num_drafts and length + row < slot.end_len
            assert page or not needed, f"slot {index} has no page at {length + row}"
            device.write("target_kv", page, offset, token)
            device.exchange[first_row + row] = token
        self._context(device.table, index, text[:-1])
        if self._states is not None:
            self._states.block(index, text[:-1], block)
        emitted: list[int] = []
        num_left = slot.max_tokens - slot.n_out
        for row in range(slot.num_drafts + 1):
            token = next_token(text + block[1 : row + 1])
            emitted.append(token)
            self._accept(slot, token)
            if slot.done or row == slot.num_drafts or block[row + 1] != token:
                break
        slot.count(min(slot.num_drafts, num_left - 1), len(emitted) - 1)
        slot.feature_start, slot.feature_row = length, first_row
        return emitted

    def _accept(self, slot: ToySlot, token: int) -> None:
        slot.tokens.append(token)
        slot.n_out += 1
        if token == EOS or slot.n_out >= slot.max_tokens:
            slot.done = STOPPED

    def _chunk(self, chunk: Chunk, first_row: int, table: np.ndarray, text: list[int], results: ToyResults) -> None:
        device = self._device
        tokens = list(chunk.token_ids)
        assert text[chunk.start : chunk.start + len(tokens)] == tokens
        for index, token in enumerate(tokens):
            page, offset = self._place(table, chunk.slot, chunk.start + index)
            assert page, f"slot {chunk.slot} has no page at {chunk.start + index}"
            device.write("target_kv", page, offset, token)
        assert first_row + len(tokens) <= len(device.exchange) or not device.exchange
        device.exchange[first_row : first_row + len(tokens)] = tokens
        self._context(table, chunk.slot, text[: chunk.start])
        if self._states is not None:
            end = chunk.start + len(tokens)
            self._states.chunk(chunk.slot, text, (chunk.start, end), state_reach(end, is_last=chunk.is_last))
        if chunk.is_last:
            slot = device.slots[chunk.slot]
            assert slot.done != CLOSED
            assert slot.tokens == text
            token = next_token(text)
            self._accept(slot, token)
            slot.num_rows = slot.num_drafts = 0
            results.tokens.append([token])
