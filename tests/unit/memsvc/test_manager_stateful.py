"""Random engines against one manager, in pools of several shapes."""

from typing import Any, ClassVar

from tests.support import hypothesis_profiles
from tests.support.mem_builders import DRAFT, NAMES, RECURRENT, RING, STATE, TARGET, windowed
from tests.support.mem_machine import Pool

PROFILE = hypothesis_profiles.load()


class TwoEngines(Pool):
    """Two engines of the same model share pool and tree."""

    num_engines = 2
    num_frames = 12


class Windowed(Pool):
    """Draft pages below the last four tokens are given up while a request runs."""

    kinds = (TARGET, windowed(DRAFT, 4))
    window = 4
    config: ClassVar[dict[str, Any]] = {"max_extend_tokens": 6}


class Roomy(Pool):
    """Large enough that nothing is evicted unless asked to: hits are exactly what the model says."""

    num_frames = 60


class RoomyWindowed(Windowed):
    """The same with a window that is no whole number of pages."""

    num_frames = 60
    kinds = (TARGET, windowed(DRAFT, 3))
    window = 3


class Limited(TwoEngines):
    """Quotas for an engine and a salt, lfu, and a low watermark."""

    num_frames = 13
    config: ClassVar[dict[str, Any]] = {
        "engine_quota_frames": {"e0": 9},
        "salt_quota_frames": {"s": 7},
        "eviction_policy": "lfu",
        "low_watermark": 0.1,
    }


class Important(Pool):
    """Eviction by priority."""

    config: ClassVar[dict[str, Any]] = {"eviction_policy": "priority"}


class Scanned(Pool):
    """Eviction by slru."""

    config: ClassVar[dict[str, Any]] = {"eviction_policy": "slru"}


class Recurrent(Pool):
    """A model with recurrent state, in a pool that holds a few states beside the running requests."""

    num_frames = 24
    kinds = RECURRENT
    engine_kinds: ClassVar = [NAMES]
    pin_budget = 4
    config: ClassVar[dict[str, Any]] = {"checkpoint_interval": 4}


class RoomyRecurrent(Recurrent):
    """Nothing is evicted unless asked to: hits are the longest checkpoints that thinning has left."""

    num_frames = 250
    pin_budget = 1  # too small for a state: the model does not know what pins hold
    lagging = False


class TwoModels(Recurrent):
    """A recurrent model and one that is not share the pool, not the tree."""

    num_engines = 2
    num_frames = 26
    engine_kinds: ClassVar = [NAMES, ("target_kv", "draft_kv")]
    models: ClassVar[list[str]] = ["recurrent", "plain"]


class TwoRecurrent(Recurrent):
    """Two engines of the same model hit each other's checkpoints."""

    num_engines = 2
    num_frames = 26


class RecurrentLimited(TwoRecurrent):
    """A window and quotas."""

    kinds = (TARGET, windowed(DRAFT, 4), STATE, RING)
    window = 4
    config: ClassVar[dict[str, Any]] = {
        "max_extend_tokens": 6,
        "checkpoint_interval": 2,
        "engine_quota_frames": {"e0": 17},
        "salt_quota_frames": {"s": 15},
        "low_watermark": 0.1,
    }


class RecurrentScanned(Recurrent):
    """States of text that was hit twice go last."""

    config: ClassVar[dict[str, Any]] = {"checkpoint_interval": 4, "eviction_policy": "slru"}


class RecurrentAged(Recurrent):
    """What was unused for two seconds goes."""

    config: ClassVar[dict[str, Any]] = {"checkpoint_interval": 4, "eviction_policy": "ttl", "ttl_s": 2.0}


def _case(machine: type[Pool]) -> Any:
    case = machine.TestCase
    case.settings = PROFILE
    return case


TestPool = _case(Pool)
TestTwoEngines = _case(TwoEngines)
TestWindowed = _case(Windowed)
TestRoomy = _case(Roomy)
TestRoomyWindowed = _case(RoomyWindowed)
TestLimited = _case(Limited)
TestImportant = _case(Important)
TestScanned = _case(Scanned)
TestRecurrent = _case(Recurrent)
TestRoomyRecurrent = _case(RoomyRecurrent)
TestTwoModels = _case(TwoModels)
TestTwoRecurrent = _case(TwoRecurrent)
TestRecurrentLimited = _case(RecurrentLimited)
TestRecurrentScanned = _case(RecurrentScanned)
TestRecurrentAged = _case(RecurrentAged)
