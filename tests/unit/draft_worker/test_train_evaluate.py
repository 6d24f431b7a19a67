import json

import pytest

from draft_worker.train.evaluate import Answer, EvaluateConfig, figures, is_loop, read_prompts


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
    assert figures([loop], EvaluateConfig(loop_share=1.0))["accept_length"] == 4.0


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
