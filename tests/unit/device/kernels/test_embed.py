"""Rows in and out of a forward: bit for bit."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import embed

DTYPES = [torch.float32, torch.bfloat16]
VOCAB, WIDTH, SLOTS = 50, 40, 6


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def members(device):
    return ints([4, 0, 2], device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "scale"), [(WIDTH, 1.0), (2100, 0.3)])
def test_a_block_is_its_anchor_and_masks_scaled(device, members, dtype, width, scale):
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, width).to(device, dtype)
    mask_row = torch.randn(width).to(device, dtype)
    anchors = ints([0, 11, 49, 13, 7, 15, 16], device)
    got = embed.embed_block(anchors, members, embedding, mask_row, 3, scale)
    want = (mask_row * scale).repeat(3, 3, 1)
    want[:, 0] = embedding[anchors[members.long()].long()] * scale
    assert torch.equal(got, want)


def test_a_verify_embeds_anchor_and_drafts_and_no_row_outside_the_vocabulary(device, members):
    torch.manual_seed(1)
    embedding = torch.randn(VOCAB, WIDTH).to(device, torch.bfloat16)
    anchors = ints([0, 1, 2, 3, 4, 5, 6], device)
    drafts = ints([[20, 21, 22, 23, 24, 25, 26][:3]] * (SLOTS + 1), device)
    drafts[4] = ints([30, 49, 50], device)
    drafts[2] = ints([-1, 33, 0], device)
    got = embed.embed_verify(anchors, drafts, members, embedding)
    tokens = torch.tensor([[4, 30, 49, 0], [0, 20, 21, 22], [2, 0, 33, 0]], device=device)
    assert torch.equal(got, embedding[tokens])


@pytest.mark.parametrize("skip", [0, 1])
def test_wanted_rows_are_gathered_out_of_strided_blocks(device, skip):
    x = torch.randn(3, 5, 2 * WIDTH).to(device, torch.bfloat16)[:, :4, :WIDTH]
    got = embed.gather_rows(x, skip)
    assert torch.equal(got, x[:, skip:].reshape(-1, WIDTH))


def test_features_come_from_each_slots_rows_and_the_rest_are_zeros(device, members):
    exchange = torch.randn(30, WIDTH).to(device, torch.bfloat16)
    exchange[20:] = torch.nan
    first_rows = ints([0, 0, 17, 0, 5, 0, 0], device)
    num_rows = ints([0, 9, 3, 9, 2, 9, 9], device)
    got = embed.gather_features(exchange, members, first_rows, num_rows, 4).view(3, 4, WIDTH)
    want = torch.zeros_like(got)
    want[0, :2], want[2, :3] = exchange[5:7], exchange[17:20]
    assert torch.equal(got, want)
