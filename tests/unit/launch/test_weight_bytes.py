"""Weights as the plan counts them are what the workers really hold."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from launch.config import LaunchConfig
from launch.models import read_models
from launch.weight_bytes import draft_weight_bytes, stored_fp8, target_weight_bytes
from target_worker.model.fp8_stacks import fp8_stacks
from target_worker.model.wanted import wanted_tensors
from target_worker.model.weights import load_target
from tests.support.fp8_folders import BLOCKS, CHANNEL, by_blocks, by_rows, make_fp8
from tests.support.make_drafter import V1, V2, make_drafter, make_target_stub
from tests.support.model_folders import HYBRID, TARGET, folder
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_target import make_target

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
}  # fmt: skip
SMALL_HYBRID = {
    **SMALL, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: packed ones have another size."""
    monkeypatch.setattr("memsvc.device.layers.is_packable", lambda weight: False)


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    """All that a model's objects hold."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors(item)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from tensors(getattr(thing, field.name))
    elif type(thing).__module__.startswith(
        ("memsvc.device.layers", "memsvc.device.fp8", "target_worker", "draft_worker")
    ):
        for item in vars(thing).values():
            yield from tensors(item)


def num_bytes(model: Any, *, borrowed: tuple[torch.Tensor, ...] = ()) -> int:
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(model)}
    starts = {tensor.untyped_storage().data_ptr() for tensor in borrowed}
    return sum({start: size for start, size in storages.items() if start not in starts}.values())


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (TARGET, {**SMALL, "tie_word_embeddings": True}),
        (TARGET, {**SMALL, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        (TARGET, {**SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
        (TARGET, {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
        (HYBRID, {"text_config": {**HYBRID["text_config"], **SMALL_HYBRID}}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_target_holds_what_is_counted(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], dtype: str):
    path = folder(tmp_path / "target", base, **changes)
    model, shape = load_target(path, dtype, load_format="dummy")
    assert num_bytes(model) == target_weight_bytes(shape, dtype)
    model, shape = load_target(path, dtype, load_format="dummy", quantization="fp8")
    assert num_bytes(model) == target_weight_bytes(shape, dtype, fp8_stacks(wanted_tensors(shape)))


@pytest.mark.parametrize("make", [lambda path: make_target(path, "Qwen3"), make_hybrid])
@pytest.mark.parametrize(("store", "config"), [(by_rows, CHANNEL), (by_blocks, BLOCKS)])
def test_a_target_that_is_stored_in_fp8_holds_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, store: Any, config: dict[str, Any]
):
    monkeypatch.setattr("target_worker.model.weights.stays_fp8", lambda device, dtype: True)
    make(tmp_path / "plain")
    path = make_fp8(tmp_path / "plain", tmp_path / "fp8", store, config)
    model, shape = load_target(path, "bfloat16")
    gc.collect()
    models = read_models(LaunchConfig(device="cuda", dtype="bfloat16"), path)
    assert models.fp8 == fp8_stacks(wanted_tensors(shape))
    # Some are views of the file's mapping, which is larger.
    held = {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors(model)}
    assert sum(size for _, size in held) == target_weight_bytes(shape, "bfloat16", models.fp8)
    for other in (LaunchConfig(dtype="bfloat16"), LaunchConfig(device="cuda", dtype="float32")):
        assert read_models(other, path).fp8 == frozenset()


def test_a_folder_without_fp8_has_none_to_count(tmp_path: Path):
    make_target(tmp_path, "Llama")
    assert stored_fp8(tmp_path) == frozenset()


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "attention_sink_bias": True}])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_drafter_holds_what_is_counted(tmp_path: Path, version: int, changes: dict[str, Any], load_format: str):
    target = make_target_stub(tmp_path / "target", tied=False)
    path = make_drafter(tmp_path / "drafter", target, version, **changes)
    check_drafter(path, target, load_format)


def test_rows_of_a_reduced_head_are_the_drafters_own(tmp_path: Path):
    target = make_target_stub(tmp_path / "target", tied=False)
    path = make_drafter(tmp_path / "drafter", target, V2, draft_vocab_size=24)
    config = DraftConfig(
        run_dir="", draft_path=str(path), target_path=str(target), dtype="bfloat16", load_format="dummy"
    )
    shape = DraftShape.from_folder(path)
    model = load_model(config, shape)
    assert num_bytes(model, borrowed=(model.embedding,)) == draft_weight_bytes(shape, "bfloat16", None)


def test_a_drafters_own_embedding_and_head_are_counted(tmp_path: Path):
    target = make_target_stub(tmp_path / "target", tied=False)
    path = make_drafter(tmp_path / "drafter", target, V1)
    matrices = load_file(target / "model.safetensors")
    own = {
        "embed_tokens.weight": matrices["model.embed_tokens.weight"], "lm_head.weight": matrices["lm_head.weight"],
    }  # fmt: skip
    save_file(load_file(path / "model.safetensors") | own, path / "model.safetensors")
    check_drafter(path, target, "auto")


def check_drafter(path: Path, target: Path, load_format: str) -> None:
    config = DraftConfig(
        run_dir="", draft_path=str(path), target_path=str(target), dtype="float32", load_format=load_format
    )
    shape = DraftShape.from_folder(path)
    model = load_model(config, shape)
    borrowed = (model.embedding, model.head)
    own = sum(tensor.nbytes for tensor in borrowed if not is_borrowed(tensor, path, load_format))
    held = num_bytes(model, borrowed=borrowed) + own
    gc.collect()
    assert held == draft_weight_bytes(shape, "float32", path if load_format == "auto" else None)


def is_borrowed(tensor: torch.Tensor, path: Path, load_format: str) -> bool:
    names = load_file(path / "model.safetensors") if load_format == "auto" else {}
    return not any(name in names for name in ("embed_tokens.weight", "lm_head.weight"))
