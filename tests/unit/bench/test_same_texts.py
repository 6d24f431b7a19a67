"""Where greedy answers part: with a tiny model whose greedy answers are computed here, and in a server's records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from draft_worker.train.target import FrozenTarget
from target_worker.model.decoder import Decoder
from target_worker.model.weights import load_target
from tests.bench import same_texts
from tests.bench.same_texts_compare import compare, report
from tests.bench.served_models import find_model
from tests.bench.short_prompts import PROMPTS
from tests.bench.text_gap import AnswerTokens, gap_of
from tests.support.embedded_model import EMBEDDED, EMBEDDED_DRAFT
from tests.support.tiny_server import write_tiny_model

PROMPT = "the quiet river"
RED, OLD, SHORT = " a small red boat", " a small old boat", " a small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_target(folder, "float32")[0]


@pytest.fixture(scope="module")
def ids_of(folder: Path) -> Callable[[str], list[int]]:
    """Of a text after the prompt."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def next_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    _, hidden = FrozenTarget(model, ()).read(torch.tensor([ids]))
    return model.logits(hidden[-1:])[0].float()


def record(texts: list[tuple[str, int]], **config: Any) -> dict[str, Any]:
    answers = [
        {"prompt_sha256": same_texts.sha(PROMPT), "text": text, "output_tokens": num, "prompt_tokens": 4,
         "cached_tokens": 0, "histogram": [2, num], "num_drafts": 1}
        for text, num in texts
    ]  # fmt: skip
    return {
        "config": {"max_tokens": 8, "raw": True, "target": "t"} | config, "accept_length": 2.0,
        "accept_length_error": 0.1, "answers": answers,
    }  # fmt: skip


def test_answers_part_at_the_first_other_token(folder: Path, ids_of: Callable[[str], list[int]]):
    tokens, red, old = AnswerTokens(folder, raw=True), ids_of(RED), ids_of(OLD)
    parting = tokens.parting(PROMPT, ((RED, len(red)), (OLD, len(old))))
    assert parting is not None
    num = len(parting.common)
    assert parting.common == red[:num] == old[:num]
    assert parting.tokens == (red[num], old[num])
    assert red[num] != old[num]
    assert RED.startswith(SHORT + parting.texts[0])
    assert parting.is_sure
    for nums in ((len(red) + 2, len(old)), (len(red), len(old) - 1)):
        wrong = tokens.parting(PROMPT, ((RED, nums[0]), (OLD, nums[1])))
        assert wrong is not None
        assert not wrong.is_sure


def test_an_answer_that_ends_parts_by_its_end(folder: Path, ids_of: Callable[[str], list[int]]):
    tokens, num = AnswerTokens(folder, raw=True), len(ids_of(SHORT))
    parting = tokens.parting(PROMPT, ((SHORT, num + 1), (OLD, len(ids_of(OLD)))))
    assert parting is not None
    assert parting.texts[0] == "<end>"
    assert parting.tokens == (tokens.end_ids[0], ids_of(OLD)[num])
    assert parting.is_sure
    assert tokens.parting(PROMPT, ((SHORT, num), (SHORT, num))) is None


def test_the_gap_is_the_models_own(folder: Path, model: Decoder, ids_of: Callable[[str], list[int]]):
    tokens = AnswerTokens(folder, raw=True)
    parting = tokens.parting(PROMPT, ((RED, len(ids_of(RED))), (OLD, len(ids_of(OLD)))))
    assert parting is not None
    gap = gap_of(model, parting, tokens.end_ids)
    rows = [next_logits(model, parting.prompt_ids + parting.common[:n]) for n in range(len(parting.common) + 1)]
    a, b = (float(rows[-1][token]) for token in parting.tokens)
    assert gap.gap == pytest.approx(a - b, abs=1e-5)
    assert gap.behind == pytest.approx(float(rows[-1].max()) - max(a, b), abs=1e-5)
    off = max(float(row.max() - row[token]) for row, token in zip(rows, parting.common, strict=False))
    assert gap.off == pytest.approx(off, abs=1e-5)
    most = torch.tensor(max(a, b)).abs()
    assert gap.spacing == pytest.approx(float(torch.nextafter(most, torch.tensor(9.0)) - most))


def test_the_end_is_the_likeliest_of_all_end_tokens(folder: Path, model: Decoder):
    tokens = AnswerTokens(folder, raw=True)
    parting = tokens.parting(PROMPT, (("", 1), (" a", 1)))
    assert parting is not None
    assert parting.common == []
    row = next_logits(model, parting.prompt_ids)
    many = (tokens.end_ids[0], int(row.argmax()))
    gap = gap_of(model, parting, many)
    assert gap.gap == pytest.approx(float(row.max() - row[parting.tokens[1]]), abs=1e-5)
    assert (gap.behind, gap.off) == (pytest.approx(0, abs=1e-6), 0.0)


