"""Every accepted request ends exactly once, with the text of exactly the tokens that count."""

from array import array
from pathlib import Path

import pytest

from memsvc.wire.base import FinishReason, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.text import (
    Abort,
    AbortAll,
    Accepted,
    Admit,
    ChatMessage,
    ChatPrompt,
    Failed,
    Sampling,
    Submit,
    TextOut,
    TextPrompt,
    TokenPrompt,
    TokensOut,
    Usage,
)
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder, Text
from tokenizer_proc.service import TextService

RUNNING, STOP, LENGTH, ABORT = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
RID = ReqId(1)
USAGE = Usage(1, 99, 16, accepted=[1, 2], num_drafts=9, matched_stop=-1, num_retracts=1)


class Desk:
    """The service with both neighbours played by the test."""

    def __init__(self, folder: Path) -> None:
        config = TokenizerConfig(run_dir="", model_path=str(folder), context_len=256, inline_chars=100)
        self.encoder = PromptEncoder(config)
        self.later: list[tuple[ReqId, Text]] = []
        self.service = TextService(config, self.encoder, lambda rid, text: self.later.append((rid, text)))

    def ids(self, text: str) -> list[int]:
        return list(self.encoder.encode(Text(text=text, adds_special=False)))

    def submit(self, rid: int = RID, max_tokens: int = 0, **fields: object) -> Submit:
        sampling = Sampling(seed=0, max_tokens=max_tokens)
        return Submit(**{"rid": ReqId(rid), "prompt": TextPrompt("x"), "sampling": sampling, **fields})

    def turn(self) -> tuple[list[object], list[object]]:
        to_front, to_target = self.service.outgoing.take()
        return list(to_front), list(to_target)

    def open(self, rid: int = RID, **fields: object) -> Admit:
        """Submit a request that must reach the target."""
        self.service.on_front(self.submit(rid, **fields))
        to_front, to_target = self.turn()
        admit = to_target[0]
        assert isinstance(admit, Admit)
        assert to_front == [Accepted(ReqId(rid), admit.prompt_len)]
        return admit

    def tokens(self, token_ids: list[int], usage: Usage | None = None, finish: FinishReason = RUNNING) -> None:
        usages = [] if usage is None else [usage]
        self.service.on_target(TokensOut([RID], [pack_tokens(token_ids)], [finish], usages))

    def row(self) -> tuple[str, list[int], FinishReason]:
        """The one row of the one TextOut of this turn."""
        to_front, _ = self.turn()
        (out,) = to_front
        assert isinstance(out, TextOut)
        assert len(out.rids) == 1
        return out.texts[0], unpack_tokens(out.token_ids[0]), out.finished[0]


@pytest.fixture
def desk(chat_folder: Path) -> Desk:
    return Desk(chat_folder)


def text_out(text: str, token_ids: list[int], finish: FinishReason, usage: Usage, stop: str = "") -> TextOut:
    return TextOut([RID], [text], [pack_tokens(token_ids)], [finish], [usage], [stop])


def test_a_request_goes_to_the_target_and_its_text_comes_back(desk: Desk) -> None:
    admit = desk.open(prompt=ChatPrompt([ChatMessage("user", "ox")]))
    assert admit.prompt_len == len(unpack_tokens(admit.token_ids))
    ids = desk.ids("the \U0001f9e9!")
    desk.tokens(ids[:3])
    assert desk.row() == ("the ", ids[:3], RUNNING)
    desk.tokens(ids[3:])
    assert desk.row() == ("\U0001f9e9!", ids[3:], RUNNING)
    desk.tokens([2], USAGE, STOP)
    assert desk.turn() == ([text_out("", [2], STOP, USAGE)], [])
    assert desk.service.num_reqs == 0


def test_what_is_held_back_comes_with_the_end(desk: Desk) -> None:
    desk.open(stop=["ox!"])
    half = desk.ids("\U0001f9e9")[:2]
    desk.tokens(desk.ids("the ox") + half)
    assert desk.row()[0] == "the "
    desk.tokens([], USAGE, LENGTH)
    assert desk.turn() == ([text_out("ox\ufffd", [], LENGTH, USAGE)], [])


