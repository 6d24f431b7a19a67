"""The attention benchmark without a GPU: what it keeps after each part, and whom it names the winner."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bench import attention, attention_cases

LOAD = SimpleNamespace(num_reqs=8, context_len=1300, floor_us=40.0, geometry=SimpleNamespace(num_layers=4))


def test_figures_are_in_the_file_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, seen = tmp_path / "attention.json", []

    def measure(name: str, us: float) -> list[dict[str, object]]:
        seen.append([row["geometry"] for row in json.loads(file.read_text())["rows"]] if file.exists() else [])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return [attention.row_of(name, LOAD, "triton-table", us)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Made-up")
    monkeypatch.setattr(attention, "blocks", lambda args, name: measure(name, 90.0))
    monkeypatch.setattr(attention, "prefills", lambda name: measure(f"{name} one chunk", 400.0))
    command = ["attention", "--no-tiles", "--prefill", "--geometry", "draft-9", "verify-8b", "--json", str(file)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(KeyboardInterrupt):
        attention.main()
    assert seen == [[], ["draft-9"], ["draft-9", "draft-9 one chunk"], ["draft-9", "draft-9 one chunk", "verify-8b"]]
    written = json.loads(file.read_text())
    assert written["device"] == "Made-up"
    assert [row["us"] for row in written["winners"]] == [90.0, 400.0, 90.0]


def test_a_kernel_that_fails_or_is_not_there_leaves_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(load: object, kernel: str) -> float:
        if kernel == "fa3":
            raise RuntimeError("no such kernel")
        return 117.0

    monkeypatch.setattr(attention_cases, "flashinfer_us", fail)
    assert [row["backend"] for row in attention.flashinfer_rows("verify-8b", LOAD)] == ["flashinfer-fa2"]
    assert "fa3 verify-8b: RuntimeError: no such kernel" in capsys.readouterr().err
    monkeypatch.setattr(attention_cases, "flashinfer_us", lambda load, kernel: None)
    assert attention.flashinfer_rows("verify-8b", LOAD) == []


def test_the_winner_is_the_quickest_of_a_shape_with_each_backends_best_beside_it():
    figures = [("triton", 95.0), ("triton", 88.0), ("flashinfer-fa2", 117.0)]
    rows = [attention.row_of("verify-8b", LOAD, backend, us) for backend, us in figures]
    (found,) = attention.winners(rows)
    assert (found["us"], found["ratio"]) == (88.0, 2.2)
    assert found["by_backend"] == {"triton": 88.0, "flashinfer-fa2": 117.0}
