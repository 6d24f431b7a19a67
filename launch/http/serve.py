"""Life of the front process: bind, listen, say ready, drain on SIGTERM."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from launch.http.app import build_app
from launch.http.config import FrontConfig
from launch.http.engine import Engine
from launch.http.links import Links
from launch.http.listen import url_of
from launch.http.protocol import limited_protocol
from launch.http.tally import Tally
from memsvc.heart import BEAT_S, Heart
from memsvc.process import announce, install_sigterm
from memsvc.wire.control import Ready, ToFront
from memsvc.wire.links import LAUNCH_FRONT, TARGET_FRONT, TOK_FRONT

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 2
_POLL_S = 0.05


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are handled by the process, which drains before it stops the server."""
        yield


async def serve(config: FrontConfig, api_key: str, listener: socket.socket) -> None:
    """Serve on listener until SIGTERM. Ready is sent once requests really get through."""
    run_dir = Path(config.run_dir)
    async with Links(run_dir) as links:
        engine = Engine(config, links.tokenizer, Tally())
        links.receive(TOK_FRONT, engine.on_text)
        links.receive(TARGET_FRONT, engine.on_stats)
        stop, told = asyncio.Event(), asyncio.Event()
        install_sigterm(stop.set)

        def on_peer(msg: ToFront) -> None:
            engine.on_peer(msg)
            told.set()

        links.receive(LAUNCH_FRONT, on_peer)
        # Until it has heard of them, it would say of processes that serve that they don't.
        if not await _first(told, stop):
            return
        server = _Server(_uvicorn_config(config, build_app(engine, links, api_key)))
        tasks = [
            asyncio.create_task(_live(run_dir, engine, server, url_of(listener))),
            asyncio.create_task(_drain_then_stop(stop, engine, server)),
        ]
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _first(told: asyncio.Event, stop: asyncio.Event) -> bool:
    """Wait for either; whether it was told that came."""
    waits = [asyncio.create_task(event.wait()) for event in (told, stop)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return told.is_set()


async def _live(run_dir: Path, engine: Engine, server: uvicorn.Server, url: str) -> None:
    """Say Ready, then give signs of life, from the loop that serves."""
    while not (server.started and engine.is_serving):
        await asyncio.sleep(_POLL_S)
    await asyncio.to_thread(announce, run_dir, Ready("front", os.getpid(), [f"url={url}"]))
    with Heart(run_dir, "front") as heart:
        while True:
            heart.beat()
            await asyncio.sleep(BEAT_S)


async def _drain_then_stop(stop: asyncio.Event, engine: Engine, server: uvicorn.Server) -> None:
    await stop.wait()
    engine.stop()
    deadline = time.monotonic() + engine.config.drain_s
    while len(engine.journal) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    logger.info("stopping requests_cut=%d", len(engine.journal))
    engine.fail_all("the server is stopping")
    server.should_exit = True


def _uvicorn_config(config: FrontConfig, app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(config),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
