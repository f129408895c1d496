"""Machines known by name.

Figures for ``hgx-h200`` were measured (copy engines, 2026-11); the others are the makers'
nominal ones, NVLink through a switch scaled by what the H200 machine reaches of its own (0.83).
Disk figures stand for a few NVMe drives; give your own where disk matters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dgl_mgpu.errors import ConfigError, nearest
from dgl_mgpu.machine.topology import HostGroup, Topology

_GIB = 1 << 30
_TB = 10**12

# NVLinks between pairs of GPUs of a DGX-1 with V100, in the numbering of XGNN's figure 7,
# where GPU 0 has no link to GPUs 4, 5 and 7.  Each is 25 GB/s a way.
_DGX1_LINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 6, 2), (1, 2, 2), (1, 3, 1), (1, 7, 2), (2, 3, 2),
    (2, 4, 1), (3, 5, 1), (4, 5, 2), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 1),
)  # fmt: skip
_PCIE_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


def _dgx1() -> Topology:
    links = np.diag(np.full(8, 900.0))
    for one, other, count in _DGX1_LINKS:
        links[one, other] = links[other, one] = 25.0 * count
    groups = tuple(HostGroup(pair, 12.5) for pair in _PCIE_PAIRS)
    return Topology(
        "dgx1", links, _full(8, 16 * _GIB), _full(8, 12.5), 512 * _GIB, groups,
        disk_bandwidth=2.0, disk_memory=7 * _TB,
    )  # fmt: skip


def _switched(
    name: str, gpus: int, local: float, link: float, port: float, memory: int, host: float,
    groups: tuple[HostGroup, ...], host_memory: int, disk: float,
) -> Topology:  # fmt: skip
    links = np.full((gpus, gpus), link)
    np.fill_diagonal(links, local)
    return Topology(
        name, links, _full(gpus, memory), _full(gpus, host), host_memory, groups,
        _full(gpus, port), disk, 28 * _TB,
    )  # fmt: skip


def _dgx_a100() -> Topology:
    groups = tuple(HostGroup(pair, 25.0) for pair in _PCIE_PAIRS)
    return _switched(
        "dgx-a100", 8, 2039.0, 250.0, 250.0, 80 * 10**9, 25.0, groups, 2048 * _GIB, 20.0
    )


def _dgx_h100() -> Topology:
    groups = (HostGroup(tuple(range(8)), 216.0),)
    return _switched(
        "dgx-h100", 8, 1465.0, 396.0, 373.0, 80 * 10**9, 54.0, groups, 2048 * _GIB, 20.0
    )


def _hgx_h200() -> Topology:
    # Local reads are half of the 4,198 GB/s of a copy; 8 GPUs at once get 27 GB/s each from
    # the host, though one alone gets 54.
    groups = (HostGroup(tuple(range(8)), 216.0),)
    return _switched(
        "hgx-h200", 8, 2099.0, 396.0, 373.0, 143 * 10**9, 54.0, groups, 560 * _GIB, 6.0
    )


def _pcie() -> Topology:
    # Peers and host come through the same x16 port (version 4).
    groups = (HostGroup((0, 1, 2, 3), 50.0), HostGroup((4, 5, 6, 7), 50.0))
    return _switched("pcie", 8, 700.0, 22.0, 22.0, 48 * 10**9, 25.0, groups, 512 * _GIB, 6.0)


def _quad_v100() -> Topology:
    links = np.full((4, 4), 50.0)
    np.fill_diagonal(links, 900.0)
    return Topology(
        "quad-v100", links, _full(4, 16 * _GIB), _full(4, 12.5), 378 * 10**9,
        (HostGroup((0, 1), 12.5), HostGroup((2, 3), 12.5)), disk_bandwidth=2.0,
        disk_memory=2 * _TB,
    )  # fmt: skip


def _single() -> Topology:
    return Topology(
        "single", np.array([[2039.0]]), _full(1, 80 * 10**9), _full(1, 25.0), 256 * _GIB,
        disk_bandwidth=6.0, disk_memory=4 * _TB,
    )  # fmt: skip


def cpu_topology(ranks: int, memory: int) -> Topology:
    """Ranks on a machine without GPUs: all memory is shared and equally near.

    Parameters
    ----------
    ranks : int
    memory : int
        Bytes of shared memory for all ranks together.  "Device" and host memory are the same
        here, which a store counts once (:func:`dgl_mgpu.store.planning.plan_tables`).
    """
    if ranks < 1:
        raise ConfigError(
            "describe a machine of CPU ranks", f"there are {ranks} ranks", "use 1 or more"
        )
    return Topology(
        "cpu", np.full((ranks, ranks), 10.0), _full(ranks, memory // ranks), _full(ranks, 10.0),
        memory, disk_bandwidth=1.0, disk_memory=4 * _TB,
    )  # fmt: skip


def _cpu() -> Topology:
    return cpu_topology(8, 64 * _GIB)


_MACHINES: dict[str, Callable[[], Topology]] = {
    "dgx1": _dgx1,
    "dgx-a100": _dgx_a100,
    "dgx-h100": _dgx_h100,
    "hgx-h200": _hgx_h200,
    "pcie": _pcie,
    "quad-v100": _quad_v100,
    "single": _single,
    "cpu": _cpu,
}

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
        topology = _dgx1().subset(_DGX1_PARTS[key])
    elif key in _MACHINES:
        topology = _MACHINES[key]()
    else:
        raise ConfigError(
            f"use the topology '{name}'",
            "there is no topology of this name",
            nearest(key, preset_names()),
        )
    if gpus is None or gpus == topology.num_gpus:
        return topology
    if key == "cpu":
        return cpu_topology(gpus, topology.host_memory)
    if not 1 <= gpus <= topology.num_gpus:
        raise ConfigError(
            f"use {gpus} GPUs of '{name}'",
            f"it has {topology.num_gpus}",
            f"use 1 to {topology.num_gpus}",
        )
    return topology.subset(range(gpus))


def _full(count: int, value: float) -> np.ndarray:
    return np.full(count, value)
