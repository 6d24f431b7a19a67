"""Limits on single fields of a request. Every refusal names the field, the limit and the value."""

from typing import TypeVar

from launch.http.errors import ApiError
from launch.http.openai import GenerateRequest

ValueT = TypeVar("ValueT")

MAX_N = 8
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 64
MAX_SALT_CHARS = 256
INT32_MAX = (1 << 31) - 1

# field: (lowest, highest)
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, INT32_MAX),
    "max_completion_tokens": (1, INT32_MAX),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, INT32_MAX),
    "min_p": (0.0, 1.0),
    "n": (1, MAX_N),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    # Logits are divided by it in float32, where a tiny one is 0.
    "repetition_penalty": (0.01, 10.0),
    "min_tokens": (0, INT32_MAX),
    "priority": (-INT32_MAX, INT32_MAX),
}
_ABOVE_LOWEST = {"top_p"}


def given(value: ValueT | None, default: ValueT) -> ValueT:
    """value, or default where the client left it out."""
    return default if value is None else value


def check_ranges(request: GenerateRequest) -> None:
    """Raises ApiError 400 for the first number out of its range."""
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(request, name, None)
        if value is None:
            continue
        if name in _ABOVE_LOWEST and value == lowest:
            raise ApiError(400, f"{name!r} is {value}, it must be above {lowest} and at most {highest}", name)
        if not lowest <= value <= highest:
            raise ApiError(400, f"{name!r} is {value}, it must be between {lowest} and {highest}", name)


def check_ids(token_ids: list[int], name: str) -> None:
    """Raises ApiError 400 unless every token id fits the wire."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= INT32_MAX):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id <= INT32_MAX)
        raise ApiError(400, f"{name!r} holds {bad}, a token id is between 0 and {INT32_MAX}", name)


def check_length(value: str | list[int], limit: int, unit: str, name: str) -> None:
    """Raises ApiError 400 if value is longer than limit."""
    if len(value) > limit:
        raise ApiError(400, f"{name!r} has {len(value)} {unit}, limit {limit}", name)


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings as a list. Raises ApiError 400."""
    stops = [stop] if isinstance(stop, str) else given(stop, [])
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"'stop' has {len(stops)} strings, limit {MAX_STOPS}", "stop")
    for text in stops:
        if not text:
            raise ApiError(400, "'stop' holds an empty string, which would end every answer at once", "stop")
        check_length(text, MAX_STOP_CHARS, "characters", "stop")
    return stops
