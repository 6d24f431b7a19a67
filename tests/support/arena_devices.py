"""Where tests of the arena run: CPU memory, a made-up CUDA device, a real one. Take the `arena_device` fixture."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memsvc import cuda_driver
from memsvc.device import cuda_map
from tests.support.fake_cuda import FakeCuda


class _Held(np.ndarray):
    """An array that keeps the mapping it lies in."""

    mapping: Any


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A made-up driver with two devices in this process; memory that is mapped from it comes as CPU tensors."""
    fake = FakeCuda()

    def tensor(mapping: Any) -> torch.Tensor:
        shown = mapping.__cuda_array_interface__
        address, is_read_only = shown["data"]
        assert (shown["typestr"], shown["strides"], is_read_only) == ("|u1", None, False)
        assert fake.accessible[address] == mapping.device.ordinal
        array = np.frombuffer(fake.mapped[address], dtype=np.uint8).view(_Held)
        assert shown["shape"] == array.shape
        array.mapping = mapping
        return torch.from_numpy(array)

    monkeypatch.setattr(cuda_driver, "_module", fake.module)
    monkeypatch.setattr(cuda_map, "_tensor", tensor)
    monkeypatch.setattr(cuda_map, "_make_context", lambda ordinal: fake.calls.append(("context", ordinal)))
    monkeypatch.setattr(cuda_map, "_finish", lambda ordinal: fake.calls.append(("finish", ordinal)))
    return fake


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """use_fake_cuda; descriptors of handles that a test leaves open are closed at its end."""
    fake = use_fake_cuda(monkeypatch)
    yield fake
    fake.close()


@pytest.fixture(params=["cpu", "made-up cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def arena_device(request: pytest.FixtureRequest) -> str:
    """cpu or cuda, as map_arena and the service take it."""
    if request.param == "made-up cuda":
        request.getfixturevalue("fake_cuda")
    elif request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param.split()[-1]
