"""Bodies of the OpenAI requests as clients send them. Every optional field may be null: not given."""

from typing import Any

import msgspec

_NULL = msgspec.Raw(b"null")


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content; only type "text" is served."""

    type: str
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. The fields after content are read by nothing here and must be null or empty."""

    role: str
    content: str | list[TextPart] | None = None
    name: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    tool_calls: msgspec.Raw = _NULL
    tool_call_id: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: one last chunk with usage. continuous_usage_stats: usage on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What chat and completion requests have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None


class ChatRequest(GenerateRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerateRequest, kw_only=True):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]


NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "lora_path": (),
    "metadata": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that other servers know and this one does not act on, with the values that ask for nothing.

null always asks for nothing. Any other value is refused: a client must not believe that it got what
was ignored.
"""
