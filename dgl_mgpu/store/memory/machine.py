"""The machine as a plan sees it: a GPU for each rank, memory for a store, usable links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import DeviceInfo, Runtime
from dgl_mgpu.errors import ConfigError, PeerAccessError
from dgl_mgpu.machine import HostGroup, Topology, preset, probe_shared_memory
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.segment import Segment

# What training keeps of a GPU for itself: a share, and bytes at least.
_SHARE_FOR_TRAINING = 0.25
_MIN_FOR_TRAINING = 4 << 30
_PATTERN_BYTES = 4096
_PROVE = "try which GPUs read each other"


def machine(
    topology: Topology | str,
    num_ranks: int,
    runtime: Runtime | None = None,
    device_infos: Sequence[DeviceInfo] | None = None,
) -> Topology:
    """The machine that a plan is made for, with one GPU for each rank.

    ``topology`` may also be a preset's name, or 'auto' for this machine: its GPUs, of which
    ``device_infos`` has each rank's, or without them its shared memory.  Raises ConfigError if
    there are more ranks than GPUs to hold their partitions.
    """
    if topology == "auto":
        if runtime is None or device_infos is None:
            return probe_shared_memory(num_ranks)
        return topology_of_ranks(runtime.machine(), runtime.gpus(), device_infos)
    if not isinstance(topology, str | Topology):
        raise ConfigError(
            "place a store on a machine",
            f"topology={topology!r} does not name a machine",
            "pass a Topology, a preset's name or 'auto'",
        )
    named = preset(topology, num_ranks) if isinstance(topology, str) else topology
    if named.num_gpus < num_ranks:
        raise ConfigError(
            f"place a store for {num_ranks} ranks on '{named.name}'",
            f"the machine has {named.num_gpus} GPUs, and each rank needs one of its own",
            f"use at most {named.num_gpus} ranks",
        )
    return named if named.num_gpus == num_ranks else named.subset(range(num_ranks))


def topology_of_ranks(
    machine: Topology, seen: Sequence[str], device_infos: Sequence[DeviceInfo]
) -> Topology:
    """A machine's GPUs in the order of the ranks that use them.

    Ranks may share a GPU.  Each then has an equal part of its memory, reads the others' parts
    as fast as its own, and shares its way to the host.  Memory is what is free, less what
    training needs: a quarter of the GPU or 4 GiB, whichever is more.

    ``seen`` are the machine's GPUs as numbered there, ``device_infos`` that of each rank.  Raises
    ConfigError if a rank's GPU is not among those seen.
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
    reserved = max(int(device_info.total * _SHARE_FOR_TRAINING), _MIN_FOR_TRAINING)
    return max(device_info.free - reserved, 0)


def prove_access(runtime: Runtime, ranks: Communicator) -> np.ndarray:
    """Find out whose GPU memory each rank can read.

    Every rank writes a pattern to its GPU's memory; each other rank maps it, copies it with its own
    GPU and compares.  Drivers are not asked: on a virtualised bus they may confirm access although
    reads return other bytes.

    Collective.  In the result, bool, shape (ranks.size, ranks.size), entry (i, j) says whether rank
    i reads the memory of rank j.  Raises DeviceMemoryError or RankFailedError.
    """
    if ranks.size == 1:
        return np.ones((1, 1), bool)
    rank, ref_counts_bytes = ranks.rank, 8 * ranks.size
    ref_counts: Segment | None = None
    memory: DeviceMemory | None = None

    def make_ref_counts() -> Path:
        nonlocal ref_counts
        ref_counts = Segment.create(ref_counts_bytes)
        return ref_counts.path

    path = ranks.broadcast_from_rank0(_PROVE, make_ref_counts)

    def leave_pattern() -> bytes:
        nonlocal memory
        memory = DeviceMemory(runtime, Segment.attach(path, ref_counts_bytes), rank)
        memory.allocate(2 * _PATTERN_BYTES)
        runtime.upload(memory.block, _pattern(rank))
        try:
            return memory.share()
        except PeerAccessError:
            return b""

    def reads_others(handles: list[bytes]) -> list[bool]:
        assert memory is not None
        return [
            owner == rank or (bool(handle) and _reads(runtime, memory, handle, _pattern(owner)))
            for owner, handle in enumerate(handles)
        ]

    try:
        handles = ranks.all_gather(ranks.run_all(_PROVE, leave_pattern))
        mine = ranks.run_all(_PROVE, lambda: reads_others(handles))
        return np.array(ranks.all_gather(mine), bool)
    finally:
        if memory is not None:
            memory.close()


def _pattern(rank: int) -> np.ndarray:
    """Bytes that differ by rank."""
    return np.random.default_rng([rank, 71]).integers(0, 256, _PATTERN_BYTES, np.uint8)


def _reads(runtime: Runtime, memory: DeviceMemory, handle: bytes, expected: np.ndarray) -> bool:
    scratch = memory.block + _PATTERN_BYTES
    try:
        runtime.upload(scratch, np.zeros_like(expected))
        runtime.copy(scratch, memory.open(handle), _PATTERN_BYTES)
        return bool(np.array_equal(runtime.download(scratch, _PATTERN_BYTES), expected))
    except RuntimeError:  # the memory cannot be mapped, or cannot be read
        return False


def restrict_links(topology: Topology, links: str | Sequence[Sequence[int]]) -> Topology:
    """A machine with only some of its links.

    ``links`` is 'auto' for all of them, a preset's name for those that its first GPUs have too, or
    the pairs of GPUs to be linked both ways.  Raises ConfigError if there is no such preset, if it
    has fewer GPUs, or if ``links`` are not pairs of GPUs.
    """
    if links == "auto":
        return topology
    if isinstance(links, str):
        return _restricted(topology, preset(links, topology.num_gpus).link_bandwidth > 0, links)
    allowed = np.eye(topology.num_gpus, dtype=bool)
    for one, other in _pairs(links, topology.num_gpus):
        allowed[one, other] = allowed[other, one] = True
    return _restricted(topology, allowed, "chosen links")


def with_access(topology: Topology, access: np.ndarray) -> Topology:
    """A machine without the links that could not be proved (:func:`prove_access`)."""
    return _restricted(topology, access, "proved links")


def _restricted(topology: Topology, allowed: np.ndarray, reason: str) -> Topology:
    bandwidth = np.where(allowed, topology.link_bandwidth, 0.0)
    if np.array_equal(bandwidth, topology.link_bandwidth):
        return topology
    return replace(topology, name=f"{topology.name} ({reason})", link_bandwidth=bandwidth)


def _pairs(links: Sequence[Sequence[int]], num_gpus: int) -> Iterable[tuple[int, int]]:
    for pair in links if isinstance(links, Iterable) else (links,):
        try:
            one, other = pair
        except (TypeError, ValueError):
            one = other = -1
        if not all(type(gpu) is int and 0 <= gpu < num_gpus for gpu in (one, other)) or (
            one == other
        ):
            raise ConfigError(
                f"use the links store.links={links!r}",
                f"{pair!r} is not a pair of the {num_gpus} GPUs",
                f"give 'auto', a preset's name or pairs of different numbers in [0, {num_gpus})",
            )
        yield one, other
