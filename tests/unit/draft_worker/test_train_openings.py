"""Openings of a model's own texts: what they are cut from, how many, and what stands in the held-out file."""

import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer

from draft_worker.train import openings, prompts
from draft_worker.train.config import PromptConfig
from draft_worker.train.evaluate import read_prompts
from draft_worker.train.openings import draw, without_ends
from draft_worker.train.sequences import read_sequences
from target_worker.train.shards import write_shards
from tests.support.tiny_server import write_tiny_model
from tests.support.tiny_tokenizer import training_text

EOS = 2
LINES = training_text(60)


def sized(**changes):
    return PromptConfig(least_opening=5, most_opening=12, **changes)


def numbered(lens, start=10):
    """Documents without a token in common."""
    edges = np.cumsum([start, *lens])
    return [np.arange(a, b, dtype=np.uint16) for a, b in pairwise(edges)]


@pytest.fixture
def texts(tmp_path):
    """A target, shards of both stems, and the tokenizer."""
    target = write_tiny_model(tmp_path / "target")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    for stem, lines in (("train", LINES[:40]), ("heldout", LINES[40:])):
        documents = [np.array([*tokenizer.encode(line).ids, EOS], dtype=np.uint16) for line in lines]
        write_shards(tmp_path / "shards", stem, documents)
    return target, tmp_path / "shards", tokenizer


def test_openings_lie_within_one_text_and_have_the_lengths_asked_for():
    documents = numbered([40, 5, 4, 90])
    found = draw(documents, 60, sized(), lambda _opening: True)
    assert len(set(found)) == 60
    assert {len(opening) for opening in found} == set(range(5, 13))
    for opening in found:
        assert any(set(opening) <= set(document.tolist()) for document in documents)
        assert np.array_equal(np.diff(opening), np.ones(len(opening) - 1))


def test_half_of_them_begin_texts_each_text_once_as_long_as_there_are_any():
    documents = numbered([50] * 30)
    first = {int(document[0]) for document in documents}
    for num, least, most in ((40, 19, 25), (200, 30, 40)):
        found = draw(documents, num, sized(), lambda _opening: True)
        begins = [opening[0] for opening in found if opening[0] in first]
        assert least <= len(begins) <= most
        assert len(set(begins)) >= min(30, len(begins) - 2)


def test_the_seed_decides_which():
    documents = numbered([50] * 30)
    assert draw(documents, 9, sized(), bool) == draw(documents, 9, sized(), bool)
    assert draw(documents, 9, sized(), bool) != draw(documents, 9, sized(seed=1), bool)


def test_too_few_texts_are_reported_with_the_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"1 texts of .* gave 1 of 2 openings"):
        draw(numbered([5]), 2, sized(openings=tmp_path), bool)
    with pytest.raises(ValueError, match=r"2 texts of .* gave 0 of 2 openings"):
        draw(numbered([4, 3]), 2, sized(openings=tmp_path), bool)


def test_ends_of_texts_are_taken_off():
    documents = [np.array([EOS, 5, EOS, 6, EOS]), np.array([7, 8]), np.array([EOS])]
    assert [part.tolist() for part in without_ends(documents, [EOS])] == [[5, EOS, 6], [7, 8], []]


def test_prompts_are_openings_of_training_texts_and_the_file_holds_others(texts, tmp_path, capsys):
    target, shards, tokenizer = texts
    flags = ["--num-openings", "50", "--held-out-openings", "8", "--least-opening", "5", "--most-opening", "12"]
    file = tmp_path / "held" / "out.jsonl"
    command = ["--target", str(target), "--out", str(tmp_path / "p"), "--openings", str(shards)]
    prompts.main([*command, *flags, "--held-out-file", str(file)])
    facts = json.loads(capsys.readouterr().out)
    assert facts["kinds"] == {"maths": 0, "code": 0, "docs": 0, "chat": 0, "openings": 50}
    found = read_sequences(tmp_path / "p")
    assert found.prompt_lens.tolist() == found.lens.tolist()
    assert set(found.groups) == {openings.KIND}
    asked = read_prompts(file)
    assert len(set(asked)) == 8
    train, held_out = "\n".join(LINES[:40]), "\n".join(LINES[40:])
    for index in range(50):
        assert tokenizer.decode(found[index].tolist()).strip("\ufffd") in train
    for text in asked:
        assert text in held_out
        assert text not in train
        assert 5 <= len(tokenizer.encode(text)) <= 12


def test_text_that_would_be_read_as_other_tokens_is_not_asked(texts, tmp_path):
    target, shards, tokenizer = texts
    word = tokenizer.encode(" torun mi kalo sta ren").ids
    letters = [tokenizer.token_to_id(letter) for letter in "storunstorun"][: len(word)]
    half = tokenizer.encode(" torun mi kalo sta ren \u00fc").ids[:-1][-len(word) :]
    special = [*word[:-1], 1, word[-1]]
    assert len(letters) == len(half) == len(word)
    documents = [np.array(ids, dtype=np.uint16) for ids in (letters, half, special[1:], word)]
    write_shards(shards, "heldout", documents)
    file = tmp_path / "out.jsonl"
    sizes = {"least_opening": len(word), "most_opening": 20, "openings": shards, "held_out_file": file}
    openings.write_held_out(target, PromptConfig(held_out_openings=1, **sizes))
    assert read_prompts(file) == [" torun mi kalo sta ren"]
    write_shards(shards, "heldout", documents[:3])
    with pytest.raises(ValueError, match="0 of 1"):
        openings.write_held_out(target, PromptConfig(held_out_openings=1, seed=3, **sizes))


def test_held_out_openings_need_a_place_to_go(tmp_path, capsys):
    command = ["--target", "x", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        prompts.main([*command, "--held-out-openings", "5", "--openings", str(tmp_path)])
    assert "--held-out-file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        prompts.main([*command, "--least-opening", "9", "--most-opening", "8"])
    assert "--least-opening is 9" in capsys.readouterr().err
