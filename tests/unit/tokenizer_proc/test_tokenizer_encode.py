"""Prompts become tokens, or an answer with the numbers that were wrong."""

import json
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from memsvc.wire.base import ReqId, pack_tokens, unpack_tokens
from memsvc.wire.text import ChatMessage, ChatPrompt, Sampling, Submit, TextPrompt
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder

CONTEXT = 64


def encoder_of(folder: Path, **fields: int) -> PromptEncoder:
    return PromptEncoder(TokenizerConfig(run_dir="", model_path=str(folder), **{"context_len": CONTEXT, **fields}))


@pytest.fixture
def encoder(chat_folder: Path) -> PromptEncoder:
    return encoder_of(chat_folder)


def ids_of(encoder: PromptEncoder, prompt: ChatPrompt | TextPrompt) -> list[int]:
    return list(encoder.encode(encoder.text_of(prompt)))


def submit(max_tokens: int = 0, **fields: object) -> Submit:
    sampling = Sampling(seed=5, max_tokens=max_tokens)
    return Submit(**{"rid": ReqId(7), "prompt": TextPrompt("x"), "sampling": sampling, **fields})


def test_a_chat_goes_through_the_template_and_its_special_tokens_become_tokens(
    encoder: PromptEncoder, byte_level: Tokenizer
) -> None:
    prompt = ChatPrompt([ChatMessage("user", "the ox")])
    text = "<|im_start|>user\nthe ox<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(encoder, prompt) == byte_level.encode(text, add_special_tokens=False).ids
    assert ids_of(encoder, prompt).count(byte_level.token_to_id("<|im_start|>")) == 2
    without = ChatPrompt([ChatMessage("user", "the ox")], add_generation_prompt=False)
    assert ids_of(encoder, without) == ids_of(encoder, prompt)[: len(ids_of(encoder, without))]


def test_the_post_processor_adds_to_a_plain_prompt_and_not_to_a_chat(
    chat_folder: Path, byte_level: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((chat_folder / "tokenizer_config.json").read_text())
    encoder = encoder_of(tmp_path)
    plain = byte_level.encode("the ox", add_special_tokens=False).ids
    assert ids_of(encoder, TextPrompt("the ox")) == [1, *plain]
    chat = ids_of(encoder, ChatPrompt([ChatMessage("user", "the ox")]))
    assert chat[:1] == [1]
    assert chat[1] != 1


def test_truncation_and_padding_of_the_file_are_switched_off(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = ids_of(encoder_of(tmp_path), TextPrompt("1234567"))
    assert ids == byte_level.encode("1234567").ids
    assert len(ids) == 7


def test_prompt_and_answer_must_fit_the_context(encoder: PromptEncoder) -> None:
    prompt = array("i", [5] * 60)
    assert encoder.admit(submit(4), prompt).sampling.max_tokens == 4
    with pytest.raises(ValueError, match=r"prompt of 60 tokens plus max_tokens 5 is 65 tokens, the context holds 64"):
        encoder.admit(submit(5), prompt)
    assert encoder.admit(submit(0), prompt).sampling.max_tokens == 4
    assert encoder.admit(submit(0), array("i", [5] * 63)).sampling.max_tokens == 1


@pytest.mark.parametrize("num_digits", [64, 200])
def test_a_prompt_that_fills_the_context_is_refused_with_its_length(encoder: PromptEncoder, num_digits: int) -> None:
    for attempt in (
        lambda: ids_of(encoder, TextPrompt("1" * num_digits)),
        lambda: encoder.check_tokens(pack_tokens([5] * num_digits)),
        lambda: encoder.admit(submit(), array("i", [5] * num_digits)),
    ):
        with pytest.raises(ValueError, match=rf"has {num_digits} tokens, the context holds 64"):
            attempt()


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_encoded(encoder: PromptEncoder) -> None:
    with pytest.raises(ValueError, match=r"has 1000000 bytes, more than the context of 64 tokens can hold"):
        encoder.text_of(TextPrompt("a" * 1_000_000))


def test_an_admit_carries_prompt_and_resumed_tokens_and_all_else_unchanged(encoder: PromptEncoder) -> None:
    given = submit(9, resumed=pack_tokens([8, 9]), priority=3, salt="s")
    admit = encoder.admit(given, array("i", [5, 6, 7]))
    assert unpack_tokens(admit.token_ids) == [5, 6, 7, 8, 9]
    assert (admit.rid, admit.prompt_len, admit.priority, admit.salt) == (7, 3, 3, "s")
    assert admit.sampling == given.sampling


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": ["a"] * 65}, "65 stop strings, at most 64"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": ["a" * 3000, "b" * 1097]}, "4097 characters, at most 4096"),
        ({"sampling": Sampling(seed=0, max_tokens=-1)}, "max_tokens is -1"),
        (
            {"sampling": Sampling(seed=0, max_tokens=1, stop_token_ids=[3, 512])},
            r"token id 512 in stop_token_ids .*\[0, 512\)",
        ),
    ],
)
def test_requests_beyond_a_limit_are_refused_with_it(
    encoder: PromptEncoder, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        encoder.check_request(submit(**fields))


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (pack_tokens([1, -3]), r"token id -3 in the prompt is not in the vocabulary \[0, 512\)"),
        (pack_tokens([512]), "token id 512 in the prompt"),
        (b"\x01\x00\x00", "the prompt has 3 bytes, packed token ids have 4 each"),
    ],
)
def test_token_prompts_must_be_tokens_of_the_model(encoder: PromptEncoder, packed: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        encoder.check_tokens(packed)


def test_the_vocabulary_is_the_models_also_where_it_is_larger(
    chat_folder: Path, byte_level: Tokenizer, tmp_path: Path
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    for config, size in (({"vocab_size": 600}, 600), ({"text_config": {"vocab_size": 700}}, 700), ({}, 512)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert encoder_of(tmp_path).vocab_size == size
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 40}))
    with pytest.raises(ValueError, match=r"in the prompt is not in the vocabulary \[0, 40\)"):
        ids_of(encoder_of(tmp_path), TextPrompt("the ox"))


def test_empty_prompts_are_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(ValueError, match="0 tokens, at least 1"):
        encoder.admit(submit(), array("i", ids_of(encoder, TextPrompt(""))))
    with pytest.raises(ValueError, match="0 messages, at least 1"):
        encoder.text_of(ChatPrompt([]))


def test_messages_without_a_template_are_refused(plain_folder: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encoder_of(plain_folder).text_of(ChatPrompt([ChatMessage("user", "hi")]))


def test_resumed_tokens_are_checked_too(encoder: PromptEncoder) -> None:
    for resumed, reason in ((pack_tokens([700]), "token id 700 in the resumed answer"), (b"12345", "has 5 bytes")):
        with pytest.raises(ValueError, match=reason):
            encoder.admit(submit(resumed=resumed), array("i", [5]))


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        encoder_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer of the tokenizers library"):
        encoder_of(tmp_path)


def test_only_text_prompts_of_a_conversation_or_nothing_start_a_text(plain_folder: Path) -> None:
    encoder = encoder_of(plain_folder)
    begin, word = (encoder.encode(encoder.text_of(TextPrompt(text))) for text in ("", "the"))
    begin.append(1)  # <s>
    chat = submit(prompt=ChatPrompt([ChatMessage("user", "x")]))
    assert encoder.stream_for(chat, word).feed(list(word)) == "the"
    assert encoder.stream_for(submit(), begin).feed(list(word)) == "the"
    assert encoder.stream_for(submit(), word).feed(list(word)) == " the"
