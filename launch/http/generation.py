"""A checked request: what to generate, how often, and how to answer."""

import secrets
from dataclasses import dataclass
from typing import cast

import msgspec

from launch.http.config import FrontConfig
from launch.http.errors import ApiError
from launch.http.limits import (
    MAX_SALT_CHARS,
    MAX_STOP_IDS,
    check_ids,
    check_length,
    check_ranges,
    given,
    stop_strings,
)
from launch.http.openai import ChatRequest, CompletionRequest, GenerateRequest, Message
from memsvc.wire.base import pack_tokens
from memsvc.wire.text import ChatMessage, ChatPrompt, Sampling, TextPrompt, TokenPrompt

Prompt = ChatPrompt | TextPrompt | TokenPrompt

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that names none, as OpenAI has it; a chat then ends at the context."""

_SEED_MASK = (1 << 63) - 1
# OpenAI calls the role of newer system messages "developer"; templates know the older name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNREAD = tuple(name for name in Message.__struct_fields__ if name not in ("role", "content"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One HTTP request in the terms of the engine; sampling.seed is the seed of the first choice."""

    model: str
    prompts: list[Prompt]
    num_per_prompt: int
    sampling: Sampling
    stop: list[str]
    include_stop: bool
    priority: int
    salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def num_choices(self) -> int:
        """Choices in the answer: choice i answers prompt i // num_per_prompt."""
        return len(self.prompts) * self.num_per_prompt

    def sampling_of(self, index: int) -> Sampling:
        """Sampling of choice `index`: the i-th answer to a prompt uses seed + i."""
        seed = (self.sampling.seed + index % self.num_per_prompt) & _SEED_MASK
        return msgspec.structs.replace(self.sampling, seed=seed)


def from_chat(request: ChatRequest, config: FrontConfig) -> Generation:
    """Raises ApiError 400, or 404 for a model that is not served."""
    if not request.messages:
        raise ApiError(400, "'messages' is empty, at least one message is needed", "messages")
    messages = [_chat_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    prompt = ChatPrompt(messages, given(request.add_generation_prompt, True))
    max_tokens = given(request.max_completion_tokens, given(request.max_tokens, 0))
    return _generation(request, config, [prompt], max_tokens)


def from_completion(request: CompletionRequest, config: FrontConfig) -> Generation:
    """Raises ApiError 400, or 404 for a model that is not served."""
    prompts = _prompts(request.prompt, config.context_len)
    return _generation(request, config, prompts, given(request.max_tokens, DEFAULT_COMPLETION_TOKENS))


def _generation(request: GenerateRequest, config: FrontConfig, prompts: list[Prompt], max_tokens: int) -> Generation:
    model = given(request.model, config.model_name)
    if model not in config.served_model_names:
        raise ApiError(404, f"model {model[:128]!r} does not exist, this server has {config.model_name!r}", "model")
    check_ranges(request)
    options = request.stream_options
    if options is not None and not request.stream:
        raise ApiError(400, "'stream_options' needs 'stream': true", "stream_options")
    num = given(request.n, 1)
    num_choices = len(prompts) * num
    if num_choices > config.max_choices:
        asked = f"{len(prompts)} prompts times n={num} are {num_choices} choices"
        raise ApiError(400, f"{asked}, limit {config.max_choices}", "n" if len(prompts) == 1 else "prompt")
    salt = given(request.cache_salt, "")
    check_length(salt, MAX_SALT_CHARS, "characters", "cache_salt")
    return Generation(
        model=model,
        prompts=prompts,
        num_per_prompt=num,
        sampling=_sampling(request, max_tokens),
        stop=stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        priority=given(request.priority, 0),
        salt=salt,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )


def _sampling(request: GenerateRequest, max_tokens: int) -> Sampling:
    min_tokens = given(request.min_tokens, 0)
    if max_tokens and min_tokens > max_tokens:
        raise ApiError(400, f"'min_tokens' is {min_tokens}, the answer may have {max_tokens} tokens", "min_tokens")
    stop_ids = given(request.stop_token_ids, [])
    check_length(stop_ids, MAX_STOP_IDS, "entries", "stop_token_ids")
    check_ids(stop_ids, "stop_token_ids")
    # A request without a seed gets one here, so that a resubmission after a restart draws the same.
    seed = secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=given(request.temperature, 1.0),
        top_k=max(0, given(request.top_k, 0)),
        top_p=given(request.top_p, 1.0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _chat_message(message: Message, where: str) -> ChatMessage:
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"role {message.role[:64]!r} in {where} is not supported, known are {known}", where)
    for name in _UNREAD:
        if bytes(getattr(message, name)) not in (b"null", b"[]"):
            raise ApiError(400, f"{where}.{name} is not supported by this server, leave it out or null", where)
    match message.content:
        case None:
            raise ApiError(400, f"{where} has no content", where)
        case str(text):
            return ChatMessage(_ROLES[message.role], text)
        case parts:
            other = next((part.type for part in parts if part.type != "text"), None)
            if other is not None:
                raise ApiError(400, f"{where} has a part of type {other[:64]!r}, only text is served", where)
            return ChatMessage(_ROLES[message.role], "\n".join(part.text for part in parts))


def _prompts(prompt: str | list[str | int | list[int]], context_len: int) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise ApiError(400, "'prompt' is an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "'prompt' mixes texts, token ids and lists, all its entries must be of one kind", "prompt")
    if kinds == {str}:
        return [TextPrompt(text) for text in cast("list[str]", prompt)]
    lists = [cast("list[int]", prompt)] if kinds == {int} else cast("list[list[int]]", prompt)
    return [_token_prompt(token_ids, context_len) for token_ids in lists]


def _token_prompt(token_ids: list[int], context_len: int) -> TokenPrompt:
    if not token_ids:
        raise ApiError(400, "'prompt' holds an empty list of token ids", "prompt")
    # Also keeps the message to the tokenizer below the limit of its link.
    check_length(token_ids, context_len, "tokens", "prompt")
    check_ids(token_ids, "prompt")
    return TokenPrompt(pack_tokens(token_ids))