def test_all_that_came_in_a_turn_leaves_as_one_message(desk: Desk) -> None:
    for rid in (1, 2, 3):
        desk.open(rid)
    ids = desk.ids("ab")
    packed = pack_tokens(ids)
    desk.service.on_target(TokensOut([ReqId(1), ReqId(2)], [packed] * 2, [RUNNING] * 2))
    desk.service.on_target(
        TokensOut([ReqId(3), ReqId(2), ReqId(1)], [packed] * 3, [STOP, RUNNING, LENGTH], [USAGE, Usage(5, 5, 5)])
    )
    (out,), _ = desk.turn()
    assert out == TextOut(
        [ReqId(1), ReqId(2), ReqId(3)], ["abab", "abab", "ab"], [packed * 2, packed * 2, packed],
        [LENGTH, RUNNING, STOP], [Usage(5, 5, 5), USAGE], ["", ""],
    )  # fmt: skip
    assert desk.turn() == ([], [])


def test_a_stop_string_ends_the_text_at_once_and_the_request_when_the_target_says_so(desk: Desk) -> None:
    desk.open(stop=["3"])
    ids = desk.ids("1234567")
    desk.tokens(ids[:2])
    desk.turn()
    desk.tokens(ids[2:5])
    assert desk.turn() == ([TextOut([RID], [""], [pack_tokens(ids[2:3])], [RUNNING])], [Abort(RID)])
    desk.tokens(ids[5:])
    assert desk.turn() == ([], [])
    desk.tokens(ids[:1], USAGE, ABORT)
    counted = Usage(1, 3, 16, accepted=[1, 2], num_drafts=9, matched_stop=-1, num_retracts=1)
    assert desk.turn() == ([text_out("", [], STOP, counted, "3")], [])


@pytest.mark.parametrize(("include", "text"), [(False, "12"), (True, "1234")])
def test_a_stop_string_in_the_last_tokens_needs_no_abort(desk: Desk, include: bool, text: str) -> None:
    desk.open(stop=["34"], include_stop=include)
    ids = desk.ids("12345")
    desk.tokens(ids, Usage(1, 5, 0, matched_stop=ids[-1]), LENGTH)
    assert desk.turn() == ([text_out(text, ids[:4], STOP, Usage(1, 4, 0), "34")], [])


@pytest.mark.parametrize(("include", "text"), [(False, "12"), (True, "123")])
def test_the_token_that_ends_an_answer_counts_and_its_text_does_not(desk: Desk, include: bool, text: str) -> None:
    desk.open(stop=["39"], include_stop=include)
    ids = desk.ids("123")
    usage = Usage(1, 3, 0, matched_stop=ids[-1])
    desk.tokens(ids, usage, STOP)
    assert desk.turn() == ([text_out(text, ids, STOP, usage)], [])


@pytest.mark.parametrize("stop", [[], ["7"], ["45"], ["\ufffd"]])
def test_a_resumed_request_gives_out_the_text_that_its_first_life_did_not(chat_folder: Path, stop: list[str]) -> None:
    ids = Desk(chat_folder).ids("the 4\U0001f9e945 78")
    for cut in range(len(ids) + 1):
        first, second = Desk(chat_folder), Desk(chat_folder)
        first.open(stop=stop)
        first.tokens(ids[:cut])
        (out,) = first.turn()[0] or [TextOut([RID], [""], [b""], [RUNNING])]
        second.service.on_front(second.submit(stop=stop, resumed=out.token_ids[0]))
        to_front, to_target = second.turn()
        if to_target:
            assert unpack_tokens(to_target[0].token_ids)[to_target[0].prompt_len :] == ids[:cut]
            second.tokens(ids[cut:], Usage(1, len(ids), 0), LENGTH)
            (end,) = second.turn()[0]
        else:
            end = to_front[1]
        first.tokens(ids[cut:], Usage(1, len(ids), 0), LENGTH)
        (expected,) = first.turn()[0]
        assert (end.texts, end.usages, end.stops) == (expected.texts, expected.usages, expected.stops)


