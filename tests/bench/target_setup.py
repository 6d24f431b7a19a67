"""A target's step with random weights and nobody around it: what CudaEngine puts together, over an arena of its own.

All of it is for torch.inference_mode.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memsvc.device.fixed_frames import ExchangeLayout
from memsvc.device.lane import Words
from memsvc.device.row_sampler import RowSampler
from memsvc.slot_layout import SCALARS_AT, SlotLayout
from memsvc.wire.base import Epoch, ReqId
from memsvc.wire.mem import Registered
from memsvc.wire.text import Sampling
from target_worker.base import Base
from target_worker.config import DEVICE_TIMES, TargetConfig
from target_worker.cuda.assembly import CudaEngine
from target_worker.cuda.exchange import Exchange
from target_worker.cuda.order import Chunk
from target_worker.cuda.plan_link import TargetLane
from target_worker.cuda.work import Parts, StepWork
from target_worker.model.config import kind_specs
from target_worker.model.weights import load_target
from tests.bench.ladder_geometry import Ladder
from tests.bench.propose_geometry import GEOMETRIES
from tests.bench.target_pages import PAGE_SIZE, Wanted, lay_out
from tests.bench.target_states import SlotStates, state_len

_PATIENCE_S = 60.0
SPARE_STEPS = 16
"""Verifies that may move a request on before its slot is set back: there are pages for so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    name: str
    ladder: Ladder
    concurrency: tuple[int, ...]
    context: int
    """Tokens of every request whose block is verified."""
    prefill: tuple[int, ...]
    """Prompt tokens of a step."""
    rests: tuple[int, ...] = ()
    """Last tokens of the context of one request, computed alone, as after a prefix that was found."""
    accept_length: float = 4.0
    """Simulated; 0: drafts are accepted that are right."""
    attention_backend: str = "auto"
    """Of prompts."""
    dtype: str = "auto"
    device: str = "cuda"

    @property
    def num_slots(self) -> int:
        """Requests at once."""
        return max((*self.concurrency, *(len(self.prompts(num)) for num in self.prefill)))

    @property
    def max_prefill_tokens(self) -> int:
        """Of a step."""
        return max((*self.prefill, *self.rests, self.ladder.prompt_tokens))

    def prompts(self, num_tokens: int) -> list[int]:
        """Whole prompts of the ladder's length, the last one shorter, that are num_tokens together."""
        size = self.ladder.prompt_tokens
        return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]

    def num_tokens(self, slot: int) -> int:
        """Tokens that a slot's request consists of. The long prompts are the first slot's."""
        longest = self.max_prefill_tokens if slot == 1 else min(self.ladder.prompt_tokens, self.max_prefill_tokens)
        return max(self.context + 1, longest)


