"""The builder of FlashInfer's delta rule says what it needs where none of it is installed."""

import runpy
import sys

import pytest

MODULE = "memsvc.device.build_flashinfer_delta"


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> object:
    """Its exit status, without the compiler that it needs."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setattr(sys, "argv", [MODULE, *argv])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(MODULE, run_name="__main__")
    return ended.value.code


def test_help_needs_nothing_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: python -m {MODULE} [-h] OUT\n")
    assert "nvidia-cutlass-dsl[cu13]==4.6.3" in out
    assert err == ""


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "out") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cutlass" in err
    assert "--help says what is needed" in err
