"""Reading safetensors folders, and the random stand-in."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memsvc.device.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointReader, RandomSource, listed, load_source


def write_sharded(folder: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4).bfloat16(), "c": torch.ones(1)}, folder / "two.safetensors")
    names = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))


def test_tensors_of_all_shards_are_read_and_converted(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(reader.get("a", (2, 3), torch.float32), torch.arange(6.0).view(2, 3))
        assert reader.get("b", (4,), torch.float32).dtype == torch.float32
        assert (reader.has("c"), reader.has("d")) == (True, False)
        assert reader.unused() == ["c"]


def test_names_files_and_shapes_are_known_without_reading_a_tensor(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        a, b, c = ("one.safetensors", (2, 3)), ("two.safetensors", (4,)), ("two.safetensors", (1,))
        assert reader.stored() == {"a": a, "b": b, "c": c}
        assert reader.unused() == ["a", "b", "c"]


def test_a_long_list_of_names_is_cut_and_the_rest_counted() -> None:
    assert [listed(["a", "b", "c"], most) for most in (4, 3, 2)] == ["a, b, c", "a, b, c", "a, b and 1 more"]


def test_tensors_outlive_the_reader(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        kept = reader.get("a", (2, 3), torch.float32)
    assert kept.sum() == 15


def test_missing_and_misshaped_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(ValueError, match=r"no tensor d \(wanted \[7\]\)"):
            reader.get("d", (7,), torch.float32)
        with pytest.raises(ValueError, match=r"a in one\.safetensors is \[2, 3\], the config asks for \[3, 2\]"):
            reader.get("a", (3, 2), torch.float32)


def test_an_index_must_name_files_that_are_there(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names 1 files that are not there: \['two.safetensors'\]"):
        CheckpointReader(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        CheckpointReader(tmp_path)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="only safetensors are read"):
        CheckpointReader(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        CheckpointReader(tmp_path)


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    source = RandomSource(seed=3)
    first = source.get("layers.0.w.weight", (64, 400), torch.float32)
    source.get("other.weight", (9, 9), torch.float32)
    assert torch.equal(first, source.get("layers.0.w.weight", (64, 400), torch.float32))
    assert not torch.equal(first, source.get("layers.1.w.weight", (64, 400), torch.float32))
    assert not torch.equal(first, RandomSource(seed=4).get("layers.0.w.weight", (64, 400), torch.float32))
    assert abs(first.std().item() - 400**-0.5) < 0.003
    assert (source.get("norm.weight", (5,), torch.bfloat16) == 1).all()
    assert (source.get("q.bias", (5,), torch.bfloat16) == 0).all()


def test_the_load_format_picks_the_source(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    assert isinstance(load_source(tmp_path, "auto", "cpu"), CheckpointReader)
    assert isinstance(load_source(tmp_path, "dummy", "cpu"), RandomSource)
    with pytest.raises(ValueError, match="'gguf' is not known; known are auto, dummy"):
        load_source(tmp_path, "gguf", "cpu")
