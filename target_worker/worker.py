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
from memsvc.device.fingerprint import fingerprint
from memsvc.device.fp8 import Fp8Linear
from memsvc.device.shared_weights import shared_weights
from memsvc.process import StopFlag
from memsvc.wire.mem import Layout, Registered
from target_worker.assembly import HostEngine
from target_worker.base import Base, Engine
from target_worker.config import TargetConfig
from target_worker.mem_link import DRAFT_KV
from target_worker.model.config import TargetShape, kind_specs
from target_worker.model.decoder import Decoder
from target_worker.model.weights import load_target

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
        shape = TargetShape.from_folder(config.model_path)
        with ExitStack() as stack:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._client = MemoryClient(run_dir, timeout_s=10.0)
            stack.push(self._client)
            registered = self._register(shape)
            # Before the weights: some of them may lie in the arena.
            arena = map_arena(registered.fd_endpoint, registered.layout.arena_bytes, config.device)
            self._model = self._load(registered.layout, arena, shape)
            self._load_s = time.monotonic() - started
            self._engine = make_engine(
                Base(
                    config=config,
                    run_dir=run_dir,
                    context=self._context,
                    client=self._client,
                    registered=registered,
                    arena=arena,
                    model=self._model,
                )
            )
            self._opened = stack.pop_all()

    def _register(self, shape: TargetShape) -> Registered:
        config = self._config
        dtype = shape.resolve_dtype(config.dtype)
        kinds = [kind.name for kind in kind_specs(shape, config.page_size, dtype)]
        if config.draft:
            # The draft co-writes pages of the same requests, so they are this registration's too.
            kinds.append(DRAFT_KV)
        arithmetic = (dtype, config.quantization, config.kv_cache_dtype, config.mamba_ssm_dtype)
        name = fingerprint(Path(config.model_path), config.load_format, *arithmetic)
        return self._client.register(config.engine, "target", kinds, name)

    def _load(self, layout: Layout, arena: torch.Tensor, shape: TargetShape) -> Decoder:
        config = self._config
        dtype = getattr(torch, shape.resolve_dtype(config.dtype))
        shared = shared_weights(arena, layout, (shape.vocab_size, shape.hidden_size), dtype)
        return load_target(
            config.model_path, config.dtype, str(arena.device), config.load_format, shared, config.quantization
        )[0]

    def lines(self) -> list[str]:
        """What an operator reads at start."""
        shape, model = self._model.shape, self._model
        lines = [
            f"target={shape.architecture} layers={shape.num_layers} hidden={shape.hidden_size} "
            f"dtype={model.dtype} kv={self._config.kv_cache_dtype} device={model.device} threads={torch.get_num_threads()} load_s={self._load_s:.1f}"
        ]
        num_fp8 = sum(isinstance(matrix, Fp8Linear) for matrix in model.matrices)
        if num_fp8:
            lines.append(f"fp8 matrices={num_fp8} of {len(model.matrices)}, a scale a row")
        if self._config.simulate_accept_length:
            lines.append(
                f"accept length is simulated at {self._config.simulate_accept_length:g}: the text is meaningless"
            )
        return lines + self._engine.lines()

    def num_device_bytes(self) -> int:
        """See Serving."""
        return self._engine.num_device_bytes()

    def meet(self, stop: StopFlag) -> None:
        """Nobody: it decodes without drafts until a draft comes, and the tokenizer waits for it."""

    def run(self, stop: StopFlag, beat: Callable[[], None]) -> None:
        """Serve until stop is set. Beats with every round, with every layer of a forward, and while the draft works.

        Raises FencedError or ServiceDown when the memory service gives this client up.
        """
        self._engine.watch(beat)
        while not stop.is_set:
            beat()
            self._engine.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            # After an error the device may answer nothing any more.
            if kind is None:
                self._engine.close()


def make_engine(base: Base) -> Engine:
    """The one for the device that the arena lies on."""
    if base.arena.device.type == "cpu":
        return HostEngine(base)
    # Imported here: its kernels need triton, which a machine without a GPU may lack.
    from target_worker.cuda.assembly import CudaEngine

    torch.cuda.set_device(base.arena.device)
    # Matrices that were copied into the arena, or stacked, while the model was read.
    torch.cuda.empty_cache()
    return CudaEngine(base)
