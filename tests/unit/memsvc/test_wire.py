"""The messages as bytes: a difference to the golden file is a change of the protocol."""

import inspect
import json
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memsvc import async_client, client, registration
from memsvc.wire.base import BadRequest, Done, Msg, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.links import LINKS, MAX_MSG_BYTES, MEM, MEM_ADMIN
from memsvc.wire.mem import Commit, Step
from tests.support.wire_samples import GOLDEN, golden_text, make_sample, message_classes

ROOT = Path(__file__).parents[3]


def members(union: Any) -> set[type[Msg]]:
    return set(typing.get_args(union)) or {union}


def unions() -> list[Any]:
    return [union for link in LINKS for union in (link.there, link.back) if union is not None]


def test_frames_equal_the_golden_file():
    expected = json.loads(GOLDEN.read_text("ascii"))
    actual = json.loads(golden_text())
    changed = {name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)}
    assert not changed, "a protocol change: look at it, then python -m tests.support.wire_samples --regenerate"


@pytest.mark.parametrize("message", message_classes(), ids=lambda message: message.__name__)
def test_every_message_comes_back_equal(message: type[Msg]):
    sample = make_sample(message)
    assert msgspec.msgpack.decode(encode(sample), type=message) == sample


@pytest.mark.parametrize("union", unions(), ids=lambda union: re.sub(r"[\w.]+\.", "", str(union))[:40])
def test_a_union_takes_its_members_and_refuses_all_others(union: Any):
    for message in message_classes():
        frame = encode(make_sample(message))
        if message in members(union):
            assert type(decoder(union).decode(frame)) is message
        else:
            with pytest.raises(msgspec.ValidationError):
                decoder(union).decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode({"type": "Step"}),
        msgspec.msgpack.encode(["Stop", 1, 2, 3]),
        msgspec.msgpack.encode(["Step", "one", 2, 3]),
        msgspec.msgpack.encode(["Step", 1]),
        encode(make_sample(Step))[:-1],
        encode(make_sample(Step)) + b"\0",
    ],
)
def test_what_is_no_message_is_refused(frame: bytes):
    with pytest.raises(msgspec.DecodeError):
        decoder(MEM.there).decode(frame)


def test_a_missing_tail_gets_its_defaults_and_a_longer_one_is_ignored():
    short = msgspec.msgpack.encode(["Step", 1, 2, 3])
    assert decoder(MEM.there).decode(short) == Step(1, 2, 3)
    longer = msgspec.msgpack.encode(["Done", "a field of a later version"])
    assert decoder(MEM.back).decode(longer) == Done()


def test_every_request_of_the_service_has_a_client_method():
    for link, clients in (
        (MEM, [client.MemoryClient, async_client.AsyncMemoryClient]),
        (MEM_ADMIN, [client.AdminClient]),
    ):
        names = {re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).lower() for message in members(link.there)}
        for each in clients:
            methods = {name for name, _ in inspect.getmembers(each, inspect.isfunction)}
            assert names <= methods, names - methods


def test_step_parts_are_the_fields_of_step():
    names = set(registration.StepParts.__slots__)
    assert names == {field.name for field in msgspec.structs.fields(Step)} - {"epoch", "num"}


def test_links_have_names_of_their_own_and_a_reply_union_where_there_are_replies():
    assert len({link.name for link in LINKS}) == len(LINKS)
    for link in LINKS:
        assert (link.back is not None) == (link.sockets == "DEALER/ROUTER")
        assert BadRequest in members(link.back) or link.back is None


def test_tokens_come_back_equal_and_odd_lengths_are_refused():
    token_ids = [0, 1, 151_935, 2**31 - 1, -1]
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids
    assert pack_tokens([1]) == b"\x01\0\0\0"
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_tokens(b"12345")


def test_a_million_token_prompt_fits_in_a_message():
    step = Step(1, 1, 0, commit=Commit([ReqId(1)], [0], [0], [bytes(4_000_000)]))
    assert len(encode(step)) < MAX_MSG_BYTES


def test_endpoints_lie_in_the_run_directory(tmp_path: Path):
    for link in LINKS:
        assert link.endpoint(tmp_path) == f"ipc://{tmp_path}/{link.name}.sock"


def test_the_protocol_page_is_fresh():
    checked = subprocess.run([sys.executable, "-m", "docs.generate_protocol", "--check"], cwd=ROOT, timeout=60)
    assert checked.returncode == 0
