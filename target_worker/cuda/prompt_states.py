"""The linear layers of a hybrid target over prompt chunks: any number of rows of any requests, whose places are known.

As on the CPU a state comes to stand at the last page edge of a chunk, and the rows after it are kept in the ring. So a
chunk is computed in two parts: the rows up to the edge, whose state is written, and from that state on the others. A
prompt that ends on an edge has its state at the one before, a page behind (state_reach).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.delta_plan import PlanRule, Rule
from memsvc.device.kernels.delta_inputs import SequenceInputs, Sequences
from memsvc.device.slots import Stage
from target_worker.attention import Span
from target_worker.cuda.states import DeviceStates
from target_worker.recurrence import DeltaSpan
from target_worker.req import state_reach


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [begin, begin + num) of a request, from the state at begin on."""

    place: int
    """Of its span."""
    slot: int
    begin: int
    num: int
    is_own: bool = False
    """That state was written by the same step, to state_out."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Pieces that are computed at once."""

    rows: slice
    pages: torch.Tensor
    """int64 [layers, n]: where their states are."""
    empty: torch.Tensor
    """int64: those that begin before the first token."""
    rule: Rule


class PromptStates:
    """Makes ready the recurrences of a step's chunks, with the rule that was chosen at start."""

    def __init__(self, states: DeviceStates, rule: PlanRule, stage: Stage) -> None:
        """stage: of the lane that steps run on."""
        self.states = states
        self.rule = rule
        self.stage = stage

    def plan(self, spans: Sequence[Span]) -> "PromptRecur":
        """For one span a request, all of whose rows are final: so its state stands at the last page edge before it."""
        size = self.states.memory.page_size
        return PromptRecur(
            self,
            [
                DeltaSpan(
                    table_row=span.table_row,
                    state_len=span.start // size * size,
                    start=span.start,
                    num=span.num,
                    write_len=state_reach(span.end, is_last=span.is_last) // size * size,
                    first=span.first,
                )
                for span in spans
            ],
        )

    def ints(self, *parts: Sequence[int] | np.ndarray) -> tuple[torch.Tensor, ...]:
        """int64 on the device, in one copy."""
        arrays = [np.asarray(part, dtype=np.int64).reshape(-1) for part in parts]
        return self.stage(np.concatenate(arrays)).split([len(array) for array in arrays])


