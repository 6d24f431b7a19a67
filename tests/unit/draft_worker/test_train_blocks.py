"""The training forward against the oracle and against serving."""

import numpy as np
import pytest
import torch

from draft_worker.batch import BlockBatch
from draft_worker.borrowed import borrow
from draft_worker.config import DraftConfig
from draft_worker.features import FeatureWrites, write_features
from draft_worker.propose import Proposer
from draft_worker.shape import DraftShape
from draft_worker.train.batches import make_batch
from draft_worker.train.blocks import block_rows, make_blocks
from draft_worker.train.checkpoint import write_drafter
from draft_worker.train.drafter import assemble, drafter_json, parameter_sizes, spread_taps
from draft_worker.train.held_out import greedy_drafts
from draft_worker.train.target import FrozenTarget
from draft_worker.weights import load_model
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import PageId, ReqId
from target_worker.model.weights import load_target
from tests.support.dflash_oracle import DFlashOracle
from tests.support.draft_rig import GREEDY, NUM_PAGES, PAGE_SIZE, PAGES_PER_FRAME, draft_kind
from tests.support.make_drafter import random_tensors
from tests.support.tiny_target import make_target
from tests.support.train_rig import small_answers, small_drafter

KINDS = {
    "v2": {},
    "v2 without window": {"window": 0},
    "v2 whole vocabulary": {"draft_vocab": 0},
    "v1": {"version": 1},
    "v1 without window": {"version": 1, "window": 0, "draft_vocab": 0},
}


class Rig:
    """A random drafter for a tiny target, as trained and as served."""

    def __init__(self, folder, **changes):
        model, shape = load_target(folder / "target")
        drafter = small_drafter(**changes)
        size = drafter.draft_vocab or shape.vocab_size
        self.json = drafter_json(drafter, shape, size, "float32")
        self.shape = DraftShape.from_json(self.json)
        self.tensors = random_tensors(parameter_sizes(self.shape))
        vocab = None if size == shape.vocab_size else torch.arange(0, 2 * size, 2)
        self.borrowed = borrow(folder / "target", self.shape, "auto", torch.float32, "cpu")
        self.model = assemble(self.shape, self.tensors, self.borrowed, vocab)
        self.target = FrozenTarget(model, self.shape.target_layer_ids)
        write_drafter(folder / "drafter", self.json, self.tensors, vocab, torch.float32)
        config = DraftConfig(
            run_dir="", draft_path=str(folder / "drafter"), target_path=str(folder / "target"), dtype="float32"
        )
        self.served = load_model(config, DraftShape.from_folder(folder / "drafter"))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "target").mkdir()
    make_target(folder / "target", "Llama")
    return folder


@pytest.fixture(scope="module")
def answers(target):
    return small_answers(target / "target", num=4, max_new=30)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_drafts_are_those_of_the_formulas(target, answers, kind):
    rig = Rig(target, **KINDS[kind])
    batch = make_batch(answers, np.arange(5), 4, np.random.default_rng(1))
    blocks = make_blocks(batch, rig.shape.block_size, torch.device("cpu"))
    features, _ = rig.target.read(blocks.tokens)
    z = block_rows(rig.model, blocks, features).view(*blocks.anchors.shape, -1, rig.shape.hidden_size)
    drafts, _ = greedy_drafts(rig.model, rig.target, batch)
    by_place = features.view(*blocks.tokens.shape, -1)
    oracle = DFlashOracle(rig.json, rig.tensors, rig.borrowed.embedding, rig.model.head)
    for row, column in np.argwhere(batch.is_anchor)[::3]:
        place = int(batch.anchors[row, column])
        known = {at: by_place[row, at] for at in range(place)}
        context = [(at, oracle.context_kv(feature, at)) for at, feature in known.items()]
        expected = oracle.rows(context, int(batch.tokens[row, place]), place, rig.shape.block_size - 1)[1:]
        assert torch.allclose(z[row, column], expected, atol=2e-4), (row, place)
        if rig.model.selector is None:
            ids = rig.model.token_ids(oracle.logits(expected).argmax(1)).tolist()
            assert drafts[row, column].tolist() == ids


@pytest.mark.parametrize("kind", KINDS)
def test_serving_the_checkpoint_drafts_what_training_drafts(target, answers, kind):
    rig = Rig(target, **KINDS[kind])
    batch = make_batch(answers, np.arange(5), 5, np.random.default_rng(2))
    drafts, blocks = greedy_drafts(rig.model, rig.target, batch)
    features, _ = rig.target.read(blocks.tokens)
    by_place = features.view(*blocks.tokens.shape, -1)
    compared = 0
    for row, column in np.argwhere(batch.is_anchor):
        place = int(batch.anchors[row, column])
        tokens = batch.tokens[row, : place + 1].tolist()
        assert served_drafts(rig.served, by_place[row, :place], tokens) == drafts[row, column].tolist(), (row, place)
        compared += 1
    assert compared > 10


def served_drafts(model, features, tokens):
    """Drafts after the last of tokens, by the paged route over a poisoned pool; features [len(tokens) - 1, width]."""
    kind, shape = draft_kind(model.shape), model.shape
    arena = torch.full((NUM_PAGES * kind.stride_bytes,), 0xFF, dtype=torch.uint8)
    sizes = KvShape(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=torch.float32
    )
    pool, tables = KvPool(arena, kind, sizes), PageTables(max_reqs=2, max_pages=40, page_size=PAGE_SIZE)
    row = tables.add(ReqId(1))
    for index in range(-(-(len(tokens) + shape.block_size) // PAGE_SIZE)):
        tables.set(ReqId(1), index, PageId(PAGES_PER_FRAME + 7 + index))
    run = {"rows": [row], "starts": [0], "lens": [len(features)], "first": [0]}
    with torch.inference_mode():
        writes = FeatureWrites(**{name: np.array(value) for name, value in run.items()})
        write_features(model, pool, tables, features, writes)
    batch = BlockBatch(
        rows=np.array([row]),
        anchors=np.array(tokens[-1:]),
        anchor_pos=np.array([len(tokens) - 1]),
        context_start=np.array([0]),
        num_drafts=shape.block_size - 1,
    )
    sampler = RowSampler(GREEDY, eos_ids=[2], prompt=tokens, output=[])
    return Proposer(model, pool, tables, "paged").propose(batch, [sampler]).token_ids[0].tolist()


def test_drafts_do_not_depend_on_what_comes_after_their_anchor(target, answers):
    rig = Rig(target)
    batch = make_batch(answers, np.arange(5), 4, np.random.default_rng(1))
    before, _ = greedy_drafts(rig.model, rig.target, batch)
    first = batch.anchors[:, 0]
    for row, place in zip(batch.tokens, first, strict=True):
        row[place + 1 :] = (row[place + 1 :] + 11) % 90
    after, _ = greedy_drafts(rig.model, rig.target, batch)
    assert np.array_equal(before[:, 0], after[:, 0])
    assert not np.array_equal(before, after)


def test_taps_are_spread_from_near_the_bottom_to_the_third_from_the_top():
    assert spread_taps(4, 30) == (2, 10, 19, 27)
    assert spread_taps(1, 3) == (0,)
    assert spread_taps(3, 3) == (0, 1, 2)
    with pytest.raises(ValueError, match="4 taps of a target of 3"):
        spread_taps(4, 3)
