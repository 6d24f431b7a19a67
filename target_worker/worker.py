"""Puts the target worker together: memory, model, links, and the loop over them."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
import zmq

from memsvc.client import MemoryClient
from memsvc.device.arena_map import map_arena
from memsvc.process import StopFlag
from memsvc.rpc import Rpc
from memsvc.wire import links
from memsvc.wire.mem import Layout, Registered
from target_worker.config import TargetConfig
from target_worker.executor import Executor
from target_worker.linear_memory import LinearMemory
from target_worker.mem_link import DRAFT_KV, MemLink
from target_worker.model.config import TargetShape, fingerprint, kind_specs
from target_worker.model.decoder import Decoder
from target_worker.model.weights import load_target
from target_worker.pools import kv_pool, page_tables
from target_worker.runner import Runner
from target_worker.scheduler import Links, Scheduler
from target_worker.spec_link import DraftContract, SpecLink
from target_worker.state_link import StateLink
from target_worker.text_link import TextLink

logger = logging.getLogger(__name__)


class Worker:
    """A target worker that serves from construction on; use it in a `with`.

    Raises ValueError if model, layout and config do not fit each other, with the numbers.
    """

    def __init__(self, config: TargetConfig, run_dir: Path) -> None:
        started = time.monotonic()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._config = config
        model, shape = load_target(config.model_path, config.dtype, config.device, config.load_format)
        self._load_s = time.monotonic() - started
        self._model = model
        with ExitStack() as stack:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._client = MemoryClient(run_dir, timeout_s=10.0)
            stack.push(self._client)
            registered = self._register(shape)
            self._runner = self._make_runner(registered, model)
            executor = Executor(self._runner, config.simulate_accept_length)
            linear = self._runner.linear
            states = StateLink(registered.layout, linear.table, executor.catch_up) if linear else None
            mem = MemLink(self._client, registered.layout, self._runner.tables, states)
            self._spec = self._make_spec(registered, model, run_dir) if config.draft else None
            neighbours = Links(mem, TextLink(self._context, run_dir), self._spec)
            self._scheduler = Scheduler(config, neighbours, executor)
            self._opened = stack.pop_all()

    def _register(self, shape: TargetShape) -> Registered:
        config = self._config
        dtype = shape.resolve_dtype(config.dtype)
        kinds = [kind.name for kind in kind_specs(shape, config.page_size, dtype, config.block_size)]
        if config.draft:
            # The draft co-writes pages of the same requests, so they are this registration's too.
            kinds.append(DRAFT_KV)
        return self._client.register(
            config.engine, "target", kinds, fingerprint(config.model_path, dtype, config.load_format)
        )

    def _make_runner(self, registered: Registered, model: Decoder) -> Runner:
        config, layout, shape = self._config, registered.layout, model.shape
        arena = map_arena(registered.fd_endpoint, layout.arena_bytes, config.device)
        features = _exchange(arena, layout, config, model) if config.target_layer_ids else None
        return Runner(
            model,
            kv_pool(arena, layout, shape, model.dtype),
            page_tables(layout, config),
            features,
            list(config.target_layer_ids),
            LinearMemory.of_layout(
                arena, layout, model, max_reqs=config.max_running_requests, block_size=config.block_size
            ),
        )

    def _make_spec(self, registered: Registered, model: Decoder, run_dir: Path) -> SpecLink:
        contract = DraftContract(
            engine=self._config.engine,
            epoch=registered.epoch,
            feature_dim=model.shape.hidden_size,
            feature_dtype=str(model.dtype).removeprefix("torch."),
            block_size=self._config.block_size,
            target_layer_ids=self._config.target_layer_ids,
        )
        return SpecLink(Rpc(self._context, links.SPEC, run_dir), contract)

    def lines(self) -> list[str]:
        """What an operator reads at start."""
        shape, model = self._model.shape, self._model
        lines = [
            f"target={shape.architecture} layers={shape.num_layers} hidden={shape.hidden_size} "
            f"dtype={model.dtype} device={model.device} threads={torch.get_num_threads()} load_s={self._load_s:.1f}"
        ]
        if self._config.simulate_accept_length:
            lines.append(
                f"accept length is simulated at {self._config.simulate_accept_length:g}: the text is meaningless"
            )
        return lines

    def meet(self, stop: StopFlag) -> None:
        """Nobody: it decodes without drafts until a draft comes, and the tokenizer waits for it."""

    def run(self, stop: StopFlag, beat: Callable[[], None]) -> None:
        """Serve until stop is set. Beats with every round, with every layer of a forward, and while the draft works.

        Raises FencedError or ServiceDown when the memory service gives this client up.
        """
        self._runner.on_layer = beat
        if self._spec is not None:
            self._spec.on_wait = beat
        while not stop.is_set:
            beat()
            self._scheduler.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()


def _exchange(arena: torch.Tensor, layout: Layout, config: TargetConfig, model: Decoder) -> torch.Tensor:
    """The rows of features in the arena, [max_step_rows, taps * hidden]."""
    width = len(config.target_layer_ids) * model.shape.hidden_size
    num_bytes = config.max_step_rows * width * model.dtype.itemsize
    if num_bytes > layout.exchange_bytes:
        raise ValueError(
            f"features of {config.max_step_rows} rows need {num_bytes} bytes, the exchange has {layout.exchange_bytes}"
        )
    region = arena[layout.exchange_offset : layout.exchange_offset + num_bytes]
    return region.view(model.dtype).view(config.max_step_rows, width)
