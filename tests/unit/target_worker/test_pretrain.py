"""The embedded model's training: the network is transformers', runs are exact, the folder is one that serves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from memsvc.device.gated_delta import DeltaRows, gated_delta_rule
from target_worker.model.config import TargetShape
from target_worker.model.weights import load_target
from target_worker.train import pretrain
from target_worker.train.config import NetworkConfig, PretrainConfig
from target_worker.train.delta import chunked_delta_rule
from target_worker.train.network import first_params, forms, hidden_states
from target_worker.train.pretrain import LOG_FILE, Pretraining
from target_worker.train.stream import Stream, held_out_sequences
from target_worker.train.tokenizer import END_OF_TEXT

NETWORK = NetworkConfig(
    vocab=97, hidden=48, mlp_width=80, layers=4, heads=4, kv_heads=2, head_dim=16, linear_k_heads=2, linear_v_heads=4,
    linear_dim=16, positions=128,
)  # fmt: skip
CONFIG = PretrainConfig(
    steps=6, sequences_per_step=2, warmup_steps=2, log_every=2, eval_every=3, eval_sequences=3, lr=1e-2
)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokens of a made-up language in which each word tells the next two, for most of the time."""

    def read_tokens(_folder: Path, stem: str) -> np.ndarray:
        rng = np.random.default_rng(len(stem))
        phrases = np.random.default_rng(0).integers(5, 97, (20, 8))
        return phrases[rng.integers(0, 20, 300)].reshape(-1).astype(np.uint16)

    monkeypatch.setattr(pretrain, "read_tokens", read_tokens)
    return Path("unused")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocab = {END_OF_TEXT: 3} | {f"t{i}": i for i in range(97) if i != 3}
    Tokenizer(BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def random_params(seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters in which no constant hides a mistake."""
    params = first_params(NETWORK, seed, "cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in params.items():
            if tensor.dim() > 1:
                tensor.mul_(8)
            elif not name.endswith(("A_log", "dt_bias")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return params


def transformers_model(folder: Path, params: dict[str, torch.Tensor]) -> Any:
    # With an end-of-sequence id transformers gives that row of the embedding no gradient.
    config = NETWORK.to_json(0, "float32") | {"pad_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.detach().contiguous() for name, tensor in params.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    params = random_params()
    model = transformers_model(tmp_path, params)
    tokens = torch.randint(0, 97, (3, 192), generator=torch.Generator().manual_seed(1))
    theirs = model(tokens).logits
    ours = hidden_states(NETWORK, params, tokens) @ params["model.embed_tokens.weight"].T
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    (theirs * weights).sum().backward()
    (ours * weights).sum().backward()
    found = dict(model.named_parameters())
    assert found.keys() == params.keys()
    for name, tensor in params.items():
        wanted = found[name].grad
        torch.testing.assert_close(tensor.grad, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0, msg=name)


def test_the_rule_is_the_one_that_serves() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 192, 2, 16) for _ in range(2))
    v, g, beta = torch.randn(2, 192, 4, 8), -torch.rand(2, 192, 4).pow(4) * 5, torch.rand(2, 192, 4)
    wanted, _ = gated_delta_rule(DeltaRows(q, k, v, g, beta), torch.zeros(2, 4, 16, 8), [0, 0], 0)
    torch.testing.assert_close(chunked_delta_rule(q, k, v, g, beta), wanted, atol=1e-5, rtol=0)


def run(corpus: Path, state: Path, **changes: Any) -> Pretraining:
    config = PretrainConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | changes)
    training = Pretraining(NETWORK, config, corpus, state, "cpu")
    training.run()
    return training


def test_a_run_in_slices_is_the_run_in_one_piece(corpus: Path, tmp_path: Path) -> None:
    whole = run(corpus, tmp_path / "whole")
    first = Pretraining(NETWORK, CONFIG, corpus, tmp_path / "parts", "cpu")
    for _ in range(2):
        first._step()
    first.save()
    again = run(corpus, tmp_path / "parts")
    assert again.progress.step == 6
    assert again.progress.tokens == 6 * 2 * 128
    for name, tensor in whole.params.items():
        assert torch.equal(tensor, again.params[name]), name


def test_the_loss_falls_and_the_log_says_so(corpus: Path, tmp_path: Path) -> None:
    training = run(corpus, tmp_path, steps=40)
    lines = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    held_out = [line["held_out_loss"] for line in lines if line["kind"] == "held_out"]
    assert len(held_out) == 14
    assert held_out[-1] < held_out[0] - 0.5
    assert held_out[-1] == pytest.approx(training.held_out_loss(), abs=1e-4)


def test_the_folder_loads_in_the_server_with_the_weights_of_the_run(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    training = run(corpus, tmp_path / "state", steps=2)
    training.export(tokenizer, tmp_path / "model")
    shape = TargetShape.from_folder(tmp_path / "model")
    assert (shape.eos_ids, shape.num_linear_layers, shape.num_full_layers, shape.stored_dtype) == (
        (3,),
        3,
        1,
        "bfloat16",
    )
    assert shape.rope.rotary_dim == NETWORK.rotary_dim
    load_target(tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == forms(NETWORK).keys()
    assert all(torch.equal(found[name], tensor.detach().bfloat16()) for name, tensor in training.params.items())
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_state_of_another_network_is_refused(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, steps=1)
    other = NetworkConfig(**{name: getattr(NETWORK, name) for name in NETWORK.__dataclass_fields__} | {"mlp_width": 64})
    with pytest.raises(ValueError, match="holds a run of"):
        Pretraining(other, CONFIG, corpus, tmp_path, "cpu")


def test_an_epoch_reads_each_sequence_once_and_the_next_is_cut_elsewhere() -> None:
    stream = Stream(np.arange(1000, dtype=np.uint16), 64, seed=3)
    per_epoch = stream.per_epoch
    first, second = stream.sequences(0, per_epoch), stream.sequences(per_epoch, per_epoch)
    assert len(set(first[:, 0].tolist())) == per_epoch
    assert (first[:, 1:] - first[:, :-1] == 1).all()
    assert {int(start) % 64 for start in first[:, 0]} != {int(start) % 64 for start in second[:, 0]}
    assert (stream.sequences(5, 3) == first[5:8]).all()


def test_too_few_tokens_and_too_small_a_vocabulary_are_refused_with_the_numbers(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="100 tokens are too few for sequences of 64"):
        Stream(np.zeros(100, dtype=np.uint16), 64, 0)
    with pytest.raises(ValueError, match="10 held-out tokens are too few"):
        held_out_sequences(np.zeros(10, dtype=np.uint16), 64, 3)
    small = NetworkConfig(**{name: getattr(NETWORK, name) for name in NETWORK.__dataclass_fields__} | {"vocab": 50})
    with pytest.raises(ValueError, match="holds token 96, --vocab is 50"):
        Pretraining(small, CONFIG, corpus, tmp_path, "cpu")
    with pytest.raises(ValueError, match="--layers 6 is not a multiple of --interval 4"):
        NetworkConfig(layers=6)
