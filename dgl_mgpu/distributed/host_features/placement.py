"""Whether features are kept in the host's memory."""

from __future__ import annotations

import logging

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.memory import free_bytes

#: Share of a GPU's free memory that features may take.  Sums of them, where they are kept, take as
#: much; the rest is for what a model makes of them.
_MOST = 0.25

log = logging.getLogger(__name__)


def are_for_host(place: str, nbytes: int, device: torch.device) -> bool:
    """Whether features are to stay in the host's memory; collective, and the same on all ranks.

    Parameters
    ----------
    place : {'auto', 'gpu', 'host'}
        'auto' keeps them there if on some rank they would take more than a quarter of what its GPU
        has free.
    nbytes : int
        Of this rank's features.
    device : torch.device
        That of this rank's part of the graph.
    """
    if place != "auto":
        return place == "host"
    ranks = Communicator.of_all_machines()
    everyone = ranks.all_gather((nbytes, free_bytes(device)))
    found = any(needed > _MOST * free for needed, free in everyone)
    if found and ranks.rank == 0:
        needed, free = max(everyone, key=lambda each: each[0] / max(each[1], 1))
        # Ranks that were launched show warnings alone.
        log.warning(
            "features stay in the host's memory: they take %.1f GB, and %.1f GB are free on a GPU"
            " (fullgraph.features=gpu moves them there)",
            needed / 1e9,
            free / 1e9,
        )
    return found
