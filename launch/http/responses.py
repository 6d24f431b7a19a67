"""Bodies of the answers, in OpenAI's shapes with the additions that benchmark clients read."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from memsvc.wire.text import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens whose KV was there already."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts, summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """How drafts fared. acceptance_histogram[j]: verify steps that accepted j drafts.

    mean_acceptance_length counts the target's own token of each step: 1 + accepted / steps.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(msgspec.Struct, frozen=True):
    """Top-level `metrics` of an answer."""

    speculative_decoding: SpeculativeDecoding


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    content: str
    role: str = "assistant"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New text of a chat choice; role comes with the first one only."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a full answer or of a chunk; message, delta or text holds its text.

    stop_reason is the stop string or stop_token_id that ended it (vLLM's name), matched_stop the
    same with the end-of-sequence token included (SGLang's name).
    """

    index: int
    message: AnswerMessage | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """A full answer, or one chunk of a stream. usage is null on chunks that carry none."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "memsvc"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    data: list[ModelBody]
    object: str = "list"


def usage_body(prompt_tokens: int, usages: Sequence[Usage]) -> UsageBody:
    """Counts of a finished answer. prompt_tokens is counted once a prompt, not once a choice."""
    completion = sum(usage.completion_tokens for usage in usages)
    # After a resubmission the answer so far is found in the cache too, and is no prompt.
    cached = sum(min(usage.cached_tokens, usage.prompt_tokens) for usage in usages)
    details = PromptTokensDetails(min(cached, prompt_tokens))
    return UsageBody(prompt_tokens, completion, prompt_tokens + completion, details)


def speculative_metrics(usages: Sequence[Usage], num_spec_tokens: int) -> Metrics | UnsetType:
    """The acceptance block over all choices; UNSET if no draft was verified."""
    width = max((len(usage.accepted) for usage in usages), default=0)
    histogram = [sum(u.accepted[j] for u in usages if j < len(u.accepted)) for j in range(width)]
    steps = sum(histogram)
    if not steps:
        return UNSET
    accepted = sum(j * num for j, num in enumerate(histogram))
    drafted = sum(usage.num_drafts for usage in usages)
    return Metrics(
        SpeculativeDecoding(
            mean_acceptance_length=1 + accepted / steps,
            draft_acceptance_rate=accepted / drafted if drafted else 0.0,
            acceptance_histogram=histogram,
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            num_spec_tokens=num_spec_tokens,
        )
    )
