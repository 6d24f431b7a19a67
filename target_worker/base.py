"""What a target worker has when it is registered and its weights are there, before memory is put to use."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import zmq

from memsvc.client import MemoryClient
from memsvc.rpc import Rpc
from memsvc.wire import links
from memsvc.wire.mem import Layout, Registered
from memsvc.wire.spec import ExchangeMap
from target_worker.config import TargetConfig
from target_worker.draft_peer import DraftContract
from target_worker.model.decoder import Decoder
from target_worker.text_link import TextLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Given to what puts an engine together, on the CPU or on a device."""

    config: TargetConfig
    run_dir: Path
    """Directory of the sockets."""
    context: "zmq.Context[zmq.Socket[bytes]]"
    client: MemoryClient
    registered: Registered
    arena: torch.Tensor
    """uint8 [arena_bytes]"""
    model: Decoder

    @property
    def layout(self) -> Layout:
        """How the arena is cut."""
        return self.registered.layout

    @property
    def exchange(self) -> torch.Tensor:
        """uint8 [exchange_bytes]: the part of the arena that lies between target and draft."""
        first = self.layout.exchange_offset
        return self.arena[first : first + self.layout.exchange_bytes]

    @property
    def feature_width(self) -> int:
        """Numbers in a row of features, 0 without taps."""
        return len(self.config.target_layer_ids) * self.model.shape.hidden_size

    def feature_rows(self, num_bytes: int) -> torch.Tensor:
        """The first num_bytes of the exchange as rows of features, [rows, taps * hidden]."""
        return self.exchange[:num_bytes].view(self.model.dtype).view(-1, self.feature_width)

    @property
    def feature_bytes(self) -> int:
        """All rows that the largest step may leave."""
        return self.config.sizes.feature_rows * self.feature_width * self.model.dtype.itemsize

    def text_link(self) -> TextLink:
        """The way to the tokenizer."""
        return TextLink(self.context, self.run_dir)

    def spec_rpc(self) -> Rpc:
        """The way to the draft worker."""
        return Rpc(self.context, links.SPEC, self.run_dir)

    def draft_contract(self, exchange: ExchangeMap | None = None) -> DraftContract:
        """What the draft has to agree to. exchange: where things lie in it, on a CUDA device."""
        return DraftContract(
            engine=self.config.engine,
            epoch=self.registered.epoch,
            feature_dim=self.model.shape.hidden_size,
            feature_dtype=str(self.model.dtype).removeprefix("torch."),
            block_size=self.config.block_size,
            target_layer_ids=self.config.target_layer_ids,
            exchange=exchange,
        )


class Engine(Protocol):
    """What the worker's loop turns."""

    def step(self) -> None:
        """One round; sleeps while there is nothing to do."""
        ...

    def watch(self, beat: Callable[[], None]) -> None:
        """Have beat called now and then during whatever takes long within a round."""
        ...

    def lines(self) -> list[str]:
        """What an operator reads at start, beside the facts about the model."""
        ...

    def num_device_bytes(self) -> int:
        """What this process holds of a CUDA device beside the arena and its context; 0 on the CPU."""
        ...

    def close(self) -> None:
        """Nothing of it runs any more."""
        ...
