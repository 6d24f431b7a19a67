"""What must be right about a DraftHello, whichever worker it reaches."""

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from memsvc.wire.base import WIRE_VERSION, Epoch
from memsvc.wire.spec import DraftHello

FEATURE_DTYPES = ("bfloat16", "float32", "float16")
"""Torch's names of what features may be."""


def check_hello(msg: DraftHello, config: DraftConfig, shape: DraftShape, epoch: Epoch) -> None:
    """Raise ValueError, with both sides' numbers, if this draft cannot serve that target. epoch: the newest one known."""
    width = shape.target_hidden_size
    if msg.wire_version != WIRE_VERSION:
        raise ValueError(f"wire version {msg.wire_version}, this draft speaks {WIRE_VERSION}")
    if msg.engine != config.engine:
        raise ValueError(f"engine {msg.engine!r}, this draft serves {config.engine!r}")
    if msg.feature_dim != width:
        raise ValueError(f"features of {msg.feature_dim} numbers a tap, the drafter takes {width}")
    if msg.feature_dtype not in FEATURE_DTYPES:
        raise ValueError(f"feature dtype {msg.feature_dtype!r} is none of {', '.join(FEATURE_DTYPES)}")
    if msg.epoch < max(1, epoch):
        raise ValueError(f"epoch {msg.epoch}, the target is registered as {epoch}")
