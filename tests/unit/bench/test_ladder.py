"""The ladder's folders and figures, and one climb of a tiny server on the CPU."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draft_worker.shape import DraftShape
from target_worker.model.config import TargetShape
from tests.bench import ladder
from tests.bench.ladder_geometry import LADDERS


def test_the_geometry_is_the_peers(tmp_path: Path):
    target, drafter = LADDERS["qwen3-8b-dflash"].write(tmp_path)
    shape, draft = TargetShape.from_folder(target), DraftShape.from_folder(drafter)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (36, 4096, 32, 8)
    assert (shape.head_dim, shape.vocab_size, shape.tie_word_embeddings, shape.qk_norm) == (128, 151936, False, True)
    assert (draft.block_size, draft.num_layers, draft.has_selector, draft.window) == (9, 5, False, 0)
    assert draft.target_hidden_size == shape.hidden_size
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shape.vocab_size
    assert tokenizer.decode([151935, 4000]) == " 151935 4000"


def test_facts_of_the_start_are_taken_from_the_log():
    lines = [
        "2026-01-01T00:00:00.000Z launch INFO mps=off: turns\n",
        "2026-01-01T00:00:00.000Z launch INFO target: device cuda:0 H200 total=1\n",
        "2026-01-01T00:00:00.000Z launch INFO start role=target pid=4\n",
        "2026-01-01T00:00:00.000Z launch INFO device memory taken=1 planned=2\n",
    ]
    assert ladder.facts(lines) == [
        "mps=off: turns", "target: device cuda:0 H200 total=1", "device memory taken=1 planned=2",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_tiny_server_is_climbed_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "ladder.json"
    argv = ["--geometry", "tiny", "--device", "cpu", "--concurrency", "1,3", "--accept-length", "2.5"]
    flags = ["--threads", "1", "--dtype", "float32", "--mem-bytes", "64M"]
    log = tmp_path / "server.log"
    assert ladder.main([*argv, "--json", str(file), "--log", str(log), "--", *flags, "--spec-trace", "1"]) == 0
    assert "[spec-phase]" in log.read_text()
    result = json.loads(file.read_text())
    assert [row["c"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert set(row) == {"c", "output_tok_s", "ttft_ms_p50", "tpot_ms_p50"}
        assert min(row.values()) > 0
    assert result["config"]["accept_lengths"]["3"] == pytest.approx(2.5, abs=0.4)
    assert "out tok/s" in capsys.readouterr().out
