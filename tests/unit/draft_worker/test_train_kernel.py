"""Attention of one decoded token a row, by the kernel and by torch."""

import pytest
import torch

from draft_worker.train.decode_attention import choose_attention, torch_attention


def plain(q, keys, values, lens):
    """Row by row, head by head."""
    n, num_heads, dim = q.shape
    group = num_heads // keys.shape[2]
    out = torch.empty_like(q)
    for row in range(n):
        end = int(lens[row]) + 1
        for head in range(num_heads):
            k, v = keys[row, :end, head // group], values[row, :end, head // group]
            out[row, head] = torch.softmax(k @ q[row, head] * dim**-0.5, 0) @ v
    return out


def made(device, num_heads=9, num_kv_heads=3, dim=64):
    torch.manual_seed(0)
    q = torch.randn(5, num_heads, dim, device=device)
    keys, values = (torch.randn(5, 150, num_kv_heads, dim, device=device) for _ in range(2))
    return q, keys, values, torch.tensor([0, 5, 63, 64, 149], device=device)


def test_attention_reads_each_row_to_its_own_end():
    args = made("cpu")
    assert torch.allclose(torch_attention(*args), plain(*args), atol=1e-5)


def test_the_cpu_takes_torchs_attention():
    assert choose_attention(9, 3, 64, torch.zeros(1)) is torch_attention


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (6, 2, 16), (8, 8, 128)])
def test_the_kernel_computes_what_torch_computes(num_heads, num_kv_heads, dim):
    from draft_worker.train.decode_kernel import decode_attention

    args = made("cuda", num_heads, num_kv_heads, dim)
    assert torch.allclose(decode_attention(*args), torch_attention(*args), atol=1e-2)
