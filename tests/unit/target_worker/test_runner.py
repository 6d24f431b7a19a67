"""What the runner refuses."""

from pathlib import Path

import pytest
import torch

from target_worker.runner import Runner, Segment
from tests.support.tiny_target import TargetRig, make_target, tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_target(path, "Llama")
    return path


def test_a_segment_without_tokens_is_refused(folder: Path) -> None:
    rig = TargetRig(folder)
    with pytest.raises(ValueError, match="at least one token"):
        rig.runner.forward([Segment(rig.open(1, 4), 0, [], 0)])


def test_a_token_outside_the_vocabulary_is_refused_with_its_id(folder: Path) -> None:
    rig = TargetRig(folder)
    with pytest.raises(ValueError, match="97 in a vocabulary of 97"):
        rig.runner.forward([Segment(rig.open(1, 4), 0, [5, 97], 1)])


def test_a_position_past_the_page_table_is_refused(folder: Path) -> None:
    rig = TargetRig(folder)
    row = rig.open(1, 8)
    with pytest.raises(ValueError, match="90 pages x 4 tokens"):
        rig.runner.forward([Segment(row, 90 * 4 - 1, [5, 6], 1)])


def test_more_logits_than_rows_are_refused(folder: Path) -> None:
    rig = TargetRig(folder)
    with pytest.raises(ValueError, match="3 logits of a segment of 2"):
        rig.runner.forward([Segment(rig.open(1, 8), 0, [5, 6], 3)])


def test_more_rows_than_features_have_room_for_are_refused(folder: Path) -> None:
    rig = TargetRig(folder, taps=[0])
    with pytest.raises(ValueError, match="300 rows, features have room for 256"):
        rig.runner.forward([Segment(rig.open(1, 300), 0, tokens_of(1, 300), 1)])


def test_taps_must_be_layers_and_features_wide_enough(folder: Path) -> None:
    rig = TargetRig(folder)
    room = torch.zeros(8, 48)
    with pytest.raises(ValueError, match=r"layers \[3\].*0 to 2"):
        Runner(rig.model, rig.pool, rig.tables, room, [3])
    with pytest.raises(ValueError, match="no tensor"):
        Runner(rig.model, rig.pool, rig.tables, None, [1])
    with pytest.raises(ValueError, match=r"48 x torch\.float32"):
        Runner(rig.model, rig.pool, rig.tables, room, [0, 1])


def test_a_segment_that_wants_no_logits_gives_none(folder: Path) -> None:
    rig = TargetRig(folder)
    assert rig.runner.forward([Segment(rig.open(1, 8), 0, [5, 6], 0)]).shape == (0, 97)
