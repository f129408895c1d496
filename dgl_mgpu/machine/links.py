"""Bandwidths that were measured on this machine, kept for the next time by GPU and driver."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dgl_mgpu.machine.topology import HostGroup, Topology
from dgl_mgpu.utils.tuning_cache import TuningCache

#: GB/s by what :func:`reads` says, as `Topology` means them.
FOUND = TuningCache("links.json", 1, float)
#: What is read, if it is no GPU.
HOST = "host memory"

_NOT_MEASURED = " (usual bandwidths, not measured)"
_DRIVER = Path("/proc/driver/nvidia/version")


def reads(gpus: Sequence[str], *sources: str) -> str:
    """GPUs that read at once, each from all of the sources, as `FOUND` names them."""
    return f"{' and '.join(sorted(gpus))} from {' and '.join(sorted(sources))}; {_driver()}"


@functools.cache
def _driver() -> str:
    """The version of the driver, which is asked nothing: that may take a context on a GPU."""
    try:
        return _DRIVER.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return "driver unknown"


def as_measured(topology: Topology, gpus: Sequence[str]) -> Topology:
    """A machine of these GPUs with the bandwidths that were measured in place of the usual ones.

    Where some were not its name says so.
    """
    found = FOUND.read()
    links, host = topology.link_bandwidth.copy(), topology.host_bandwidth.copy()
    port, groups = topology.port_bandwidth.copy(), topology.host_groups
    for one, gpu in enumerate(gpus):
        peers = topology.neighbors(one)
        for other in (one, *peers):
            links[one, other] = found.get(reads([gpu], gpus[other]), links[one, other])
        host[one] = found.get(reads([gpu], HOST), host[one])
        # No port is narrower than a link that was measured through it.
        ways = [reads([gpu], gpus[peer]) for peer in peers]
        port[one] = max([port[one], *(found.get(way, 0.0) for way in ways)])
        port[one] = found.get(reads([gpu], *(gpus[peer] for peer in peers)), port[one])
    if (together := found.get(reads(gpus, HOST))) is not None:
        groups = (HostGroup(tuple(range(len(gpus))), together),)
    name = topology.name.removesuffix(_NOT_MEASURED)
    if not figures(topology, gpus).keys() <= found.keys():
        name += _NOT_MEASURED
    return replace(
        topology, name=name, link_bandwidth=links, host_bandwidth=host, port_bandwidth=port,
        host_groups=groups,
    )  # fmt: skip


def is_measured(topology: Topology, gpus: Sequence[str]) -> bool:
    """Whether all bandwidths of a machine of these GPUs are known."""
    return figures(topology, gpus).keys() <= FOUND.read().keys()


def figures(topology: Topology, gpus: Sequence[str]) -> Mapping[str, float]:
    """All bandwidths of a machine of these GPUs, as `FOUND` keeps them."""
    return dict(_figures(topology, gpus))


def _figures(topology: Topology, gpus: Sequence[str]) -> Iterator[tuple[str, float]]:
    for one, gpu in enumerate(gpus):
        peers = topology.neighbors(one)
        for other in (one, *peers):
            yield reads([gpu], gpus[other]), float(topology.link_bandwidth[one, other])
        yield reads([gpu], HOST), float(topology.host_bandwidth[one])
        if len(peers) > 1:  # else it is the link
            port = float(topology.port_bandwidth[one])
            yield reads([gpu], *(gpus[peer] for peer in peers)), port
    if len(gpus) > 1:
        yield reads(gpus, HOST), sum(group.bandwidth for group in topology.host_groups)
