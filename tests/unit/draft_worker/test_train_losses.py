"""Each part of the loss against its definition."""

import math

import pytest
import torch

from draft_worker.train import losses
from draft_worker.train.config import LossConfig
from draft_worker.train.losses import Rows, block_loss, head_rows, reachable, selector_loss, total_variation


class Network:
    """As much of a DraftModel as losses need."""

    def __init__(self, head, draft_to_target=None, selector=None, top_k=2):
        self.head = head
        self.draft_to_target = draft_to_target
        self.selector = selector
        self.shape = type("Shape", (), {"vocab_size": 10, "selector_top_k": top_k})

    def token_ids(self, rows):
        return rows if self.draft_to_target is None else self.draft_to_target[rows]


class Selector:
    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden_projection = torch.randn(3, 4, generator=generator)
        self.predecessor = torch.randn(10, 3, generator=generator)
        self.successor = torch.randn(10, 3, generator=generator)


def rows_of(labels, z=None, num_drafts=2, vocab=10, before=None):
    m = len(labels)
    generator = torch.Generator().manual_seed(5)
    return Rows(
        z=torch.randn(m, 4, generator=generator) if z is None else z,
        before=torch.zeros(m, dtype=torch.int64) if before is None else before,
        labels=torch.tensor(labels),
        target=torch.softmax(torch.randn(m, vocab, generator=generator), 1),
        num_drafts=num_drafts,
    )


def test_labels_become_rows_of_a_reduced_head():
    kept = torch.tensor([1, 4, 9])
    assert head_rows(kept, torch.tensor([4, 0, -1, 9, 1]), 10).tolist() == [1, -1, -1, 2, 0]
    assert head_rows(None, torch.tensor([4, -1]), 10).tolist() == [4, -1]


def test_rows_after_a_token_that_cannot_be_drafted_have_no_weight():
    assert reachable(torch.tensor([3, -1, 2, 0, 1, -1]), 3).tolist() == [1, 0, 0, 1, 1, 0]


def test_cross_entropy_is_the_decayed_mean_over_rows_with_a_label():
    head = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    rows = rows_of([3, 5, 7, -1])
    _, parts = block_loss(Network(head), rows, LossConfig(gamma=2.0))
    each = -torch.log_softmax(rows.z @ head.T, 1)
    weights = [1.0, math.exp(-0.5), 1.0]
    expected = sum(w * each[row, label] for row, (w, label) in enumerate(zip(weights, (3, 5, 7), strict=True)))
    assert parts["cross_entropy"].item() == pytest.approx(expected.item() / sum(weights), rel=1e-5)


def test_total_variation_is_the_chance_that_the_best_coupling_rejects():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    target = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    assert total_variation(logits, target, 1.0).tolist() == pytest.approx([0.3, 0.0], abs=1e-6)
    half = torch.tensor([[0.2, 0.3, 0.0]])
    assert total_variation(logits[:1], half, 1.0).tolist() == pytest.approx([0.5])


def test_the_loss_is_the_sum_of_its_weighted_parts_and_moves_every_weight():
    head = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    selector = Selector()
    for name in ("hidden_projection", "predecessor", "successor"):
        getattr(selector, name).requires_grad_()
    rows = rows_of([3, 5, 7, 2], z=torch.randn(4, 4).requires_grad_())
    config = LossConfig(cross_entropy=0.3, total_variation=0.9, selector=0.7)
    loss, parts = block_loss(Network(head, selector=selector), rows, config)
    expected = 0.3 * parts["cross_entropy"] + 0.9 * parts["total_variation"] + 0.7 * parts["selector"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert all(part.grad.abs().sum() > 0 for part in (rows.z, selector.hidden_projection, selector.successor))


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_the_selector_ranks_the_wanted_token_even_where_it_is_not_among_the_best(label):
    head = torch.eye(4)
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    selector = Selector()
    rows = rows_of([label], z=z, num_drafts=1, vocab=4, before=torch.tensor([6]))
    found = selector_loss(Network(head, selector=selector), rows, z, torch.tensor([label]))
    candidates = [0, 1] if label < 2 else [0, label]
    r = selector.hidden_projection @ z[0]
    scores = torch.stack([z[0, c] + (selector.predecessor[6] * r * selector.successor[c]).sum() for c in candidates])
    expected = -torch.log_softmax(scores, 0)[candidates.index(label)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_accuracy_counts_rows_with_a_label_only():
    z = torch.eye(4)
    _, parts = block_loss(Network(torch.eye(4)), rows_of([0, 3, 2, -1], z=z, vocab=4), LossConfig())
    assert parts["accuracy"].tolist() == [1.0, 0.0]
    assert losses.decay(3, 1.0, z.device).tolist() == pytest.approx([1.0, math.exp(-1), math.exp(-2)])
