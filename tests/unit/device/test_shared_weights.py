"""Embedding and head in the arena: filled by the target, read by the draft, in memory once."""

from pathlib import Path

import pytest
import torch

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from memsvc.core.config import PoolConfig
from memsvc.core.geometry import make_layout, solve
from memsvc.device.fixed_frames import ALIGN, ExchangeLayout, SharedForm
from memsvc.device.shared_weights import SharedWeights, shared_weights
from memsvc.wire.mem import KindSpec, Layout
from target_worker.model.config import TargetShape
from target_worker.model.weights import build, load_target
from tests.support.make_drafter import V1, V2, make_drafter, make_target_stub
from tests.support.model_folders import TARGET, folder

KIND = KindSpec("target_kv", 1000, 4)


def make_arena(form: SharedForm | None, exchange_bytes: int = 3000) -> tuple[torch.Tensor, Layout]:
    """An arena in which every byte is NaN, as the service lays it out."""
    config = PoolConfig(
        arena_bytes=4 << 20,
        page_size=4,
        kinds=[KIND],
        exchange_bytes=exchange_bytes,
        shared_bytes=form.num_bytes if form else 0,
    )
    layout = make_layout(config, solve(config.kinds))
    return torch.full((layout.arena_bytes,), 0xFF, dtype=torch.uint8), layout


def form_of(shape: DraftShape | TargetShape, dtype: torch.dtype, *, tied: bool) -> SharedForm:
    return SharedForm(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, item_bytes=dtype.itemsize, is_tied=tied
    )


def share(arena: torch.Tensor, layout: Layout, shape: DraftShape | TargetShape, dtype: torch.dtype) -> SharedWeights:
    shared = shared_weights(arena, layout, (shape.vocab_size, shape.hidden_size), dtype)
    assert shared is not None
    return shared


def test_parts_of_the_exchange_follow_each_other_on_the_lattice():
    parts = ExchangeLayout(feature_bytes=1000, slot_bytes=700)
    assert (parts.slots, parts.num_bytes) == (1024, 1024 + 768)
    assert ExchangeLayout(feature_bytes=0, slot_bytes=256).slots == 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_matrices_lie_in_their_frames_and_nowhere_else(tied: bool):
    form = SharedForm(vocab_size=13, hidden_size=6, item_bytes=2, is_tied=tied)
    arena, layout = make_arena(form)
    shared = SharedWeights(arena, layout, (13, 6), torch.bfloat16)
    embedding, head = torch.arange(78.0).view(13, 6), -torch.arange(78.0).view(13, 6)
    assert shared.fill(shared.embedding, embedding) is shared.embedding
    if not tied:
        shared.fill(shared.head, head)
    again = SharedWeights(arena, layout, (13, 6), torch.bfloat16)
    assert torch.equal(again.embedding.float(), embedding)
    assert torch.equal(again.head.float(), embedding if tied else head)
    assert (shared.head is shared.embedding) == tied
    start = layout.shared_offset
    assert start == (1 + -(-3000 // layout.frame_bytes)) * layout.frame_bytes
    assert start % ALIGN == form.head_offset % ALIGN == 0
    written = (arena != 0xFF).nonzero()
    assert int(written.min()) >= start
    assert int(written.max()) < start + layout.shared_bytes
    assert layout.shared_bytes <= -(-layout.shared_bytes // layout.frame_bytes) * layout.frame_bytes


def test_a_layout_of_another_size_is_refused_with_the_numbers():
    form = SharedForm(vocab_size=130, hidden_size=6, item_bytes=2, is_tied=True)
    arena, layout = make_arena(form)
    for size, dtype in (((131 * 2, 6), torch.bfloat16), ((130, 6), torch.float32)):
        with pytest.raises(ValueError, match=rf"the layout has {form.num_bytes} bytes .*\[{size[0]}, 6\].* {dtype}"):
            SharedWeights(arena, layout, size, dtype)
    plain, layout = make_arena(None)
    assert shared_weights(plain, layout, (130, 6), torch.bfloat16) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_target_puts_both_there_and_computes_with_them(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("memsvc.device.layers.is_packable", lambda weight: False)
    sizes = {"num_hidden_layers": 1, "hidden_size": 18, "num_attention_heads": 9, "vocab_size": 40, "head_dim": 2}
    path = folder(tmp_path, TARGET, **sizes, intermediate_size=16, tie_word_embeddings=tied)
    plain, shape = load_target(path, "float32", load_format="dummy")
    arena, layout = make_arena(form_of(shape, torch.float32, tied=tied))
    shared = share(arena, layout, shape, torch.float32)
    model, _ = load_target(path, "float32", load_format="dummy", shared=shared)
    assert torch.equal(shared.embedding, plain.embedding)
    assert torch.equal(shared.head, plain.head.weight)
    assert model.embedding.data_ptr() == shared.embedding.data_ptr()
    assert model.head.weight.data_ptr() == shared.head.data_ptr()


def test_a_layout_made_for_a_tied_head_is_refused_by_another_target(tmp_path: Path):
    shape = TargetShape.from_folder(folder(tmp_path, TARGET, vocab_size=40, tie_word_embeddings=False))
    arena, layout = make_arena(form_of(shape, torch.float32, tied=True))
    shared = share(arena, layout, shape, torch.float32)
    with pytest.raises(ValueError, match="tie_word_embeddings is False"):
        build(shape, NoSource(), torch.float32, "cpu", shared)


class NoSource:
    """A source that is never to be asked."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError(name)

    def has(self, name: str) -> bool:
        raise AssertionError(name)

    def unused(self) -> list[str]:
        raise AssertionError


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_reads_what_the_target_fills_later(tmp_path: Path, version: int, tied: bool):
    target = make_target_stub(tmp_path / "target", tied=tied)
    config = DraftConfig(
        run_dir="",
        draft_path=str(make_drafter(tmp_path / "drafter", target, version)),
        target_path=str(target),
        dtype="float32",
    )
    shape = DraftShape.from_folder(config.draft_path)
    expected = load_model(config, shape)
    arena, layout = make_arena(form_of(shape, torch.float32, tied=tied))
    model = load_model(config, shape, share(arena, layout, shape, torch.float32))
    mask_row = model.mask_row
    assert not torch.equal(mask_row, expected.mask_row)
    filled = share(arena, layout, shape, torch.float32)
    filled.fill(filled.embedding, expected.embedding)
    filled.fill(filled.head, expected.head)
    model.fill_late()
    assert model.mask_row.data_ptr() == mask_row.data_ptr()
    for name in ("mask_row", "embedding", "head"):
        assert torch.equal(getattr(model, name), getattr(expected, name)), name
    assert model.embedding.data_ptr() == filled.embedding.data_ptr()
    assert model.head.data_ptr() == filled.head.data_ptr()
    assert expected.late == []


def test_rows_of_a_reduced_head_come_late_too(tmp_path: Path):
    target = make_target_stub(tmp_path / "target", tied=False)
    path = make_drafter(tmp_path / "drafter", target, V1, draft_vocab_size=24)
    config = DraftConfig(
        run_dir="", draft_path=str(path), target_path=str(target), dtype="float32", load_format="dummy"
    )
    shape = DraftShape.from_folder(path)
    arena, layout = make_arena(form_of(shape, torch.float32, tied=False))
    shared = share(arena, layout, shape, torch.float32)
    model = load_model(config, shape, shared)
    head = model.head
    shared.fill(shared.head, torch.randn(shape.vocab_size, shape.hidden_size))
    model.fill_late()
    assert model.head.data_ptr() == head.data_ptr()
    assert torch.equal(model.head, shared.head[:24])
