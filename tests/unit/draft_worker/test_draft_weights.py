"""Loading: name variants, what is missing, misshapen or left over, and what is borrowed from the target."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.borrowed import eos_token_ids
from draft_worker.config import DraftConfig
from draft_worker.model import DraftModel
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from tests.support.make_drafter import V1, V2, make_drafter, make_target_stub


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they were read: a packed one cannot be compared."""
    monkeypatch.setattr("memsvc.device.layers.is_packable", lambda weight: False)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target_stub(tmp_path / "target")


def load(drafter: Path, target: Path, **changes: str) -> DraftModel:
    config = DraftConfig(run_dir="", draft_path=str(drafter), target_path=str(target), dtype="float32", **changes)
    return load_model(config, DraftShape.from_folder(drafter))


def flat(model: DraftModel) -> dict[str, torch.Tensor]:
    """Tensors that a model computes with, by a name of this test's own."""
    tensors = {
        "fc": model.feature_proj.weight, "feature_norm": model.feature_norm.weight, "norm": model.norm.weight,
        "kv": model.context_kv.weight, "head": model.head, "embedding": model.embedding, "mask": model.mask_row,
    }  # fmt: skip
    for index, layer in enumerate(model.layers):
        tensors |= {f"{index}.qkv": layer.qkv.weight, f"{index}.mlp": layer.mlp.gate_up.weight}
        if layer.attention_conv is not None:
            tensors[f"{index}.conv"] = layer.attention_conv.base_kernel
    if model.selector is not None:
        tensors |= {"before": model.selector.predecessor, "after": model.selector.successor}
    return tensors


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def edit(folder: Path, **keys) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def codebooks_as_modules(name: str) -> str:
    return f"{name}.weight" if name.endswith("codebook") else name


def muse(name: str) -> str:
    return name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc.")


VARIANTS = {
    "model prefix": lambda name: f"model.{name}",
    "codebooks as modules": codebooks_as_modules,
    "encoder names": muse,
    "midlayer": lambda name: name.replace("layers.0.", "midlayer."),
    "all of them": lambda name: "model." + muse(codebooks_as_modules(name).replace("layers.0.", "midlayer.")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_name_variants_load_the_same_model(variant, target, tmp_path):
    plain = make_drafter(tmp_path / "plain", target, V2)
    other = shutil.copytree(plain, tmp_path / "other")
    rewrite(other, lambda tensors: {VARIANTS[variant](name): tensor for name, tensor in tensors.items()})
    expected, got = flat(load(plain, target)), flat(load(other, target))
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "layers.1.self_attn.k_norm.weight", "layers.2.mlp_conv.base_kernel",
     "candidate_selector.predecessor_codebook"],
)  # fmt: skip
def test_a_missing_tensor_is_named(name, target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V2)
    rewrite(drafter, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=name):
        load(drafter, target)


def test_a_misshapen_tensor_is_named_with_both_shapes(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V2)
    name = "layers.0.attention_conv.kernel_projection.weight"
    rewrite(drafter, lambda tensors: tensors | {name: torch.zeros(5, 48)})
    with pytest.raises(ValueError, match=rf"{name}.*\[5, 48\].*\[12, 48\]"):
        load(drafter, target)


