"""The best tokens of rows by a kernel, ties by the lowest id."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels import top_k as kernels
from memsvc.device.kernels.top_k import TopKTile, argmax, top_k

SMALL = TopKTile(group=16, groups=4, width=8)


def by_sorting(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k].int()


@pytest.mark.parametrize("vocab", [1, 16, 17, 65, 1000])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_the_order_is_logit_then_lowest_id_even_if_most_are_equal(device, vocab, k):
    k = min(k, vocab)
    torch.manual_seed(vocab)
    for spread in (1, 3, 50):
        logits = torch.randint(-spread, spread, (3, vocab)).float()
        values, ids = top_k(logits.to(device), k, tile=SMALL)
        assert ids.tolist() == by_sorting(logits, k).tolist()
        assert torch.equal(values.cpu(), logits.gather(1, by_sorting(logits, k).long()))


def test_zeros_of_either_sign_are_equal_a_nan_comes_first_and_minus_infinity_last(device):
    logits = torch.tensor([[-0.0, 0.0, -torch.inf, 0.0, torch.nan], [-torch.inf, 3.0, torch.inf, 3.0, -torch.inf]])
    assert top_k(logits.to(device), 5)[1].tolist() == [[4, 0, 1, 3, 2], [2, 1, 3, 0, 4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_with_their_many_ties_give_the_same_in_any_strides(device, dtype):
    torch.manual_seed(0)
    logits = torch.randn(4, 777).to(dtype)
    expected = by_sorting(logits.float(), 16).tolist()
    assert top_k(logits.to(device), 16)[1].tolist() == expected
    assert top_k(logits.t().contiguous().to(device).t(), 16, tile=SMALL)[1].tolist() == expected


def test_multiplier_and_softcap_come_before_the_choice(device):
    torch.manual_seed(0)
    logits = 40 * torch.randn(3, 300)
    capped = (2 * torch.tanh(logits.double() * 0.5 / 2).float()).to(torch.float32)
    values, ids = top_k(logits.to(device), 16, multiplier=0.5, softcap=2.0, tile=SMALL)
    # In float32 many of the largest saturate at the cap, and then the lowest ids win.
    assert ids.tolist() == by_sorting(capped, 16).tolist()
    torch.testing.assert_close(values.cpu(), capped.gather(1, ids.long().cpu()))
    assert ids.tolist() != by_sorting(logits, 16).tolist()


def test_groups_grow_where_a_vocabulary_has_too_many(device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_GROUPS", 8)
    torch.manual_seed(1)
    logits = torch.randn(2, 400)
    assert top_k(logits.to(device), 6, tile=SMALL)[1].tolist() == by_sorting(logits, 6).tolist()


def test_argmax_is_the_first_of_the_largest(device):
    torch.manual_seed(2)
    logits = torch.randint(0, 3, (9, 130)).float()
    assert argmax(logits.to(device), tile=SMALL).tolist() == logits.numpy().argmax(1).tolist()


def test_more_tokens_than_there_are_are_refused():
    with pytest.raises(ValueError, match="the 6 best of 5 tokens, at most 64"):
        top_k(torch.zeros(1, 5), 6)


def test_no_rows_give_nothing():
    assert top_k(torch.zeros(0, 5), 2)[1].shape == (0, 2)
