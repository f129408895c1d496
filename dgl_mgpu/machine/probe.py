"""What this machine has, according to torch and NVML, or measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from dgl_mgpu.errors import ConfigError, UnsupportedEnvironmentError
from dgl_mgpu.machine.links import FOUND, as_measured, figures
from dgl_mgpu.machine.presets import cpu_topology
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.machine.topology import GB, HostGroup, Topology

if TYPE_CHECKING:
    import torch

# Where nothing was measured. Part of the device's name → GB/s of its own memory, of one NVLink, and
# through its switch port.
_DEVICES = {
    "H200": (2099.0, 22.0, 373.0),
    "H100": (1465.0, 22.0, 373.0),
    "A100": (1555.0, 20.8, 250.0),
    "V100": (900.0, 25.0, 150.0),
}
_UNKNOWN_DEVICE = (700.0, 20.0, 250.0)
# Over PCIe, to a peer and to the host (version 4).
_PCIE, _HOST = 22.0, 25.0
# Ranks to plan for on a machine without GPUs when none are asked for, at most.
_MAX_RANKS = 8
_COPY_BYTES = 256 << 20
_REPEATS = 8


def probe(num_ranks: int | None = None, *, free_memory: bool = True) -> Topology:
    """The machine at hand, without timing anything.

    Links are those that P2P access works over.  Bandwidths are those that were measured when a
    store was built on these GPUs, or by :func:`measure`; where none were, that of a link is NVML's
    number of NVLinks times what is known of the device, or a usual value, and the name says so.

    Parameters
    ----------
    num_ranks : int, optional
        Use the first so many GPUs; or, without GPUs, so many ranks in shared memory.
    free_memory : bool
        Whether a GPU's memory is what is free now, which takes a CUDA context on each of them, of
        some hundred MB until this process ends; or all that the GPU has, which takes none.

    Raises
    ------
    ConfigError
        If there are GPUs, but fewer.
    """
    import torch

    if not torch.cuda.is_available():
        return probe_shared_memory(num_ranks)
    count = torch.cuda.device_count()
    if num_ranks is not None and not 1 <= num_ranks <= count:
        raise ConfigError(
            f"use {num_ranks} GPUs",
            f"this machine has {count} GPUs that torch sees",
            f"use 1 to {count} ranks",
        )
    gpus = range(count if num_ranks is None else num_ranks)
    names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    local, nvlink, port = np.array([
        next((rates for part, rates in _DEVICES.items() if part in name), _UNKNOWN_DEVICE)
        for name in names
    ]).T  # fmt: skip
    links = np.diag(local)
    counts = _nvlinks(gpus)
    for one in gpus:
        for other in gpus:
            if one != other and torch.cuda.can_device_access_peer(one, other):
                width = counts[one, other] * nvlink[one]
                links[one, other] = min(width, port[one]) if width else _PCIE
    through_nvlink = np.where((counts > 0).any(1), port, _PCIE)
    memory = [
        torch.cuda.mem_get_info(gpu)[0]
        if free_memory
        else torch.cuda.get_device_properties(gpu).total_memory
        for gpu in gpus
    ]
    usual = _topology(names, memory, links, np.full(len(gpus), _HOST), through_nvlink, ())
    return as_measured(usual, [gpu_id(gpu) for gpu in gpus])


def gpu_id(gpu: int) -> str:
    """A GPU's name that is the same for all processes; asking for it opens no context."""
    import torch

    return str(torch.cuda.get_device_properties(gpu).uuid)


def probe_shared_memory(num_ranks: int | None = None) -> Topology:
    """Ranks that keep everything in this machine's shared memory, GPUs or not.

    Parameters
    ----------
    num_ranks : int, optional
        By default one a core, at most eight.
    """
    ranks = min(len(os.sched_getaffinity(0)), _MAX_RANKS) if num_ranks is None else num_ranks
    return cpu_topology(ranks, SharedMemory.of_this_machine().room)


