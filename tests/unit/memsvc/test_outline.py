"""What a message and an error look like in a log: sizes and ids, nothing that a user wrote."""

import pytest

from memsvc.outline import outline, trace
from memsvc.wire.admin import Pin
from memsvc.wire.base import Epoch, ReqId, pack_tokens
from memsvc.wire.mem import Commit, OpenReq, Register, Reserve, Step
from tests.support.wire_samples import make_sample, message_classes

SECRET = 1_234_567_890


def test_a_step_keeps_its_numbers_and_loses_its_tokens():
    tokens = pack_tokens([SECRET, 2, 3])
    step = Step(
        Epoch(7), 12, 11,
        commit=Commit([ReqId(5)], [3], [0], [tokens]),
        reserve=Reserve([ReqId(5)], [16]),
        opens=[OpenReq(ReqId(6), tokens, 9, "salt of a tenant", 2)],
    )  # fmt: skip
    text = outline(step)
    assert "Step(epoch=7, num=12" in text
    assert "Commit(rids=[5], target_lens=[3], draft_lens=[0], tokens=[<12 bytes>])" in text
    assert "rid=6, tokens=<12 bytes>" in text
    assert "salt=<16 chars>" in text
    assert "tenant" not in text
    assert str(SECRET) not in text


def test_names_of_ours_stay():
    assert "engine='main'" in outline(make_register("main"))
    assert "name=<6 chars>" in outline(Pin("secret", b"", 1.0, ""))


def make_register(engine: str) -> Register:
    return Register(
        **{field: getattr(make_sample(Register), field) for field in Register.__struct_fields__} | {"engine": engine}
    )


@pytest.mark.parametrize("message", message_classes(), ids=lambda message: message.__name__)
def test_no_bytes_of_any_message_are_shown(message: type):
    assert "x01" not in outline(make_sample(message))


def failure(error: Exception) -> BaseException:
    def inner() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        inner()
    return caught.value


def test_an_error_is_told_by_kind_and_place_and_its_text_only_if_it_quotes_nobody():
    assert trace(failure(AssertionError("kind 1 page 5 is free"))).startswith(
        "AssertionError: kind 1 page 5 is free at "
    )
    told = trace(failure(KeyError(pack_tokens([SECRET]))))
    assert told.startswith("KeyError at test_outline.py:")
    assert told.endswith("inner")
    assert "secret" not in trace(failure(ValueError("secret")))
    assert trace(ValueError("never raised")) == "ValueError at an unknown place"