def test_a_resumed_answer_that_was_complete_ends_without_the_target(desk: Desk) -> None:
    ids = desk.ids("123")
    desk.service.on_front(desk.submit(stop=["3"], resumed=pack_tokens(ids)))
    assert desk.turn() == ([Accepted(RID, 1), text_out("", [], STOP, Usage(1, 3, 0), "3")], [])
    desk.service.on_front(desk.submit(max_tokens=3, stop=["39"], resumed=pack_tokens(ids)))
    assert desk.turn() == ([Accepted(RID, 1), text_out("3", [], LENGTH, Usage(1, 3, 0))], [])
    assert desk.service.num_reqs == 0


def test_an_abort_of_a_known_request_is_the_targets_to_end(desk: Desk) -> None:
    desk.open()
    for _ in range(2):
        desk.service.on_front(Abort(RID))
    assert desk.turn() == ([], [Abort(RID)])
    desk.tokens(desk.ids("a"), USAGE, ABORT)
    assert desk.turn() == ([text_out("a", desk.ids("a"), ABORT, USAGE)], [])
    desk.service.on_front(Abort(RID))
    assert desk.turn() == ([], [])


def test_an_abort_that_the_target_does_not_know_of_ends_after_the_timeout(desk: Desk) -> None:
    desk.open(1, stop=["2"])
    desk.open(2)
    desk.open(3)
    desk.tokens(desk.ids("12"))
    desk.turn()
    desk.service.on_front(Abort(ReqId(2)))
    desk.turn()
    desk.service.on_time(0.0)
    assert desk.turn() == ([], [])
    desk.service.on_time(float("inf"))
    (out,), _ = desk.turn()
    assert out.rids == [1, 2]
    assert out.finished == [STOP, ABORT]
    assert out.usages == [Usage(1, 2, 0), Usage(1, 0, 0)]
    assert out.stops == ["2", ""]
    assert desk.service.num_reqs == 1


def test_tokens_of_an_older_life_are_dropped_and_the_target_told_to_stop(desk: Desk) -> None:
    packed = pack_tokens([5])
    desk.service.on_target(TokensOut([ReqId(8), ReqId(9)], [packed] * 2, [RUNNING, STOP], [USAGE]))
    desk.service.on_target(Failed(ReqId(8), "internal", "gone"))
    assert desk.turn() == ([], [Abort(ReqId(8))])


def test_a_failure_of_the_target_comes_after_the_text_before_it_and_ends_the_request(desk: Desk) -> None:
    desk.open()
    desk.tokens(desk.ids("a"))
    desk.service.on_target(Failed(RID, "too_large", "9 pages"))
    to_front, _ = desk.turn()
    assert to_front == [
        TextOut([RID], ["a"], [pack_tokens(desk.ids("a"))], [RUNNING]),
        Failed(RID, "too_large", "9 pages"),
    ]
    desk.tokens(desk.ids("b"), USAGE, STOP)
    assert desk.turn() == ([], [])


def test_a_failure_after_the_stop_string_changes_nothing_for_the_client(desk: Desk) -> None:
    desk.open(stop=["2"])
    desk.tokens(desk.ids("12"))
    desk.turn()
    desk.service.on_target(Failed(RID, "internal", "died"))
    assert desk.turn() == ([text_out("", [], STOP, Usage(1, 2, 0), "2")], [])


