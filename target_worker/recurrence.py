"""Gated delta net over pages: rows are replayed from the ring, a state is written where a page edge is passed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from memsvc.device.gated_delta import DeltaRows, core_of, gated_delta_rule, grouped
from target_worker.linear_memory import LinearMemory
from target_worker.model.delta_layer import DeltaInputs
from target_worker.model.linear_spec import LinearSpec


@dataclass(frozen=True, slots=True)
class DeltaSpan:
    """Rows [first, first + num) of the batch are tokens [start, start + num) of a request.

    Its state stands at state_len and stays there, or is to stand at write_len. Tokens [state_len, start) are in
    its ring.
    """

    table_row: int
    state_len: int
    start: int
    num: int
    write_len: int
    first: int

    @property
    def end(self) -> int:
        """Position after its last row."""
        return self.start + self.num

    @property
    def num_rows(self) -> int:
        """Rows to compute: replayed ones, then new ones."""
        return self.end - self.state_len

    @property
    def keep(self) -> int:
        """Rows after which the state is wanted; 0 if it stays."""
        return self.write_len - self.state_len

    def check(self, page_size: int, ring_rows: int) -> None:
        """Raise ValueError, with the numbers, unless state and ring can be where the span says."""
        if self.state_len % page_size or not 0 <= self.state_len <= self.start:
            raise ValueError(f"a state at {self.state_len} before token {self.start}, pages of {page_size} tokens")
        held = max(self.start - self.state_len, self.end - self.write_len)
        if held > ring_rows:
            raise ValueError(
                f"tokens [{self.start}, {self.end}) with the state at {self.state_len}, then {self.write_len}, "
                f"need a ring of {held} rows; it has {ring_rows}"
            )


@dataclass(frozen=True, slots=True)
class _Group:
    """n spans padded to the same number of rows, computed as one batch."""

    chunk: int
    num_rows: int
    keep: list[int]
    state_in: torch.Tensor
    """int64 [layers, n]; page 0 for the zero state."""
    state_out: torch.Tensor
    """int64 [layers, n]"""
    replay_pages: torch.Tensor
    """int64 [layers, r]: ring pages of the replayed rows of all spans,"""
    replay_positions: torch.Tensor
    """int64 [r]: their positions,"""
    replay_at: torch.Tensor
    """int64 [r]: and their places among the n * num_rows rows."""
    new_from: torch.Tensor
    """int64 [m]: rows of the batch,"""
    new_at: torch.Tensor
    """int64 [m]: and their places."""


class Recurrence:
    """One forward's recurrences: planned once from its spans, one a request, then run in every linear layer."""

    def __init__(self, memory: LinearMemory, spec: LinearSpec, spans: Sequence[DeltaSpan]) -> None:
        self._memory = memory
        self._spec = spec
        self._device = memory.states.device
        self._num_rows = sum(span.num for span in spans)
        self._groups = [self._plan(group) for group in group_spans(spans)]
        kept = [(span, p) for span in spans for p in range(max(span.start, span.write_len), span.end)]
        self._kept_pages = self._ring_pages([span.table_row for span, _ in kept], [p for _, p in kept])
        self._kept_positions = self._ints([p for _, p in kept])
        self._kept_from = self._ints([span.first + p - span.start for span, p in kept])

    def run(self, layer: int, conv: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
        """Outputs [rows, v_heads, v_dim] float32 of all rows; conv [kernel, conv_dim] float32.

        Writes the states that pass a page edge, and puts the rows after them into the rings.
        """
        form = (self._num_rows, self._spec.num_v_heads, self._spec.v_dim)
        out = torch.empty(form, dtype=torch.float32, device=self._device)
        for group in self._groups:
            rows, raw = self._rows(group, layer, conv, inputs)
            got = self._recur(group, layer, rows, raw)
            out[group.new_from] = got.flatten(0, 1)[group.new_at]
        # Last, since the rows that these overwrite may have been read just now.
        source = self._kept_from
        raw, gates = inputs.raw[source], inputs.gates[source]
        self._memory.rings.write(self._kept_pages[layer], self._kept_positions, raw, gates)
        return out

    def _rows(
        self, group: _Group, layer: int, conv: torch.Tensor, inputs: DeltaInputs
    ) -> tuple[DeltaRows, torch.Tensor]:
        """Rows ready for the rule, and their raw inputs [n, kernel - 1 + rows, conv_dim], the state's in front."""
        states, rings, spec = self._memory.states, self._memory.rings, self._spec
        n, before = group.state_in.shape[1], spec.conv_kernel - 1
        # Zeros past a request's own rows: nothing is read there, but 0 * NaN would reach the rows before them.
        raw = torch.zeros((n, before + group.num_rows, spec.conv_dim), dtype=inputs.raw.dtype, device=self._device)
        gates = torch.zeros((n, group.num_rows, 2, spec.num_v_heads), device=self._device)
        raw[:, :before] = states.read_conv(group.state_in[layer])
        old_raw, old_gates = rings.read(group.replay_pages[layer], group.replay_positions)
        for at, new_raw, new_gates in (
            (group.replay_at, old_raw, old_gates),
            (group.new_at, inputs.raw[group.new_from], inputs.gates[group.new_from]),
        ):
            raw.flatten(0, 1).index_copy_(0, at + (at // group.num_rows + 1) * before, new_raw)
            gates.flatten(0, 1).index_copy_(0, at, new_gates)
        key_size = spec.num_k_heads * spec.k_dim
        q, k, v = convolved(raw, conv).split([key_size, key_size, spec.value_size], dim=-1)
        heads, values = (spec.num_k_heads, spec.k_dim), (spec.num_v_heads, spec.v_dim)
        q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, values)
        return DeltaRows(q, k, v, gates[:, :, 0], gates[:, :, 1]), raw

    def _recur(self, group: _Group, layer: int, rows: DeltaRows, raw: torch.Tensor) -> torch.Tensor:
        states, before = self._memory.states, self._spec.conv_kernel - 1
        begin = states.read(group.state_in[layer])
        out, kept = gated_delta_rule(rows, begin, group.keep, group.chunk)
        if kept.members:
            # The state at row `keep` has seen the `before` rows in front of it.
            conv = torch.stack([raw[i, group.keep[i] : group.keep[i] + before] for i in kept.members])
            states.write(group.state_out[layer, kept.members], kept.states, conv)
        return out

    def _plan(self, spans: list[DeltaSpan]) -> _Group:
        table = self._memory.table
        chunk, num_rows = core_of(spans[0].num_rows)
        owners = [span.table_row for span in spans]
        state_in = self._pages(table.state_in, owners)
        state_in[:, self._ints([i for i, span in enumerate(spans) if span.state_len == 0])] = 0
        replay = [(i, p) for i, span in enumerate(spans) for p in range(span.state_len, span.start)]
        new = [(i, p) for i, span in enumerate(spans) for p in range(span.start, span.end)]

        def places(rows: list[tuple[int, int]]) -> torch.Tensor:
            return self._ints([i * num_rows + p - spans[i].state_len for i, p in rows])

        return _Group(
            chunk=chunk,
            num_rows=num_rows,
            keep=[span.keep for span in spans],
            state_in=state_in,
            state_out=self._pages(table.state_out, owners),
            replay_pages=self._ring_pages([owners[i] for i, _ in replay], [p for _, p in replay]),
            replay_positions=self._ints([p for _, p in replay]),
            replay_at=places(replay),
            new_from=self._ints([spans[i].first + p - spans[i].start for i, p in new]),
            new_at=places(new),
        )

    def _pages(self, table: np.ndarray, rows: list[int]) -> torch.Tensor:
        """int64 [layers, len(rows)]"""
        return torch.from_numpy(table[rows].T.astype(np.int64)).to(self._device)

    def _ring_pages(self, rows: list[int], positions: list[int]) -> torch.Tensor:
        """int64 [layers, len(rows)]: the pages that hold these positions of the requests in these table rows."""
        shape = self._memory.rings.shape
        parts = np.asarray(positions, dtype=np.int64) % shape.num_rows // shape.page_rows
        pages = self._memory.table.ring[np.asarray(rows, dtype=np.int64), :, parts]
        return torch.from_numpy(pages.T.astype(np.int64)).to(self._device)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def convolved(raw: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """silu of the causal depthwise convolution, float32 [n, rows, conv_dim]."""
    num_rows = raw.shape[1] - len(conv) + 1
    out = raw[:, :num_rows] * conv[0]
    for i in range(1, len(conv)):
        out.addcmul_(raw[:, i : i + num_rows].float(), conv[i])
    return F.silu(out, inplace=True)


def group_spans(spans: Sequence[DeltaSpan]) -> list[list[DeltaSpan]]:
    """Spans that are computed together."""
    return [[spans[place] for place in group] for group in grouped([span.num_rows for span in spans])]
