"""Answers the target: who it is (DraftHello), and each step's Propose. No sockets here."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from draft_worker.checks import Limits, ProposeCheck
from draft_worker.config import DraftConfig
from draft_worker.features import exchange_rows, write_features
from draft_worker.greeting import check_hello
from draft_worker.model import DraftModel
from draft_worker.propose import Drafts, Proposer
from draft_worker.requests import Requests
from memsvc.device.kv_pool import KvPool
from memsvc.wire.base import BadRequest, Epoch
from memsvc.wire.mem import Layout
from memsvc.wire.spec import Drafted, DraftHello, DraftReady, Plan, Propose

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The arena as this worker uses it."""

    arena: torch.Tensor
    """uint8 [arena_bytes]"""
    layout: Layout
    pool: KvPool
    """Pages of draft_kv."""


class DraftWorker:
    """State of one draft process. `handle` gives the reply to any message of the target."""

    def __init__(
        self,
        config: DraftConfig,
        model: DraftModel,
        memory: Memory,
        requests: Requests,
        ack_epoch: Callable[[Epoch], None],
    ) -> None:
        """ack_epoch tells the memory service that epochs before the one given touch nothing any more."""
        self._config = config
        self._model = model
        self._memory = memory
        self._requests = requests
        self._ack_epoch = ack_epoch
        self._proposer = Proposer(model, memory.pool, requests.tables, config.propose_route)
        self._max_drafts = config.drafts_per_block(model.shape)
        self._instance = secrets.randbits(48)
        self._epoch = Epoch(0)
        self._exchange = torch.empty(0)

    def handle(self, msg: DraftHello | Propose | Plan) -> DraftReady | Drafted | BadRequest:
        """The reply. A BadRequest says why, and nothing has changed then."""
        if isinstance(msg, Plan):
            return BadRequest("Plan is for a CUDA device, this draft runs on the CPU and takes Propose")
        try:
            match msg:
                case DraftHello():
                    check_hello(msg, self._config, self._model.shape, self._epoch)
                case Propose():
                    self._check_propose(msg)
        except ValueError as error:
            logger.warning("refused msg=%s reason=%s", type(msg).__name__, error)
            return BadRequest(str(error))
        return self._hello(msg) if isinstance(msg, DraftHello) else self._propose(msg)

    def _hello(self, msg: DraftHello) -> DraftReady:
        # A target that says hello again has lost the thread and tells everything anew.
        num_dropped = self._requests.drop_all()
        # A target says hello when it has loaded, so what it shares is there now.
        self._model.fill_late()
        if msg.epoch > self._epoch:
            self._ack_epoch(msg.epoch)
        self._epoch = msg.epoch
        shape, layout = self._model.shape, self._memory.layout
        self._exchange = exchange_rows(
            self._memory.arena,
            layout.exchange_offset,
            layout.exchange_bytes,
            shape.feature_width,
            getattr(torch, msg.feature_dtype),
        )
        logger.info("hello epoch=%d dropped=%d feature_rows=%d", msg.epoch, num_dropped, len(self._exchange))
        return DraftReady(os.getpid(), self._instance, 1 + self._max_drafts, list(shape.target_layer_ids))

    def close(self) -> None:
        """Nothing is left over from one message to the next."""

    def _check_propose(self, msg: Propose) -> None:
        if not self._epoch:
            raise ValueError("Propose before DraftHello")
        ProposeCheck(self._limits, self._requests, msg).run()

    @property
    def _limits(self) -> Limits:
        kind = self._memory.pool.kind
        return Limits(
            max_drafts=self._max_drafts,
            vocab_size=self._model.shape.vocab_size,
            window=self._model.shape.window,
            first_page=kind.pages_per_frame,
            num_pages=kind.num_pages,
            num_rows=len(self._exchange),
        )

    @torch.inference_mode()
    def _propose(self, msg: Propose) -> Drafted:
        started = time.perf_counter()
        self._requests.update(msg)
        pool = self._memory.pool
        pool.zero_pages([int(page) for page in msg.clear_pages])
        writes = self._requests.writes(msg)
        write_features(self._model, pool, self._requests.tables, self._exchange, writes)
        mem_us = (time.perf_counter() - started) * 1e6
        batch, samplers = self._requests.blocks(msg)
        drafts = self._proposer.propose(batch, samplers)
        if self._config.spec_trace:
            _trace(len(batch), batch.context_len, drafts, mem_us)
        return Drafted(
            msg.num_drafts,
            drafts.token_ids.astype(np.int32).tobytes(),
            drafts.fwd_us,
            drafts.head_us,
            drafts.select_us,
        )


def _trace(num_blocks: int, context_len: int, drafts: Drafts, mem_us: float) -> None:
    """mem is page tables, cleared pages and features written into draft KV."""
    logger.info(
        "[spec-phase-dev] n=%d ctx=%d fwd=%d head=%d select=%d mem=%d",
        num_blocks, context_len, drafts.fwd_us, drafts.head_us, drafts.select_us, mem_us,
    )  # fmt: skip
