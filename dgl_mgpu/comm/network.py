"""The network between a job's machines, measured."""

from __future__ import annotations

import math
import platform
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.machine import Network
from dgl_mgpu.machine.topology import GB
from dgl_mgpu.utils.tuning_cache import TuningCache

_ACTION = "measure the network between machines"
#: What each rank sends in all to find the bandwidth, and how often; and how often next to nothing.
_BYTES, _REPEATS, _SMALL_REPEATS = 8 << 20, 3, 8
#: Of the file: the bandwidth in GB/s and the latency in seconds, by hosts, ranks and device.
FOUND = TuningCache("network.json", 1, list)

#: What this job has found, by its group.
_known: WeakKeyDictionary[Communicator, Network] = WeakKeyDictionary()


def measured_network(machines: Communicator, ranks: Communicator, device: torch.device) -> Network:
    """What ranks of several machines get of the network while all of them use it.

    All ranks send each other tensors on ``device`` for some tenths of a second, as a store of
    several machines does: from GPU to GPU where each rank has one.  The slowest rank counts.  It is
    measured once for a job; `FOUND` has what an earlier job found on the same hosts, and keeps what
    is found.

    Collective of all ranks of the job, of which ``ranks`` are those of this machine, and
    ``machines`` those with this one's place in each.
    """
    if machines not in _known:
        _known[machines] = _measured(machines, ranks, device)
    return _known[machines]


def _measured(machines: Communicator, ranks: Communicator, device: torch.device) -> Network:
    everyone = Communicator.of_all_machines()
    hosts = machines.all_gather(platform.node())
    key = f"{', '.join(hosts)}: {ranks.size} ranks each, {device.type}"
    known = everyone.broadcast_from_rank0(_ACTION, FOUND.read)
    if _is_network(known.get(key)):
        return Network(*known[key])
    latency = min(_seconds(machines, ranks, device, 1) for _ in range(_SMALL_REPEATS))
    count = _BYTES // machines.size
    seconds = min(_seconds(machines, ranks, device, count) for _ in range(_REPEATS))
    latency, seconds = (max(everyone.all_gather(value)) for value in (latency, seconds))
    nbytes = count * (machines.size - 1)
    # Noise must not make of a fast network one without bounds.
    network = Network(nbytes / max(seconds - latency, seconds / 2) / GB, latency)
    found = {key: [network.bandwidth, network.latency]}
    everyone.broadcast_from_rank0(_ACTION, lambda: FOUND.keep(found))
    return network


def _is_network(found: Any) -> bool:
    """Whether what a file has of a network is one."""
    return (
        isinstance(found, list)
        and len(found) == 2
        and all(type(value) is float and 0 < value < math.inf for value in found)
    )


def _seconds(
    machines: Communicator, ranks: Communicator, device: torch.device, count: int
) -> float:
    """Time in which a rank exchanges so many bytes with each rank of its place."""
    rows = torch.zeros(count * machines.size, dtype=torch.uint8, device=device)
    counts = [count] * machines.size
    ranks.all_gather(None)  # all begin at once
    start = time.perf_counter()
    # On a GPU the last byte tells that all have come.
    machines.all_to_all(rows, counts, counts)[-1:].cpu()
    return time.perf_counter() - start
