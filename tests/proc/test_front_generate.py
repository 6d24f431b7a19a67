"""Chat and completions through a real front process: bodies, chunk order, usage, stops."""

from collections.abc import Iterator

import pytest

from memsvc.wire.base import FinishReason, unpack_tokens
from memsvc.wire.text import Abort, ChatMessage, ChatPrompt, Submit, TextPrompt, TokenPrompt, Usage
from tests.support.front import RunningFront, running_front, text_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SPEC_USAGE = Usage(7, 6, 3, accepted=[1, 0, 2], num_drafts=6)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    with running_front(tmp_path_factory.mktemp("front"), block_size=3, draft_model_path="/models/draft") as running:
        yield running


def test_chat_answers_with_the_whole_text_and_usage(front: RunningFront) -> None:
    response = front.post(CHAT, messages=HELLO, model="toy", max_tokens=5)
    submit = front.engine.expect(Submit)
    assert submit.prompt == ChatPrompt([ChatMessage("user", "hello")])
    assert submit.sampling.max_tokens == 5
    assert submit.sampling.temperature == 1.0
    front.engine.accept(submit)
    front.engine.say(submit.rid, "good ")
    front.engine.finish(submit.rid, "day", usage=Usage(7, 2, 4, matched_stop=2))
    answer = response.result().json()
    assert response.result().status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "toy"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "good day"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "matched_stop": 2,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert "metrics" not in answer


def test_chat_stream_begins_with_the_role_and_ends_with_done(front: RunningFront) -> None:
    events = front.stream(CHAT, messages=HELLO)
    submit = front.engine.expect(Submit)
    front.engine.accept(submit)
    front.engine.say(submit.rid, "one ")
    first, second = events.next(), events.next()
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "one "}
    assert second["choices"][0]["finish_reason"] is None
    front.engine.say(submit.rid, "two")
    assert events.next()["choices"][0]["delta"] == {"content": "two"}
    front.engine.finish(submit.rid, reason=FinishReason.LENGTH)
    last, done, end = events.next(), events.next(), events.next()
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in last
    assert done == "[DONE]"
    assert end is None
    assert first["id"] == last["id"]
    assert events.headers["content-type"].startswith("text/event-stream")


def test_usage_chunk_comes_only_when_asked_and_carries_acceptance(front: RunningFront) -> None:
    events = front.stream(CHAT, messages=HELLO, stream_options={"include_usage": True})
    submit = front.engine.expect(Submit)
    front.engine.accept(submit)
    front.engine.finish(submit.rid, "a b c d e f", usage=SPEC_USAGE)
    *chunks, usage, done = events.rest()
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [1, 0, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_tokens": 2,
    }


def test_continuous_usage_counts_tokens_on_every_chunk(front: RunningFront) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = front.stream(COMPLETIONS, prompt="x", stream_options=options)
    submit = front.engine.expect(Submit)
    front.engine.accept(submit, prompt_tokens=4)
    front.engine.say(submit.rid, "a b")
    assert events.next()["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": None,
    }
    front.engine.say(submit.rid, " c")
    assert events.next()["usage"]["completion_tokens"] == 3
    front.engine.finish(submit.rid, usage=Usage(4, 3, 0))
    assert [event["usage"]["total_tokens"] for event in events.rest()[:-1]] == [7, 7]


def test_completion_default_is_16_tokens_and_a_chat_goes_on_to_the_context(front: RunningFront) -> None:
    for path, body, limit in ((COMPLETIONS, {"prompt": "x"}, 16), (CHAT, {"messages": HELLO}, 0)):
        response = front.post(path, **body)
        submit = front.engine.expect(Submit)
        assert submit.sampling.max_tokens == limit
        front.engine.finish(submit.rid, "y")
        assert response.result().status_code == 200


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_each_prompt_of_a_completion_gets_its_own_choice(
    front: RunningFront, prompt: object, wanted: list[object]
) -> None:
    response = front.post(COMPLETIONS, prompt=prompt, max_tokens=3)
    submits = [front.engine.expect(Submit) for _ in wanted]
    got: list[object] = []
    for submit in submits:
        match submit.prompt:
            case TextPrompt(text):
                got.append(text)
            case TokenPrompt(packed):
                got.append(unpack_tokens(packed))
    assert got == wanted
    for submit in reversed(submits):
        front.engine.finish(submit.rid, f"answer {submits.index(submit)}")
    answer = response.result().json()
    assert answer["object"] == "text_completion"
    assert [choice["text"] for choice in answer["choices"]] == [f"answer {i}" for i in range(len(wanted))]
    assert answer["usage"]["prompt_tokens"] == 7 * len(wanted)