def measure(num_ranks: int | None = None) -> Topology:
    """The machine at hand with bandwidths timed by large copies; takes seconds.

    :func:`probe` knows them from then on.

    Raises
    ------
    UnsupportedEnvironmentError
        If there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedEnvironmentError(
            "measure the bandwidths of this machine's GPUs",
            "torch sees no GPU",
            "probe the machine instead (dgl-mgpu topology), or run it where torch sees a GPU",
        )
    known = probe(num_ranks)
    gpus = range(known.num_gpus)
    blocks = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
    targets = [torch.empty_like(block) for block in blocks]
    host = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in gpus]
    links = np.zeros((len(gpus), len(gpus)))
    for gpu in gpus:
        # As a gather does, a copy writes to the GPU's memory what it reads of it.
        links[gpu, gpu] = _rates([(targets[gpu], blocks[gpu])])[0]
        for peer in known.neighbors(gpu):
            links[gpu, peer] = _rates([(targets[gpu], blocks[peer])])[0]
    # Every GPU reads all its peers at once: what they get together is the width of its port.
    pairs = [(gpu, peer) for gpu in gpus for peer in known.neighbors(gpu)]
    port = np.zeros(len(gpus))
    if pairs:
        rates = _rates([(targets[gpu], blocks[peer]) for gpu, peer in pairs])
        np.add.at(port, [gpu for gpu, _ in pairs], rates)
    alone = np.array([_rates([(targets[gpu], host[gpu])])[0] for gpu in gpus])
    together = sum(_rates([(targets[gpu], host[gpu]) for gpu in gpus]))
    names = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    groups = (HostGroup(tuple(gpus), together),)
    measured = _topology(names, known.gpu_memory, links, alone, port, groups)
    FOUND.keep(figures(measured, [gpu_id(gpu) for gpu in gpus]))
    return measured


def _topology(
    names: Sequence[str], memory: ArrayLike, links: np.ndarray, host: np.ndarray,
    port: np.ndarray, groups: tuple[HostGroup, ...],
) -> Topology:  # fmt: skip
    kinds = " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    shared, disk = SharedMemory.of_this_machine().room, shutil.disk_usage("/").free
    return Topology(kinds, links, np.array(memory), host, shared, groups, port, 2.0, disk)


def _nvlinks(gpus: Sequence[int]) -> np.ndarray:
    """NVLinks between GPUs, a switch counting for every pair; zeros where NVML does not know."""
    count = np.zeros((len(gpus), len(gpus)))
    try:
        import pynvml
    except ImportError:
        return count
    import torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return count
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
            for gpu in gpus
        ]
        address = {pynvml.nvmlDeviceGetPciInfo(handle).busId: i for i, handle in enumerate(handles)}
        for index, handle in enumerate(handles):
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                        continue
                    remote = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
                except pynvml.NVMLError:  # no such link on this device
                    continue
                peer = address.get(remote)
                count[index, slice(None) if peer is None else peer] += 1
    except pynvml.NVMLError:  # part of a GPU, as MIG gives it, is not found by its name
        return np.zeros_like(count)
    finally:
        pynvml.nvmlShutdown()
    np.fill_diagonal(count, 0)
    return count


def _rates(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """GB/s of copies (target, source), all at once."""
    # torch carries out a copy on the stream of the GPU it comes from, if it comes from one.
    moves = [
        (
            source.device if source.is_cuda else target.device,
            partial(target.copy_, source, non_blocking=True),
        )
        for target, source in copies
    ]
    return rates(moves, copies[0][0].numel())


def rates(
    copies: Sequence[tuple[torch.device, Callable[[], object]]],
    nbytes: int,
    repeats: int = _REPEATS,
) -> list[float]:
    """GB/s of copies of so many bytes, all at once, each on a stream of the GPU named with it."""
    import torch

    streams = [torch.cuda.Stream(device) for device, _ in copies]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in copies]
    for repeat in range(repeats + 1):
        for (_, copy), stream, (start, _) in zip(copies, streams, events, strict=True):
            with torch.cuda.stream(stream):
                if repeat == 1:  # the first copy sets up mappings
                    start.record(stream)
                copy()
    for stream, (_, stop) in zip(streams, events, strict=True):
        stop.record(stream)
    for stream in streams:
        stream.synchronize()
    moved = repeats * nbytes
    return [moved / (start.elapsed_time(stop) * 1e-3) / GB for start, stop in events]
