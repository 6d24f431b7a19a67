"""Prompt steps of few rows as CUDA graphs, padded to a bucket: the host takes longer to enqueue them than they run.

A graph is the whole step of a dense target, with the first tokens of the prompts that end. What differs from step to
step arrives in one copy. Padded rows stand at the dummy page and are attended by nobody; their features go behind those
of the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from memsvc.device.graphs import Bucket, GraphPlan, GraphPool, SizedGraphs
from memsvc.device.kernels.accept import RESULT_EXTRA
from memsvc.device.kernels.attention_tiles import MAX_ROWS
from memsvc.device.kernels.places import TokenRows
from memsvc.device.kernels.prefill_attention import PrefillPlan
from target_worker.cuda.network import Segment
from target_worker.cuda.order import Chunk
from target_worker.cuda.prompts import PromptRows, PromptStep, TritonPrefill
from target_worker.cuda.step_times import PROMPTS
from target_worker.cuda.verify_step import VerifyStep
from target_worker.step_sizes import prompts_of

MOST_CONTEXT = 16384
"""Tokens up to the last row of a chunk, at most, where eager steps have another kernel than Triton's.

By docs/benchmarks/attention-h200.json a program of that reads 1000 tokens in some 23 us, and nobody shares them with it.
In a layer of Qwen3-8B the host is 550 us busy with an eager step, where 100 rows take the device 140 without attention.
"""
_FIRST = 2
"""Numbers before the columns, which so begin where kernels expect tensors to begin."""
_TILE = 4
"""Numbers of a tile of PrefillPlan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPlaces:
    """Static tensors of a bucket. All zero they stand for nobody."""

    inputs: torch.Tensor
    """int64: the first feature's row and a gap, `columns`, `wanted`, tiles, members."""
    results: torch.Tensor
    """int32 [prompts, 3]: rows for the host of prompts that end, in order."""
    num_rows: int
    num_tiles: int

    @classmethod
    def make(cls, num_rows: int, num_prompts: int, tile_tokens: int, device: torch.device | str) -> "PromptPlaces":
        """tile_tokens: the most that a tile of attention has."""
        # Of each prompt one tile may be short, all others are full.
        num_tiles = num_rows // tile_tokens + num_prompts
        num_inputs = _FIRST + 3 * num_rows + 2 * num_prompts + _TILE * num_tiles
        return cls(
            inputs=torch.zeros(num_inputs, dtype=torch.int64, device=device),
            results=torch.zeros((num_prompts, 1 + RESULT_EXTRA), dtype=torch.int32, device=device),
            num_rows=num_rows,
            num_tiles=num_tiles,
        )

    @property
    def num_prompts(self) -> int:
        """Prompts there is room for."""
        return len(self.results)

    @property
    def first_row(self) -> torch.Tensor:
        """[1]: exchange row of the first row's features."""
        return self.inputs[:1]

    @property
    def columns(self) -> torch.Tensor:
        """[3, rows], as PromptRows has them."""
        return self.inputs[_FIRST : _FIRST + 3 * self.num_rows].view(3, -1)

    @property
    def wanted(self) -> torch.Tensor:
        """[prompts]: rows whose logits are wanted."""
        start = _FIRST + 3 * self.num_rows
        return self.inputs[start : start + self.num_prompts]

    def tiles_and_members(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [tiles, 4] and [prompts], copied: tiles of nobody have no tokens, and nobody is the dummy slot."""
        numbers = self.inputs[_FIRST + 3 * self.num_rows + self.num_prompts :].int()
        return numbers[: _TILE * self.num_tiles].view(-1, _TILE), numbers[_TILE * self.num_tiles :]

    def host_inputs(self, rows: PromptRows, tiles: np.ndarray, feature_row: int) -> np.ndarray:
        """What `inputs` is to hold."""
        assert len(tiles) <= self.num_tiles, f"{len(tiles)} tiles in a bucket for {self.num_tiles}"
        values = np.zeros(len(self.inputs), dtype=np.int64)
        values[0] = feature_row
        wanted_at = _FIRST + 3 * self.num_rows
        values[_FIRST:wanted_at].reshape(3, -1)[:, : rows.num_rows] = rows.columns
        tiles_at = wanted_at + self.num_prompts
        members_at = tiles_at + _TILE * self.num_tiles
        for at, part in ((wanted_at, rows.wanted), (tiles_at, tiles.ravel()), (members_at, rows.ending)):
            values[at : at + len(part)] = part
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimits:
    """What is captured."""

    sizes: tuple[int, ...]
    """Rows of the buckets, ascending."""
    max_running_requests: int
    feature_rows: int
    """Of the exchange; 0 if there are no features."""
    most_context: int = 0
    """Tokens up to a chunk's last row; 0 is any number."""
    is_captured: bool = True
    """False runs the same functions eagerly."""


class PromptGraphs:
    """Chunks through a bucket, if one has room for them. Before `capture` none has."""

    def __init__(self, step: PromptStep, verify: VerifyStep, attention: TritonPrefill, limits: PromptLimits) -> None:
        """step: what runs the same chunks eagerly, of a dense target. verify: chooses the first tokens."""
        self._step = step
        self._verify = verify
        self._attention = attention
        self._limits = limits
        self._sizes: tuple[int, ...] = ()
        """Those that may be used."""
        plan = GraphPlan(sizes=limits.sizes, sections=(PROMPTS,), is_captured=limits.is_captured, of="prompts")
        self._graphs = SizedGraphs(plan, self._make_bucket, attention.page_table.device)

    def capture(self, pool: GraphPool | None) -> tuple[float, int]:
        """Capture all buckets: seconds it took, and bytes of device memory. pool: see SizedGraphs."""
        self._graphs.capture(pool)
        self._sizes = self._limits.sizes
        return self._graphs.capture_s, self._graphs.num_bytes

    def run(self, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        """PromptStep.run and first_tokens of the chunks that end a prompt: rows for the host int32 [m, 3].

        They hold until the next run. None: no bucket has room, and nothing was enqueued.
        """
        size = self.size_for(chunks, feature_row)
        if size is None:
            return None
        bucket, rows = self._graphs.bucket(size), self._step.rows(chunks)
        tiles = PrefillPlan.of(rows.spans, self._attention.group_size, "cpu").tiles.numpy()
        places = bucket.places
        self._step.lane.stage_into(places.inputs, places.host_inputs(rows, tiles, feature_row))
        bucket.run()
        return places.results[: len(rows.ending)]

    def size_for(self, chunks: Sequence[Chunk], feature_row: int) -> int | None:
        """Rows of the bucket that they take; None: no bucket has room for them."""
        limits, num_rows = self._limits, sum(len(chunk.token_ids) for chunk in chunks)
        if limits.most_context and any(chunk.start + len(chunk.token_ids) > limits.most_context for chunk in chunks):
            return None
        for size in self._sizes:
            if size >= num_rows and self._num_prompts(size) >= len(chunks):
                has_room = not limits.feature_rows or feature_row + size <= limits.feature_rows
                return size if has_room else None
        return None

    def _num_prompts(self, size: int) -> int:
        return prompts_of(size, self._limits.max_running_requests)

    def _make_bucket(self, size: int) -> Bucket[PromptPlaces]:
        attention = self._attention
        tile_tokens = MAX_ROWS // attention.group_size
        places = PromptPlaces.make(size, self._num_prompts(size), tile_tokens, attention.page_table.device)
        return Bucket(places, lambda: self._turn(places))

    def _turn(self, places: PromptPlaces) -> Iterator[str]:
        network = self._step.network
        tiles, members = places.tiles_and_members()
        token_ids, positions, slots = places.columns
        attend = self._attention.planned(PrefillPlan(tiles, self._attention.group_size))
        segment = Segment(TokenRows(positions=positions, slots=slots), attend)
        x = F.embedding(token_ids, network.model.embedding)
        u = network.hidden(x, [segment], places.first_row, places.wanted)
        self._verify.first_tokens(network.model.head(u), members, places.results)
        yield PROMPTS
