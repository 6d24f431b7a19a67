"""One encoder for all messages, one typed decoder for each union."""

from functools import cache
from typing import Any

import msgspec

from memsvc.wire.base import Msg

_encoder = msgspec.msgpack.Encoder()


def encode(msg: Msg) -> bytes:
    """The message as it goes into a frame."""
    return _encoder.encode(msg)


@cache
def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of a union of messages; it raises msgspec.DecodeError (or ValidationError) on anything else."""
    return msgspec.msgpack.Decoder(union)
