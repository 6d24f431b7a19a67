"""Packing a folder: what is written, what is left alone, and that models load from it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from memsvc.device.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointReader, weight_files
from memsvc.device.int8 import dequantise_rows, quantise_rows
from memsvc.device.pack import PackOptions, main, pack_folder
from memsvc.device.quant_config import check_quantization
from memsvc.device.shards import write_shards
from target_worker.model.config import TargetShape
from target_worker.model.weights import load_target
from tests.support.make_drafter import V1, V2, make_drafter, make_target_stub, random_tensors, write_folder
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_target import make_target

SIZES = {
    "model.embed_tokens.weight": (300, 64), "layer.q_proj.weight": (64, 64), "layer.in_proj_b.weight": (4, 64),
    "layer.norm.weight": (64,), "layer.conv.weight": (64, 1, 4), "codebook": (300, 16),
}  # fmt: skip
ALL = PackOptions(min_elements=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = random_tensors(SIZES, dtype=torch.bfloat16) | {"d2t": torch.arange(300)}
    folder = write_folder(tmp_path / "model", {"dtype": "bfloat16", "vocab_size": 300}, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE", "train.png", "optimizer.pt"):
        (folder / name).write_text(name)
    (folder / "draft").mkdir()
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(folder / file).items()}


def test_large_matrices_become_int8_and_everything_else_stays(model: Path, tmp_path: Path) -> None:
    packed = pack_folder(model, tmp_path / "out", PackOptions(min_elements=4096))
    before, after = load_file(model / SINGLE_FILE), load_file(tmp_path / "out" / SINGLE_FILE)
    matrices = {"model.embed_tokens.weight", "layer.q_proj.weight", "codebook"}
    assert after.keys() == before.keys() | {f"{name}_scale" for name in matrices}
    for name, tensor in before.items():
        if name in matrices:
            codes, scale = quantise_rows(tensor, torch.bfloat16)
            assert torch.equal(after[name], codes)
            assert torch.equal(after[f"{name}_scale"], scale)
            assert scale.dtype == torch.bfloat16
        else:
            assert torch.equal(after[name], tensor)
            assert after[name].dtype == tensor.dtype
    assert (packed.num_matrices, packed.worst_name in matrices) == (3, True)
    assert 0.001 < packed.worst_error < 0.01
    assert packed.bytes_before == (model / SINGLE_FILE).stat().st_size
    assert packed.bytes_after == (tmp_path / "out" / SINGLE_FILE).stat().st_size
    assert packed.bytes_after < 0.6 * packed.bytes_before


def test_the_config_says_which_modules_are_in_int8(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "out", PackOptions(min_elements=4096))
    config = config_of(tmp_path / "out")
    assert {key: value for key, value in config.items() if key != "quantization_config"} == config_of(model)
    quantization = config["quantization_config"]
    check_quantization(quantization)
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear", "Embedding"]
    assert quantization["ignore"] == ["layer.in_proj_b", "lm_head"]
    pack_folder(model, tmp_path / "kept", PackOptions(min_elements=4096, keep="embed_tokens|q_proj"))
    quantization = config_of(tmp_path / "kept")["quantization_config"]
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert quantization["ignore"] == ["layer.in_proj_b", "layer.q_proj", "lm_head", "model.embed_tokens"]


def test_a_model_without_large_matrices_is_not_called_quantised(model: Path, tmp_path: Path) -> None:
    assert pack_folder(model, tmp_path / "out", PackOptions(min_elements=1 << 20)).num_matrices == 0
    assert config_of(tmp_path / "out") == config_of(model)


def test_texts_and_tokenizer_go_along_and_nothing_else(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "out", ALL)
    copied = {"tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", SINGLE_FILE, *copied}
    assert all((tmp_path / "out" / name).read_text() == name for name in copied)


@pytest.mark.parametrize("max_bytes", [9_000, 22_000])
def test_files_keep_to_the_limit_and_an_index_names_them(model: Path, tmp_path: Path, max_bytes: int) -> None:
    pack_folder(model, tmp_path / "whole", ALL)
    pack_folder(model, tmp_path / "out", PackOptions(min_elements=1, max_bytes=max_bytes))
    files = weight_files(tmp_path / "out")
    assert len(files) > 1
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert (tmp_path / "out" / file).stat().st_size <= max_bytes or len(tensors) == 1
    whole, parts = stored(tmp_path / "whole"), stored(tmp_path / "out")
    assert all(torch.equal(whole[name], parts[name]) for name in whole.keys() | parts.keys())
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_shards_of_an_earlier_call_are_removed(tmp_path: Path) -> None:
    tensors = {name: torch.ones(100) for name in "abc"}
    assert len(write_shards(tmp_path, tensors, 800)) == 3
    assert [file.name for file in write_shards(tmp_path, tensors, 8000)] == [SINGLE_FILE]
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]


def test_what_is_packed_already_or_in_the_way_is_refused(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "out", ALL)
    with pytest.raises(ValueError, match="packed already"):
        pack_folder(tmp_path / "out", tmp_path / "again", ALL)
    with pytest.raises(ValueError, match="out is not an empty folder"):
        pack_folder(model, tmp_path / "out", ALL)
    (model / SINGLE_FILE).unlink()
    with pytest.raises(ValueError, match="only safetensors are read"):
        pack_folder(model, tmp_path / "none", ALL)


def test_a_matrix_that_is_not_finite_is_named(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / SINGLE_FILE)
    tensors["layer.q_proj.weight"][3, 3] = torch.inf
    write_folder(model, config_of(model), tensors)
    with pytest.raises(ValueError, match=r"layer\.q_proj\.weight: 1 rows"):
        pack_folder(model, tmp_path / "out", ALL)
    assert not (tmp_path / "out").exists()


def test_the_command_reports_sizes_and_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--out", str(tmp_path / "out"), "--min-elements", "4096", "--keep", "codebook"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'out'}: 2 matrices in int8, {(model / SINGLE_FILE).stat().st_size} -> ")
    assert main(flags) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert main([*flags, "--keep", "("]) == 1
    assert "--keep '(' is not a regular expression" in capsys.readouterr().err
    assert main([*flags, "--max-bytes", "0"]) == 1
    assert "--max-bytes is 0" in capsys.readouterr().err


@pytest.mark.parametrize("version", [V1, V2])
def test_a_packed_drafter_loads_as_the_rounded_one(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsvc.device.layers.is_packable", lambda weight: False)
    target = make_target_stub(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, version)
    pack_folder(drafter, tmp_path / "packed", ALL)
    rounded = {
        name: dequantise_rows(*quantise_rows(tensor, torch.float32), torch.float32) if tensor.dim() == 2 else tensor
        for name, tensor in load_file(drafter / SINGLE_FILE).items()
    }
    write_folder(tmp_path / "rounded", config_of(drafter), rounded)
    models = []
    for folder in (tmp_path / "packed", tmp_path / "rounded"):
        config = DraftConfig(run_dir="", draft_path=str(folder), target_path=str(target), dtype="float32")
        models.append(load_model(config, DraftShape.from_folder(folder)))
    one, other = models
    assert torch.equal(one.feature_proj.weight, other.feature_proj.weight)
    for layer, same in zip(one.layers, other.layers, strict=True):
        assert torch.equal(layer.qkv.weight, same.qkv.weight)
        assert torch.equal(layer.mlp.down.weight, same.mlp.down.weight)
    if version == V2:
        assert one.selector is not None
        assert other.selector is not None
        assert torch.equal(one.selector.successor, other.selector.successor)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_target_loads_with_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    model = make_target(tmp_path / "model", "Qwen3", tie_word_embeddings=tied)
    pack_folder(tmp_path / "model", tmp_path / "packed", ALL)
    decoder, shape = load_target(tmp_path / "packed", "float32")
    embedding = model.model.embed_tokens.weight.detach()
    expected = dequantise_rows(*quantise_rows(embedding, torch.float32), torch.float32)
    assert torch.equal(decoder.embedding, expected)
    assert shape == TargetShape.from_folder(tmp_path / "model")


def test_a_packed_hybrid_loads_and_keeps_what_is_no_matrix(tmp_path: Path) -> None:
    make_hybrid(tmp_path / "model")
    pack_folder(tmp_path / "model", tmp_path / "packed", ALL)
    before, after = stored(tmp_path / "model"), stored(tmp_path / "packed")
    for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"):
        full = f"model.layers.0.linear_attn.{name}"
        assert torch.equal(before[full], after[full])
    load_target(tmp_path / "packed", "float32")
    with CheckpointReader(tmp_path / "packed") as reader:
        name = "model.layers.0.linear_attn.in_proj_a.weight"
        found = reader.get(name, tuple(before[name].shape), torch.float32)
    assert (found - before[name]).norm() < 0.01 * before[name].norm()