def test_n_choices_count_their_prompt_once_and_use_consecutive_seeds(front: RunningFront) -> None:
    response = front.post(CHAT, messages=HELLO, n=3, seed=41)
    submits = [front.engine.expect(Submit) for _ in range(3)]
    assert [submit.sampling.seed for submit in submits] == [41, 42, 43]
    for submit in submits:
        front.engine.finish(submit.rid, "a b")
    answer = response.result().json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 6


def test_every_sampling_field_reaches_the_target(front: RunningFront) -> None:
    response = front.post(
        COMPLETIONS, prompt="x", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, presence_penalty=1.5,
        frequency_penalty=-0.5, repetition_penalty=1.1, min_tokens=2, max_tokens=9, ignore_eos=True,
        stop=["x", "yz"], stop_token_ids=[11, 12], include_stop_str_in_output=True, priority=4, cache_salt="s",
        best_of=1, logprobs=None, user="me",
    )  # fmt: skip
    submit = front.engine.expect(Submit)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (3, 9, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert (sampling.repetition_penalty, sampling.ignore_eos, sampling.stop_token_ids) == (1.1, True, [11, 12])
    assert (submit.stop, submit.include_stop, submit.priority, submit.salt) == (["x", "yz"], True, 4, "s")
    front.engine.finish(submit.rid, "abc", usage=Usage(1, 1, 0, matched_stop=12), stop="yz")
    assert response.result().json()["choices"][0]["stop_reason"] == "yz"


def test_stop_token_is_told_as_stop_reason(front: RunningFront) -> None:
    response = front.post(COMPLETIONS, prompt="x", stop_token_ids=[12])
    submit = front.engine.expect(Submit)
    front.engine.finish(submit.rid, "abc", usage=Usage(1, 1, 0, matched_stop=12))
    assert response.result().json()["choices"][0]["stop_reason"] == 12


def test_an_error_before_the_first_text_is_a_plain_error_also_when_streaming(front: RunningFront) -> None:
    for kind, status in (("bad_request", 400), ("too_large", 400), ("overloaded", 503), ("internal", 500)):
        events = front.stream(CHAT, messages=HELLO)
        submit = front.engine.expect(Submit)
        front.engine.accept(submit)
        front.engine.fail(submit.rid, kind, "needs 9 pages, 4 are usable")
        body = events.rest()
        assert events.status == status
        assert body[0]["error"]["message"] == "needs 9 pages, 4 are usable"
        assert body[0]["error"]["code"] == status


def test_an_error_in_mid_stream_is_one_event_and_the_end(front: RunningFront) -> None:
    events = front.stream(CHAT, messages=HELLO)
    submit = front.engine.expect(Submit)
    front.engine.say(submit.rid, "some text")
    assert text_of([events.next(), events.next()]) == "some text"
    front.engine.fail(submit.rid, "internal", "broken")
    rest = events.rest()
    assert len(rest) == 1
    assert rest[0]["error"]["message"] == "broken"


def test_the_other_choices_end_when_one_fails(front: RunningFront) -> None:
    response = front.post(COMPLETIONS, prompt=["a", "b"])
    first, second = front.engine.expect(Submit), front.engine.expect(Submit)
    front.engine.fail(first.rid, "bad_request", "too long")
    assert front.engine.expect(Abort).rid == second.rid
    assert response.result().status_code == 400
