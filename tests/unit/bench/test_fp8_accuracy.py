"""What is said of a variant beside bf16, from probabilities that are known."""

import math
from pathlib import Path

import pytest
import torch

from target_worker.model.weights import load_target
from tests.bench.fp8_accuracy import Reading, Texts, compared, greedy, read, weight_errors
from tests.support.tiny_target import make_target, tokens_of


def reading(rows: list[list[list[float]]], perplexity: float) -> Reading:
    return Reading(rows=[torch.tensor(row).log() for row in rows], perplexity=perplexity)


def test_a_variant_is_counted_token_by_token_and_answer_by_answer() -> None:
    bf16 = reading([[[0.6, 0.4], [0.3, 0.7]], [[0.5, 0.5]]], 4.0)
    assert compared(bf16, bf16) == {
        "perplexity": 4.0, "perplexity_over_bf16": 1.0, "same_token": 1.0, "same_token_where_sure": 1.0,
        "same_answers": 2, "mean_divergence": 0.0,
    }  # fmt: skip
    found = compared(reading([[[0.6, 0.4], [0.6, 0.4]], [[0.5, 0.5]]], 5.0), bf16)
    assert (found["perplexity_over_bf16"], found["same_token"], found["same_answers"]) == (1.25, 0.6667, 1)
    assert found["same_token_where_sure"] == 0.5
    divergence = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    assert found["mean_divergence"] == pytest.approx(divergence / 3, abs=1e-6)


def test_a_model_agrees_with_its_own_greedy_answers(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    model, _ = load_target(tmp_path, "float32")
    texts = Texts(prompts=[tokens_of(1, 5), tokens_of(2, 9)], windows=[tokens_of(3, 20)])
    answers = greedy(model, texts.prompts, 6)
    found = read(model, texts, answers)
    assert [row.argmax(1).tolist() for row in found.rows] == answers
    assert found.perplexity > 1


def test_keys_and_values_in_8_bits_change_probabilities_a_little(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    model, _ = load_target(tmp_path, "float32")
    texts = Texts(prompts=[tokens_of(1, 5), tokens_of(2, 9)], windows=[tokens_of(3, 20)])
    answers = greedy(model, texts.prompts, 6)
    whole, short = (read(model, texts, answers, has_fp8_kv=has_fp8) for has_fp8 in (False, True))
    assert whole.perplexity != short.perplexity == pytest.approx(whole.perplexity, rel=0.1)
    changes = (torch.cat(short.rows).exp() - torch.cat(whole.rows).exp()).abs()
    assert 0 < changes.max() < 0.5


def test_blocks_made_rows_have_both_errors(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama", hidden_size=192, intermediate_size=384)
    errors = weight_errors(tmp_path)
    assert 0.01 < errors["rows"] < 0.04
    assert errors["blocks"] < errors["blocks_made_rows"] < 1.6 * errors["blocks"]
