"""Slots on a device with requests in them, beside the host's samplers of the same requests."""

from dataclasses import dataclass, field
from typing import Any

import torch

from memsvc.device.row_sampler import RowSampler
from memsvc.device.slots import SlotState, SlotWriter
from memsvc.slot_layout import SlotLayout
from memsvc.wire.text import Sampling


@dataclass
class SlotRig:
    """Requests in shuffled slots. samplers[i] is the host's view of place i."""

    vocab: int
    block_size: int
    num_slots: int
    device: str
    seed: int = 0
    samplers: list[RowSampler] = field(default_factory=list)
    members: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = SlotLayout(self.num_slots, self.block_size, self.vocab)
        region = torch.full((layout.num_bytes,), 0x5A, dtype=torch.uint8, device=self.device)
        self.slots = SlotState(layout, region)
        self.slots.reset()
        self.writer = SlotWriter(self.slots)
        self.generator = torch.Generator().manual_seed(self.seed)
        self._free = (torch.randperm(self.num_slots, generator=self.generator) + 1).tolist()

    def tokens(self, num: int) -> list[int]:
        """Random token ids."""
        return torch.randint(0, self.vocab, (num,), generator=self.generator).tolist()

    def logits(self, num_rows: int, spread: float) -> torch.Tensor:
        """float32 [num_rows, vocab] on the host."""
        return torch.randn(num_rows, self.vocab, generator=self.generator) * spread

    def open(self, *, drafts: list[int] | None = None, num_output: int = 3, **params: Any) -> RowSampler:
        """One more place, with a random prompt and answer; drafts: as if proposed."""
        sampling = Sampling(**({"seed": 1000 + 7 * len(self.members), "max_tokens": 100} | params))
        prompt, eos = self.tokens(5), 2 % self.vocab
        harmless = sorted(set(range(self.vocab)) - {eos, *sampling.stop_token_ids})
        # A request whose last token is a stop would be finished.
        output = [harmless[token % len(harmless)] for token in self.tokens(num_output)]
        sampler = RowSampler(sampling, eos_ids=[eos], prompt=prompt, output=output)
        slot = self._free.pop()
        self.writer.open(slot, sampler, length=sampler.num_tokens - 1, anchor=(prompt + output)[-1])
        self.samplers.append(sampler)
        self.members.append(slot)
        if drafts is not None:
            self.writer.set(slot, "num_drafts", len(drafts))
            self.slots.drafts[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32, device=self.device)
        return sampler

    def flush(self) -> torch.Tensor:
        """What was opened is on the device; returns members int32 [N] there."""
        self.writer.flush(lambda values: torch.from_numpy(values).to(self.device))
        return torch.tensor(self.members, dtype=torch.int32, device=self.device)
