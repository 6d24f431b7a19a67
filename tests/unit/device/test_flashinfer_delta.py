"""FlashInfer's delta rule: its operands by what each function says it takes; on CUDA also what comes out, as fla-core's."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memsvc.device import flashinfer_delta
from memsvc.device.delta_plan import PlanRule
from memsvc.device.delta_rules import TorchRule
from memsvc.device.flashinfer_delta import FUNCTIONS, HEAD_DIM, LIBRARY, FlashInferRule, lacks, piece_rows
from memsvc.device.gated_delta import DeltaRows
from target_worker.model.linear_spec import LinearSpec
from tests.bench.delta_prefill import make_rule
from tests.support.delta_libraries import FakeLibrary

NUM_SMS = 132
CUDA = torch.device("cuda")


def linear(num_k_heads: int, num_v_heads: int) -> LinearSpec:
    return LinearSpec(num_k_heads=num_k_heads, num_v_heads=num_v_heads, k_dim=HEAD_DIM, v_dim=HEAD_DIM, conv_kernel=4)


NO_FUNCTION = f"'types.SimpleNamespace' object has no attribute '{FUNCTIONS[-1]}'"
SMALL, LARGE = linear(2, 6), linear(16, 48)
"""The larger is the 27B's."""


def stage(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


def rows_of(num: int, spec: LinearSpec = SMALL, device: str = "cpu") -> DeltaRows:
    """As a model has them: some heads forget at once, others not within thousands of rows."""
    dice = torch.Generator().manual_seed(num)
    q, k = (torch.randn(1, num, spec.num_k_heads, HEAD_DIM, generator=dice) for _ in range(2))
    v = torch.randn(1, num, spec.num_v_heads, HEAD_DIM, generator=dice)
    g, beta = (torch.rand(1, num, spec.num_v_heads, generator=dice) for _ in range(2))
    g = -g * torch.logspace(-3.5, 1.3, spec.num_v_heads)
    return DeltaRows(*(x.bfloat16().to(device) for x in (q, k, v)), g.to(device), beta.to(device))


def wide(rows: DeltaRows) -> DeltaRows:
    return DeltaRows(rows.q.float(), rows.k.float(), rows.v.float(), rows.g, rows.beta)


def states_of(num: int, spec: LinearSpec = SMALL, device: str = "cpu") -> torch.Tensor:
    dice = torch.Generator().manual_seed(num)
    return torch.randn(num, spec.num_v_heads, HEAD_DIM, HEAD_DIM, generator=dice).to(device) * 0.3


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Length of the difference, in lengths of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def computed(lens: list[int], piece: int | None, spec: LinearSpec = SMALL) -> tuple[list[str], float, float]:
    """Functions called, and how far outputs and states are from those of TorchRule."""
    library = FakeLibrary(spec, NUM_SMS)
    rule = FlashInferRule(torch.device("cpu"), spec.num_v_heads, piece=piece, num_sms=NUM_SMS, library=library)
    rows, states = rows_of(sum(lens), spec), states_of(len(lens), spec)
    out, ends = rule(lens, stage)(rows, states.clone())
    assert out.shape == rows.v.shape
    assert out.dtype == torch.bfloat16
    want, want_ends = TorchRule()(lens, stage)(wide(rows), states.clone())
    return library.called, apart(out, want), apart(ends, want_ends)


@pytest.mark.parametrize("lens", [[1], [2], [65], [7, 130, 1, 64]])
@pytest.mark.parametrize("piece", [0, 64, 128])
def test_its_functions_are_called_with_what_they_take(lens: list[int], piece: int):
    called, out, ends = computed(lens, piece)
    assert called == (["t", "mn", "fix few", "out"] if piece else ["whole"])
    assert out < 1e-2
    assert ends < 1e-2


@pytest.mark.parametrize(("spec", "kind"), [(linear(4, 8), "few"), (linear(4, 12), "some"), (linear(6, 18), "many")])
def test_pieces_are_put_together_by_the_number_of_heads(spec: LinearSpec, kind: str):
    called, out, ends = computed([70], 64, spec)
    assert called == ["t", "mn", f"fix {kind}", "out"]
    assert max(out, ends) < 1e-2


def test_long_sequences_are_cut_if_the_device_would_be_idle():
    assert piece_rows([8192], 48, NUM_SMS) == 4096
    assert piece_rows([2000], 48, NUM_SMS) == 1024
    assert piece_rows([2048], 16, NUM_SMS) == 256
    assert piece_rows([1100, 30], 16, NUM_SMS) == 192
    assert piece_rows([512], 48, NUM_SMS) == 0, "so few rows are over before pieces would be"
    assert piece_rows([8192, 8192], 48, NUM_SMS) == 0, "two sequences of so many heads fill more than half"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Functions of the library that FlashInfer loads; it does not load without one."""
    functions: dict[str, object] = {}

    def load() -> SimpleNamespace:
        if not functions:
            raise RuntimeError("undefined symbol: cudaSomething")
        return SimpleNamespace(**functions)

    spec = SimpleNamespace(build_and_load=load)
    core = SimpleNamespace(gen_jit_spec=lambda name, sources: spec)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", core)  # type: ignore[arg-type]
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flashinfer_delta._load.cache_clear()
    yield functions
    flashinfer_delta._load.cache_clear()


def test_it_is_never_had_without_its_library(built: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    packages: dict[str, SimpleNamespace] = {}
    monkeypatch.setattr(flashinfer_delta.importlib.util, "find_spec", packages.get)
    assert lacks(torch.bfloat16, CUDA, LARGE) == "flashinfer is not installed"
    packages["flashinfer"] = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    assert lacks(torch.bfloat16, CUDA, LARGE) == f"FlashInfer's {LIBRARY}.so is not built"
    file = tmp_path / "data" / "aot" / LIBRARY / f"{LIBRARY}.so"
    file.parent.mkdir(parents=True)
    file.touch()
    unusable = f"FlashInfer's {LIBRARY}.so can't be used: "
    assert lacks(torch.bfloat16, CUDA, LARGE) == f"{unusable}undefined symbol: cudaSomething"
    built |= dict.fromkeys(FUNCTIONS[:-1], print)
    assert lacks(torch.bfloat16, CUDA, LARGE) == f"{unusable}{AttributeError(NO_FUNCTION)}"
    built[FUNCTIONS[-1]] = print
    assert lacks(torch.bfloat16, CUDA, LARGE) is None


def test_what_is_asked_of_the_library_is_what_is_called():
    assert all(callable(getattr(FakeLibrary, name)) for name in FUNCTIONS)
    assert {name for name in vars(FakeLibrary) if not name.startswith("_")} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "for bfloat16, not torch.float16"),
        ({"heads": replace(LARGE, k_dim=64)}, "heads of 128, not 64 and 128"),
        ({"heads": linear(1, 4)}, "no single key head"),
        ({"device": torch.device("cpu")}, "for a CUDA device, not cpu"),
        ({"capability": 10}, "for compute capability 9, cuda has 10"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(change: dict, reason: str, monkeypatch: pytest.MonkeyPatch):
    found = {"dtype": torch.bfloat16, "device": CUDA, "heads": LARGE, "capability": 9} | change
    capability = (found.pop("capability"), 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reason in str(lacks(**found))


def on_device(name: str, piece: int | None, spec: LinearSpec) -> PlanRule:
    try:
        rule = make_rule(name, spec, [1], CUDA)
    except ValueError as error:
        pytest.skip(str(error))
    return FlashInferRule(CUDA, spec.num_v_heads, piece=piece) if name == "flashinfer" else rule


LENS = [[1], [2], [63], [2000], [1, 2, 64, 65, 127, 700], [300, 1, 2000, 128, 17], [1] * 9, [64, 128, 64]]
CASES = [
    ("fla", None, LARGE), ("flashinfer", None, LARGE), ("flashinfer", 0, LARGE), ("flashinfer", 448, LARGE),
    ("flashinfer", 64, LARGE), ("flashinfer", 0, SMALL), ("flashinfer", 64, SMALL), ("flashinfer", 64, linear(4, 12)),
]  # fmt: skip
"""Pieces are put together by another function for up to 8 heads, up to 16, and more."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "piece", "spec"), CASES, ids=lambda x: str(getattr(x, "num_v_heads", x)))
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_sequences_come_out_as_by_torch(lens: list[int], name: str, piece: int | None, spec: LinearSpec):
    rule = on_device(name, piece, spec)
    rows, states = rows_of(sum(lens), spec, "cuda"), states_of(len(lens), spec, "cuda")

    def place(values: np.ndarray) -> torch.Tensor:
        return stage(values).cuda()

    run = rule(lens, place)
    want, want_ends = TorchRule()(lens, place)(wide(rows), states.clone())
    # Twice: what the first call left in memory must not be seen.
    for _ in range(2):
        out, ends = run(rows, states.clone())
        assert out.isfinite().all()
        first = 0
        for i, num in enumerate(lens):
            span = slice(first, first + num)
            assert apart(out[:, span], want[:, span]) < 2e-2, f"outputs of sequence {i}, {num} rows"
            assert apart(ends[i], want_ends[i]) < 2e-2, f"state after sequence {i}, {num} rows"
            first += num
