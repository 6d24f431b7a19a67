"""The compiled kernels give the bits of the torch code they stand for."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from memsvc.device import kv_pool, layers, rope
from memsvc.device.cpu.kernels import load
from memsvc.device.hf_config import rope_spec
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, Rotary
from memsvc.wire.mem import KindLayout

pytestmark = pytest.mark.skipif(load() is None, reason="the CPU kernels are not built, or not for this CPU")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def by_torch(monkeypatch: pytest.MonkeyPatch, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What run gives without the kernels."""
    with monkeypatch.context() as patch:
        for module in (layers, rope, kv_pool):
            patch.setattr(module, "kernels_for", lambda _: None)
        return run()


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.parametrize("width", [7, 31, 40, 64, 100, 576, 1025, 4096, 16384, 40000])
def test_a_norm_has_the_bits_of_torch_at_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(width)
    norm = RMSNorm(random(width), 1e-5)
    x = random(max(3, 40000 // width), width) * torch.logspace(-3, 3, max(3, 40000 // width))[:, None].bfloat16()
    assert torch.equal(norm(x), by_torch(monkeypatch, lambda: norm(x)))


def test_a_norm_of_heads_takes_strides_and_a_weight_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x = random(9, 15, 64)[:, 2:14]
    for weight in (random(64), random(12, 64)):
        norm = RMSNorm(weight, 1e-6)
        got = norm(x)
        assert got.is_contiguous()
        assert torch.equal(got, by_torch(monkeypatch, lambda norm=norm: norm(x)))


def test_a_norm_it_does_not_take_is_left_to_torch() -> None:
    kernels = load()
    assert kernels is not None
    weight = random(64)
    assert kernels.rms_norm(random(64, 8).t(), random(64), 1e-5) is None
    assert kernels.rms_norm(random(2, 3, 4, 64), weight, 1e-5) is None
    assert kernels.rms_norm(random(2, 64), weight.float(), 1e-5) is None
    assert kernels.rms_norm(random(2, 3, 64), random(3, 1), 1e-5) is None
    assert torch.equal(RMSNorm(weight, 0.0)(torch.ones(2, 3, 4, 64).bfloat16()), weight.expand(2, 3, 4, 64))


def test_the_sum_is_added_before_the_norm_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    norm, x, more = RMSNorm(random(576), 1e-5), random(33, 576), random(33, 600)[:, :576]
    mine, theirs = x.clone(), x.clone()
    got = norm.after(mine, more)
    assert torch.equal(got, by_torch(monkeypatch, lambda: norm.after(theirs, more)))
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, x + more)


def test_silu_has_the_bits_of_torch_for_every_number_there_is() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    kernels = load()
    assert kernels is not None
    got = kernels.silu_mul(torch.cat((numbers, torch.ones_like(numbers)), dim=1))
    assert got is not None
    assert torch.equal(got.nan_to_num(1.5), F.silu(numbers).nan_to_num(1.5))


@pytest.mark.parametrize("width", [7, 33, 1536])
def test_a_gated_mlp_has_the_bits_of_torch(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(width)
    mlp = GatedMlp(Linear(random(2 * width, 24)), Linear(random(24, width)), F.silu)
    x = random(11, 24)
    assert torch.equal(mlp(x), by_torch(monkeypatch, lambda: mlp(x)))


def test_other_activations_stay_with_torch() -> None:
    mlp = GatedMlp(Linear(random(32, 8)), Linear(random(8, 16)), F.relu)
    x = random(5, 8)
    gate, up = mlp.gate_up(x).chunk(2, dim=-1)
    assert torch.equal(mlp(x), mlp.down(F.relu(gate) * up))


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 1.0), (128, 1.0), (64, 0.5), (80, 0.25)])
def test_rotated_heads_have_the_bits_of_torch(head_dim: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(head_dim)
    spec = rope_spec({"rope_theta": 1e4, "partial_rotary_factor": factor, "max_position_embeddings": 4096}, head_dim)
    rotary = Rotary(spec)
    tables = rotary.tables(torch.randint(0, 4096, (37,)), torch.bfloat16)
    x = random(37, 15, head_dim)[:, :12]
    assert torch.equal(rotary.rotate(x, tables), by_torch(monkeypatch, lambda: rotary.rotate(x, tables)))


def make_pool(num_pages: int = 6) -> KvPool:
    shape = KvShape(num_layers=2, num_kv_heads=3, head_dim=16, dtype=torch.bfloat16)
    page_bytes = shape.token_bytes * 5
    kind = KindLayout("target_kv", page_bytes, 5, 0, 0, 1, page_bytes + 64, num_pages)
    return KvPool(torch.zeros(kind.stride_bytes * num_pages, dtype=torch.uint8), kind, shape)


def test_keys_and_values_go_where_torch_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    pool, other = make_pool(), make_pool()
    slots = torch.tensor([29, 5, 6, 17])
    k, v = random(4, 6, 16)[:, 2:5], random(4, 9, 16)[:, 6:]
    pool.write(1, slots, k, v)
    by_torch(monkeypatch, lambda: other.write(1, slots, k, v) or k)
    assert torch.equal(pool.k(1)[5, 4], k[0])
    for layer in range(2):
        assert torch.equal(pool.k(layer), other.k(layer))
        assert torch.equal(pool.v(layer), other.v(layer))


@pytest.mark.parametrize("slot", [-1, 30])
def test_a_place_outside_the_pool_is_refused(slot: int) -> None:
    with pytest.raises(IndexError, match="of 6 pages x 5 tokens"):
        make_pool().write(0, torch.tensor([3, slot]), random(2, 3, 16), random(2, 3, 16))


def test_who_wants_gradients_or_other_types_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the kernel ran")

    kernels = load()
    assert kernels is not None
    for name in ("rms_norm", "silu_mul", "rotate"):
        monkeypatch.setattr(kernels, name, refuse)
    RMSNorm(torch.ones(8), 1e-5)(torch.ones(2, 8))
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
        RMSNorm(torch.ones(8, dtype=torch.bfloat16), 1e-5)(x).sum().backward()
        assert x.grad is not None
    with pytest.raises(AssertionError, match="the kernel ran"):
        RMSNorm(torch.ones(8, dtype=torch.bfloat16), 1e-5)(torch.ones(2, 8, dtype=torch.bfloat16))


def test_two_threads_give_the_bits_of_one() -> None:
    torch.manual_seed(4)
    norm, x = RMSNorm(random(576), 1e-5), random(300, 576)
    mlp = GatedMlp(Linear(random(3072, 64)), Linear(random(64, 1536)), F.silu)
    narrow = random(300, 64)
    found, threads = [], torch.get_num_threads()
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            found.append((norm(x), mlp(narrow)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_does_not_fit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load()
    assert kernels is not None
    # A weight a row, tables that are broadcast, widths of nothing.
    norm, x = RMSNorm(random(3, 64), 1e-5), random(3, 64)
    assert torch.equal(norm(x), by_torch(monkeypatch, lambda: norm(x)))
    heads, table = random(9, 4, 64), random(1, 1, 64)
    assert kernels.rotate(heads, table, table) is None
    assert kernels.rotate(heads, table.expand(9, -1, -1).contiguous(), table.float().expand(9, -1, -1)) is None
    assert kernels.rms_norm(random(3, 0), random(0), 1e-5) is None
    assert kernels.add_and_norm(random(3, 0), random(3, 0), random(0), 1e-5) is None
    assert kernels.silu_mul(random(3, 0)) is None
    pages, place = (random(4, 16, 2, 8), random(4, 16, 2, 8)), (torch.ones(3).long(), torch.ones(3).long())
    assert not kernels.write_kv(pages, place, random(3, 1, 8), random(3, 1, 8))
    assert not kernels.write_kv(pages, (place[0], place[1][:2]), random(3, 2, 8), random(3, 2, 8))
