"""Machines known by name.

Figures for ``hgx-h200`` were measured (copy engines, 2026-11); the others are nominal, those of
NVLink through a switch scaled by the share that the H200 machine reaches of its own (0.83).
Disk figures stand for a few NVMe drives; give your own where disk matters.

A rack of GB200s, ``gb200-nvl72``, is one machine here: 72 GPUs on one NVLink switch, and the memory
of 36 Grace CPUs.  One of its 18 trays by itself is ``gb200``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgl_mgpu.errors import ConfigError, nearest
from dgl_mgpu.machine.topology import HostGroup, Topology

_GIB = 1 << 30
_GB = 10**9

# NVLinks between pairs of GPUs of a DGX-1 with V100, in the numbering of XGNN's figure 7,
# where GPU 0 has no link to GPUs 4, 5 and 7.  Each is 25 GB/s a way.
_DGX1_LINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 6, 2), (1, 2, 2), (1, 3, 1), (1, 7, 2), (2, 3, 2),
    (2, 4, 1), (3, 5, 1), (4, 5, 2), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 1),
)  # fmt: skip


def _machine(
    name: str, links: np.ndarray, memory: int, host: float, host_memory: int,
    groups: Sequence[HostGroup] = (), port: float = np.inf, disk: tuple[float, int] = (2, 7),
) -> Topology:  # fmt: skip
    """A machine of equal GPUs; ``disk`` is its GB/s and TB."""
    n = len(links)
    return Topology(
        name, links, np.full(n, memory), np.full(n, host), host_memory, tuple(groups),
        np.full(n, port), float(disk[0]), disk[1] * 10**12,
    )  # fmt: skip


def _links(gpus: int, local: float, link: float) -> np.ndarray:
    links = np.full((gpus, gpus), link)
    np.fill_diagonal(links, local)
    return links


def _dgx1_links() -> np.ndarray:
    links = _links(8, 900.0, 0.0)
    for one, other, count in _DGX1_LINKS:
        links[one, other] = links[other, one] = 25.0 * count
    return links


def _host_groups(gpus: int, size: int, bandwidth: float) -> list[HostGroup]:
    return [HostGroup(tuple(range(i, i + size)), bandwidth) for i in range(0, gpus, size)]


def cpu_topology(ranks: int, memory: int) -> Topology:
    """Ranks on a machine without GPUs: all memory is shared and equally near.

    ``memory`` is the bytes of shared memory for all ranks together.  GPU memory and host memory
    are the same here, which a store counts once (:func:`dgl_mgpu.store.planning.plan_tables`).
    """
    if ranks < 1:
        raise ConfigError(
            "describe a machine of CPU ranks", f"there are {ranks} ranks", "use 1 or more"
        )
    links = np.full((ranks, ranks), 10.0)
    return _machine("cpu", links, memory // ranks, 10.0, memory, disk=(1, 4))


def _gb200(name: str, gpus: int, disk: tuple[float, int]) -> Topology:
    """GPUs in pairs, each pair with a Grace CPU, whose memory it reads over NVLink-C2C."""
    return _machine(
        name, _links(gpus, 3500.0, 792.0), 186 * _GB, 370.0, gpus // 2 * 480 * _GB,
        _host_groups(gpus, 2, 370.0), 747.0, disk,
    )  # fmt: skip


_MACHINES = {machine.name: machine for machine in (
    _machine("dgx1", _dgx1_links(), 16 * _GIB, 12.5, 512 * _GIB, _host_groups(8, 2, 12.5)),
    _machine(
        "dgx-a100", _links(8, 2039.0, 250.0), 80 * _GB, 25.0, 2048 * _GIB,
        _host_groups(8, 2, 25.0), 250.0, (20, 28),
    ),
    _machine(
        "dgx-h100", _links(8, 1465.0, 396.0), 80 * _GB, 54.0, 2048 * _GIB,
        _host_groups(8, 8, 216.0), 373.0, (20, 28),
    ),
    # Local reads are half of the 4,198 GB/s of a copy; 8 GPUs at once get 27 GB/s each from
    # the host, though one alone gets 54.
    _machine(
        "hgx-h200", _links(8, 2099.0, 396.0), 143 * _GB, 54.0, 560 * _GIB,
        _host_groups(8, 8, 216.0), 373.0, (6, 28),
    ),
    _gb200("gb200", 4, (20, 14)),
    _gb200("gb200-nvl72", 72, (0, 0)),  # no disk that all trays reach
    # Peers and host come through the same x16 port (version 4).
    _machine(
        "pcie", _links(8, 700.0, 22.0), 48 * _GB, 25.0, 512 * _GIB,
        _host_groups(8, 4, 50.0), 22.0, (6, 28),
    ),
    _machine(
        "quad-v100", _links(4, 900.0, 50.0), 16 * _GIB, 12.5, 378 * _GB,
        _host_groups(4, 2, 12.5), disk=(2, 2),
    ),
    _machine("single", np.array([[2039.0]]), 80 * _GB, 25.0, 256 * _GIB, disk=(6, 4)),
    cpu_topology(8, 64 * _GIB),
)}  # fmt: skip

#: The parts of a DGX-1 that XGNN's section 6.6 compares placements on.
_DGX1_PARTS: dict[str, tuple[int, ...]] = {
    "dgx1-4gf": (0, 1, 2, 3),
    "dgx1-4gc": (0, 1, 6, 7),
    "dgx1-6g": (0, 1, 2, 3, 4, 5),
    "dgx1-8g": (0, 1, 2, 3, 4, 5, 6, 7),
}


def preset_names() -> tuple[str, ...]:
    """Every name that :func:`preset` knows."""
    return (*_MACHINES, *_DGX1_PARTS)


def preset(name: str, gpus: int | None = None) -> Topology:
    """A known machine, or its first ``gpus`` GPUs.

    Parameters
    ----------
    name : str
        One of :func:`preset_names`.
    gpus : int, optional
        How many of its GPUs to use; for ``cpu`` any number of ranks.

    Raises
    ------
    ConfigError
        If the name is unknown (with the nearest known one) or there are not so many GPUs.
    """
    key = name.lower().replace("_", "-")
    if key in _DGX1_PARTS:
        topology = _MACHINES["dgx1"].subset(_DGX1_PARTS[key])
    elif key in _MACHINES:
        topology = _MACHINES[key]
    else:
        is_several = key.partition("x-")[0].isdecimal()
        raise ConfigError(
            f"use the topology '{name}'",
            "it is of several machines, of which each has a store's plan of its own"
            if is_several
            else "there is no topology of this name",
            f"name one of them, as {key.partition('x-')[2]}; dgl-mgpu plan draws several"
            if is_several
            else nearest(key, preset_names()),
        )
    if gpus is None or gpus == topology.num_gpus:
        return topology
    if key == "cpu":
        return cpu_topology(gpus, topology.host_memory)
    if not 1 <= gpus <= topology.num_gpus:
        limit = topology.num_gpus
        raise ConfigError(f"use {gpus} GPUs of '{name}'", f"it has {limit}", f"use 1 to {limit}")
    return topology.subset(range(gpus))
