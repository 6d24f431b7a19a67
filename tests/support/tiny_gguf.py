"""A llama GGUF file of a few hundred kilobytes, written with the gguf package as converters write them."""

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.tiny_tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, write_tiny_tokenizer

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """Sizes of the model; every row is a whole number of quantisation blocks."""

    hidden: int = 64
    mlp: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    context_len: int = 256
    has_head: bool = False

    @property
    def head_dim(self) -> int:
        """Rows of one head."""
        return self.hidden // self.num_heads


def write_tiny_gguf(path: Path, model: TinyLlama, **overrides: str) -> dict[str, npt.NDArray[np.uint8] | Array]:
    """Write the file; returns its tensors by GGUF name, as bytes of blocks where quantised.

    overrides: architecture, tokenizer, pre or tensor (an extra tensor's name), to make files that
    can't be converted.
    """
    writer = gguf.GGUFWriter(path, overrides.get("architecture", "llama"))
    writer.add_context_length(model.context_len)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.mlp)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab_size = _add_tokenizer(writer, path.parent / "source-tokenizer", overrides)
    tensors = _tensors(model, vocab_size)
    if extra := overrides.get("tensor"):
        tensors[extra] = np.ones(32, dtype=np.float32)
    for name, data in tensors.items():
        kind = None if data.dtype == np.float32 else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if "embd" in name else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, overrides: dict[str, str]) -> int:
    model = json.loads(write_tiny_tokenizer(folder, vocab_size=400).to_str())["model"]
    # A merge that only a pre-tokenizer without the digit rule ever uses.
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "34"]
    merges = [*(" ".join(merge) for merge in model["merges"]), "3 4"]
    writer.add_tokenizer_model(overrides.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(overrides.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML_TEMPLATE)
    return len(tokens)


def _tensors(model: TinyLlama, vocab_size: int) -> dict[str, npt.NDArray[np.uint8] | Array]:
    rng = np.random.default_rng(3)
    kv_rows = model.num_kv_heads * model.head_dim
    shapes = {
        "attn_q": (model.hidden, model.hidden),
        "attn_k": (kv_rows, model.hidden),
        "attn_v": (kv_rows, model.hidden),
        "attn_output": (model.hidden, model.hidden),
        "ffn_gate": (model.mlp, model.hidden),
        "ffn_up": (model.mlp, model.hidden),
        "ffn_down": (model.hidden, model.mlp),
    }

    def quantised(shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
        return gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)

    tensors: dict[str, npt.NDArray[np.uint8] | Array] = {
        "token_embd.weight": quantised((vocab_size, model.hidden), gguf.GGMLQuantizationType.Q8_0),
        "output_norm.weight": rng.normal(size=model.hidden).astype(np.float32),
    }
    if model.has_head:
        tensors["output.weight"] = quantised((vocab_size, model.hidden), gguf.GGMLQuantizationType.Q4_1)
    for layer in range(model.num_layers):
        for part in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{part}.weight"] = rng.normal(size=model.hidden).astype(np.float32)
        for part, shape in shapes.items():
            tensors[f"blk.{layer}.{part}.weight"] = quantised(shape, gguf.GGMLQuantizationType.Q4_1)
    return tensors
