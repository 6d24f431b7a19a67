"""What a DeviceTarget holds of a hybrid's request, against the CPU's runner: keys, values, states and ring rows."""

from pathlib import Path

import numpy as np
import torch

from memsvc.device.kv_dtype import AUTO
from target_worker.linear_memory import LinearMemory
from target_worker.req import Req
from tests.support.device_target import PAGE_SIZE, DeviceTarget
from tests.support.tiny_hybrid import HybridReq, HybridRig


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


def cpu_request(
    folder: Path, tokens: list[int], taps: tuple[int, ...] = (), kv: str = AUTO
) -> tuple[HybridRig, HybridReq]:
    """These tokens computed at once."""
    rig = HybridRig(folder, taps=taps, kv=kv)
    req = rig.open(1, 80)
    rig.chunk(req, tokens)
    return rig, req


def settle(target: DeviceTarget, req: Req) -> None:
    """The state stands at the last page edge."""
    target.executor.catch_up([req])
    target.executor.fence(target.wait)


def check_memory(target: DeviceTarget, req: Req, folder: Path) -> None:
    """All that later steps read of a request is what the CPU has of these tokens."""
    assert target.linear is not None
    assert req.state is not None
    settle(target, req)
    length, edge = req.computed_len, req.computed_len // PAGE_SIZE * PAGE_SIZE
    rig, other = cpu_request(folder, req.tokens[:length], kv=target.kv)
    tables = target.memory.states.mirror.tables
    assert int(tables.state_len[req.row]) == req.state.length == other.state_len == edge
    mine, theirs = tables.state_in[req.row], rig.linear.table.state_in[other.row]
    assert mine.tolist() == target.linear.table.state_in[req.row].tolist()
    if edge:
        for name in ("read", "read_conv"):
            got, want = getattr(target.linear.states, name), getattr(rig.linear.states, name)
            close(got(mine.long()), want(torch.from_numpy(theirs).long()))
    for layer in range(rig.linear.table.num_layers):
        for got, want in zip(
            ring_rows(target.linear, req.row, layer, edge, length),
            ring_rows(rig.linear, other.row, layer, edge, length),
            strict=True,
        ):
            close(got, want)
    for layer in range(target.shape.num_full_layers):
        for part in ("k", "v"):
            got = getattr(target.memory.pool, part)(layer)[target.tables.table[req.row].long()].flatten(0, 1)
            want = getattr(rig.runner.pool, part)(layer)[rig.tables.table[other.row].long()].flatten(0, 1)
            close(got[:length].float(), want[:length].float())


def ring_rows(linear: LinearMemory, row: int, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, positions = linear.rings.shape, np.arange(start, end)
    pages = linear.table.ring[row, layer, positions % shape.num_rows // shape.page_rows].astype(np.int64)
    device = linear.states.device
    return linear.rings.read(torch.from_numpy(pages).to(device), torch.from_numpy(positions).to(device))
