"""Which matrices of a target are kept in fp8. No torch: launch imports this file."""

import re
from collections.abc import Collection, Iterable

FP8 = "fp8"
QUANTIZATIONS = ("", FP8)
"""Values of --quantization; without one matrices are kept as they are stored, where that is possible."""

_STACKS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a", "qkvz", "ba")),
    ("linear_attn.out_proj",),
)
"""What is one matrix where it is computed."""
_PLACE = {module: place for place, stack in enumerate(_STACKS) for module in stack}
_NAME = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.(.+)\.weight")

Stack = tuple[int, int]
"""A layer, and which of its matrices."""


def stack_of(name: str) -> Stack | None:
    """The matrix to which a tensor of that name belongs; None if it is part of none."""
    found = _NAME.fullmatch(name)
    place = _PLACE.get(found[2]) if found else None
    return (int(found[1]), place) if found and place is not None else None


def fp8_stacks(names: Iterable[str]) -> frozenset[Stack]:
    """The matrices of which a part is among the names: in fp8, all parts are."""
    return frozenset(stack for name in names if (stack := stack_of(name)) is not None)


def kept_in_fp8(wanted: Collection[str], stored: Iterable[str], quantization: str) -> frozenset[str]:
    """Tensors of the target that are kept in fp8. stored: those that are to stay so if nothing else is said."""
    stacks = fp8_stacks(wanted if quantization == FP8 else stored)
    return frozenset(name for name in wanted if stack_of(name) in stacks)


def stays_fp8(device: str, dtype: str) -> bool:
    """What is stored in fp8 is kept so: on a CUDA device, which multiplies it to bfloat16. Elsewhere it becomes dtype."""
    return device.startswith("cuda") and dtype == "bfloat16"
