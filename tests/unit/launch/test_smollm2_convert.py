"""A GGUF file becomes the same model in a Hugging Face folder, number by number."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch.gguf_convert import convert
from launch.gguf_weights import hf_name, to_bf16, unpermute
from tests.support.tiny_gguf import TinyLlama, write_tiny_gguf
from tests.support.tiny_tokenizer import CHATML_TEMPLATE

MODEL = TinyLlama()


def to_folder(tmp_path: Path, model: TinyLlama = MODEL, **overrides: str) -> tuple[Path, dict[str, Any]]:
    """(Hugging Face folder, tensors of the GGUF file)."""
    tensors = write_tiny_gguf(tmp_path / "model.gguf", model, **overrides)
    folder = tmp_path / "hf"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder, lambda done, total: None)
    return folder, tensors


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of model.safetensors by name, bf16 widened to float32."""
    found = {}
    for name, tensor in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        assert tensor["dtype"] == "BF16"
        bits = np.frombuffer(bytes(tensor["data"]), dtype="<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(tensor["shape"])
    return found


def nearest_bf16(value: float) -> float:
    """8 significant bits, ties to even, in exact arithmetic."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def q4_1_row(row: bytes) -> list[float]:
    """Blocks of a float16 scale, a float16 minimum and 32 nibbles, the low ones first."""
    values: list[float] = []
    for start in range(0, len(row), 20):
        scale, low = struct.unpack("<2e", row[start : start + 4])
        nibbles = row[start + 4 : start + 20]
        quants = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
        values += [float(np.float32(np.float32(scale) * quant) + np.float32(low)) for quant in quants]
    return values


def q8_0_row(row: bytes) -> list[float]:
    """Blocks of a float16 scale and 32 signed bytes."""
    values: list[float] = []
    for start in range(0, len(row), 34):
        (scale,) = struct.unpack("<e", row[start : start + 2])
        values += [float(np.float32(scale) * np.float32(q)) for q in struct.unpack("<32b", row[start + 2 : start + 34])]
    return values


def rotary_row(row: int, head_dim: int) -> int:
    """Row of a GGUF file that holds this row of a Hugging Face matrix."""
    head, place = divmod(row, head_dim)
    half, pair = divmod(place, head_dim // 2)
    return head * head_dim + 2 * pair + half


def test_every_weight_is_the_dequantised_one_in_its_place(tmp_path: Path) -> None:
    folder, tensors = to_folder(tmp_path)
    weights = weights_of(folder)
    assert len(weights) == len(tensors) == 2 + 9 * MODEL.num_layers
    for name, source in tensors.items():
        row_of = q8_0_row if "embd" in name else q4_1_row
        got = weights[hf_name(name)]
        if source.dtype == np.float32:
            assert got.tolist() == [nearest_bf16(value) for value in source.tolist()]
            continue
        is_rotary = ".attn_q." in name or ".attn_k." in name
        for row in range(len(source)):
            from_row = rotary_row(row, MODEL.head_dim) if is_rotary else row
            expected = [nearest_bf16(value) for value in row_of(source[from_row].tobytes())]
            assert got[row].tolist() == expected, f"{name} row {row}"


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    folder, _ = to_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 401, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 256, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_file_with_an_output_matrix_keeps_it(tmp_path: Path) -> None:
    folder, _ = to_folder(tmp_path, TinyLlama(has_head=True))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert weights_of(folder)["lm_head.weight"].shape == (401, 64)


def test_tokenizer_is_the_one_the_file_was_made_from(tmp_path: Path) -> None:
    folder, _ = to_folder(tmp_path)
    source = Tokenizer.from_file(str(tmp_path / "source-tokenizer" / "tokenizer.json"))
    got = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("the ox 12345 67", "<|im_start|>user\nhi<|im_end|>", "caf\u00e9 \u4f60\u597d \U0001f600\t\n  x", ""):
        assert got.encode(text).ids == source.encode(text).ids
        assert got.decode(got.encode(text).ids, skip_special_tokens=False) == text
    assert got.encode("345").tokens == ["3", "4", "5"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHATML_TEMPLATE
    assert config["model_max_length"] == 256
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert [entry["content"] for entry in config["added_tokens_decoder"].values()] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2': only 'llama'"),
        ({"tokenizer": "llama"}, "tokenizer family 'llama'"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not known"),
        ({"tensor": "blk.0.ssm_a.weight"}, "'blk.0.ssm_a.weight' has no counterpart"),
        ({"tensor": "rope_freqs.weight"}, "'rope_freqs.weight' has no counterpart"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, overrides: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_folder(tmp_path, **overrides)


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", MODEL)
    (tmp_path / "hf").mkdir()
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "model.gguf", tmp_path / "hf", lambda done, total: seen.append((done, total)))
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] < size


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
@settings(max_examples=300, deadline=None)
def test_bf16_is_the_nearest_with_ties_to_even(value: float) -> None:
    bits = int(to_bf16(np.array([value], dtype=np.float32))[0])
    (got,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    expected = nearest_bf16(value)
    assert got == expected or (math.isinf(got) and abs(expected) > 3.39e38)


def test_rows_that_are_no_whole_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="6 rows do not divide into 2 heads"):
        unpermute(np.zeros((6, 4), dtype=np.float32), 2)