class PromptRecur:
    """One step's recurrences: planned once from its spans, then run in every linear layer. Nobody waits for a device."""

    def __init__(self, prompts: PromptStates, spans: Sequence[DeltaSpan]) -> None:
        self._prompts = prompts
        self._states = prompts.states
        self._num_rows = sum(span.num for span in spans)
        numbered = list(enumerate(spans))
        before = [_Piece(place, s.table_row, s.state_len, s.keep) for place, s in numbered if s.keep]
        after = [
            _Piece(place, s.table_row, s.write_len, s.end - s.write_len, s.keep > 0)
            for place, s in numbered
            if s.end > s.write_len
        ]
        self._lay_out(spans, [*before, *after])
        self._before = self._part(before, 0)
        self._after = self._part(after, sum(piece.num for piece in before))
        self._order = self._order_of(spans, [*before, *after])
        self._keep(spans, before)

    def _lay_out(self, spans: Sequence[DeltaSpan], pieces: list[_Piece]) -> None:
        owners = np.repeat([piece.place for piece in pieces], [piece.num for piece in pieces])
        facts = np.array([[span.table_row, span.state_len, span.start, span.first] for span in spans]).T
        flat, owned, placed = self._prompts.ints(facts, owners, _positions(pieces))
        self._rows = Sequences(facts=flat.view(4, -1), owners=owned, positions=placed)

    def _order_of(self, spans: Sequence[DeltaSpan], pieces: list[_Piece]) -> torch.Tensor | None:
        """int64: where each row of the batch stands among the rows of all pieces, some of which are replayed from a ring.

        None if these are the rows of the batch, in order.
        """
        lens = [piece.num for piece in pieces]
        starts, firsts = (
            np.repeat([getattr(spans[piece.place], name) for piece in pieces], lens) for name in ("start", "first")
        )
        positions = _positions(pieces)
        found = np.flatnonzero(positions >= starts)
        order = np.empty(self._num_rows, dtype=np.int64)
        order[(firsts + positions - starts)[found]] = found
        return None if np.array_equal(order, np.arange(len(positions))) else self._prompts.ints(order)[0]

    def _part(self, pieces: list[_Piece], first: int) -> _Part | None:
        """Pieces whose rows begin at row `first` of all."""
        if not pieces:
            return None
        lens = [piece.num for piece in pieces]
        slots, own, empty = self._prompts.ints(
            [piece.slot for piece in pieces],
            [piece.is_own for piece in pieces],
            [place for place, piece in enumerate(pieces) if piece.begin == 0],
        )
        tables = self._states.memory.tables
        read, written = (table.index_select(0, slots) for table in (tables.state_in, tables.state_out))
        return _Part(
            rows=slice(first, first + sum(lens)),
            pages=torch.where(own[:, None] > 0, written, read).t().long(),
            empty=empty,
            rule=self._prompts.rule(lens, self._prompts.stage),
        )

    def _keep(self, spans: Sequence[DeltaSpan], before: list[_Piece]) -> None:
        """Where states go, with the inputs of the convolution before them, and the rows that the ring keeps."""
        memory = self._states.memory
        tables, ring = memory.tables, memory.ring
        reach = np.arange(-memory.state.conv_rows, 0)
        tails = [(s, np.arange(max(s.start, s.write_len), s.end)) for s in spans]
        kept = np.concatenate([positions for _, positions in tails])
        self._written, owners, ends, self._slots, lens, slots, parts, self._ring_rows, self._kept = self._prompts.ints(
            [piece.slot for piece in before],
            np.repeat([piece.place for piece in before], len(reach)),
            np.array([piece.begin + piece.num for piece in before])[:, None] + reach,
            [span.table_row for span in spans],
            [span.write_len for span in spans],
            np.repeat([span.table_row for span, _ in tails], [len(positions) for _, positions in tails]),
            kept % ring.num_rows // ring.page_rows,
            kept % ring.page_rows,
            np.concatenate([span.first + positions - span.start for span, positions in tails]),
        )
        self._lens = lens.int()
        self._reach = Sequences(facts=self._rows.facts, owners=owners, positions=ends)
        self._out_pages = tables.state_out.index_select(0, self._written).t().long()
        self._ring_pages = tables.ring[slots, :, parts].t().long()

    def __call__(self, layer: int, raw: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See RecurRows. Writes the states that pass a page edge, and puts the rows after them into the rings."""
        linear, site = self._states.linear, self._states.sites[layer]
        inputs = SequenceInputs(memory=site.memory, layer=layer, conv=site.conv, raw=raw, gates=gates)
        outs = []
        if self._before is not None:
            out, ends = self._run(self._before, inputs)
            outs.append(out)
            reach = inputs.gathered(self._reach).view(len(ends), -1, raw.shape[1])
            linear.states.write(self._out_pages[layer], ends, reach)
        if self._after is not None:
            outs.append(self._run(self._after, inputs)[0])
        # Last, since the rows that these overwrite were read just now.
        if len(self._kept):
            kept = raw.index_select(0, self._kept), gates.index_select(0, self._kept)
            linear.rings.write_at(self._ring_pages[layer], self._ring_rows, *kept)
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._order is None else out.index_select(0, self._order)

    def _run(self, part: _Part, inputs: SequenceInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows, v_heads, v_dim] of a part, and the states after its pieces."""
        rows = inputs.convolved(self._rows, part.rows, self._prompts.rule.dtype)
        state = self._states.linear.states.read(part.pages[inputs.layer], part.empty)
        out, ends = part.rule(rows, state)
        return out[0], ends

    def finish(self) -> None:
        """All layers have run: what they wrote is what later steps read."""
        tables = self._states.memory.tables
        tables.state_in.index_copy_(0, self._written, tables.state_out.index_select(0, self._written))
        tables.state_len.index_copy_(0, self._slots, self._lens)


def _positions(pieces: Sequence[_Piece]) -> np.ndarray:
    """Of the rows of pieces, one after another."""
    return np.concatenate([np.arange(piece.begin, piece.begin + piece.num) for piece in pieces])
