"""Small drafters for the draft step's tests, and what its drafts are compared with."""

from pathlib import Path
from typing import Any

from memsvc.wire.spec import DraftReady
from memsvc.wire.text import Sampling
from tests.support.make_drafter import V2
from tests.support.plan_rig import PlanRig

NUM_DRAFTS = 2
WINDOW = 5


def small_rig(
    folder: Path,
    version: int,
    device: str,
    num_layers: int = 1,
    changes: dict[str, Any] | None = None,
    **overrides: Any,
) -> PlanRig:
    """A rig that has been greeted, of a drafter that is small enough to be interpreted."""
    sizes: dict[str, Any] = {"num_hidden_layers": num_layers, "block_size": 1 + NUM_DRAFTS, "head_dim": 8}
    sizes |= {"num_attention_heads": 2 * num_layers, "num_key_value_heads": num_layers}
    if version == V2:
        sizes |= {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": WINDOW}
    rig = PlanRig(folder, version, device, changes=changes, **(sizes | overrides))
    assert isinstance(rig.hello(), DraftReady)
    return rig


def assert_same_drafts(rig: PlanRig, rids: list[int], sampling: Sampling | None = None, **columns: Any) -> None:
    """The next Plan, with these columns, gives rids the drafts of the torch worker."""
    expected = rig.cpu.propose(rids, NUM_DRAFTS, **({} if sampling is None else {"sampling": sampling}))
    assert rig.drafts(rids, NUM_DRAFTS, **columns) == expected
