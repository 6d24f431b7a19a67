"""Base of all messages, the id types, and what every link shares."""

from array import array
from enum import StrEnum
from typing import NewType

import msgspec

WIRE_VERSION = 3
"""Raised with every change to a message; Register and DraftHello refuse a peer with another one."""

ReqId = NewType("ReqId", int)
"""A request. Unique for the life of the front; a resubmitted request gets a new one."""

PageId = NewType("PageId", int)
"""A page of one kind. 0 is the dummy page of every kind; real ids start at pages_per_frame."""

Epoch = NewType("Epoch", int)
"""One registration of one client. A message of an older epoch is answered with Fenced."""


class Msg(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class FinishReason(StrEnum):
    """Why a request produces no more tokens. RUNNING means that it goes on."""

    RUNNING = ""
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Done(Msg, frozen=True):
    """The request was carried out and there is nothing to say about it."""


class BadRequest(Msg, frozen=True):
    """The caller's mistake. Nothing was changed."""

    reason: str


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as raw little-endian int32, the form they have on every link and in the tree."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of pack_tokens. Raises ValueError if the length is not a multiple of 4."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids have {len(packed)} bytes, not a multiple of 4")
    return array("i", packed).tolist()
