"""Accept length, its error and its rounds, from answers that a server could have given."""

import json

import pytest

from draft_worker.train import evaluate
from draft_worker.train.evaluate import Answer, EvaluateConfig, figures, is_loop, read_prompts, with_width
from tests.support.model_folders import DRAFT, folder


def answer(text="one two three", histogram=(), tokens=5):
    return Answer(
        text=text, output_tokens=tokens, prompt_tokens=3, cached_tokens=0, histogram=list(histogram), num_drafts=3
    )


def test_figures_are_over_all_verify_steps_and_count_the_targets_own_token():
    found = figures([answer(histogram=[1, 2, 0, 3]), answer(histogram=[4, 0])], EvaluateConfig())
    assert found["n_steps"] == 10
    assert found["accept_per_position"] == [0.5, 0.3, 0.3]
    assert found["accept_length"] == pytest.approx(2.1)
    assert found["output_tokens"] == 10


def test_answers_in_a_loop_are_left_out():
    loop = answer("to be or not to be " * 30, histogram=[0, 0, 0, 9])
    config = EvaluateConfig()
    assert is_loop(loop.text, config)
    assert not is_loop("one two three", config)
    found = figures([loop, answer(histogram=[1, 1])], config)
    assert (found["accept_length"], found["num_loops"]) == (1.5, 1)
    assert found["accept_length_with_loops"] == pytest.approx(1 + 28 / 11, abs=1e-4)
    assert figures([loop], EvaluateConfig(loop_share=1.0))["accept_length"] == 4.0


def test_the_error_is_that_of_a_ratio_of_sums_over_answers():
    # Tokens and steps of three answers: 10 in 5, 6 in 2, 4 in 3; together 2 a step.
    counts = [[2, 1, 2, 0], [0, 1, 0, 1], [2, 1, 0, 0]]
    found = figures([answer(histogram=row) for row in counts], EvaluateConfig())
    assert found["accept_length"] == 2.0
    # Off by 0, 2 and -2: sqrt(8 * 3 / 2) / 10.
    assert found["accept_length_error"] == pytest.approx(12**0.5 / 10, abs=1e-4)
    assert figures([answer(histogram=[1, 1])], EvaluateConfig())["accept_length_error"] == 0.0


def test_each_round_says_how_many_answers_are_those_of_the_first_and_all_are_written(tmp_path, monkeypatch):
    told = iter(["a", "b", "a", "c", "d", "b"])
    monkeypatch.setattr(evaluate, "ask", lambda *_: answer(next(told), histogram=[0, 1]))
    file = tmp_path / "answers.jsonl"
    found = evaluate.evaluate("", ["x", "y"], EvaluateConfig(rounds=3), file)
    assert [one["num_same"] for one in found["rounds"]] == [2, 1, 1]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["round"], line["text"]) for line in lines] == list(zip([0, 0, 1, 1, 2, 2], "abacdb", strict=True))
    assert lines[0]["histogram"] == [0, 1]


def refused(url, prompts, *_):
    raise RuntimeError("HTTP 401: the key is wrong")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--url", "http://x", "--prompts", "/nowhere"], "--prompts /nowhere does not exist"),
        (["--draft", "/nowhere"], "--draft /nowhere does not exist"),
        (["--draft", ".", "--target", "/nowhere"], "/nowhere holds no config.json"),
        (["--url", "http://x"], "HTTP 401: the key is wrong"),
    ],
)
def test_a_users_mistake_is_one_line_and_no_traceback(tmp_path, monkeypatch, capsys, flags, reason):
    (tmp_path / "p").write_text("a prompt\n")
    monkeypatch.setattr(evaluate, "ask_all", refused)
    with pytest.raises(SystemExit, match="1"):
        evaluate.main(["--prompts", str(tmp_path / "p"), *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {reason}")


def test_no_drafts_means_a_length_of_one():
    assert figures([answer()], EvaluateConfig())["accept_length"] == 1.0


def test_prompts_come_one_a_line_or_as_json(tmp_path):
    file = tmp_path / "p.jsonl"
    records = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "d"]}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "plain line\n\n")
    assert read_prompts(file) == ["a", "b", "c", "plain line"]


def test_a_record_without_a_prompt_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"answer": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(file)


def test_blocks_are_as_long_as_the_drafter_was_trained_for_unless_flags_say_otherwise(tmp_path):
    draft = folder(tmp_path / "draft", DRAFT, block_size=6)
    assert with_width(draft, ["--threads", "1"]) == ["--spec-tokens", "5", "--threads", "1"]
    for flags in (["--spec-tokens", "auto"], ["--spec-widths=0,2"], ["--speculative-num-draft-tokens", "4"]):
        assert with_width(draft, flags) == flags
