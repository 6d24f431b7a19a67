"""Kernels ask for the next weight if there is one on a GPU, and are not changed by it where there is none."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import ahead


class OnGpu:
    """A weight as far as `operands` looks at it."""

    def __init__(self, nbytes: int, contiguous: bool = True) -> None:
        self.nbytes = nbytes
        self.device = torch.device("cuda")
        self.is_contiguous = lambda: contiguous


@pytest.mark.parametrize(("nbytes", "limit", "asked"), [(9000, 1 << 20, 8192), (1 << 22, 1 << 20, 1 << 20)])
def test_whole_pieces_are_asked_for_up_to_the_limit(monkeypatch, nbytes, limit, asked):
    monkeypatch.setattr(ahead, "BYTES", limit)
    weight = OnGpu(nbytes)
    assert ahead.operands(weight) == (weight, asked)


def test_nothing_is_asked_for_without_a_weight_that_a_gpu_could_fetch(monkeypatch):
    nothing = (None, 0)
    assert ahead.operands(None) == nothing
    assert ahead.operands(torch.zeros(9000)) == nothing
    assert ahead.operands(OnGpu(9000, contiguous=False)) == nothing
    assert ahead.operands(OnGpu(4095)) == nothing
    monkeypatch.setattr(ahead, "BYTES", 0)
    assert ahead.operands(OnGpu(9000)) == nothing


def test_the_asking_is_in_the_compiled_kernels_only_if_there_is_a_weight(tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_ahead"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    found = json.loads(done.stdout)
    assert set(found) == {"_norm", "_gated"}
    assert all(without == 0 < with_weight for without, with_weight in found.values()), found
