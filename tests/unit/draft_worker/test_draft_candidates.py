"""The best tokens of a row, with ties by the lowest id."""

import pytest
import torch

from draft_worker.candidates import CandidateFinder


def by_sorting(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize("vocab_size", [1, 16, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("k", [1, 16])
def test_the_order_is_logit_then_lowest_id_even_if_most_are_equal(vocab_size, k):
    k = min(k, vocab_size)
    finder = CandidateFinder()
    torch.manual_seed(vocab_size)
    for spread in (1, 3, 50):
        logits = torch.randint(-spread, spread, (11, vocab_size)).float()
        values, ids = finder.top(logits.t().contiguous(), k)
        assert torch.equal(ids, by_sorting(logits, k))
        assert torch.equal(values, logits.gather(1, ids))


def test_zeros_of_either_sign_are_equal_and_minus_infinity_comes_last():
    logits = torch.tensor([[-0.0, 0.0, -torch.inf, 0.0, -1.0]])
    assert CandidateFinder().top(logits.t().contiguous(), 5)[1].tolist() == [[0, 1, 3, 4, 2]]


def test_bfloat16_logits_with_their_many_ties_give_the_same():
    torch.manual_seed(0)
    logits = torch.randn(20, 777).bfloat16()
    expected = by_sorting(logits.float(), 16)
    assert torch.equal(CandidateFinder().top(logits.t().contiguous(), 16)[1], expected)


def test_multiplier_and_softcap_come_before_the_choice():
    torch.manual_seed(0)
    logits = 40 * torch.randn(9, 300)
    capped = 2 * torch.tanh(logits * 0.5 / 2)
    values, ids = CandidateFinder(multiplier=0.5, softcap=2.0).top(logits.t().contiguous(), 16)
    # In float32 many of the largest saturate at the cap, and then the lowest ids win.
    assert torch.equal(ids, by_sorting(capped, 16))
    torch.testing.assert_close(values, capped.gather(1, ids))
    assert not torch.equal(ids, by_sorting(logits, 16))
