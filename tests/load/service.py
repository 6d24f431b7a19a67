"""What the server says about itself: its model, its counters, its own audit of memory."""

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from tests.load.answers import Check, Models
from tests.load.http1 import Address, HttpError, get

# vLLM's names, which this project's server uses too.
_STEPS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Verify steps and accepted drafts since the server's start."""

    steps: float
    accepted: float

    def accept_length_since(self, before: "SpecCounters") -> float:
        """Mean tokens a step, the bonus token included; 1.0 if no draft was verified in between."""
        steps = self.steps - before.steps
        return 1.0 + (self.accepted - before.accepted) / steps if steps > 0 else 1.0


def _sum_of(text: str, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus' text format, None if it is not there."""
    found = None
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            found = (found or 0.0) + float(line.rpartition("}")[2].removeprefix(name).split()[0])
    return found


class Service:
    """The routes beside the load. Every question is answered with None where the server has no answer."""

    def __init__(self, address: Address, api_key: str) -> None:
        self._address = address
        self._api_key = api_key

    async def _get(self, path: str, timeout_s: float = 30.0) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await get(self._address, path, self._api_key)
        except (HttpError, TimeoutError):
            return None
        return body if status == 200 else None

    async def first_model(self) -> str:
        """Name of the first model. Raises ConnectionError if the server does not list one."""
        try:
            async with asyncio.timeout(30.0):
                status, body = await get(self._address, "/v1/models", self._api_key)
        except (HttpError, TimeoutError) as error:
            raise ConnectionError(str(error) or "no answer from /v1/models in 30 s") from error
        if status != 200:
            raise ConnectionError(f"/v1/models answered {status}: {body[:200].decode('utf-8', 'replace')}")
        models = msgspec.json.decode(body, type=Models).data
        if not models:
            raise ConnectionError("/v1/models lists no model")
        return models[0].id

    async def info(self) -> Any:
        """/server_info as it is."""
        body = await self._get("/server_info")
        return None if body is None else msgspec.json.decode(body)

    async def spec_counters(self) -> SpecCounters | None:
        """Speculation counters of /metrics."""
        body = await self._get("/metrics")
        if body is None:
            return None
        text = body.decode("utf-8", "replace")
        steps, accepted = _sum_of(text, _STEPS), _sum_of(text, _ACCEPTED)
        return None if steps is None or accepted is None else SpecCounters(steps, accepted)

    async def settled_check(self, settle_s: float) -> Check | None:
        """The audit once the server is idle, or after settle_s seconds if it does not become so."""
        deadline = perf_counter() + settle_s
        while True:
            body = await self._get("/check")
            if body is None:
                return None
            check = msgspec.json.decode(body, type=Check)
            if check.idle or perf_counter() >= deadline:
                return check
            await asyncio.sleep(0.1)
