"""What prompts are made of, and what is kept out of them."""

import json
import random

import numpy as np
import pytest

from draft_worker.train import prompt_sources, prompts, questions
from draft_worker.train.chat_topics import chat_request
from draft_worker.train.config import GenerateConfig, PromptConfig
from draft_worker.train.generate import Answers, Job
from draft_worker.train.sequences import from_lists, read_sequences
from memsvc.wire.text import ChatMessage, ChatPrompt
from tests.support.tiny_server import write_tiny_model
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder

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


def test_a_file_of_questions_that_is_not_there_is_named_in_one_line(tmp_path, capsys):
    target = write_tiny_model(tmp_path / "target")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        prompts.main(["--target", str(target), "--out", str(tmp_path / "p"), "--gsm8k", "/nowhere"])
    assert capsys.readouterr().err == "error: --gsm8k /nowhere does not exist\n"


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


def test_a_targets_own_questions_become_prompts_in_its_template(tmp_path, capsys):
    target = write_tiny_model(tmp_path / "target")
    command = ["--target", str(target), "--out", str(tmp_path / "q"), "--device", "cpu", "--loop-share", "1"]
    questions.main([*command, "--samples", "400", "--slots", "50", "--max-new", "60", "--temperature", "3"])
    found = read_sequences(tmp_path / "q")
    assert json.loads(capsys.readouterr().out)["prompts"] == len(found) > 5
    frame = questions.frame_of(target)
    for index in range(len(found)):
        tokens = found[index].tolist()
        asked = tokens[len(frame.before) : -len(frame.after)]
        assert tokens == [*frame.before, *asked, *frame.after]
        assert len(asked) >= 6
        assert 2 not in asked
    encoder = PromptEncoder(TokenizerConfig(run_dir="", model_path=str(target), context_len=1024))
    whole = encoder.encode(encoder.text_of(ChatPrompt([ChatMessage("user", "what is two")])))
    assert list(whole)[: len(frame.before)] == frame.before
    assert list(whole)[-len(frame.after) :] == frame.after


def test_questions_that_did_not_end_or_were_not_sampled_are_no_prompts():
    config = GenerateConfig()
    answers = Answers(from_lists([[5]], 97, [0]), config)
    long = [*range(10, 20), 2]
    made = ((0.0, long), (0.8, long), (0.8, long[:-1]), (0.8, [7, 2]), (0.8, long), (0.8, [*range(30, 40), 2]))
    answers.jobs = [Job(0, temperature) for temperature, _ in made]
    answers.answers = [np.array(tokens) for _, tokens in made]
    found = questions.chosen(answers, questions.Frame([1], [2, 3]), [2], 97)
    assert [found[index].tolist() for index in range(len(found))] == [
        [1, *range(10, 20), 2, 3],
        [1, *range(30, 40), 2, 3],
    ]
    assert set(found.groups) == {questions.KIND}
