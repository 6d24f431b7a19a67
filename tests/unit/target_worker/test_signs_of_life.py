"""A long forward shows that it moves on: a prompt of a large model on a slow machine must not look like a hang."""

from pathlib import Path

from target_worker.runner import Segment
from tests.support.tiny_target import TargetRig, make_target, tokens_of


def test_every_layer_of_a_forward_gives_a_sign_of_life(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    rig = TargetRig(tmp_path)
    beats: list[int] = []
    rig.runner.on_layer = lambda: beats.append(1)
    rig.runner.forward([Segment(rig.open(1, 8), 0, tokens_of(1, 8), 1)])
    assert len(beats) == rig.model.shape.num_layers > 1
