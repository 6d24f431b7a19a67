"""What the weights of target and drafter take on a device: counted from their shapes, as the workers build them.

The sizes of the files say it only for the CPU, which maps them: there may be none (random weights), or parts in them
that nobody loads, and a device holds what the workers stack and copy.
"""

import json
import math
import struct
from pathlib import Path

from draft_worker.config import DTYPE_BYTES as DRAFT_DTYPE_BYTES
from draft_worker.config import resolve_dtype
from draft_worker.shape import DraftShape
from memsvc.device.quant_config import HEADER_FP8
from target_worker.model.config import DTYPE_BYTES, TargetShape
from target_worker.model.fp8_stacks import Stack, fp8_stacks, stack_of
from target_worker.model.wanted import wanted_tensors

_FLOAT32 = 4
_MAX_HEADER_BYTES = 100 << 20
_IN_FLOAT32 = (".conv1d.weight", ".A_log", ".dt_bias")
_WIDENED = (".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")
"""A number a head, with zeros up to gate_width."""
_PLAIN_NORM = ".linear_attn.norm.weight"
"""The norm of a hybrid that is not zero-centred; the others are held in float32."""


def target_weight_bytes(shape: TargetShape, dtype: str, fp8: frozenset[Stack] = frozenset()) -> int:
    """All tensors of the target in that dtype (auto: the checkpoint's), embedding and head included.

    fp8: matrices that are held in 8 bits, with a scale a row.
    """
    item = DTYPE_BYTES[shape.resolve_dtype(dtype)]
    total = 0
    for name, form in wanted_tensors(shape).items():
        if shape.linear is not None and name.endswith(_WIDENED):
            form = (shape.linear.gate_width, *form[1:])
        if stack_of(name) in fp8:
            total += math.prod(form) + form[0] * _FLOAT32
        else:
            total += math.prod(form) * (_FLOAT32 if _is_float32(shape, name) else item)
    return total


def _is_float32(shape: TargetShape, name: str) -> bool:
    is_centred = shape.is_hybrid_family and name.endswith("norm.weight") and not name.endswith(_PLAIN_NORM)
    return is_centred or name.endswith(_IN_FLOAT32)


def stored_fp8(folder: Path) -> frozenset[Stack]:
    """Matrices of a target of which a part is stored in fp8."""
    return fp8_stacks(name for name, dtype in _tensor_dtypes(folder).items() if dtype == HEADER_FP8)


def draft_weight_bytes(shape: DraftShape, dtype: str, folder: Path | None) -> int:
    """All tensors of the drafter but what it borrows. folder: where its files lie, None for random weights."""
    item = DRAFT_DTYPE_BYTES[resolve_dtype(dtype, shape)]
    hidden, dim = shape.hidden_size, shape.head_dim
    context_kv = shape.num_layers * 2 * shape.num_kv_heads * dim * hidden
    context_kv += shape.num_layers * 2 * shape.num_kv_heads * dim if shape.attention_bias else 0
    ends = shape.feature_width * hidden + 3 * hidden + shape.num_layers * dim
    selector = shape.selector_rank * (hidden + 2 * shape.vocab_size) if shape.has_selector else 0
    numbers = shape.num_layers * _draft_layer(shape) + context_kv + ends + selector
    return (numbers + _own_rows(shape, folder) * hidden) * item + _vocab_map_bytes(shape)


def _draft_layer(shape: DraftShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    rows = heads + 2 * shape.num_kv_heads * shape.head_dim
    numbers = rows * hidden + hidden * heads + 3 * hidden * shape.intermediate_size + 2 * hidden
    numbers += (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    numbers += rows + hidden if shape.attention_bias else 0
    numbers += shape.num_heads if shape.attention_sink_bias else 0
    if shape.has_conv:
        taps = 2 * shape.conv_kernel_size
        numbers += 2 * (taps * hidden + taps * (hidden // shape.conv_group_size) * hidden)
    return numbers


def _own_rows(shape: DraftShape, folder: Path | None) -> int:
    """Rows of embedding and head that the drafter does not share: its own, or those of a reduced vocabulary."""
    names = _tensor_dtypes(folder).keys() if folder is not None else set()
    has_own_head = bool(names & {"lm_head.weight", "model.lm_head.weight"})
    rows = shape.draft_vocab_size if has_own_head or shape.draft_vocab_size != shape.vocab_size else 0
    return rows + (shape.vocab_size if names & {"embed_tokens.weight", "model.embed_tokens.weight"} else 0)


def _vocab_map_bytes(shape: DraftShape) -> int:
    return 8 * shape.draft_vocab_size if shape.draft_vocab_size != shape.vocab_size else 0


def _tensor_dtypes(folder: Path) -> dict[str, str]:
    """Of all safetensors of a folder. A file that is none is left to the worker, which says more about it."""
    found: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            start = opened.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            try:
                header = json.loads(opened.read(size)) if 0 < size <= _MAX_HEADER_BYTES else {}
            except ValueError:
                continue
        for name, tensor in header.items() if isinstance(header, dict) else ():
            found[name] = str(tensor.get("dtype")) if isinstance(tensor, dict) else ""
    return found
