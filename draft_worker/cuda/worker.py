"""Answers the target on a CUDA device: who it is (DraftHello), and each turn's Plan, which is only enqueued here."""

import logging
import os
import secrets
import time
from collections.abc import Callable

import numpy as np
import torch

from draft_worker.config import DraftConfig
from draft_worker.cuda.checks import LAST_NUMBER, PlanCheck
from draft_worker.cuda.prompt_features import write_prompt_features
from draft_worker.cuda.session import Session, SessionMaker
from draft_worker.features import FeatureWrites
from draft_worker.greeting import check_hello
from draft_worker.model import DraftModel
from draft_worker.worker import Memory
from memsvc.wire.base import BadRequest, Epoch
from memsvc.wire.spec import DraftHello, DraftReady, ExchangeMap, Plan, Planned, Propose

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""A target that lives writes F within a step. One that has not done so for this long is taken for dead."""


class PlanWorker:
    """State of one draft process on a CUDA device. `handle` gives the reply to any message of the target.

    The device is waited for when a target comes and when the worker ends, and never in between.
    """

    def __init__(
        self,
        config: DraftConfig,
        model: DraftModel,
        memory: Memory,
        ack_epoch: Callable[[Epoch], None],
        maker: SessionMaker | None = None,
    ) -> None:
        """ack_epoch tells the memory service that epochs before the one given touch nothing any more."""
        self._config = config
        self._model = model
        self._memory = memory
        self._ack_epoch = ack_epoch
        self._maker = maker or SessionMaker(config, model, memory)
        self._instance = secrets.randbits(48)
        self._epoch = Epoch(0)
        self._session: Session | None = None
        self._number = 0
        """Of the newest Plan."""

    @property
    def session(self) -> Session | None:
        """What the newest target has; None before the first one."""
        return self._session

    def handle(self, msg: DraftHello | Propose | Plan) -> DraftReady | Planned | BadRequest:
        """The reply. A BadRequest says why, and nothing has been enqueued then."""
        try:
            match msg:
                case DraftHello():
                    check_hello(msg, self._config, self._model.shape, self._epoch)
                    return self._hello(msg)
                case Plan():
                    return self._plan(msg)
                case Propose():
                    raise ValueError("Propose is for CPU memory, this draft runs on a CUDA device and takes Plan")
        except ValueError as error:
            logger.warning("refused msg=%s reason=%s", type(msg).__name__, error)
            return BadRequest(str(error))

    def _hello(self, msg: DraftHello) -> DraftReady:
        if msg.exchange is None:
            raise ValueError("DraftHello has no map of the exchange, which a CUDA draft needs")
        # The target of an older epoch is dead, and nothing but this will let the stream go on.
        self._drain(0.0 if msg.epoch > self._epoch else PATIENCE_S)
        session = self._session_for(msg.exchange, msg.feature_dtype)
        with session.lane.running(), torch.inference_mode():
            # The target has filled what it shares before it greets.
            self._model.fill_late()
        num_dropped = session.tables.close_all()
        if msg.epoch > self._epoch:
            self._ack_epoch(msg.epoch)
        self._epoch = msg.epoch
        self._number = self._first_number(session)
        logger.info(
            "hello epoch=%d dropped=%d slots=%d feature_rows=%d number=%d",
            msg.epoch, num_dropped, msg.exchange.num_slots, msg.exchange.num_rows, self._number,
        )  # fmt: skip
        shape, block_size = self._model.shape, 1 + session.limits.max_drafts
        taps = list(shape.target_layer_ids)
        return DraftReady(os.getpid(), self._instance, block_size, taps, plans=True, number=self._number)

    def _session_for(self, exchange: ExchangeMap, feature_dtype: str) -> Session:
        session = self._session
        if session is None or (session.exchange, session.feature_dtype) != (exchange, feature_dtype):
            # The old one's graphs and buffers go before new ones are made.
            self._session = session = None
            self._session = session = self._maker.make(exchange, feature_dtype)
        return session

    def _first_number(self, session: Session) -> int:
        words = session.lane.words()
        if not 0 <= min(words) <= max(words) < LAST_NUMBER:
            raise ValueError(f"hand-over words {words} are not in [0, {LAST_NUMBER}): they were not zeroed")
        return max(words)

    @torch.inference_mode()
    def _plan(self, msg: Plan) -> Planned:
        session = self._session
        if session is None:
            raise ValueError("Plan before DraftHello")
        started = time.perf_counter()
        PlanCheck(session.limits, session.tables, self._number, msg).run()
        self._number = msg.number
        lane, times = session.lane, session.times
        with lane.running():
            lane.await_peer(msg.after)
            if times is not None:
                times.collect()
                times.begin(msg.number, msg.members)
            self._write(session, msg)
            self._run(session, msg)
            if times is not None:
                times.end()
            lane.post(msg.number)
        return self._planned(session, msg, (time.perf_counter() - started) * 1e6)

    def _write(self, session: Session, msg: Plan) -> None:
        """Tables, cleared pages and prompt features."""
        session.tables.update(msg)
        session.tables.push(session.lane.stage)
        if msg.clear_pages:
            self._memory.pool.zero_pages_at(session.lane.stage(np.array(msg.clear_pages, dtype=np.int64)))
        if any(msg.write_lens):
            writes = FeatureWrites(
                rows=np.array(msg.write_slots, dtype=np.int64),
                starts=np.array(msg.write_starts, dtype=np.int64),
                lens=np.array(msg.write_lens, dtype=np.int64),
                first=np.array(msg.write_rows, dtype=np.int64),
            )
            write_prompt_features(self._model, session.memory, session.tables.host, session.lane, writes)

    def _run(self, session: Session, msg: Plan) -> None:
        """Features of the newest verify, and drafts if any are wanted."""
        on_section = None if session.times is None else session.times.mark
        if msg.members and msg.num_drafts:
            session.route.run(msg.members, msg.num_drafts, on_section)
        elif msg.members:
            session.absorb(msg.members)

    def _planned(self, session: Session, msg: Plan, host_us: float) -> Planned:
        if self._config.spec_trace == 1:
            logger.info("[spec-phase-dev] n=%d k=%d host=%d", len(msg.members), msg.num_drafts, host_us)
        if session.times is None:
            return Planned(msg.number, host_us)
        newest = session.times.newest
        us = newest.us
        return Planned(msg.number, host_us, newest.number, us["fwd"], us["head"], us["select"], us["mem"])

    def _drain(self, patience_s: float) -> None:
        if self._session is not None:
            self._session.lane.drain(patience_s)

    def close(self) -> None:
        """Nothing of this worker runs on the device any more. A target that is silent is not waited for."""
        self._drain(PATIENCE_S)
