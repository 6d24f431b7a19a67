"""The draft process: memory, model and links put together, and the loop over them."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import zmq

from draft_worker.borrowed import eos_token_ids
from draft_worker.config import DRAFT_KV, DraftConfig, resolve_dtype
from draft_worker.model import DraftModel
from draft_worker.requests import Requests
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from draft_worker.worker import DraftWorker, Memory
from memsvc.client import MemoryClient
from memsvc.device.arena_map import map_arena
from memsvc.device.fingerprint import fingerprint
from memsvc.device.kv_dtype import kv_torch_name
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.device.shared_weights import shared_weights
from memsvc.errors import MemoryServiceError
from memsvc.heart import BEAT_S
from memsvc.inbox import RouterInbox
from memsvc.process import StopFlag
from memsvc.transport import bind
from memsvc.wire.base import BadRequest
from memsvc.wire.links import SPEC
from memsvc.wire.mem import Layout, Registered
from memsvc.wire.spec import Drafted, DraftHello, DraftReady, Plan, Planned, Propose

if TYPE_CHECKING:
    from draft_worker.cuda.worker import PlanWorker

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class DraftProcess:
    """Serves one target from construction on; use it in a `with`.

    Raises ValueError if drafter, target and pool do not fit each other, with the numbers.
    """

    def __init__(self, config: DraftConfig, run_dir: Path) -> None:
        started = time.monotonic()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._config = config
        shape = DraftShape.from_folder(config.draft_path)
        self._num_drafts = config.drafts_per_block(shape)
        with ExitStack() as stack:
            self._client = MemoryClient(run_dir)
            stack.push(self._leave)
            registered = self._register(shape)
            self._renew_every_s = registered.lease_ms / 1000 / _RENEWALS_PER_LEASE
            # Before the weights: some of the target's may lie in the arena.
            arena = map_arena(registered.fd_endpoint, registered.layout.arena_bytes, config.device)
            self._model = self._load(registered.layout, arena, shape)
            self._load_s = time.monotonic() - started
            self._worker = self._make_worker(registered.layout, arena, shape)
            stack.callback(self._worker.close)
            self._renew_at = time.monotonic() + self._renew_every_s
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._inbox = RouterInbox(bind(self._context, SPEC, run_dir), SPEC)
            self._opened = stack.pop_all()
        self._target = b""
        """Who said DraftHello last; nobody else may send a Propose or a Plan."""
        self._was_greeted = False

    def _load(self, layout: Layout, arena: torch.Tensor, shape: DraftShape) -> DraftModel:
        dtype = getattr(torch, resolve_dtype(self._config.dtype, shape))
        shared = shared_weights(arena, layout, (shape.vocab_size, shape.hidden_size), dtype)
        return load_model(replace(self._config, device=str(arena.device)), shape, shared)

    def _make_worker(self, layout: Layout, arena: torch.Tensor, shape: DraftShape) -> "DraftWorker | PlanWorker":
        config = self._config
        memory = _memory(layout, arena, self._model, config.kv_cache_dtype)
        if arena.device.type == "cuda":
            torch.cuda.set_device(arena.device)
            # What the model needed while it was read.
            torch.cuda.empty_cache()
            # Imported here: its kernels need triton, which a machine without a GPU may lack.
            from draft_worker.cuda.worker import PlanWorker

            return PlanWorker(config, self._model, memory, self._client.ack_epoch)
        tables = PageTables(
            max_reqs=config.max_running_requests,
            max_pages=-(-(config.context_len + shape.block_size) // layout.page_size),
            page_size=layout.page_size,
            device=str(arena.device),
        )
        requests = Requests(tables, eos_token_ids(Path(config.target_path)))
        return DraftWorker(config, self._model, memory, requests, self._client.ack_epoch)

    def _register(self, shape: DraftShape) -> Registered:
        config = self._config
        arithmetic = (resolve_dtype(config.dtype, shape), config.kv_cache_dtype)
        name = fingerprint(Path(config.draft_path), config.load_format, *arithmetic)
        return self._client.register(config.engine, "draft", [DRAFT_KV], name)

    def lines(self) -> list[str]:
        """What an operator reads at start."""
        shape = self._model.shape
        kind = "DFlash2" if shape.has_selector else "DFlash"
        return [
            f"draft={kind} layers={shape.num_layers} hidden={shape.hidden_size} drafts={self._num_drafts}"
            f" of {shape.block_size - 1} window={shape.window or 'none'} taps={list(shape.target_layer_ids)}",
            f"dtype={self._model.dtype} kv={self._config.kv_cache_dtype} device={self._config.device}"
            f" route={self._config.propose_route} threads={torch.get_num_threads()} load_s={self._load_s:.1f}",
        ]

    def num_device_bytes(self) -> int:
        """See Serving. Once a target has said hello, graphs and buffers are among it."""
        device = self._model.head.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    def meet(self, stop: StopFlag) -> None:
        """Answer until a target has said hello, whatever the answer to that is.

        A request that came before that would be computed without a draft, and its prompt cached without draft KV.
        """
        self._turns(lambda: stop.is_set or self._was_greeted, stop, lambda: None)

    def run(self, stop: StopFlag, beat: Callable[[], None]) -> None:
        """Answer until stop is set. Raises FencedError or ServiceDown when the memory service gives this client up."""
        self._turns(lambda: stop.is_set, stop, beat)

    def _turns(self, is_over: Callable[[], bool], stop: StopFlag, beat: Callable[[], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(stop.fd, zmq.POLLIN)
        while not is_over():
            beat()
            left_s = self._renew_at - time.monotonic()
            if left_s <= 0:
                self._client.renew()
                self._renew_at = time.monotonic() + self._renew_every_s
                continue
            poller.poll(math.ceil(min(left_s, BEAT_S) * 1000))
            received = self._inbox.recv()
            if received is not None:
                address, msg = received
                self._inbox.reply(address, self._answer(address[0], msg))

    def _answer(self, sender: bytes, msg: DraftHello | Propose | Plan) -> DraftReady | Drafted | Planned | BadRequest:
        if not isinstance(msg, DraftHello) and sender != self._target:
            return BadRequest(f"{type(msg).__name__} from a peer that did not say DraftHello last")
        self._was_greeted |= isinstance(msg, DraftHello)
        reply = self._worker.handle(msg)
        if isinstance(reply, DraftReady):
            self._target = sender
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._opened.__exit__(*exc_info)

    def _leave(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and issubclass(kind, MemoryServiceError):
            # A service that gave this client up, or is gone, takes no leave.
            self._client.close()
        else:
            self._client.__exit__(kind, *exc_info)


def _memory(layout: Layout, arena: torch.Tensor, model: DraftModel, kv_cache_dtype: str) -> Memory:
    shape = model.shape
    kind = next(kind for kind in layout.kinds if kind.name == DRAFT_KV)
    kv_shape = KvShape(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=getattr(torch, kv_torch_name(kv_cache_dtype, str(model.dtype).removeprefix("torch."))),
    )
    return Memory(arena=arena, layout=layout, pool=KvPool(arena, kind, kv_shape))
