"""The CUDA device that --device names, as the plan needs it. Asks the driver and NVML; torch is not needed."""

from dataclasses import dataclass, replace

from launch.config import LARGE_CUDA_PREFILL_TOKENS, LARGE_DEVICE_BYTES, LaunchConfig
from memsvc import cuda_driver
from memsvc.cuda_driver import CudaError


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A device before anything of this server is on it."""

    name: str
    """Number, model and UUID, for people."""
    free: int
    """Bytes that nobody has."""
    total: int
    """Bytes of the device."""
    unit: int
    """The arena is a multiple of so many bytes."""


def read_card(device: str) -> Card:
    """Raises ValueError, naming what is there, if the device or what it takes to ask it is missing."""
    found = cuda_driver.find_device(device)
    free, total = cuda_driver.memory_info(found.uuid)
    try:
        unit = cuda_driver.granularity(found.ordinal)
    except CudaError as error:
        raise ValueError(f"{found} gives out no memory that can be shared: {error}") from error
    return Card(name=str(found), free=free, total=total, unit=unit)


def with_prefill_tokens(config: LaunchConfig, card: Card) -> LaunchConfig:
    """config with longer prompt steps if the card is large, unless the command says how long they are."""
    if config.max_prefill_tokens or card.total < LARGE_DEVICE_BYTES:
        return config
    return replace(config, max_prefill_tokens=LARGE_CUDA_PREFILL_TOKENS)
