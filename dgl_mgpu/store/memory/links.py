"""Which GPUs can read each other's memory: found out by reading, or restricted by an option."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import ConfigError, PeerAccessError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.segment import Segment

_PATTERN_BYTES = 4096
_PROVE = "try which GPUs read each other"


def prove_access(runtime: Runtime, ranks: Communicator) -> np.ndarray:
    """Find out whose GPU memory each rank can read.

    Every rank writes a pattern to its GPU's memory; each other rank maps it, copies it with its own
    GPU and compares.  Drivers are not asked: on a virtualised bus they may confirm access although
    reads return other bytes.

    Collective.

    Returns bool, shape (ranks.size, ranks.size): entry (i, j): whether rank i reads the memory of
    rank j.  Raises DeviceMemoryError, RankFailedError.
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


def linked(topology: Topology, links: str | Sequence[Sequence[int]]) -> Topology:
    """A machine with only some of its links.

    ``links``: all links, those that a preset has too (its first GPUs), or these, both ways.  Raises
    ConfigError if there is no such preset, if it has fewer GPUs, or if ``links`` are not pairs of
    GPUs.
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
