"""What attends prompts: which kernel is taken on which device, and under what name. No GPU is needed."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.attention_backends import AttentionCase
from memsvc.device.flashinfer_prefill import kernel_name
from target_worker.cuda import prefill_backends
from target_worker.cuda.prefill_backends import PrefillMemory, choose_prefill

SHAPE: Any = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128, group_size=4)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """choose(requested, capability, kernels that are built) -> (name, the kernel if it is FlashInfer's)."""
    find_spec = importlib.util.find_spec

    def found(name: str) -> Any:
        return SimpleNamespace(origin=str(tmp_path / "__init__.py")) if name == "flashinfer" else find_spec(name)

    def made(case: AttentionCase, memory: PrefillMemory, kernel: str) -> tuple[AttentionCase, str]:
        return case, kernel

    def choose(requested: str, capability: int, *built: str, kv_dtype: torch.dtype = torch.bfloat16) -> tuple[str, str]:
        device = torch.device("cuda:1")
        table: Any = SimpleNamespace(device=device)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda asked: (capability, 0) if asked == device else 0
        )
        case = AttentionCase(
            use=prefill_backends.Use.EAGER, device="cuda", dtype=torch.bfloat16, num_heads=32, num_kv_heads=8,
            head_dim=128, page_size=16, num_rows=8192, capability=capability, kv_dtype=kv_dtype,
        )  # fmt: skip
        for name in (kernel_name(case, kernel) for kernel in built):
            (tmp_path / "data" / "aot" / name).mkdir(parents=True)
            (tmp_path / "data" / "aot" / name / f"{name}.so").touch()
        pool: Any = SimpleNamespace(shape=SimpleNamespace(dtype=kv_dtype), page_size=16)
        memory = PrefillMemory(pool=pool, tables=table, page_table=table, dtype=torch.bfloat16)
        name, backend = choose_prefill(requested, SHAPE, memory, 8192)
        if not isinstance(backend, tuple):
            return name, ""
        assert backend[0] == case
        return name, backend[1]

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(prefill_backends._FlashInfer, "of", made)
    return choose


@pytest.mark.parametrize(
    ("requested", "capability", "built", "expected"),
    [
        ("auto", 9, ("fa2", "fa3"), ("flashinfer-fa3", "fa3")),
        ("auto", 9, ("fa2",), ("triton", "")),
        ("auto", 9, (), ("triton", "")),
        ("auto", 8, ("fa2", "fa3"), ("triton", "")),
        ("flashinfer", 9, ("fa2", "fa3"), ("flashinfer-fa3", "fa3")),
        ("flashinfer", 9, ("fa2",), ("flashinfer-fa2", "fa2")),
        ("flashinfer", 8, ("fa2", "fa3"), ("flashinfer-fa2", "fa2")),
        ("triton", 9, ("fa2", "fa3"), ("triton", "")),
        ("torch", 9, ("fa2", "fa3"), ("torch", "")),
    ],
)
def test_the_kernel_is_the_best_that_runs_on_the_device_and_is_built(choose, requested, capability, built, expected):
    assert choose(requested, capability, *built) == expected


@pytest.mark.parametrize(
    ("requested", "built", "expected"),
    [
        ("auto", ("fa2", "fa3"), ("triton", "")),
        ("flashinfer", ("fa2", "fa3"), ("flashinfer-fa2", "fa2")),
        ("triton", (), ("triton", "")),
        ("torch", (), ("torch", "")),
    ],
)
def test_pages_in_8_bits_are_for_all_but_fa3(choose, requested, built, expected):
    assert choose(requested, 9, *built, kv_dtype=torch.float8_e4m3fn) == expected


def test_flashinfer_for_pages_in_8_bits_says_what_each_lacks(choose):
    with pytest.raises(
        ValueError, match=r"fa3: pages of torch.float8_e4m3fn for rows of .*dtype_kv_e4m3_.*is not built"
    ):
        choose("flashinfer", 9, "fa3", kv_dtype=torch.float8_e4m3fn)


def test_flashinfer_without_a_kernel_says_what_each_lacks(choose):
    with pytest.raises(
        ValueError,
        match=r"flashinfer-fa3: compute capability 8 is not among 9; flashinfer-fa2: .*False\.so is not built",
    ):
        choose("flashinfer", 8, "fa3")
