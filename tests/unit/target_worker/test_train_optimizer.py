"""Muon against what defines it, beside AdamW."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_worker.train.config import TrainConfig
from draft_worker.train.plot import read_log
from target_worker.train.muon import Muon, orthogonal
from target_worker.train.optimizer import Optimizer
from tests.support.train_rig import make_run, make_trainer, paths_of

SIZES = {"fc.weight": (6, 10), "gate.weight": (10, 6), "norm.weight": (6,), "x_codebook": (9, 4)}


def some_params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).requires_grad_() for name, size in SIZES.items()}


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in params.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def test_matrices_of_every_shape_come_out_with_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in ((8, 20), (20, 8), (8, 8), (8, 20))]
    for matrix, found in zip(given, orthogonal(given), strict=True):
        assert found.shape == matrix.shape
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.4
        assert values.max() < 1.4
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), dim=0) > 0.95


def test_a_step_of_muon_is_as_large_as_one_of_adamw():
    param = torch.zeros(40, 60, requires_grad=True)
    param.grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(1)) * 1e-3
    Muon([param], lr=0.1, weight_decay=0.0).step()
    assert param.detach().pow(2).mean().sqrt().item() == pytest.approx(0.02, rel=0.2)


def test_muon_moves_matrices_alone_and_adamw_the_rest_as_it_would_without():
    plain, mixed = some_params(), some_params()
    one = Optimizer(plain, TrainConfig(optimizer="adamw"))
    other = Optimizer(mixed, TrainConfig(optimizer="muon"))
    for params, optimizer in ((plain, one), (mixed, other)):
        give_gradients(params, 3)
        optimizer.step(0.01)
        assert all(tensor.grad is None for tensor in params.values())
    assert torch.equal(plain["norm.weight"], mixed["norm.weight"])
    assert torch.equal(plain["x_codebook"], mixed["x_codebook"])
    assert not torch.equal(plain["fc.weight"], mixed["fc.weight"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_that_are_restored_go_on_as_if_there_had_been_no_pause(name):
    config = TrainConfig(optimizer=name)
    whole, first = some_params(), some_params()
    straight, before = Optimizer(whole, config), Optimizer(first, config)
    for seed in range(3):
        for params, optimizer in ((whole, straight), (first, before)):
            give_gradients(params, seed)
            optimizer.step(0.01)
    second = {key: tensor.detach().clone().requires_grad_() for key, tensor in first.items()}
    after = Optimizer(second, config)
    assert set(before.moments()) == set(after.moment_names())
    after.restore({key: tensor.clone() for key, tensor in before.moments().items()}, 3)
    for params, optimizer in ((whole, straight), (second, after)):
        give_gradients(params, 9)
        optimizer.step(0.01)
    assert all(torch.equal(whole[key], second[key]) for key in whole)


def test_a_run_with_muon_learns_and_goes_on_in_slices(tmp_path):
    make_run(tmp_path)
    whole, sliced = paths_of(tmp_path, "whole"), paths_of(tmp_path, "sliced")
    made = make_trainer(whole, steps=30, lr=5e-3, optimizer="muon")
    made.run()
    for steps in (7, 30):
        part = make_trainer(sliced, steps=30, lr=5e-3, optimizer="muon")
        part._late = lambda _started, part=part, steps=steps: part.progress.step >= steps
        part.run()
    one, other = (load_file(next(paths.state.glob("*.safetensors"))) for paths in (whole, sliced))
    assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(ValueError, match="optimiser"):
        make_trainer(sliced, steps=30, optimizer="adamw")
    losses = [entry["loss"] for entry in read_log(whole.state / "train.jsonl")["step"]]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:2])
