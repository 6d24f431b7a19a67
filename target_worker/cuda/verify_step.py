"""The verify of one step as sections on a stream: layers, head, and the choice of tokens; captured bucket by bucket."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memsvc.device.graphs import Places, Turn
from memsvc.device.kernels.accept import accept
from memsvc.device.kernels.attention_tiles import AttentionScratch
from memsvc.device.kernels.block_attention import Context
from memsvc.device.kernels.embed import embed_verify
from memsvc.device.kernels.places import BlockRows
from memsvc.device.kernels.sample import SampleScratch, sample_rows_device
from memsvc.device.linear import linear
from target_worker.cuda.network import BlockAttend, Segment, TargetMemory, TargetNetwork
from target_worker.cuda.prompts import PromptBatch
from target_worker.cuda.states import BlockRecur

VERIFY, HEAD, ACCEPT = SECTIONS = ("verify", "head", "accept")
"""What a step consists of: embedding and layers, output head, token choice and accept rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """What is fixed when the step is made."""

    block_size: int
    """B: rows of a block, anchor and drafts."""
    max_places: int
    """Requests of the largest batch."""
    simulate_accept_length: float = 0.0
    """Load tests: force this mean accept length. 0 = off."""


class VerifyStep:
    """Verifies the drafts that lie in the slots; the slots are one step further afterwards."""

    def __init__(self, network: TargetNetwork, memory: TargetMemory, config: VerifyConfig) -> None:
        shape, device = network.model.shape, network.model.device
        self._network = network
        self._memory = memory
        self._config = config
        self._attention = AttentionScratch.for_buckets(
            (config.max_places,), config.block_size, (shape.num_heads, shape.num_kv_heads), shape.head_dim, device
        )
        self._sampling = SampleScratch(config.max_places * config.block_size, shape.vocab_size, device)
        self._first_row = torch.zeros(1, dtype=torch.int32, device=device)
        """Features of blocks begin at the first row of the exchange."""
        self._starts = torch.zeros_like(memory.slots.length)
        """All of a request's tokens are there."""

    def turn_of(self, results: Callable[[Places], torch.Tensor]) -> Callable[[Places], Turn]:
        """make_turn for BucketGraphs. results: where a bucket's rows for the host go, int32 [size, 2 + B]."""

        def make_turn(places: Places) -> Turn:
            attend, out = self._attend(places), results(places)
            return lambda: self._run(places, attend, out)

        return make_turn

    def _run(self, places: Places, attend: BlockAttend, results: torch.Tensor) -> Iterator[str]:
        x, segment = self._blocks(places, attend)
        u = self._network.hidden(x, [segment], self._first_row)
        yield VERIFY
        logits = linear(u, self._network.model.head)
        yield HEAD
        self._accept(logits, places, results)
        yield ACCEPT

    def _attend(self, places: Places) -> BlockAttend:
        memory = self._memory
        context = Context(memory.page_table, places.members, self._starts, memory.slots.length)
        return BlockAttend(memory.pool, context, self._config.block_size, self._attention)

    def _blocks(self, places: Places, attend: BlockAttend) -> tuple[torch.Tensor, Segment]:
        """Embedded rows [N * B, hidden]."""
        memory, slots, size = self._memory, self._memory.slots, self._config.block_size
        rows = BlockRows(
            members=places.members, lengths=slots.length, block_size=size, page_table=memory.page_table, done=slots.done
        )
        x = embed_verify(slots.anchor, slots.drafts[:, : size - 1], places.members, self._network.model.embedding)
        recur = BlockRecur(memory.states, rows) if memory.states is not None else None
        return x.flatten(0, 1), Segment(rows, attend, recur)

    def _accept(self, logits: torch.Tensor, places: Places, results: torch.Tensor) -> None:
        slots = self._memory.slots
        tokens = sample_rows_device(logits, places.members, slots, self._sampling)
        accept(tokens, places.members, slots, simulate=self._config.simulate_accept_length, results=results)

    def run_with_prompts(self, places: Places, results: torch.Tensor, prompts: PromptBatch) -> torch.Tensor:
        """Verify and compute prompts in one forward, without a graph; all weights are read once.

        prompts: staged behind the rows of all places, which are its first wanted rows. Returns logits [m, vocab] of
        the prompts that end.
        """
        num_rows = places.size * self._config.block_size
        x, segment = self._blocks(places, self._attend(places))
        first_row, wanted = prompts.head[:1], prompts.head[1:]
        u = self._network.hidden(torch.cat((x, prompts.x)), [segment, prompts.segment], first_row, wanted)
        logits = linear(u, self._network.model.head)
        self._accept(logits[:num_rows], places, results)
        return logits[num_rows:]

    def first_tokens(
        self, logits: torch.Tensor, members: torch.Tensor, results: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sample and accept the token after a prompt: logits [N, vocab] of the last rows of the members' prompts.

        Their slots stand at the prompt's last token. Features of prompts are no part of the slots. Returns the rows
        for the host, int32 [N, 3]: results, if given.
        """
        slots = self._memory.slots
        tokens = sample_rows_device(logits, members, slots, self._sampling)
        return accept(tokens, members, slots, feature_base=None, results=results)