class Setup:
    """Weights and memory, which steps of several settings share."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Takes the device memory for all that the job names; folder: an empty one, for the config."""
        self.job = job
        block_size = 1 + job.ladder.num_drafts
        (folder / "config.json").write_text(json.dumps(job.ladder.target), encoding="utf-8")
        self.config = TargetConfig(
            run_dir=str(folder), model_path=str(folder), device=job.device, dtype=job.dtype, load_format="dummy",
            page_size=PAGE_SIZE, max_running_requests=job.num_slots, max_prefill_tokens=job.max_prefill_tokens,
            context_len=job.num_tokens(1) + SPARE_STEPS * block_size, num_draft_tokens=job.ladder.num_drafts,
            target_layer_ids=tuple(GEOMETRIES[job.ladder.drafter].drafter["dflash_config"]["target_layer_ids"]),
            simulate_accept_length=job.accept_length, cuda_graph_max_bs=max(job.concurrency),
            attention_backend=job.attention_backend,
        )  # fmt: skip
        self.model, self.shape = load_target(folder, job.dtype, job.device, "dummy")
        self.item_bytes = self.model.dtype.itemsize
        rng = np.random.default_rng(0)
        self.tokens = {slot: self._random_tokens(rng, job.num_tokens(slot)) for slot in self.slot_numbers}
        self.drafts = {slot: self._random_tokens(rng, job.ladder.num_drafts) for slot in self.slot_numbers}
        self.base = self._make_base(folder, rng)

    @property
    def slot_numbers(self) -> range:
        """Those of all requests."""
        return range(1, self.job.num_slots + 1)

    def _random_tokens(self, rng: np.random.Generator, num: int) -> list[int]:
        return rng.integers(0, self.shape.vocab_size, num).tolist()

    @property
    def is_hybrid(self) -> bool:
        """The target has states."""
        return self.shape.linear is not None

    @property
    def state_lens(self) -> dict[int, int]:
        """Tokens that the states of each slot have seen before its verify."""
        return {slot: state_len(slot, self.job.context, self.config.block_size) for slot in self.slot_numbers}

    def writes_states(self, slot: int) -> bool:
        """A verify of this slot does: its context has passed a page edge that its states have not."""
        return self.is_hybrid and self.state_lens[slot] <= self.job.context - PAGE_SIZE

    def _make_base(self, folder: Path, rng: np.random.Generator) -> Base:
        config = self.config
        dtype = str(self.model.dtype).removeprefix("torch.")
        slots = SlotLayout(config.max_running_requests, config.block_size, self.shape.vocab_size)
        row_bytes = len(config.target_layer_ids) * self.shape.hidden_size * self.item_bytes
        parts = ExchangeLayout(feature_bytes=config.sizes.feature_rows * row_bytes, slot_bytes=slots.num_bytes)
        spare = SPARE_STEPS * config.block_size
        wanted = {
            slot: Wanted(num_tokens=self.job.num_tokens(slot) + spare, writes_states=self.writes_states(slot))
            for slot in self.slot_numbers
        }
        layout, self.pages = lay_out(
            kind_specs(self.shape, PAGE_SIZE, dtype, config.block_size), wanted, parts.num_bytes, rng
        )
        arena = torch.zeros(layout.arena_bytes, dtype=torch.uint8, device=self.job.device)
        return Base(
            config=config, run_dir=folder, context=None, client=None,  # type: ignore[arg-type]
            registered=Registered(Epoch(1), layout, 0, ""), arena=arena, model=self.model,
        )  # fmt: skip


