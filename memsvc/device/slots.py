"""The slots' state as tensors, and the host's way to change it: one copy and one scatter a step for all changes."""

import struct
from collections.abc import Callable

import numpy as np
import torch

from memsvc.device.row_sampler import RowSampler
from memsvc.slot_layout import DONE_CLOSED, FLOATS, MAX_STOP_IDS, NOT_DONE, SCALARS, SCALARS_AT, SlotLayout

Stage = Callable[[np.ndarray], torch.Tensor]
"""Makes a copy of an array on the device that work enqueued later may read; the array may change right after."""


class SlotState:
    """Views over the slots' region. Target and draft make the same ones over the same bytes.

    Scalar fields are contiguous [num_slots + 1], int32 unless said.
    """

    length: torch.Tensor
    """Committed tokens: the position of the anchor."""
    anchor: torch.Tensor
    """The newest token, whose KV is not written yet."""
    num_rows: torch.Tensor
    """Rows of the newest verify whose features are final; 0 right after prefill."""
    feature_row: torch.Tensor
    """First of these rows in the exchange."""
    feature_start: torch.Tensor
    """Position of the first of these rows."""
    done: torch.Tensor
    """Nothing more is to be computed: one of the DONE values of slot_layout, 0 while it runs."""
    num_drafts: torch.Tensor
    """How many of `drafts` the next verify takes; it sets this to 0."""
    num_emitted: torch.Tensor
    """How many of `emitted` count."""
    n_out: torch.Tensor
    """Tokens given out so far."""
    num_tokens: torch.Tensor
    """Position of the next token to be sampled: length + 1."""
    max_tokens: torch.Tensor
    min_tokens: torch.Tensor
    """0 if there is nothing to withhold."""
    num_stop_ids: torch.Tensor
    """So many of `stop_ids` end the request."""
    num_withheld_ids: torch.Tensor
    """So many of `stop_ids` cannot be chosen before min_tokens."""
    valid_from: torch.Tensor
    """First position whose draft KV may be read."""
    temperature: torch.Tensor
    """float32; 0 is argmax."""
    top_k: torch.Tensor
    top_p_low: torch.Tensor
    """top_p is float64, as on the host, in two words."""
    top_p_high: torch.Tensor
    min_p: torch.Tensor
    """float32, as are the penalties."""
    repetition_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    seed_low: torch.Tensor
    """The seed modulo 2^64 in two words."""
    seed_high: torch.Tensor

    def __init__(self, layout: SlotLayout, region: torch.Tensor) -> None:
        """region: uint8 [layout.num_bytes], on any device."""
        if region.numel() != layout.num_bytes:
            raise ValueError(f"slots need {layout.num_bytes} bytes, the region has {region.numel()}")
        self.layout = layout
        self.words = region.view(torch.int32)
        """The whole region."""
        num_rows, stride = layout.num_slots + 1, layout.stride
        scalars = region[SCALARS_AT : layout.drafts_at].view(torch.int32).view(len(SCALARS), stride)
        for name, field in zip(SCALARS, scalars, strict=True):
            setattr(self, name, (field.view(torch.float32) if name in FLOATS else field)[:num_rows])

        def rows(start: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return region[start : start + num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)

        self.drafts = rows(layout.drafts_at, layout.draft_width, torch.int32)[:, : layout.block_size - 1]
        """[num_slots + 1, B - 1]"""
        self.emitted = rows(layout.emitted_at, layout.block_size, torch.int32)
        """[num_slots + 1, B]"""
        self.stop_ids = rows(layout.stop_ids_at, MAX_STOP_IDS, torch.int32)
        self.prompt_seen = rows(layout.prompt_seen_at, layout.seen_width, torch.int32)
        self.counts = rows(layout.counts_at, layout.count_width, torch.int16)
        """int16; columns past the vocabulary are padding."""

    def reset(self) -> None:
        """Nobody is in any slot. Once, by the owner, before anything reads the region."""
        self.words.zero_()
        self.done.fill_(DONE_CLOSED)


class SlotWriter:
    """Gathers what the host wants to change and puts it on the device in one piece.

    The later of two changes of a field wins. Without changes flush does nothing.
    """

    def __init__(self, slots: SlotState) -> None:
        self._slots = slots
        self._layout = slots.layout
        stride = slots.layout.stride
        self._firsts = {name: SCALARS_AT // 4 + index * stride for index, name in enumerate(SCALARS)}
        self._changes: dict[int, int] = {}
        """Address of an int32 in the region -> its value."""
        self._cleared: set[int] = set()
        """Slots whose counts and prompt bits begin at zero."""

    def open(self, slot: int, sampler: RowSampler, *, length: int, anchor: int = 0, valid_from: int = 0) -> None:
        """A request takes the slot. sampler stands where it goes on; length: tokens whose KV is final.

        After prefill of a whole prompt, length is one less than the prompt, and the anchor its last token: the
        first token is then sampled and accepted as from a block without drafts.
        """
        params = sampler.params
        stops = sorted(sampler.stop_ids)
        withheld = [token for token in sampler.withheld_ids if token not in sampler.stop_ids]
        if len(stops) + len(withheld) > MAX_STOP_IDS:
            raise ValueError(f"{len(stops) + len(withheld)} stop ids, a slot holds {MAX_STOP_IDS}")
        self._write(slot, "length", length)
        self._write(slot, "anchor", anchor)
        self._write(slot, "valid_from", valid_from)
        self._write(slot, "done", NOT_DONE)
        for name in ("num_rows", "num_drafts", "num_emitted", "feature_row", "feature_start"):
            self._write(slot, name, 0)
        self._write(slot, "n_out", sampler.n_out)
        self._write(slot, "num_tokens", sampler.num_tokens)
        self._write(slot, "max_tokens", min(params.max_tokens, 2**31 - 1))
        self._write(slot, "min_tokens", min(params.min_tokens, 2**31 - 1) if sampler.withheld_ids else 0)
        self._write(slot, "num_stop_ids", len(stops))
        self._write(slot, "num_withheld_ids", len(sampler.withheld_ids) and len(stops) + len(withheld))
        self._changes.update(enumerate((*stops, *withheld), self._layout.stop_ids_at // 4 + slot * MAX_STOP_IDS))
        self._write_sampling(slot, sampler)

    def _write_sampling(self, slot: int, sampler: RowSampler) -> None:
        params = sampler.params
        self._write(slot, "temperature", 0.0 if sampler.is_greedy else params.temperature)
        self._write(slot, "top_k", min(max(0, params.top_k), 2**31 - 1))
        low, high = struct.unpack("<2i", struct.pack("<d", params.top_p))
        self._write(slot, "top_p_low", low)
        self._write(slot, "top_p_high", high)
        for name in ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            self._write(slot, name, getattr(params, name))
        low, high = struct.unpack("<2i", struct.pack("<Q", params.seed % 2**64))
        self._write(slot, "seed_low", low)
        self._write(slot, "seed_high", high)
        if sampler.has_penalty:
            self._cleared.add(slot)
            self._count(slot, sampler)

    def _count(self, slot: int, sampler: RowSampler) -> None:
        """Counts and prompt bits of a slot that begin at zero."""
        words: dict[int, int] = {}
        first = self._layout.counts_at // 4 + slot * self._layout.count_width // 2
        for token, count in sampler.counts.items():
            place = first + token // 2
            words[place] = words.get(place, 0) | min(count, 2**15 - 1) << 16 * (token % 2)
        first = self._layout.prompt_seen_at // 4 + slot * self._layout.seen_width
        for token in sampler.seen:
            words[first + token // 32] = words.get(first + token // 32, 0) | 1 << token % 32
        self._changes.update((place, word - 2**32 if word >= 2**31 else word) for place, word in words.items())

    def close(self, slot: int) -> None:
        """The slot is nobody's: rows of it go to the dummy page, and nothing is sampled."""
        self._write(slot, "done", DONE_CLOSED)
        for name in ("length", "num_rows", "num_drafts", "num_emitted", "valid_from"):
            self._write(slot, name, 0)

    def set(self, slot: int, name: str, value: float) -> None:
        """A scalar field of an open slot becomes value, whatever the device made of it meanwhile."""
        self._write(slot, name, value)

    def _write(self, slot: int, name: str, value: float) -> None:
        if not 0 < slot <= self._layout.num_slots:
            raise ValueError(f"slot {slot} outside [1, {self._layout.num_slots}]")
        self._changes[self._firsts[name] + slot] = _float_bits(value) if name in FLOATS else int(value)

    def flush(self, stage: Stage) -> None:
        """Enqueue all changes so far on the current stream."""
        for slot in self._cleared:
            self._slots.counts[slot].zero_()
            self._slots.prompt_seen[slot].zero_()
        self._cleared.clear()
        if not self._changes:
            return
        num = len(self._changes)
        packed = np.zeros(num + (num + 1) // 2, dtype=np.int64)
        packed[:num] = np.fromiter(self._changes.keys(), dtype=np.int64, count=num)
        packed[num:].view(np.int32)[:num] = np.fromiter(self._changes.values(), dtype=np.int32, count=num)
        self._changes.clear()
        staged = stage(packed)
        self._slots.words.index_copy_(0, staged[:num], staged[num:].view(torch.int32)[:num])


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
