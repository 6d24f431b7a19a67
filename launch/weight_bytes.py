"""What the weights of target and drafter take on a device: counted from their shapes, as the workers build them.

The sizes of the files say it only for the CPU, which maps them: there may be none (random weights), or parts in them
that nobody loads, and a device holds what the workers stack and copy.
"""

import json
import struct
from pathlib import Path

from draft_worker.config import DTYPE_BYTES as DRAFT_DTYPE_BYTES
from draft_worker.config import resolve_dtype
from draft_worker.shape import DraftShape
from target_worker.model.config import DTYPE_BYTES, TargetShape
from target_worker.model.linear_spec import LINEAR, LinearSpec

_FLOAT32 = 4
_MAX_HEADER_BYTES = 100 << 20


def target_weight_bytes(shape: TargetShape, dtype: str) -> int:
    """All tensors of the target in that dtype (auto: the checkpoint's), embedding and head included."""
    item = DTYPE_BYTES[shape.resolve_dtype(dtype)]
    norm_item = _FLOAT32 if shape.is_hybrid_family else item
    matrix = shape.vocab_size * shape.hidden_size * item
    layers = sum(
        _linear_layer(shape, shape.linear, item)
        if kind == LINEAR and shape.linear
        else _full_layer(shape, item, norm_item)
        for kind in shape.layer_types
    )
    ends = 2 * len(shape.layer_types) * shape.hidden_size * norm_item + shape.hidden_size * norm_item
    return matrix * (1 if shape.tie_word_embeddings else 2) + layers + ends


def _full_layer(shape: TargetShape, item: int, norm_item: int) -> int:
    """Attention and MLP; the two norms over the hidden size are the caller's."""
    heads, hidden = shape.num_heads * shape.head_dim, shape.hidden_size
    rows = heads * (2 if shape.is_hybrid_family else 1) + 2 * shape.num_kv_heads * shape.head_dim
    numbers = rows * hidden + hidden * heads
    numbers += (rows if shape.qkv_bias else 0) + (hidden if shape.o_bias else 0)
    qk_norm = 2 * shape.head_dim * norm_item if shape.qk_norm else 0
    return (numbers + _mlp(shape)) * item + qk_norm


def _mlp(shape: TargetShape) -> int:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    return 3 * hidden * wide + (2 * wide + hidden if shape.mlp_bias else 0)


def _linear_layer(shape: TargetShape, spec: LinearSpec, item: int) -> int:
    rows = spec.conv_dim + spec.value_size + 2 * spec.gate_width
    numbers = (rows + spec.value_size) * shape.hidden_size + spec.v_dim + _mlp(shape)
    return numbers * item + (spec.conv_kernel * spec.conv_dim + 2 * spec.gate_width) * _FLOAT32


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
    names = _tensor_names(folder) if folder is not None else set()
    has_own_head = bool(names & {"lm_head.weight", "model.lm_head.weight"})
    rows = shape.draft_vocab_size if has_own_head or shape.draft_vocab_size != shape.vocab_size else 0
    return rows + (shape.vocab_size if names & {"embed_tokens.weight", "model.embed_tokens.weight"} else 0)


def _vocab_map_bytes(shape: DraftShape) -> int:
    return 8 * shape.draft_vocab_size if shape.draft_vocab_size != shape.vocab_size else 0


def _tensor_names(folder: Path) -> set[str]:
    """Of all safetensors of a folder. A file that is none is left to the worker, which says more about it."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            start = opened.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            try:
                header = json.loads(opened.read(size)) if 0 < size <= _MAX_HEADER_BYTES else {}
            except ValueError:
                continue
        names.update(header if isinstance(header, dict) else ())
    return names
