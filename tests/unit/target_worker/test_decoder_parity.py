"""The decoder against transformers: every family, every way to cut a sequence into forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from target_worker.runner import Segment
from tests.support.tiny_target import FAMILIES, TargetRig, make_target, oracle_logits, tokens_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("Llama", {"num_key_value_heads": 6, "head_dim": 16, "hidden_act": "gelu"}),
    ("Llama", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ("Qwen2", {"rope_parameters": YARN}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"attention_bias": True}),
    ("Qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.3}}),
]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    scale = want.abs().max().item()
    assert (got - want).abs().max().item() <= tolerance * max(1.0, scale), f"scale {scale}"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return make_target(folder, request.param), folder


@pytest.mark.parametrize(("name", "overrides"), VARIANTS)
def test_logits_equal_transformers_for_every_config_flag(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_target(tmp_path, name, **overrides)
    rig = TargetRig(tmp_path)
    tokens = tokens_of(1, 90)
    close(rig.logits(rig.open(1, 90), tokens), oracle_logits(oracle, tokens))


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    oracle = make_target(tmp_path, "Qwen3", shard="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    rig = TargetRig(tmp_path)
    tokens = tokens_of(2, 40)
    close(rig.logits(rig.open(1, 40), tokens), oracle_logits(oracle, tokens))


@pytest.mark.parametrize("chunk", [1, 3, 7, 31])
def test_a_prompt_in_chunks_equals_the_whole(family: tuple[Any, Path], chunk: int) -> None:
    oracle, folder = family
    rig = TargetRig(folder)
    tokens = tokens_of(3, 62)
    close(rig.logits(rig.open(1, 62), tokens, chunk), oracle_logits(oracle, tokens))


def test_a_prompt_longer_than_a_tile_equals_the_whole(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder, num_pages=200)
    tokens = tokens_of(4, 330)
    close(rig.logits(rig.open(1, 330), tokens, 300), oracle_logits(oracle, tokens))


def test_one_forward_mixes_prompts_blocks_and_single_tokens(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder)
    lens = {1: 61, 2: 9, 3: 30, 4: 12, 5: 70}
    seqs = {rid: tokens_of(10 + rid, num) for rid, num in lens.items()}
    done = {1: 60, 2: 1, 3: 22, 4: 0, 5: 20}
    rows = {rid: rig.open(rid, num) for rid, num in lens.items()}
    for rid, num in done.items():
        if num:
            rig.logits(rows[rid], seqs[rid][:num], 13)
    wanted = {1: 1, 2: 8, 3: 8, 4: 1, 5: 0}
    segments = [Segment(rows[rid], done[rid], seqs[rid][done[rid] :], wanted[rid]) for rid in (3, 1, 5, 2, 4)]
    got = rig.runner.forward(segments)
    want = torch.cat([oracle_logits(oracle, seqs[rid])[lens[rid] - wanted[rid] :] for rid in (3, 1, 5, 2, 4)])
    close(got, want)


def test_slots_of_rejected_rows_are_reused(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder)
    row = rig.open(1, 80)
    tokens = tokens_of(5, 10)
    rig.logits(row, tokens)
    for step in range(9):
        right, wrong = tokens_of(100 + step, 1 + step % 4), tokens_of(200 + step, 8)
        block = (right + wrong)[:8]
        got = rig.runner.forward([Segment(row, len(tokens), block, 8)])
        want = oracle_logits(oracle, tokens + block)[len(tokens) :]
        close(got, want)
        tokens = tokens + right


def test_pages_of_a_closed_request_serve_the_next_one(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder, num_pages=20)
    for rid in range(1, 6):
        tokens = tokens_of(rid, 50 - rid)
        close(rig.logits(rig.open(rid, 60), tokens, 11), oracle_logits(oracle, tokens))
        rig.close(rid)


def test_greedy_text_equals_transformers_generate(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder)
    for seed in range(20):
        prompt = tokens_of(seed, 3 + seed)
        want = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        row = rig.open(1, len(want))
        tokens = list(prompt)
        logits = rig.logits(row, tokens)[-1]
        while len(tokens) < len(want):
            tokens.append(int(logits.argmax()))
            if len(tokens) < len(want):
                logits = rig.runner.forward([Segment(row, len(tokens) - 1, tokens[-1:], 1)])[0]
        rig.close(1)
        assert tokens == want


def test_bfloat16_stays_close_to_transformers_bfloat16(tmp_path: Path) -> None:
    oracle = make_target(tmp_path, "Llama", dtype=torch.bfloat16)
    rig = TargetRig(tmp_path, dtype="bfloat16")
    assert rig.model.dtype == rig.pool.shape.dtype == torch.bfloat16
    tokens = tokens_of(6, 60)
    close(rig.logits(rig.open(1, 60), tokens, 17), oracle_logits(oracle, tokens), 2e-2)


def test_features_are_the_residual_after_the_tapped_layers(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    rig = TargetRig(folder, taps=[1, 0])
    seqs = [tokens_of(1, 20), tokens_of(2, 9)]
    rows = [rig.open(1, 20), rig.open(2, 9)]
    rig.runner.forward([Segment(row, 0, seq, 1) for row, seq in zip(rows, seqs, strict=True)])
    first = 0
    for seq in seqs:
        with torch.no_grad():
            states = oracle(torch.tensor([seq]), output_hidden_states=True).hidden_states
        want = torch.cat((states[2][0], states[1][0]), dim=-1)
        close(rig.features[first : first + len(seq)], want)
        first += len(seq)
