"""What a worker holds of its CUDA device, for people."""

import torch


def device_lines(device: torch.device) -> list[str]:
    """The device, and what this process has of it beside the arena and its context: weights, workspaces and graphs."""
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return [
        f"device {device} {properties.name} processors={properties.multi_processor_count} total={total} free={free}",
        f"device memory of this process: {reserved} bytes, in use {allocated}, beside arena and context",
    ]
