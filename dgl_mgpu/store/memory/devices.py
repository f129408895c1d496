"""The machine as a plan sees it: one GPU for each rank, with the memory a store may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dgl_mgpu.comm.cuda_runtime import DeviceInfo
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.machine import HostGroup, Topology

# What training keeps of a GPU for itself: a share, and bytes at least.
_SHARE_FOR_TRAINING = 0.25
_LEAST_FOR_TRAINING = 4 << 30


def topology_of_ranks(
    machine: Topology, seen: Sequence[str], device_infos: Sequence[DeviceInfo]
) -> Topology:
    """A machine's GPUs in the order of the ranks that use them.

    Ranks may share a GPU.  Each then has an equal part of its memory, reads the others' parts
    as fast as its own, and shares its way to the host.  Memory is what is free, less what
    training needs: a quarter of the GPU or 4 GiB, whichever is more.

    ``machine``: its GPUs' memory is not looked at.  ``seen``: its GPUs, as numbered there.
    ``device_infos``: the GPU of each rank.  Raises ConfigError if a rank's GPU is not among those
    seen.
    """
    known = {gpu: index for index, gpu in enumerate(seen)}
    for rank, device_info in enumerate(device_infos):
        if device_info.gpu not in known:
            raise ConfigError(
                "build a store on the GPUs of all ranks",
                f"GPU {device_info.gpu} of rank {rank} is not visible to the first rank",
                "let every rank see all GPUs (CUDA_VISIBLE_DEVICES) and choose its own with "
                "torch.cuda.set_device",
            )
    gpus = [known[device_info.gpu] for device_info in device_infos]
    sharers = Counter(gpus)
    groups = [
        HostGroup(ranks, group.bandwidth)
        for group in machine.host_groups
        if (ranks := tuple(rank for rank, gpu in enumerate(gpus) if gpu in group.gpus))
    ]
    for shared in (gpu for gpu, count in sharers.items() if count > 1):
        ranks = tuple(rank for rank, gpu in enumerate(gpus) if gpu == shared)
        groups.append(HostGroup(ranks, float(machine.host_bandwidth[shared])))
    local = np.diag(machine.link_bandwidth)
    return Topology(
        machine.name,
        machine.link_bandwidth[np.ix_(gpus, gpus)],
        np.array(
            [
                _for_store(device_info) // sharers[gpu]
                for device_info, gpu in zip(device_infos, gpus, strict=True)
            ]
        ),
        machine.host_bandwidth[gpus],
        machine.host_memory,
        tuple(groups),
        # Ranks on one GPU reach each other without going through its port.
        np.array([local[g] if sharers[g] > 1 else machine.port_bandwidth[g] for g in gpus]),
        machine.disk_bandwidth,
        machine.disk_memory,
    )


def _for_store(device_info: DeviceInfo) -> int:
    kept = max(int(device_info.total * _SHARE_FOR_TRAINING), _LEAST_FOR_TRAINING)
    return max(device_info.free - kept, 0)
