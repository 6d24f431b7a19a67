"""Routes. Generation lives in engine.py; here requests are read, checked and handed over."""

import asyncio
import time
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.answer import AnswerWriter, Kind
from launch.http.edge import Edge
from launch.http.engine import Engine
from launch.http.errors import ApiError
from launch.http.generation import Generation, from_chat, from_completion
from launch.http.info import check_body, model_info, server_info, version
from launch.http.links import Links
from launch.http.metrics import render
from launch.http.openai import ChatRequest, CompletionRequest
from launch.http.parse import parse
from launch.http.responses import ModelBody, ModelList
from launch.http.stream import CallAnswer, read_body
from memsvc.wire.admin import Check, Flush, GetStats, Stats

BODY_TIMEOUT_S = 60.0
_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
CHECK_TIMEOUT_S = 30.0
"""A check walks over every page of the arena."""


class Front:
    """The endpoints, around one engine."""

    def __init__(self, engine: Engine, links: Links) -> None:
        self._engine = engine
        self._config = engine.config
        self._links = links
        self._created = int(time.time())

    async def chat(self, request: Request) -> CallAnswer:
        """POST /v1/chat/completions."""
        body = parse(await self._body(request), ChatRequest)
        return self._answer("chat", from_chat(body, self._config))

    async def completion(self, request: Request) -> CallAnswer:
        """POST /v1/completions."""
        body = parse(await self._body(request), CompletionRequest)
        return self._answer("completion", from_completion(body, self._config))

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList(data=[self._model(name) for name in self._config.served_model_names]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["name"]
        if name not in self._config.served_model_names:
            raise ApiError(404, f"model {name[:128]!r} does not exist", "model")
        return _json(self._model(name))

    async def health(self, _request: Request) -> Response:
        """GET /health: 503 with the processes that are missing or hang, unless a request would be served now."""
        reasons = self._engine.peers.obstacles
        if reasons or self._engine.is_stopping:
            reasons = reasons or ["the server is stopping"]
            return _json({"status": "unavailable", "reasons": reasons}, 503)
        return _json({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics."""
        stats = await self._stats()
        return Response(render(self._engine, stats, self._links.num_bad_frames), media_type=CONTENT_TYPE_LATEST)

    async def flush(self, _request: Request) -> Response:
        """POST /flush_cache or /reset_prefix_cache: evict all that no request and no pin holds."""
        try:
            await self._links.ask_memory(Flush())
        except TimeoutError:
            raise ApiError(503, "the memory service does not answer") from None
        return _json({"success": True, "message": "the prefix cache was flushed"})

    async def check(self, _request: Request) -> Response:
        """GET /check: the memory service compares every page with its counters, and serves nobody meanwhile."""
        if not self._engine.peers.is_up("memsvc"):
            raise ApiError(503, "the memory service is not up")
        try:
            report = await self._links.ask_memory(Check(), CHECK_TIMEOUT_S)
            stats = await self._links.ask_memory(GetStats())
        except TimeoutError:
            raise ApiError(503, "the memory service does not answer") from None
        return _json(check_body(report, stats, num_live=len(self._engine.journal)))

    async def server_info(self, _request: Request) -> Response:
        """GET /server_info."""
        return _json(server_info(self._engine, await self._stats()))

    async def model_info(self, _request: Request) -> Response:
        """GET /model_info."""
        return _json(model_info(self._config))

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        return _json({"version": version()})

    def _answer(self, kind: Kind, generation: Generation) -> CallAnswer:
        call = self._engine.start(generation)
        return CallAnswer(self._engine, call, AnswerWriter(kind, call, self._config.num_draft_tokens))

    async def _body(self, request: Request) -> bytes:
        # What a page of another site may post without asking: a local server must not answer it.
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind in _FORM_TYPES:
            raise ApiError(415, f"content-type is {kind!r}, it must be 'application/json'")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await read_body(request.receive, request.headers, self._config.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    async def _stats(self) -> Stats | None:
        if not self._engine.peers.is_up("memsvc"):
            return None
        try:
            return await self._links.ask_memory(GetStats())
        except TimeoutError:
            return None

    def _model(self, name: str) -> ModelBody:
        config = self._config
        return ModelBody(id=name, created=self._created, root=config.model_path, max_model_len=config.context_len)


def build_app(engine: Engine, links: Links, api_key: str) -> Starlette:
    """The ASGI application. api_key empty: no key is asked for."""
    front = Front(engine, links)
    routes = [
        Route("/v1/chat/completions", front.chat, methods=["POST"]),
        Route("/v1/completions", front.completion, methods=["POST"]),
        Route("/v1/models", front.models),
        Route("/v1/models/{name:path}", front.model),
        Route("/health", front.health),
        Route("/metrics", front.metrics),
        Route("/version", front.version),
        Route("/flush_cache", front.flush, methods=["POST"]),
        Route("/reset_prefix_cache", front.flush, methods=["POST"]),
        Route("/check", front.check),
        Route("/server_info", front.server_info),
        Route("/get_server_info", front.server_info),
        Route("/model_info", front.model_info),
        Route("/get_model_info", front.model_info),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Edge, api_key=api_key, config=engine.config)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"no such route: {request.url.path[:128]!r}",
        405: f"{request.method} is not allowed on {request.url.path[:128]!r}",
    }
    text = texts.get(error.status_code, error.detail)
    body = ApiError(error.status_code, text).body()
    return Response(body, error.status_code, error.headers, "application/json")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