def test_records_are_compared_answer_by_answer(folder: Path):
    a = record([(RED, 4), (" a", 2), ("same", 3)], target=str(folder))
    b = record([(OLD, 4), (" a", 3), ("same", 3)], target=str(folder))
    b["accept_length"] = 1.5
    found = compare(a, b, {same_texts.sha(PROMPT): PROMPT}, str(folder), ["float32", "bfloat16"])
    assert (found.num, found.num_equal) == (3, 1)
    first, second = found.differences
    assert set(first.gaps) == {"float32", "bfloat16"}
    assert second.parting is None
    assert found.equal_accept_lengths == (1.6, 1.6)
    text = report(found)
    assert "prompt 0 at token " in text
    assert "tokens are not as many as were counted" in text
    assert "prompt 1: the texts differ, in no whole token" in text
    assert "equal 1 of 3" in text
    assert "ratio 0.7500" in text
    assert not found.passes(1e9)
    json.dumps(found.as_json())


def test_close_calls_are_let_pass_only_between_the_likeliest(folder: Path, model: Decoder):
    tokens = AnswerTokens(folder, raw=True)
    row = next_logits(model, list(tokens.parting(PROMPT, (("", 1), (" a", 1))).prompt_ids))  # type: ignore[union-attr]
    gap = float(row.max() - row.min())
    a, b = record([(" a small", 2)]), record([(" a red", 2)])
    found = compare(a, b, {same_texts.sha(PROMPT): PROMPT}, str(folder), ["float32"])
    (one,) = found.differences
    assert found.passes(10 * gap)
    needed = max(abs(one.gaps["float32"].gap), one.gaps["float32"].behind, one.gaps["float32"].off)
    assert one.gaps["float32"].off > 0
    assert not found.passes(0.999 * needed)
    assert found.passes(needed)


def test_records_of_other_questions_are_refused():
    a = record([("x", 1)])
    with pytest.raises(ValueError, match="max_tokens is 8 in one record and 9"):
        compare(a, record([("x", 1)], max_tokens=9), {}, "", [])
    with pytest.raises(ValueError, match="other prompts, 1 and 2"):
        compare(a, record([("x", 1), ("y", 1)]), {}, "", [])
    with pytest.raises(ValueError, match="prompt 0 is not known"):
        compare(record([("x", 1)]), record([("y", 1)]), {}, str(EMBEDDED), [])
    assert compare(a, a, {}, "no such target", ["float32"]).passes(0.0)


def test_models_are_found_by_name_with_the_drafters_that_come_with_them(folder: Path):
    hybrid = find_model("tiny-hybrid")
    assert (hybrid.folder, hybrid.draft) == (EMBEDDED, EMBEDDED_DRAFT)
    assert hybrid.flags(["--threads", "1"])[-4:] == ["--spec-tokens", "7", "--threads", "1"]
    assert "--spec-tokens" not in hybrid.flags(["--spec-widths", "0,3"])
    assert find_model("tiny-hybrid", "none").flags([])[-2:] == ["--speculative-algorithm", "none"]
    assert find_model(str(folder)).draft is None
    with pytest.raises(ValueError, match="nowhere holds no"):
        find_model(str(folder), "nowhere")
    assert len(set(PROMPTS)) == len(PROMPTS) >= 20


@pytest.mark.slow
def test_texts_of_a_server_are_the_same_with_and_without_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(tmp_path / name) for name in ("with.json", "without.json")]
    asked = ["--target", "tiny-hybrid", "--raw", "--num", "3", "--max-tokens", "24"]
    flags = ["--", "--threads", "1", "--dtype", "float32", "--mem-bytes", "64M"]
    assert same_texts.main(["record", "--json", files[0], *asked, *flags]) == 0
    assert same_texts.main(["record", "--json", files[1], *asked, "--draft", "none", *flags]) == 0
    assert "accept_length=1.0" in capsys.readouterr().out
    assert same_texts.main(["compare", *files, "--dtypes", "float32"]) == 0
    assert "equal 3 of 3 answers of up to 24 tokens" in capsys.readouterr().out
    whole = json.loads(Path(files[1]).read_text())
    whole["answers"][1] |= {"text": " and", "output_tokens": 1}
    Path(files[1]).write_text(json.dumps(whole))
    assert same_texts.main(["compare", *files, "--dtypes", "float32"]) == 1
    out = capsys.readouterr().out
    assert "prompt 1 at token 0: " in out
    assert "equal 2 of 3" in out


def test_a_mistake_ends_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert same_texts.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "same_texts: " in capsys.readouterr().err