class Steps(CudaEngine):
    """The engine's work without scheduler and links. All requests stand in their slots, at the job's context.

    Several of them take turns in one Setup's memory: whoever runs calls `reset` first.
    """

    def __init__(self, setup: Setup, *, is_split: bool = False) -> None:
        """is_split: a graph for each section. Nothing is captured yet; `open` comes after the capture."""
        self.setup = setup
        self._base = replace(setup.base, config=replace(setup.config, spec_trace=DEVICE_TIMES if is_split else 0))
        self.exchange = Exchange.of(self._base)
        self._lane = self.lane(Words.of_target(self.exchange.slots))
        self._work = self._make_work(self.exchange)
        states = self.parts.memory.states
        self._states = SlotStates(states, setup.pages, setup.state_lens) if states else None
        self._kept = torch.empty(0)

    def lane(self, words: Words) -> TargetLane:
        """See CudaEngine. On the CPU kernels are interpreted, when they are enqueued."""
        if self._base.arena.is_cuda:
            return super().lane(words)
        from tests.support.host_lane import HostTargetLane

        return HostTargetLane(words)

    @property
    def work(self) -> StepWork:
        """As the engine has it."""
        return self._work

    @property
    def parts(self) -> Parts:
        """What it consists of."""
        return self._work._parts

    @property
    def prefill_name(self) -> str:
        """Of the attention backend of prompts."""
        return self._prefill_name

    def capture(self) -> tuple[float, int]:
        """Seconds it took, and bytes of the device."""
        return self._work.capture()

    def open(self) -> None:
        """Every request has its slot and its pages, with a first token given out and k drafts to be verified."""
        job, slots = self.setup.job, self.exchange.slots
        for slot in self.setup.slot_numbers:
            tokens = self.setup.tokens[slot]
            assert self._tables.add(ReqId(slot)) == slot
            self._tables.set_row(ReqId(slot), self.setup.pages[slot].kv)
            sampler = RowSampler(
                Sampling(temperature=0.0, seed=slot, max_tokens=1 << 20, ignore_eos=True),
                eos_ids=self.setup.shape.eos_ids, prompt=tokens[: job.context], output=tokens[job.context :][:1],
            )  # fmt: skip
            self._work.writer.open(slot, sampler, length=job.context, anchor=tokens[job.context], valid_from=0)
            self._work.writer.set(slot, "num_drafts", job.ladder.num_drafts)
        with self._lane.running():
            self.parts.mirror.push(self._lane.stage)
            if self._states is not None:
                self._states.open(self._lane.stage)
            self._work.writer.flush(self._lane.stage)
            drafts = np.array([self.setup.drafts[slot] for slot in self.setup.slot_numbers], dtype=np.int32)
            slots.drafts[1:] = self._lane.stage(drafts)
            self._kept = self._moving.clone()

    @property
    def _moving(self) -> torch.Tensor:
        """What a verify writes of the slots, and what it reads of them beside it."""
        slots = self.exchange.slots
        return slots.words[SCALARS_AT // 4 : slots.layout.stop_ids_at // 4]

    def reset(self) -> None:
        """Enqueue: all slots are as `open` left them, but for pages: those that a verify writes it does not read."""
        self._moving.copy_(self._kept)
        if self._states is not None:
            self._states.reset()

    def fill(self) -> None:
        """Enqueue the context of every request, piece by piece, as prompts are computed.

        Prompts may move the states of a slot, so a hybrid target's are filled again after them.
        """
        with self._lane.running():
            if self._states is not None:
                self._states.aim()
            for slot in self.setup.slot_numbers:
                self._fill_slot(slot)
            self.reset()

    def _fill_slot(self, slot: int) -> None:
        context, most = self.setup.job.context, self.setup.job.max_prefill_tokens
        stop = self.setup.state_lens[slot] if self.setup.writes_states(slot) else context
        self._fill_piecewise(slot, range(0, stop, most), stop)
        if stop < context and self._states is not None:
            with self._states.standing(self.parts.prompts, stop):
                self._fill_piecewise(slot, range(stop, context, most), context)

    def _fill_piecewise(self, slot: int, starts: range, stop: int) -> None:
        for start in starts:
            end = min(start + starts.step, stop)
            self.prompts([Chunk(slot, start, self.setup.tokens[slot][start:end], False)])

    def choose(self, num_reqs: int) -> None:
        """Enqueue: the first requests are the members of their bucket."""
        places = self._work._graphs.bucket(num_reqs).places
        self._lane.stage_into(places.inputs, places.host_inputs(range(1, num_reqs + 1), []))

    def verify(self, num_reqs: int, on_section: Any = None) -> None:
        """Enqueue a verify of the chosen."""
        self._work._graphs.bucket(num_reqs).run(on_section)

    def verify_eagerly(self, num_reqs: int) -> None:
        """The same, kernel by kernel."""
        for _ in self._work._graphs.bucket(num_reqs).turn():
            pass

    def tokens(self, num_reqs: int) -> list[list[int]]:
        """What the newest verify gave each of the chosen. Waits for it."""
        self._lane.drain(_PATIENCE_S)
        rows = self._work._results[self._work._graphs.bucket(num_reqs).places.inputs.data_ptr()]
        return [row[2 : 2 + row[0]] for row in rows[:num_reqs].tolist()]

    def features(self, num_rows: int, first: int = 0) -> torch.Tensor:
        """Rows of the exchange; of prompts they begin at first = prompt_row."""
        assert self.exchange.features is not None
        return self.exchange.features[first : first + num_rows]

    @property
    def prompt_row(self) -> int:
        """Behind the largest batch of blocks, on a device."""
        sizes = self._base.config.sizes
        return sizes.max_places * sizes.block_size if sizes.is_cuda else 0

    def prompts(self, chunks: list[Chunk]) -> torch.Tensor | None:
        """Enqueue prompt chunks, kernel by kernel; logits of those that end a prompt."""
        return self.parts.prompts.run(chunks, self.prompt_row)

    def has_graph(self, chunks: list[Chunk]) -> bool:
        """There is one for such chunks."""
        graphs = self.parts.prompt_graphs
        return graphs is not None and graphs.size_for(chunks, self.prompt_row) is not None

    def prompts_by_graph(self, chunks: list[Chunk]) -> None:
        """Enqueue the same by a graph, with the first tokens; slots are reset before they are used again."""
        assert self.parts.prompt_graphs is not None
        assert self.parts.prompt_graphs.run(chunks, self.prompt_row) is not None, "no bucket has room"

    @property
    def running(self) -> Any:
        """What is enqueued within goes on the lane."""
        return self._lane.running()