def test_tensors_that_the_config_does_not_account_for_are_named(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    stray = {"candidate_selector.hidden_projection.weight": torch.zeros(4, 48), "rotary_emb.inv_freq": torch.ones(4)}
    rewrite(drafter, lambda tensors: tensors | stray)
    with pytest.raises(ValueError, match=r"1 tensors that config.json.*candidate_selector.hidden_projection.weight"):
        load(drafter, target)


def test_the_head_is_the_targets_tied_or_not(tmp_path):
    for tied in (True, False):
        target = make_target_stub(tmp_path / f"target{tied}", tied=tied)
        model = load(make_drafter(tmp_path / f"drafter{tied}", target, V1), target)
        stored = load_file(target / "model.safetensors")
        assert torch.equal(model.head, stored["model.embed_tokens.weight" if tied else "lm_head.weight"])
        assert (model.head is model.embedding) == tied


def test_a_target_with_a_text_config_lends_its_tensors_too(tmp_path):
    target = make_target_stub(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    expected = flat(load(drafter, target))
    inner = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": inner}))
    rewrite(target, lambda tensors: {name.replace("model.", "model.language_model."): t for name, t in tensors.items()})
    assert torch.equal(flat(load(drafter, target))["embedding"], expected["embedding"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "vocab_size 211.* has 48 and 300"),
        ({"hidden_size": 64}, "hidden_size 48.* has 64 and 211"),
        ({"num_hidden_layers": 5}, "has 5 layers"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_the_numbers(changes, message, target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    edit(target, **changes)
    with pytest.raises(ValueError, match=message):
        load(drafter, target)


def test_the_mask_vector_comes_from_checkpoint_side_file_or_embedding(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load(drafter, target).mask_row, embedding[16])
    side = torch.arange(48.0)
    save_file({"mask_embedding": side[None]}, drafter / "mask_embedding.safetensors")
    assert torch.equal(load(drafter, target).mask_row, side)
    rewrite(drafter, lambda tensors: tensors | {"mask_embedding": 2 * side})
    assert torch.equal(load(drafter, target).mask_row, 2 * side)


def test_a_pickled_mask_vector_is_refused_and_never_read(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    (drafter / "mask_embedding.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"mask_embedding.pt is a pickle.*mask_embedding.safetensors"):
        load(drafter, target)
    save_file({"mask_embedding": torch.ones(47)}, drafter / "mask_embedding.safetensors")
    with pytest.raises(ValueError, match=r"\[47\], expected floats \[48\]"):
        load(drafter, target)


def test_the_mask_token_is_looked_up_by_its_text(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1, mask_token_id=None)
    with pytest.raises(ValueError, match=r"<\|MASK\|>"):
        load(drafter, target)
    tokenizer = {"added_tokens": [{"id": 9, "content": "<|MASK|>"}], "model": {"vocab": {"<m>": 8}}}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load(drafter, target).mask_row, embedding[9])
    edit(drafter, mask_token="<m>")
    assert torch.equal(load(drafter, target).mask_row, embedding[8])


def reduced(drafter: Path, ids: torch.Tensor, names: tuple[str, ...]) -> None:
    edit(drafter, draft_vocab_size=len(ids))
    marked = torch.zeros(211, dtype=torch.bool)
    marked[ids] = True
    maps = {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    rewrite(drafter, lambda tensors: tensors | {name: maps[name] for name in names})


@pytest.mark.parametrize("names", [("d2t", "t2d"), ("d2t",), ("t2d",)])
def test_a_reduced_vocabulary_takes_rows_of_the_targets_head(names, target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    ids = torch.tensor([3, 5, 8, 100, 210])
    reduced(drafter, ids, names)
    model = load(drafter, target)
    assert torch.equal(model.head, load_file(target / "model.safetensors")["lm_head.weight"][ids])
    assert model.token_ids(torch.tensor([0, 4])).tolist() == [3, 210]


def test_an_own_head_and_embedding_win(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    ids = torch.tensor([3, 5, 8])
    reduced(drafter, ids, ("d2t",))
    own = {"lm_head.weight": torch.rand(3, 48), "embed_tokens.weight": torch.rand(211, 48)}
    rewrite(drafter, lambda tensors: tensors | own)
    model = load(drafter, target)
    assert torch.equal(model.head, own["lm_head.weight"])
    assert torch.equal(model.mask_row, own["embed_tokens.weight"][16])


def test_vocabulary_maps_that_do_not_fit_are_refused(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V1)
    edit(drafter, draft_vocab_size=3)
    with pytest.raises(ValueError, match="no d2t or t2d"):
        load(drafter, target)
    rewrite(drafter, lambda tensors: tensors | {"d2t": torch.tensor([3, 4, 209])})
    with pytest.raises(ValueError, match=r"\[3, 211\]"):
        load(drafter, target)
    rewrite(drafter, lambda tensors: tensors | {"d2t": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(ValueError, match="3 head rows"):
        load(drafter, target)


def test_random_weights_need_no_files(target, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", target, V2)
    (drafter / "model.safetensors").unlink()
    (target / "model.safetensors").unlink()
    model = load(drafter, target, load_format="dummy")
    assert model.selector is not None
    assert model.head.shape == (211, 48)
    with pytest.raises(ValueError, match="safetensors"):
        load(drafter, target)


def test_weights_of_the_target_are_mapped_not_copied(tmp_path):
    target = make_target_stub(tmp_path / "target")
    model = load(make_drafter(tmp_path / "drafter", target, V1), target)
    maps = Path("/proc/self/maps").read_text()
    spans = [
        line.split()[0].split("-") for line in maps.splitlines() if line.endswith(str(target / "model.safetensors"))
    ]
    address = model.head.data_ptr()
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_end_of_sequence_ids_come_from_both_files(target):
    assert eos_token_ids(target) == []
    edit(target, eos_token_id=7)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert eos_token_ids(target) == [7, 9]
    edit(target, text_config={"eos_token_id": 8})
    assert eos_token_ids(target) == [7, 8, 9]
