"""CUDA graphs of one step for batches of a few sizes, and the same step without graphs.

A step is written once, as a function over static tensors that yields the name of each section it has put on the
stream. Captured, a bucket is one graph; or a graph for each section, so that events can stand between them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

logger = logging.getLogger(__name__)

_WARM_UPS = 2
"""Runs before a capture: kernels are compiled in the first, and libraries have their workspaces after it."""

Turn = Callable[[], Iterator[str]]
"""Puts one step on the current stream, section by section. Reads and allocates nothing that depends on data."""
OnSection = Callable[[str], None]
Inputs = TypeVar("Inputs")
"""Static tensors that differ from step to step."""


@dataclass(frozen=True, slots=True)
class GraphPool:
    """Memory of graphs that run one after the other."""

    handle: Any
    """From torch.cuda.graph_pool_handle."""
    stream: torch.cuda.Stream
    """All of them are captured on it: torch's allocator gives freed memory to the stream that had it, and no other."""

    @classmethod
    def make(cls, stream: torch.cuda.Stream) -> "GraphPool":
        """An empty one."""
        return cls(torch.cuda.graph_pool_handle(), stream)


@dataclass(frozen=True, slots=True)
class Places:
    """What differs from step to step in a bucket, in one static tensor: members, then a few numbers."""

    inputs: torch.Tensor
    """int32 [size + numbers]"""
    size: int

    @classmethod
    def make(cls, size: int, num_numbers: int, device: torch.device | str) -> "Places":
        """All places hold slot 0, the dummy, and all numbers are 0."""
        return cls(torch.zeros(size + num_numbers, dtype=torch.int32, device=device), size)

    @property
    def members(self) -> torch.Tensor:
        """int32 [size]: slot of each place, 0 where there is nobody."""
        return self.inputs[: self.size]

    @property
    def numbers(self) -> torch.Tensor:
        """int32 [numbers]"""
        return self.inputs[self.size :]

    def host_inputs(self, members: Sequence[int], numbers: Sequence[int]) -> np.ndarray:
        """What `inputs` is to hold: int32, members padded with the dummy slot."""
        values = np.zeros(len(self.inputs), dtype=np.int32)
        values[: len(members)] = members
        values[self.size :] = numbers
        return values


@dataclass(frozen=True, slots=True)
class Bucket(Generic[Inputs]):
    """A batch size with its static inputs. Without graphs `turn` itself is run."""

    places: Inputs
    turn: Turn
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)
    """By section, in order; one entry, named ALL, if the sections are one graph."""

    def run(self, on_section: OnSection | None = None) -> None:
        """Put the step on the current stream; on_section hears of each section (or of ALL) right after it."""
        names = self._replay() if self.graphs else self.turn()
        for name in names:
            if on_section is not None:
                on_section(name)

    def _replay(self) -> Iterator[str]:
        for name, graph in self.graphs.items():
            graph.replay()
            yield name


ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPlan:
    """How a step is captured."""

    sizes: tuple[int, ...]
    """Buckets, ascending."""
    sections: tuple[str, ...]
    """Names that a turn yields, in order."""
    num_numbers: int = 0
    """Numbers beside the members."""
    is_split: bool = False
    """A graph for each section: one launch more for each on the host, and a gap of a few microseconds between them."""
    is_captured: bool = True
    """False runs the same functions eagerly."""
    of: str = "batches"
    """What is captured, for people."""


class SizedGraphs(Generic[Inputs]):
    """The buckets of one step, with static inputs of any form. What is larger than the largest runs at its own size."""

    def __init__(
        self, plan: GraphPlan, make_bucket: Callable[[int], Bucket[Inputs]], device: torch.device | str
    ) -> None:
        """make_bucket allocates all that a bucket of some size needs, once, with inputs that stand for nobody."""
        self._plan = plan
        self._make_bucket = make_bucket
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """Buckets are made on it. Nobody waits on it, so it can be waited for at any time."""
        self._buckets: dict[int, Bucket[Inputs]] = {}
        self.capture_s = 0.0
        self.num_bytes = 0
        """Device memory that all graphs together took."""

    def bucket(self, num: int) -> Bucket[Inputs]:
        """The smallest one that holds so many; without one, a bucket of just this size, eager."""
        size = next((size for size in self._plan.sizes if size >= num), num)
        if size not in self._buckets:
            self._buckets[size] = self._eager(size)
        return self._buckets[size]

    def _eager(self, size: int) -> Bucket[Inputs]:
        """A bucket whose tensors hold what they were made with, whichever stream uses them first."""
        with torch.cuda.stream(self._stream):
            bucket = self._make_bucket(size)
        if self._stream is not None:
            self._stream.synchronize()
        return bucket

    @torch.inference_mode()
    def capture(self, pool: GraphPool | None = None) -> None:
        """Capture every bucket, the largest first, in one pool of memory. Inputs must stand for nobody meanwhile.

        Runs each bucket as it is first. Does nothing if the plan says eager. pool: one that other graphs are in too,
        which never run at the same time; None is a new one.
        """
        if not self._plan.is_captured or not self._plan.sizes:
            return
        logger.info("compiling kernels of %s and capturing graphs buckets=%s", self._plan.of, list(self._plan.sizes))
        # A capture gives cached blocks back to the device, which would count as less than nothing.
        torch.cuda.empty_cache()
        started, free_before = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        assert self._stream is not None, f"graphs on {self._device}"
        pool = pool or GraphPool.make(self._stream)
        torch.cuda.synchronize(self._device)
        for size in reversed(self._plan.sizes):
            bucket = self._eager(size)
            with torch.cuda.stream(pool.stream):
                for _ in range(_WARM_UPS):
                    bucket.run()
            pool.stream.synchronize()
            self._buckets[size] = Bucket(bucket.places, bucket.turn, self._graphs_of(bucket.turn, pool))
        torch.cuda.synchronize(self._device)
        self.capture_s = time.perf_counter() - started
        self.num_bytes = free_before - torch.cuda.mem_get_info(self._device)[0]
        logger.info(
            "cuda graphs of=%s buckets=%s split=%s capture_s=%.1f bytes=%d",
            self._plan.of, list(self._plan.sizes), self._plan.is_split, self.capture_s, self.num_bytes,
        )  # fmt: skip

    def _graphs_of(self, turn: Turn, pool: GraphPool) -> dict[str, torch.cuda.CUDAGraph]:
        """Memory between sections stays taken until the last one is captured, and then goes to the next bucket."""
        names = self._plan.sections if self._plan.is_split else (ALL,)
        graphs = {name: torch.cuda.CUDAGraph() for name in names}
        steps = turn()
        for graph in graphs.values():
            # thread_local: what other threads do with the device meanwhile is no part of it and no error.
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
                made = [next(steps)] if self._plan.is_split else list(steps)
            assert self._plan.is_split or tuple(made) == self._plan.sections, f"sections are {made}"
        assert next(steps, None) is None, "a section is not captured"
        return graphs


class BucketGraphs(SizedGraphs[Places]):
    """Buckets of batches: members, and a few numbers."""

    def __init__(self, plan: GraphPlan, make_turn: Callable[[Places], Turn], device: torch.device | str) -> None:
        """make_turn allocates what a bucket needs besides its inputs, once."""

        def make_bucket(size: int) -> Bucket[Places]:
            places = Places.make(size, plan.num_numbers, device)
            return Bucket(places, make_turn(places))

        super().__init__(plan, make_bucket, device)
