"""Which dtype target and drafter are computed in, if the command names none."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from launch.config import LaunchConfig
from target_worker.model.config import TargetShape

logger = logging.getLogger(__name__)

AUTO = "auto"
MULTIPLIES_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of instructions that multiply bfloat16; the last is Arm's."""


def with_dtype(config: LaunchConfig, model_path: Path, features: Collection[str] | None = None) -> LaunchConfig:
    """config with a dtype in auto's stead: the faster one on this CPU, unless it would round the checkpoint's weights.

    On a CUDA device it is bfloat16: graphs and kernels are made for it. One line of the log says which and why. features: of the CPU, None asks the system. Raises ValueError if the
    checkpoint's dtype is not one of those that are served.
    """
    if config.dtype != AUTO:
        return config
    if config.is_cuda:
        return _chosen(config, "bfloat16", "the dtype that is computed in on a CUDA device")
    stored = TargetShape.from_folder(model_path).resolve_dtype(AUTO)
    if stored == "float32":
        return _chosen(config, stored, "as the checkpoint has it; bfloat16 would round its weights")
    names = cpu_features() if features is None else features
    units = [name for name in MULTIPLIES_BF16 if name in names]
    if units:
        return _chosen(config, stored, f"the faster one: the CPU multiplies it ({', '.join(units)})")
    return _chosen(config, "float32", f"the faster one: the CPU has no instructions for the checkpoint's {stored}")


def _chosen(config: LaunchConfig, dtype: str, why: str) -> LaunchConfig:
    logger.info("dtype=%s, %s", dtype, why)
    return replace(config, dtype=dtype)


def cpu_features(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the first processor can do, in the kernel's words; empty where the system does not say."""
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
