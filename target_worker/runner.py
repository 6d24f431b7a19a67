"""One forward over a batch of prompt chunks and verify blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables
from target_worker.attention import PagedAttention, Span
from target_worker.linear_memory import LinearMemory
from target_worker.model.decoder import Decoder
from target_worker.model.delta_layer import DeltaInputs
from target_worker.recurrence import DeltaSpan, Recurrence


@dataclass(slots=True)
class Segment:
    """Tokens [start, start + len(token_ids)) of a request; logits are wanted for its last num_logits rows."""

    table_row: int
    """The request's row in the page tables; its pages must cover all tokens up to the last of these."""
    start: int
    token_ids: list[int]
    num_logits: int
    state_len: int = 0
    """Hybrid targets: where the request's state stands, at most start; 0 is before the first token."""
    num_certain: int = 0
    """Hybrid targets: so many of its first rows are final for certain, and the state may pass them: the anchor of a
    block, all of a prompt's but the last.
    """

    def write_len(self, page_size: int) -> int:
        """Hybrid targets: where the state stands after the forward, the last page edge of which all rows are certain.

        If this is not state_len, the forward writes the state to state_out; the caller tells the StateTable (wrote).
        """
        return max(self.state_len, (self.start + self.num_certain) // page_size * page_size)


class Runner:
    """Runs the model over the pool. Everything about the batch is passed in; nothing is kept between calls."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        tables: PageTables,
        feature_out: torch.Tensor | None = None,
        tap_layers: list[int] | None = None,
        linear: LinearMemory | None = None,
    ) -> None:
        """feature_out [max_rows, len(tap_layers) * hidden] takes the features of the rows of a forward.

        linear: states and rings, needed by a target that has linear layers.
        """
        self.model = model
        self.pool = pool
        self.tables = tables
        self.tap_layers = list(tap_layers or [])
        self.feature_out = feature_out
        self.linear = linear
        self.on_layer: Callable[[], None] | None = None
        """Called in every layer of a forward: one of a large model on a slow machine may take minutes."""
        self._check()

    def _check(self) -> None:
        shape = self.model.shape
        odd = [layer for layer in self.tap_layers if not 0 <= layer < shape.num_layers]
        if odd:
            raise ValueError(f"taps at layers {odd}, but the target has layers 0 to {shape.num_layers - 1}")
        if self.tap_layers and self.feature_out is None:
            raise ValueError(f"taps at layers {self.tap_layers} and no tensor to write them to")
        if self.feature_out is not None:
            want = (len(self.tap_layers) * shape.hidden_size, self.model.dtype)
            if (self.feature_out.shape[1], self.feature_out.dtype) != want:
                raise ValueError(
                    f"feature_out has rows of {self.feature_out.shape[1]} x {self.feature_out.dtype}, "
                    f"{len(self.tap_layers)} taps need {want[0]} x {want[1]}"
                )
        kv, num_layers = self.pool.shape, shape.num_full_layers
        if (kv.num_layers, kv.num_kv_heads, kv.head_dim) != (num_layers, shape.num_kv_heads, shape.head_dim):
            raise ValueError(
                f"the pool holds {kv}, the target has {num_layers} layers of {shape.num_kv_heads} heads with keys"
            )
        held = self.linear.table.num_layers if self.linear else 0
        if held != shape.num_linear_layers:
            raise ValueError(f"states of {held} layers for a target with {shape.num_linear_layers} linear layers")

    @torch.inference_mode()
    def forward(self, segments: list[Segment], feature_row: int = 0) -> torch.Tensor:
        """Logits [sum of num_logits, vocab] in the model's dtype, in the order of the segments.

        Writes K and V of every row to its slot, and features of row r, counted over all segments, to
        feature_out[feature_row + r]. Tokens of a request may be spread over several segments: a layer's K and V are
        all written before any row reads them. A hybrid target takes one segment a request, runs its linear
        layers from state_len on, and writes states and rings as recurrence.py says.
        """
        token_ids, positions, rows = self._flatten(segments)
        self._check_features(feature_row, len(token_ids))
        device = self.model.device
        place = self.pool.split(self.tables.slots_at(rows, positions))
        num_heads = self.model.shape.num_heads
        attention = PagedAttention(self.pool, self.tables, _spans(segments), num_heads, self.model.dtype)

        recurrence = self._recurrence(segments)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if self.on_layer is not None:
                self.on_layer()
            self.pool.write_at(layer, place, k, v)
            return attention.run(layer, q)

        def recur(layer: int, conv: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
            if self.on_layer is not None:
                self.on_layer()
            assert recurrence is not None, f"linear layer {layer} without states"
            return recurrence.run(layer, conv, inputs)

        x = self.model.hidden(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            attend,
            partial(self._tap, feature_row) if self.tap_layers else None,
            recur,
        )
        return self.model.logits(x[_wanted(segments).to(device)])

    @torch.inference_mode()
    def catch_up(self, segments: list[Segment]) -> None:
        """Bring states to the last page edge at or before start, from the rings alone: segments have no tokens.

        So an aligned state can be frozen at close or retract. States that stand there already are left alone;
        rings are not changed.
        """
        if any(segment.token_ids for segment in segments):
            raise ValueError(f"catching up takes no tokens, got {[len(segment.token_ids) for segment in segments]}")
        moving = [segment for segment in segments if segment.write_len(self.pool.page_size) > segment.state_len]
        recurrence = self._recurrence(moving) if moving else None
        if recurrence is None:
            return
        layers = self.model.delta_layers
        nothing = DeltaInputs.none(layers[0].spec, self.model.dtype, self.model.device)
        for i, layer in enumerate(layers):
            if self.on_layer is not None:
                self.on_layer()
            recurrence.run(i, layer.conv, nothing)

    def _recurrence(self, segments: list[Segment]) -> Recurrence | None:
        if self.linear is None or self.model.shape.linear is None:
            return None
        owners = [segment.table_row for segment in segments]
        if len(set(owners)) < len(owners):
            raise ValueError(f"a hybrid target takes one segment a request, got rows {owners}")
        spans, first = [], 0
        for segment in segments:
            num, write_len = len(segment.token_ids), segment.write_len(self.pool.page_size)
            if not 0 <= segment.num_certain <= num:
                raise ValueError(f"{segment.num_certain} rows of {num} are certain")
            # Without rows of its own it need not be replayed past the edge.
            start = segment.start if num else write_len
            span = DeltaSpan(segment.table_row, segment.state_len, start, num, write_len, first)
            span.check(self.pool.page_size, self.linear.rings.shape.num_rows)
            spans.append(span)
            first += num
        return Recurrence(self.linear, self.model.shape.linear, spans)

    def _flatten(self, segments: list[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, positions and table rows of all rows, int64."""
        lens = [len(segment.token_ids) for segment in segments]
        if not segments or min(lens) == 0:
            raise ValueError(f"a forward needs segments of at least one token, got {lens}")
        token_ids = np.concatenate([np.asarray(segment.token_ids, dtype=np.int64) for segment in segments])
        if token_ids.min() < 0 or token_ids.max() >= self.model.shape.vocab_size:
            raise ValueError(
                f"token ids {token_ids.min()} to {token_ids.max()} in a vocabulary of {self.model.shape.vocab_size}"
            )
        positions = np.concatenate([np.arange(s.start, s.start + n) for s, n in zip(segments, lens, strict=True)])
        return token_ids, positions, np.repeat([segment.table_row for segment in segments], lens)

    def _check_features(self, row: int, num_rows: int) -> None:
        if self.feature_out is not None and row + num_rows > len(self.feature_out):
            raise ValueError(f"a forward of {num_rows} rows, features have room for {len(self.feature_out) - row}")

    def _tap(self, first: int, layer: int, x: torch.Tensor) -> None:
        if layer in self.tap_layers:
            assert self.feature_out is not None
            width = x.shape[1]
            place = self.tap_layers.index(layer) * width
            self.feature_out[first : first + x.shape[0], place : place + width] = x


def _spans(segments: list[Segment]) -> list[Span]:
    spans, first = [], 0
    for segment in segments:
        spans.append(Span(segment.table_row, segment.start, len(segment.token_ids), first))
        first += len(segment.token_ids)
    return spans


def _wanted(segments: list[Segment]) -> torch.Tensor:
    """Rows whose logits are wanted, int64."""
    rows, first = [], 0
    for segment in segments:
        end = first + len(segment.token_ids)
        if not 0 <= segment.num_logits <= len(segment.token_ids):
            raise ValueError(f"{segment.num_logits} logits of a segment of {len(segment.token_ids)} tokens")
        rows.extend(range(end - segment.num_logits, end))
        first = end
    return torch.tensor(rows, dtype=torch.int64)
