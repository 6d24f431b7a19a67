"""What bench.delta_prefill says of a machine without a device, and what it makes of figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memsvc.device import fla_delta, flashinfer_delta
from memsvc.device.delta_rules import TorchRule
from target_worker.model.linear_spec import LinearSpec
from tests.bench import delta_prefill, rows
from tests.bench.delta_prefill import Floor, inputs, lengths, lines_of, spec_of
from tests.bench.propose_geometry import FLOPS_PER_S

SMALL = LinearSpec(num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=8, conv_kernel=4)
CPU = torch.device("cpu")


def test_floors_are_of_what_has_to_be_moved_and_multiplied():
    spec = spec_of("qwen38-27b-dflash2")
    assert spec is not None
    floor = Floor.of(spec, 2048, 1)
    # q and k of 2048 numbers a token, v and outputs of 6144; g and beta of 48; a state of 3 MiB, read and written.
    assert floor.num_bytes == 2048 * (2 * (2 * 2048 + 2 * 6144) + 2 * 48 * 4) + 2 * (3 << 20)
    assert floor.flops == 6 * 2048 * 48 * 128 * 128
    assert floor.us(4e6) == {"bytes_us": 18.55, "flops_us": round(floor.flops / FLOPS_PER_S * 1e6, 2)}
    assert Floor.of(spec, 2048, 8).num_bytes - floor.num_bytes == 7 * 2 * (3 << 20)


def test_tokens_are_spread_over_sequences():
    assert lengths(512, 1) == [512]
    assert lengths(514, 8) == [65, 65, 64, 64, 64, 64, 64, 64]


def test_sizes_are_those_of_a_hybrid():
    assert spec_of("qwen3-8b-dflash") is None


def measured_by_torch() -> tuple[Any, list[int]]:
    lens = [70, 3]
    given, states = inputs(SMALL, lens, CPU)
    plan = TorchRule()(lens, lambda array: torch.from_numpy(array.copy()))
    return (given, states, list(plan(delta_prefill.as_dtype(given, torch.float32), states.clone()))), lens


def test_a_row_has_times_floors_and_errors(monkeypatch: pytest.MonkeyPatch):
    def called(call: Callable[[], object]) -> dict[str, float]:
        call()
        return {"device_us": 90.0, "host_us": 5.0}

    monkeypatch.setattr(delta_prefill, "times", called)
    wanted, lens = measured_by_torch()
    row = delta_prefill.case("torch", SMALL, lens, wanted, 100.0)
    assert (row["tokens"], row["sequences"], row["rule"]) == (73, 2, "torch")
    assert row["out_error"] == row["state_error"] == 0
    assert row["out_max"] > 0.1
    assert row["ratio"] == pytest.approx(90 / max(row["bytes_us"], row["flops_us"]), abs=0.01)
    assert set(delta_prefill.COLUMNS) <= set(row)


@pytest.mark.parametrize("name", ["fla", "flashinfer-whole"])
def test_a_rule_that_is_not_there_is_a_row_that_says_why(name: str):
    wanted, lens = measured_by_torch()
    row = delta_prefill.case(name, SMALL, lens, wanted, 100.0)
    assert f"{name.split('-')[0]}: its kernels are for a CUDA device, not cpu" in row["failed"]
    assert "device_us" not in row
    _, line = lines_of([row])
    assert name in line
    assert line.endswith("not cpu")


def test_rules_are_those_of_their_names(monkeypatch: pytest.MonkeyPatch):
    packages: dict[str, object] = {}
    monkeypatch.setattr(fla_delta.importlib.util, "find_spec", packages.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_delta, "lacks", lambda dtype, device, heads: None)
    monkeypatch.setattr(delta_prefill, "FlaRule", lambda dtype: ("fla", dtype))
    monkeypatch.setattr(delta_prefill, "FlashInferRule", lambda device, num_heads, piece: ("flashinfer", piece))

    def made(name: str) -> object:
        return delta_prefill.make_rule(name, SMALL, [3, 130], torch.device("cuda"))

    assert isinstance(made("torch"), TorchRule)
    with pytest.raises(ValueError, match="fla: fla-core is not installed"):
        made("fla")
    packages["fla"] = object()
    assert made("fla") == ("fla", torch.bfloat16)
    pieces = {"flashinfer": None, "flashinfer-whole": 0, "flashinfer-pieces": 128}
    assert {name: made(name) for name in pieces} == {name: ("flashinfer", piece) for name, piece in pieces.items()}


def test_errors_are_the_largest_difference_beside_the_largest_number():
    got = [torch.tensor([1.0, -2.5]), torch.tensor([4.0])]
    want = [torch.tensor([1.25, -2.0]), torch.tensor([4.0])]
    wanted = {"out_error": 0.5, "out_max": 2.0, "state_error": 0.0, "state_max": 4.0}
    assert delta_prefill.errors(got, want) == wanted


def test_figures_are_in_the_file_after_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file, seen = tmp_path / "prefill.json", []

    def case(name: str, *rest: object) -> dict[str, Any]:
        seen.append([row["rule"] for row in json.loads(file.read_text())["rows"]] if file.exists() else [])
        return {"rule": name, "tokens": 64, "sequences": 1, "device_us": 10.0} | ({"failed": "no"} if seen[1:] else {})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Made-up")
    monkeypatch.setattr(delta_prefill, "DEVICE", CPU)
    monkeypatch.setattr(rows, "copy_bytes_per_us", lambda: 4e6)
    monkeypatch.setattr(delta_prefill, "case", case)
    flags = ["--geometry", "tiny-hybrid", "--tokens", "64", "--sequences", "1", "--rules", "fla,torch"]
    assert delta_prefill.main([*flags, "--json", str(file)]) == 1
    assert seen == [[], ["fla"]]
    written = json.loads(file.read_text())
    assert (written["device"], [row["rule"] for row in written["rows"]]) == ("Made-up", ["fla", "torch"])


@pytest.mark.parametrize("flags", [["--rules", "flash"], ["--tokens", "4", "--sequences", "8"]])
def test_what_cannot_be_measured_is_told_at_once(flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        delta_prefill.parse(flags)
    assert ("not among" if flags[0] == "--rules" else "would be empty") in capsys.readouterr().err


def test_a_machine_without_a_device_is_told_so(capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert delta_prefill.main([]) == 1
    assert capsys.readouterr().err == "tests.bench.delta_prefill finds no CUDA device: nothing was measured\n"
