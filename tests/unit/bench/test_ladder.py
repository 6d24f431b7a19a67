"""The ladder's folders and figures, and one climb of a tiny server on the CPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from draft_worker.shape import DraftShape
from target_worker.model.config import TargetShape
from tests.bench import ladder
from tests.bench.ladder_geometry import LADDERS
from tests.bench.ladder_plot import plot


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
        "2026-01-01T00:00:00.000Z launch INFO target: gated delta nets blocks=triton prompts=fla\n",
        "2026-01-01T00:00:00.000Z launch INFO plan: device cuda:0 (H200, GPU-0123abcd-86fe-6179-f025-fd8207b5a08b): 1 b\n",
    ]
    assert ladder.facts(lines) == [
        "mps=off: turns", "target: device cuda:0 H200 total=1", "device memory taken=1 planned=2",
        "target: gated delta nets blocks=triton prompts=fla", "plan: device cuda:0 (H200): 1 b",
    ]  # fmt: skip


class NoServer:
    """As far as the ladder looks at a server."""

    url, start_s = "http://nowhere", 2.0

    def __init__(self, flags: list[str], ready_s: float, log: Path | None) -> None:
        self.lines = ["2026-01-01T00:00:00.000Z launch INFO mps=off: turns\n"]

    def __enter__(self) -> "NoServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass


RATES = {1: [500.0, 700.0, 593.2], 4: [2000.0, 1000.0, 3000.0]}


@pytest.fixture
def climbs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(c, turn) of each load that the ladder asked for; the first has no figures."""
    asked: list[tuple[int, int]] = []

    def climb(url: str, ladder: Any, c: int, *, max_tokens: int, requests: int, turn: int = 0) -> dict[str, Any]:
        asked.append((c, turn))
        return {
            "output_tok_s": RATES[c][turn], "ttft_ms_p50": 10.0 + turn if turn else None, "tpot_ms_p50": 2.0 + turn,
            "accept_length": 4.0, "client_cpu_s": 0.1 * (1 + turn), "wall_s": 2.0, "completed": requests,
        }  # fmt: skip

    monkeypatch.setattr(ladder, "climb", climb)
    monkeypatch.setattr(ladder, "Served", NoServer)
    monkeypatch.setattr(ladder, "ceilings_apart", lambda: {"copy_gb_s": 4000, "gemm_tflops": 700})
    monkeypatch.setattr(ladder, "server_flags", lambda *_: [])
    return asked


def test_figures_are_medians_of_turns_and_every_turn_is_kept(climbs, tmp_path: Path, capsys):
    file = tmp_path / "ladder.json"
    assert ladder.main(["--concurrency", "1,4", "--repeat", "3", "--json", str(file)]) == 0
    assert climbs[1:] == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 2)]
    result = json.loads(file.read_text())
    assert result["rows"] == [
        {"c": 1, "output_tok_s": 593.2, "ttft_ms_p50": 11.5, "tpot_ms_p50": 3.0},
        {"c": 4, "output_tok_s": 2000.0, "ttft_ms_p50": 11.5, "tpot_ms_p50": 3.0},
    ]
    config = result["config"]
    assert config["repeat"] == 3
    assert config["ceilings"] == {"copy_gb_s": 4000, "gemm_tflops": 700}
    assert config["turns_output_tok_s"] == {str(c): rates for c, rates in RATES.items()}
    assert config["client_cpu_shares"] == {"1": 0.15, "4": 0.15}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["1", "593.2", "593.2", "1.00", "11.50", "3.00", "4.0", "0.15", "9"]


def test_a_rung_is_measured_once_by_default(climbs, tmp_path: Path):
    assert ladder.main(["--concurrency", "1", "--json", str(tmp_path / "ladder.json")]) == 0
    assert climbs == [(1, 0), (1, 0)]
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert result["rows"] == [{"c": 1, "output_tok_s": 500.0, "ttft_ms_p50": None, "tpot_ms_p50": 2.0}]
    assert result["config"]["turns_output_tok_s"] == {"1": [500.0]}


def test_no_two_turns_have_the_same_prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ladder, "uvloop", SimpleNamespace(run=lambda load: load))
    monkeypatch.setattr(ladder, "run_load", lambda options: options)
    monkeypatch.setattr(ladder, "make_report", lambda result, options: {"seed": options.seed})
    monkeypatch.setattr(ladder, "verdict", lambda report: "")
    seeds = [
        ladder.climb("http://nowhere", LADDERS["tiny"], c, max_tokens=24, requests=3, turn=turn)["seed"]
        for c in (1, 2, 32) for turn in range(3)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)


def test_a_picture_is_drawn_of_what_was_measured_and_of_an_earlier_result(climbs, tmp_path: Path):
    pytest.importorskip("matplotlib")
    file, pictures = tmp_path / "ladder.json", [tmp_path / "first.png", tmp_path / "second.png"]
    argv = ["--concurrency", "4,1", "--json", str(file), "--plot", str(pictures[0])]
    assert ladder.main(argv) == 0
    asked = list(climbs)
    assert ladder.main(["--from", str(file), "--plot", str(pictures[1])]) == 0
    assert climbs == asked, "nothing is measured"
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert len(pictures[0].read_bytes()) > 1000


def test_a_ladder_without_a_peer_is_drawn_too(tmp_path: Path):
    pytest.importorskip("matplotlib")
    config = {"geometry": "tiny", "prompt_tokens": 40, "output_tokens": 24, "accept_length": 2.5}
    rows = [{"c": 1, "output_tok_s": 10.0, "ttft_ms_p50": None, "tpot_ms_p50": None}]
    plot({"rows": rows, "config": config | {"peer_output_tok_s": {}}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_can_not_be_done_is_said_before_a_server_starts(climbs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for argv, why in (
        (["--plot", "plot.png"], "--plot needs matplotlib, which is not installed"),
        (["--from", "ladder.json"], "--from needs --plot"),
        (["--repeat", "0"], "--repeat must be at least 1, not 0"),
    ):
        with pytest.raises(SystemExit):
            ladder.main(argv)
        assert why in capsys.readouterr().err
    assert climbs == []


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
