"""Which requests a front logs, and how loud."""

import asyncio
import logging
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import Message

from launch.http.config import FrontConfig
from launch.http.edge import Edge
from tests.support.front import make_config


def level_of(caplog: pytest.LogCaptureFixture, config: FrontConfig, path: str, status: int) -> int:
    """Of the one line about a request that was answered so."""
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
    }  # fmt: skip

    async def receive() -> Message:
        raise AssertionError("the body of a GET was read")

    async def send(_message: Message) -> None:
        pass

    caplog.clear()
    with caplog.at_level(logging.DEBUG, "launch.http.edge"):
        asyncio.run(Edge(Response(status_code=status), "", config)(scope, receive, send))
    (record,) = caplog.records
    assert f"path={path} status={status}" in record.getMessage()
    return record.levelno


@pytest.mark.parametrize("status", [200, 503])
def test_polls_are_not_told_at_info_however_they_end(caplog: pytest.LogCaptureFixture, tmp_path: Path, status: int):
    config = make_config(tmp_path)
    for path in ("/health", "/metrics"):
        assert level_of(caplog, config, path, status) == logging.DEBUG
        assert level_of(caplog, config, path, 404) == logging.INFO
    assert level_of(caplog, config, "/v1/models", status) == logging.INFO
