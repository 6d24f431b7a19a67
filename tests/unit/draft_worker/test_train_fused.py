"""Functions are compiled only where that gives the same numbers."""

import pytest
import torch

from draft_worker.model import DraftLayer
from draft_worker.train.blocks import BlockAttention, make_blocks
from draft_worker.train.fused_draft import FusedDraftLayer, join
from draft_worker.train.fused_target import FusedDecoder, fuse
from draft_worker.train.fused_target import fused as fused_model
from draft_worker.train.target import FrozenTarget
from memsvc.device import layers
from target_worker.model.weights import load_target
from target_worker.train import fused
from target_worker.train.fused import Fused
from tests.support.tiny_target import make_target
from tests.support.train_rig import make_run, make_trainer, paths_of, small_drafter


def double(x, factor):
    return (x * factor, None, x + factor)


def never(*_args):
    raise RuntimeError("no compiler")


def made(requires_grad=False):
    return torch.randn(4, 3).requires_grad_(requires_grad), torch.ones(3)


def test_a_function_is_compiled_if_it_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(fused.torch, "compile", lambda function: lambda *args: function(*args))
    args = made(True)
    assert Fused(double, moving=1)._choose(args) is not double
    assert args[0].grad is None


@pytest.mark.parametrize(
    "compiled",
    [lambda _function: never, lambda _function: lambda x, factor: (x * factor, None, x * factor), never],
    ids=["fails", "differs", "cannot be compiled"],
)
def test_a_function_stays_as_it_is_where_compiling_does_not_serve(compiled, monkeypatch):
    monkeypatch.setattr(fused.torch, "compile", compiled)
    assert Fused(double, moving=1)._choose(made()) is double


def test_a_wrong_gradient_is_seen(monkeypatch):
    def wrong(x, factor):
        return (x * factor + x.detach() - x, None, x + factor)

    monkeypatch.setattr(fused.torch, "compile", lambda _function: wrong)
    assert Fused(double, moving=1)._choose(made(True)) is double


def test_the_cpu_computes_as_it_always_did(monkeypatch):
    monkeypatch.setattr(fused.torch, "compile", never)
    x, factor = made()
    assert torch.equal(Fused(double, moving=1)(x, factor)[0], x * factor)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_target_in_pieces_computes_the_same(family, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "is_packable", lambda _weight: False)
    make_target(tmp_path, family)
    model, _ = load_target(tmp_path)
    assert fuse(model) is model
    pieces = fused_model(model)
    assert type(pieces) is FusedDecoder
    tokens = torch.arange(24).view(2, 12)
    taps = (0, model.shape.num_layers - 1)
    for one, other in zip(FrozenTarget(model, taps).read(tokens), FrozenTarget(pieces, taps).read(tokens), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("version", [1, 2])
def test_a_draft_layer_in_pieces_computes_the_same(version, tmp_path):
    make_run(tmp_path)
    trainer = make_trainer(paths_of(tmp_path, "x"), small_drafter(version=version))
    for seed, tensor in enumerate(trainer.params.values()):
        # A fresh convolution is the identity, which would hide one that is left out.
        tensor.data += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    model = trainer.model()
    assert {type(layer) for layer in model.layers} == {FusedDraftLayer}
    blocks = make_blocks(trainer._next_batch(), model.shape.block_size, torch.device("cpu"))
    features, _ = trainer._target.read(blocks.tokens)
    n, num_tokens = blocks.tokens.shape
    context = model.context(features, torch.arange(num_tokens).repeat(n))
    attend = BlockAttention(model.shape, blocks, context, model.dtype)
    x = torch.randn(blocks.num_blocks, model.shape.block_size, model.shape.hidden_size)
    tables = model.rotary.tables(blocks.positions.flatten(), model.dtype)
    for index, layer in enumerate(model.layers):
        args = (index, x, model.rotary, tables, attend)
        assert torch.equal(layer.forward(*args), DraftLayer.forward(layer, *args))


def test_keys_of_context_and_block_are_joined_and_spread_over_query_heads():
    context, own = torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4)
    found = join(context, own, 2)
    assert found.shape == (2, 6, 11, 4)
    assert torch.equal(found[1, 3, 2], context[1, 2, 1])
    assert torch.equal(found[0, 4, 5 + 3], own[0, 3, 2])
