"""Random engines against one manager, in pools of several shapes."""

from typing import Any, ClassVar

from tests.support import hypothesis_profiles
from tests.support.mem_builders import DRAFT, TARGET, windowed
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
