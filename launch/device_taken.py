"""What a server has of its CUDA device once it serves, beside what was planned."""

from collections.abc import Mapping

from launch.card import Card
from launch.plan import MemoryPlan


def taken_line(plan: MemoryPlan, card: Card, held: Mapping[str, int]) -> str:
    """For people. card: the device as it is now. held: by role, what its allocator has, weights and graphs included.

    Taken is what the device has less than before the start, so it is what nvidia-smi shows, others' processes
    included if they came or went meanwhile.
    """
    assert plan.device is not None, "a plan without a device"
    taken = plan.device.free_bytes - card.free
    rest = taken - plan.arena_bytes - sum(held.values())
    parts = " ".join(f"{role}={num_bytes}" for role, num_bytes in sorted(held.items()))
    return (
        f"device memory taken={taken} planned={plan.device.planned_bytes} ({taken / plan.device.planned_bytes:.3f} of"
        f" it): arena={plan.arena_bytes} {parts} contexts={rest}"
    )
