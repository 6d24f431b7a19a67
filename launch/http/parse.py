"""Bytes of a request body -> its typed struct, or a 400 that names the field."""

import difflib
import re
from typing import TypeVar

import msgspec

from launch.http.errors import ApiError
from launch.http.openai import NOT_SERVED, GenerateRequest

RequestT = TypeVar("RequestT", bound=GenerateRequest)

_AT = re.compile(r" - at `\$\.?(?P<path>.*)`$", re.DOTALL)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request in body. Raises ApiError 400: not JSON, a wrong type, an unknown or unserved field."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _check_names(fields, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None


def _check_names(fields: dict[str, msgspec.Raw], kind: type[GenerateRequest]) -> None:
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in known:
            continue
        if name not in NOT_SERVED:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ApiError(400, f"unknown field {name[:64]!r}{hint}", name[:64])
        neutral = NOT_SERVED[name]
        value = msgspec.json.decode(raw)
        # True == 1 in Python, and logprobs 0 asks for something that False does not.
        if value is not None and not any(value == item and type(value) is type(item) for item in neutral):
            raise ApiError(400, f"{name!r} is not supported by this server, leave it out or null", name)


def _from_validation(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    match = _AT.search(text)
    if match is None:
        return ApiError(400, f"the request body is not valid: {text}")
    return ApiError(400, f"{text[: match.start()]} in {match['path']!r}", match["path"] or None)
