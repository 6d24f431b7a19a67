"""Prompts, options, percentiles and the comparison of texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.load.call import Call, Outcome
from tests.load.compare import compare, main
from tests.load.options import LoadOptions, parse_options
from tests.load.progress import Progress
from tests.load.prompts import make_prompts, read_prompts
from tests.load.report import percentile, save_texts, without_folders
from tests.load.service import _sum_of


def test_percentiles_are_linear_between_neighbours():
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([float(i) for i in range(101)], 0.99) == pytest.approx(99.0)


def make_call(index: int, text: str, outcome: Outcome = Outcome.COMPLETED, **times: Any) -> Call:
    return Call(
        index=index, prompt=f"p{index}", stream=True, hang_up_point=None, outcome=outcome, texts=[text], **times
    )


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens():
    call = make_call(0, "x", start=10.0, first=11.0, last=13.0, num_chunks=5)
    assert call.ttft_s == 1.0
    assert call.tpot_s == 0.5
    assert make_call(0, "x", start=10.0, first=11.0, last=11.0, num_chunks=1).tpot_s is None


def test_a_report_names_models_without_the_folders_of_this_machine():
    info = {
        "model_path": "/somewhere/.cache/tiny",
        "processes": [{"role": "front"}, None, 3],
        "launch_command": ["python", "--model=/somewhere/tiny", "--port", "1", "models/tiny", "a/b=c"],
    }
    assert without_folders(info) == {
        "model_path": "tiny",
        "processes": [{"role": "front"}, None, 3],
        "launch_command": ["python", "--model=tiny", "--port", "1", "models/tiny", "a/b=c"],
    }


def test_metrics_are_summed_over_labels_and_not_over_longer_names():
    text = '# HELP a_total x\na_total{p="1"} 2.0\na_total{p="2"} 3.0\na_total_more 9.0\n'
    assert _sum_of(text, "a_total") == 5.0
    assert _sum_of("a_total 4.0 1700000000\n", "a_total") == 4.0
    assert _sum_of(text, "b_total") is None


def test_prompt_file_with_one_prompt_a_line(tmp_path: Path):
    path = tmp_path / "p.txt"
    path.write_text("one\n\n two \n")
    assert read_prompts(path) == ["one", " two "]
    assert make_prompts(LoadOptions(url="http://x", requests=3, prompts=path)) == ["one", " two ", "one"]


def test_prompt_file_of_json_lines(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b", "answer": "n"}\n{"turns": ["c", "d"]}\n"e"\n')
    assert read_prompts(path) == ["a", "b", "c", "e"]


@pytest.mark.parametrize(
    ("content", "message"), [('{"x": 1}\n', "line 1 has no text"), ("{\n", "line 1"), ("", "no prompt")]
)
def test_a_bad_prompt_file_names_the_place(tmp_path: Path, content: str, message: str):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_made_up_prompts_share_exactly_the_prefix():
    prompts = make_prompts(LoadOptions(url="http://x", requests=8, prompt_tokens=20, shared_prefix=5, seed=3))
    assert {len(prompt.split()) for prompt in prompts} == {25}
    assert len({tuple(prompt.split()[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt.split()[5:]) for prompt in prompts}) == 8
    assert prompts == make_prompts(LoadOptions(url="http://x", requests=8, prompt_tokens=20, shared_prefix=5, seed=3))


def test_the_issue_command_line_is_understood():
    line = "--url http://h:1/v1/ --concurrency 32 --requests 128 --json f --completions"
    options = parse_options([*line.split()])
    assert (options.base_url, options.path, options.json) == ("http://h:1", "/v1/completions", Path("f"))
    assert parse_options(["--url", "http://h:1"]).path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--requests 0", "--requests"), ("--disconnect 1.5", "--disconnect"), ("--shared-prefix -1", "--shared-prefix")],
)
def test_a_bad_flag_is_named(flags: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_options(["--url", "http://x", *flags.split()])
    assert message in capsys.readouterr().err


def test_progress_line_counts_every_outcome():
    progress = Progress(4)
    progress.ended(make_call(0, "x", num_chunks=3))
    progress.ended(make_call(1, "", Outcome.FAILED))
    progress.ended(make_call(2, "", Outcome.DISCONNECTED))
    assert "done=3/4 running=0 completed=1 failed=1 disconnected=1 " in progress.line()


def test_compare_pairs_answers_and_shows_where_they_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = tmp_path / "a", tmp_path / "b"
    save_texts(a, [make_call(0, "same"), make_call(1, "abcX"), make_call(2, "only a"), make_call(3, "long")])
    save_texts(b, [make_call(0, "same"), make_call(1, "abcY"), make_call(2, "", Outcome.FAILED), make_call(3, "lon")])
    found = compare(a, b)
    assert (found.num_equal, found.num_unpaired) == (1, 1)
    assert found.differing == ["request 1 at character 3: 'X' | 'Y'", "request 3 at character 3: 'g' | ''"]
    assert main([str(a), str(b)]) == 1
    assert "equal 1 of 3, in one run only 1" in capsys.readouterr().out
    assert main([str(a), str(a)]) == 0


def test_compare_names_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none"), str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "none") in line


def test_compare_sees_another_finish_reason(tmp_path: Path):
    a, b = tmp_path / "a", tmp_path / "b"
    save_texts(a, [make_call(0, "x", finish_reason="stop")])
    save_texts(b, [make_call(0, "x", finish_reason="length")])
    assert compare(a, b).differing == ["request 0: finish_reason stop | length"]


def test_saved_texts_are_ascii_json_lines(tmp_path: Path):
    save_texts(tmp_path / "t", [make_call(0, "a\nb \u00e9")])
    (line,) = (tmp_path / "t").read_text("ascii").splitlines()
    assert json.loads(line)["text"] == "a\nb \u00e9"
