"""Tensors of a llama GGUF file as bf16 safetensors under their Hugging Face names."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import gguf
import numpy as np
import numpy.typing as npt

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCounts:
    """Heads of the model, needed to put rotary rows back in order."""

    num_heads: int
    num_kv_heads: int


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ValueError on a name llama models do not have."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, suffix = rest.rpartition(".")
    if prefix != "blk" or not layer.isdecimal() or part not in _BLOCK_NAMES or suffix not in ("weight", "bias"):
        raise ValueError(f"GGUF tensor {name!r} has no counterpart in a llama model")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of q_proj or k_proj from GGUF's rotary order to Hugging Face's.

    GGUF pairs neighbouring rows of a head (2i, 2i+1), Hugging Face pairs row i with row i + head_dim/2.
    """
    num_rows = rows.shape[0]
    if num_rows % (2 * num_heads):
        raise ValueError(f"{num_rows} rows do not divide into {num_heads} heads of an even size")
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bf16 numbers, ties to even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write_safetensors(
    reader: gguf.GGUFReader, heads: HeadCounts, path: Path, on_bytes: Callable[[int, int], None]
) -> None:
    """Write all tensors of reader to path, one at a time, so that only the largest is held in memory.

    on_bytes is told (bytes written, bytes in all) after each tensor. Raises ValueError on a tensor
    with an unknown name or with values that are not finite.
    """
    with path.open("wb") as out:
        total = _write_header(reader, out)
        written = 0
        for name, bits in _tensors(reader, heads):
            if np.any((bits & np.uint16(0x7F80)) == np.uint16(0x7F80)):
                raise ValueError(f"GGUF tensor {name!r} has values that are not finite")
            out.write(bits.tobytes())
            written += bits.nbytes
            on_bytes(written, total)
        assert written == total, f"header promises {total} bytes, wrote {written}"


def _write_header(reader: gguf.GGUFReader, out: IO[bytes]) -> int:
    """The safetensors header: 8 bytes of length, then JSON padded to 8. Returns the bytes that must follow."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        # GGUF names the fastest dimension first.
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + 2 * int(np.prod(shape))
        entries[hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    out.write(len(header).to_bytes(8, "little") + header)
    return offset


def _tensors(reader: gguf.GGUFReader, heads: HeadCounts) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """(GGUF name, bf16 bits) of each tensor in file order."""
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute(values, heads.num_heads)
        elif ".attn_k." in tensor.name:
            values = unpermute(values, heads.num_kv_heads)
        yield tensor.name, to_bf16(values)
