"""What every command of this package does first. No sockets, so that a GPU machine needs torch and msgspec only."""

import logging
import os
import time

import torch


def begin(device: str) -> None:
    """Log to stderr in the project's form, and set what generation and training want on a GPU."""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ train %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if not device.startswith("cuda"):
        return
    # Batches differ in shape from step to step, which leaves holes in fixed segments.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # It plans anew for each shape, and with masks of our kind that costs more than it saves.
    torch.backends.cuda.enable_cudnn_sdp(False)