def test_a_starting_front_ends_all_that_ran_for_the_one_before(desk: Desk) -> None:
    desk.open(1, stop=["2"])
    desk.open(2)
    desk.service.on_front(desk.submit(3, prompt=TextPrompt("a" * 200)))
    desk.service.on_front(Abort(ReqId(2)))
    desk.turn()
    desk.service.on_front(AbortAll())
    desk.service.on_front(desk.submit(4))
    to_front, to_target = desk.turn()
    assert to_target[0] == AbortAll()
    assert [msg.rid for msg in (*to_front, *to_target[1:])] == [4, 4]
    desk.service.on_encoded(ReqId(3), array("i", [5]))
    desk.service.on_time(float("inf"))
    desk.tokens([5], USAGE, ABORT)
    assert desk.turn() == ([], [])
    assert desk.service.num_reqs == 1


def test_a_second_submit_of_a_rid_is_ignored(desk: Desk) -> None:
    desk.open()
    desk.service.on_front(desk.submit(prompt=TextPrompt("y" * 200)))
    desk.service.on_front(desk.submit())
    assert desk.turn() == ([], [])
    assert desk.later == []


def test_refusals_name_the_reason_and_leave_nothing_behind(desk: Desk) -> None:
    desk.service.on_front(desk.submit(prompt=TokenPrompt(pack_tokens([9999]))))
    desk.service.on_front(desk.submit(prompt=TextPrompt("")))
    desk.service.on_front(desk.submit(stop=[""]))
    to_front, to_target = desk.turn()
    assert [type(msg) for msg in to_front] == [Failed] * 3
    assert [msg.kind for msg in to_front] == ["bad_request"] * 3
    assert "9999" in to_front[0].message
    assert (to_target, desk.service.num_reqs) == ([], 0)


def test_a_long_prompt_is_encoded_elsewhere_while_others_go_on(desk: Desk) -> None:
    long = TextPrompt("the ox " * 20)
    desk.service.on_front(desk.submit(1, prompt=long))
    desk.open(2)
    ((rid, text),) = desk.later
    desk.service.on_encoded(rid, desk.encoder.encode(text))
    to_front, to_target = desk.turn()
    assert to_front == [Accepted(RID, to_target[0].prompt_len)]
    assert unpack_tokens(to_target[0].token_ids) == desk.ids(long.text)


@pytest.mark.parametrize("result", [array("i", [5]), ValueError("late"), RuntimeError("late")])
def test_an_abort_while_encoding_ends_the_request_and_the_result_is_dropped(desk: Desk, result: object) -> None:
    desk.service.on_front(desk.submit(prompt=TextPrompt("a" * 200)))
    desk.service.on_front(Abort(RID))
    assert desk.turn() == ([text_out("", [], ABORT, Usage(0, 0, 0))], [])
    desk.service.on_encoded(RID, result)
    assert desk.turn() == ([], [])


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (array("i", [5] * 300), "bad_request", "300 tokens, the context holds 256"),
        (ValueError("has 400 tokens"), "bad_request", "has 400 tokens"),
        (RuntimeError("boom"), "internal", "could not be encoded: boom"),
    ],
)
def test_a_long_prompt_that_cannot_be_served_is_refused(desk: Desk, result: object, kind: str, message: str) -> None:
    desk.service.on_front(desk.submit(prompt=TextPrompt("a" * 200)))
    desk.service.on_encoded(RID, result)
    (failed,), _ = desk.turn()
    assert (failed.rid, failed.kind) == (RID, kind)
    assert message in failed.message
    assert desk.service.num_reqs == 0


@pytest.mark.parametrize(
    "msg",
    [
        TokensOut([RID], [b""], [STOP], []),
        TokensOut([RID], [b""], [RUNNING], [USAGE]),
        TokensOut([RID, RID], [b""], [RUNNING, RUNNING]),
        TokensOut([RID], [b"", b""], [RUNNING]),
        TokensOut([RID], [b""], []),
        TokensOut([RID], [b"123"], [RUNNING]),
    ],
)
def test_columns_that_do_not_fit_are_refused_whole(desk: Desk, msg: TokensOut) -> None:
    desk.open()
    with pytest.raises(ValueError, match="TokensOut has"):
        desk.service.on_target(msg)
    assert desk.turn() == ([], [])
    assert desk.service.num_reqs == 1
