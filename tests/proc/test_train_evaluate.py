"""The evaluation against a real server."""

import json

import numpy as np
import pytest

from draft_worker.train import evaluate, prompts, run
from draft_worker.train.served import served
from target_worker.train.shards import write_shards
from tests.support.embedded_model import EMBEDDED, EMBEDDED_DRAFT, OPENINGS
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_server import CONTEXT, VOCAB
from tests.support.tiny_tokenizer import training_text, write_tiny_tokenizer

TRAIN_FLAGS = (
    "--device cpu --slots 8 --max-new 12 --refill-every 3 --loop-share 1 --layers 1 --num-taps 1 --block-rows 4"
    " --window 6 --draft-vocab 0 --rank 2 --top-k 4 --mask-token-id 5 --conv-group 8 --steps 4 --warmup-steps 1"
    " --tokens-per-step 200 --anchor-stride 3 --held-out 2 --log-every 1"
)


def test_figures_come_from_a_server_of_target_and_drafter(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": opening}) + "\n" for opening in OPENINGS[:4]))
    flags = f"--temperature 0 --max-tokens 24 --concurrency 2 --rounds 2 --loop-share 1 --prompts {file} --json --raw"
    models = f"--target {EMBEDDED} --draft {EMBEDDED_DRAFT}"
    evaluate.main([*flags.split(), *models.split(), "--", "--threads", "1", "--mem-bytes", "64M", "--dtype", "float32"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_answers"] == 4
    assert found["n_steps"] > 0
    assert len(found["accept_per_position"]) == 7
    assert found["accept_per_position"] == sorted(found["accept_per_position"], reverse=True)
    assert found["accept_length"] == pytest.approx(1 + sum(found["accept_per_position"]), abs=1e-3)
    assert found["accept_length"] > 1.8
    cold, warm = found["rounds"]
    assert warm["cached_tokens"] > 0
    assert warm["accept_length"] == cold["accept_length"]


def test_a_drafter_trained_for_a_hybrid_serves_plain_prompts(tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"
    target.mkdir()
    make_hybrid(target, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    tokenizer = write_tiny_tokenizer(target, VOCAB, CONTEXT)
    documents = [np.array(tokenizer.encode(line).ids, dtype=np.uint16) for line in training_text(80)]
    for stem, part in (("train", documents[:60]), ("heldout", documents[60:])):
        write_shards(tmp_path / "shards", stem, part)
    monkeypatch.setattr(run, "begin", lambda _device: None)
    file, drafter = tmp_path / "held_out.jsonl", tmp_path / "work" / "drafter"
    flags = f"--target {target} --openings {tmp_path / 'shards'} --out {tmp_path / 'prompts'} --held-out-file {file}"
    flags += " --num-openings 16 --least-opening 5 --held-out-openings 3"
    prompts.main(flags.split())
    flags = f"--target {target} --prompts {tmp_path / 'prompts'} --work {tmp_path / 'work'} --home {tmp_path / 'home'}"
    run.main([*flags.split(), *TRAIN_FLAGS.split()])
    capsys.readouterr()
    flags = f"--raw --max-tokens 12 --loop-share 1 --prompts {file} --json --target {target} --draft {drafter}"
    evaluate.main([*flags.split(), "--", "--threads", "1", "--mem-bytes", "64M", "--dtype", "float32"])
    found = json.loads(capsys.readouterr().out)
    assert found["n_steps"] > 0
    assert found["config"]["raw"]
    # No template stands around them.
    assert found["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in evaluate.read_prompts(file))


def test_a_server_that_cannot_start_is_reported_with_its_own_words():
    with pytest.raises(RuntimeError, match="does not exist"), served(["--model-path", "/nowhere"]):
        pass
