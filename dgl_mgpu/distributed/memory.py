"""How much memory a device has left."""

from __future__ import annotations

import math

import torch


def free_bytes(device: torch.device) -> float:
    """Memory of a GPU that torch may still give out; no limit elsewhere."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
