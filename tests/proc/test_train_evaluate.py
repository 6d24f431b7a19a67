"""The evaluation against a real server."""

import json

import pytest

from draft_worker.train import evaluate
from draft_worker.train.served import served
from tests.support.tiny_server import prompt, write_tiny_drafter, write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    target = write_tiny_model(folder / "target")
    return target, write_tiny_drafter(folder / "drafter", target)


def test_figures_come_from_a_server_of_target_and_drafter(models, tmp_path, capsys):
    target, drafter = models
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{prompt(seed, 40)}\n" for seed in range(4)))
    flags = f"--temperature 0 --max-tokens 12 --concurrency 2 --rounds 2 --loop-share 1 --prompts {file} --json"
    evaluate.main(
        [*flags.split(), "--target", str(target), "--draft", str(drafter), "--", "--threads", "1", "--mem-bytes", "64M"]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["num_answers"] == 4
    assert found["n_steps"] > 0
    assert len(found["accept_per_position"]) == 3
    assert found["accept_length"] == pytest.approx(1 + sum(found["accept_per_position"]), abs=1e-3)
    assert found["rounds"][1]["cached_tokens"] > 0


def test_a_server_that_cannot_start_is_reported_with_its_own_words(models):
    with pytest.raises(RuntimeError, match="does not exist"), served(["--model-path", "/nowhere"]):
        pass
