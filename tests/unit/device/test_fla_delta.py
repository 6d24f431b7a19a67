"""fla-core's kernels: launched as its entry launches them, or by that entry, from an index that the host makes."""

import importlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memsvc.device import fla_delta
from memsvc.device.delta_rules import TorchRule
from memsvc.device.fla_delta import CHUNK, Chunks, FlaRule, find_kernels
from memsvc.device.gated_delta import DeltaRows
from target_worker.model.linear_spec import LinearSpec
from tests.support.delta_libraries import as_fla
from tests.support.kernels import is_interpreted, mend_interpreter
from tests.support.never_waits import never_waits

HEADS, K_HEADS, DIM = 4, 2, 64
LENS = [3, 70, 64, 1, 129]


def stage(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


def rows_of(num: int, device: str = "cpu", dim: int = DIM) -> DeltaRows:
    """q, k and v of bfloat16, as the kernels take them."""
    dice = torch.Generator().manual_seed(num)
    q, k = (torch.randn(1, num, K_HEADS, dim, generator=dice) for _ in range(2))
    v = torch.randn(1, num, HEADS, dim, generator=dice)
    g, beta = (torch.rand(1, num, HEADS, generator=dice) for _ in range(2))
    return DeltaRows(*(x.bfloat16().to(device) for x in (q, k, v)), -g.to(device), beta.to(device))


def states_of(num: int, device: str = "cpu", dim: int = DIM) -> torch.Tensor:
    return torch.randn(num, HEADS, dim, dim, generator=torch.Generator().manual_seed(num)).to(device)


def wide(rows: DeltaRows) -> DeltaRows:
    return DeltaRows(rows.q.float(), rows.k.float(), rows.v.float(), rows.g, rows.beta)


def test_the_index_of_chunks_is_one_copy() -> None:
    copies = []
    chunks = Chunks.of([CHUNK, 1, 2 * CHUNK + 1], lambda values: copies.append(values) or stage(values))
    assert len(copies) == 1
    assert chunks.cu_seqlens.tolist() == [0, 64, 65, 194]
    assert chunks.chunk_indices.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert chunks.chunk_offsets.tolist() == [0, 1, 2, 5]
    assert all(
        part.dtype == torch.int64 and part.is_contiguous()
        for part in (chunks.cu_seqlens, chunks.chunk_indices, chunks.chunk_offsets)
    )


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_kernels_see_all_of_it_at_multiples_of_16_bytes(num: int) -> None:
    chunks = Chunks.of([CHUNK + 1] * num, stage)
    assert [part.storage_offset() % 2 for part in (chunks.cu_seqlens, chunks.chunk_indices, chunks.chunk_offsets)] == [
        0,
        0,
        0,
    ]


def test_its_entry_is_called_with_what_it_asks_for() -> None:
    rows, states = rows_of(sum(LENS)), states_of(len(LENS))
    got = FlaRule(torch.bfloat16, as_fla)(LENS, stage)(rows, states.clone())
    want = TorchRule()(LENS, stage)(wide(rows), states.clone())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Recorder:
    """A kernel of fla-core, inside what chooses its configuration, that notes how it is launched."""

    def __init__(self, parameters: str) -> None:
        self.arg_names = parameters.split()
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **named: self.launches.append((grid, named))


class Heuristics:
    """By this name fla-core's kernels are wrapped."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """In the place of fla-core's modules."""
    found = {name: Recorder(parameters) for name, (_, parameters) in fla_delta._CALLS.items()}
    modules = {
        name: ModuleType(name) for name in {"fla.ops.gated_delta_rule", *(m for m, _ in fla_delta._CALLS.values())}
    }
    for name, (module, _) in fla_delta._CALLS.items():
        setattr(modules[module], name, Heuristics(Heuristics(found[name])))
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = as_fla  # type: ignore[attr-defined]
    monkeypatch.setattr(fla_delta, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(fla_delta.os, "environ", {})
    return found


def test_each_kernel_is_launched_with_all_of_its_parameters(kernels: dict[str, Recorder]) -> None:
    rows, states = rows_of(sum(LENS)), states_of(len(LENS))
    rule = FlaRule(torch.bfloat16)
    rule(LENS, stage)(rows, states)
    for name, kernel in kernels.items():
        assert len(kernel.launches) == (2 if name.startswith("l2norm") else 1)
        for _, named in kernel.launches:
            assert set(named) == {*kernel.arg_names, "num_warps", "num_stages", "num_ctas"}
    num_chunks = sum(-(-num // CHUNK) for num in LENS)
    grids = {name: kernel.launches[0][0] for name, kernel in kernels.items()}
    assert list(grids.values()) == [
        (-(-sum(LENS) * K_HEADS // 16),), (num_chunks * HEADS,), (num_chunks, HEADS), (num_chunks, HEADS),
        (DIM // 32 * len(LENS) * HEADS,), (num_chunks, HEADS),
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["parameter", "kernel", "tuner"])
def test_its_entry_is_called_where_kernels_are_not_as_known(
    change: str, kernels: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if change == "parameter":
        kernels["chunk_fwd_kernel_o"].arg_names.append("SINKS")
    elif change == "kernel":
        monkeypatch.delitem(kernels["chunk_fwd_kernel_o"].__dict__, "arg_names")
    else:
        fla_delta.os.environ["FLA_CACHE_MODE"] = "disabled"
    with caplog.at_level(logging.WARNING):
        out, _ = FlaRule(torch.bfloat16)(LENS, stage)(rows_of(sum(LENS)), states_of(len(LENS)))
    # Who asks for the tuner knows that it is slower.
    assert [("chunk_fwd_kernel_o" in line, "slower" in line) for line in caplog.messages] == (
        [] if change == "tuner" else [(True, True)]
    )
    assert out.dtype == torch.float32, "of as_fla"
    assert not any(kernel.launches for kernel in kernels.values())


def test_a_second_rule_finds_what_the_first_set(kernels: dict[str, Recorder]) -> None:
    for _ in range(2):
        FlaRule(torch.bfloat16)([1], stage)(rows_of(1), states_of(1))
    assert fla_delta.os.environ["FLA_CACHE_MODE"] == "default"
    assert len(kernels["chunk_fwd_kernel_o"].launches) == 2


def test_what_its_tuner_finds_has_the_same_form() -> None:
    files = {file.stem: json.loads(file.read_text()) for file in fla_delta._CONFIGS.glob("*.json")}
    assert files.keys() == fla_delta._CALLS.keys()
    for name, found in files.items():
        assert found["kernel_name"] == name
        assert found["default_config"].keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"}


@pytest.mark.parametrize(
    ("k_dim", "capability", "reason"),
    [
        (256, 9, None),
        (256, 8, None),
        (257, 9, "its kernels are for keys of at most 256 numbers, not 257"),
        (128, 10, "4 warps of a kernel race above compute capability 9, cuda has 10"),
        (128, 12, "4 warps of a kernel race above compute capability 9, cuda has 12"),
    ],
)
def test_what_its_kernels_cannot_do_is_refused(
    k_dim: int, capability: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(fla_delta.importlib.util, "find_spec", lambda name: object())
    heads = LinearSpec(num_k_heads=2, num_v_heads=4, k_dim=k_dim, v_dim=128, conv_kernel=4)
    assert fla_delta.lacks(torch.bfloat16, torch.device("cuda"), heads) == reason


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Its entry, whose kernels are interpreted if there is no device."""
    pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("fla", reason="fla-core is not installed")
    entry = fla_delta._import_entry()
    if is_interpreted():
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        def counted(end: Any) -> Iterator[Any]:
            """The interpreter's loops count in Python's integers, which have no `to`."""
            for i in range(int(end)):
                yield tl.tensor(TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)

        mend_interpreter()
        monkeypatch.setattr(importlib.import_module("fla.ops.common.chunk_delta_h"), "range", counted, raising=False)
    return entry


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform:UserWarning")
@pytest.mark.parametrize("lens", [[1], LENS])
def test_launches_give_what_its_entry_gives(lens: list[int], fla: Callable[..., Any], device: str) -> None:
    assert find_kernels() is not None, "fla-core has other kernels than those known here"

    def place(values: np.ndarray) -> torch.Tensor:
        staged = stage(values)
        return staged.pin_memory().to(device, non_blocking=True) if device == "cuda" else staged

    rows, states = rows_of(sum(lens), device), states_of(len(lens), device)
    want = FlaRule(torch.bfloat16, fla)(lens, place)(rows, states.clone())
    rule = FlaRule(torch.bfloat16)
    got = rule(lens, place)(rows, states.clone())
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    if device == "cuda":
        given = states.clone()
        with never_waits():
            rule(lens, place)(rows, given)
    exact, ends = TorchRule()(lens, place)(wide(rows), states.clone())
    torch.testing.assert_close(got[0].float(), exact, rtol=2e-2, atol=5e-3)
    torch.testing.assert_close(got[1], ends, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform:UserWarning")
@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("lens", [[1], LENS])
def test_the_index_is_what_fla_makes(lens: list[int]) -> None:
    index = importlib.import_module("fla.ops.utils.index")
    chunks = Chunks.of(lens, stage)
    assert torch.equal(chunks.chunk_indices, index.prepare_chunk_indices(chunks.cu_seqlens, CHUNK))
    assert torch.equal(chunks.chunk_offsets, index.prepare_chunk_offsets(chunks.cu_seqlens, CHUNK))


def test_configurations_are_part_of_the_package() -> None:
    assert (Path(fla_delta.__file__).parent / "fla_configs").is_dir()
