import json
import random

import pytest

from draft_worker.train import prompt_sources, prompts
from draft_worker.train.chat_topics import chat_request
from draft_worker.train.config import PromptConfig
from draft_worker.train.sequences import read_sequences
from tests.support.tiny_server import write_tiny_model

SOURCE = '''
"""A module with a docstring that is long enough to be an opening of its own."""

class Thing:
    def area(self, width: float,
             height: float) -> float:
        """Area of a rectangle, which is the product of its two sides.

        Both must be positive; a rectangle without area is of no use here.
        """
        return width * height

def tiny():
    """Too short."""
'''


def test_stubs_end_with_their_docstring_and_stand_at_the_left_edge(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    stubs, docs = prompt_sources._pieces(tmp_path / "a.py")
    assert len(stubs) == 1
    assert stubs[0].startswith('def area(self, width: float,\n         height: float) -> float:\n    """Area')
    assert stubs[0].endswith('here.\n    """\n')
    assert "return" not in stubs[0]
    assert any(doc.startswith("A module with") for doc in docs)
    assert any(doc.startswith("Both must be") for doc in docs)


def test_files_that_are_no_python_are_passed_over(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:")
    assert prompt_sources._pieces(tmp_path / "a.py") == ([], [])


def test_held_out_questions_are_never_asked(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"question": f"question {n:03d}?"}) + "\n" for n in range(50)))
    made = "".join(prompt_sources.maths_prompts(file, 20, random.Random(0)))
    assert all(f"question {n:03d}" in made for n in range(30))
    assert not any(f"question {n:03d}" in made for n in range(30, 50))


def test_chat_requests_have_no_holes_and_seldom_repeat():
    made = [chat_request(random.Random(seed)) for seed in range(2000)]
    assert not any("{" in text or "}" in text for text in made)
    assert len(set(made)) > 1800
    assert len(prompt_sources.chat_prompts(500, random.Random(0))) == 500


@pytest.mark.parametrize("num", [3])
def test_a_file_holds_each_prompt_once_in_the_servers_encoding(tmp_path, monkeypatch, capsys, num):
    target = write_tiny_model(tmp_path / "target")
    monkeypatch.setattr(prompt_sources, "stubs_and_docs", lambda _rng: (["def f():\n"] * num, ["a doc"] * num))
    command = ["--target", str(target), "--out", str(tmp_path / "p"), "--num-chat", "20", "--num-code", str(num)]
    prompts.main([*command, "--max-prompt", "400"])
    found = read_sequences(tmp_path / "p")
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompts"] == len(found)
    assert facts["kinds"]["chat"] == 20
    assert len({found[index].tobytes() for index in range(len(found))}) == len(found)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = tokenizer.decode(found[0].tolist(), skip_special_tokens=False)
    assert text.rstrip().endswith("<|im_start|>assistant")


def test_prompts_that_are_too_long_are_left_out(tmp_path):
    target = write_tiny_model(tmp_path / "target")
    texts = {"chat": ["word " * 100, "hi"]}
    assert len(prompts.encode(texts, target, PromptConfig(max_prompt=60))) == 1
