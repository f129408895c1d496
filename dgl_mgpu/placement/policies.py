"""Named policies: the patterns that each system would use, as points of the solver's space."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dgl_mgpu.errors import UnreachableError
from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.patterns import ReplicationPattern
from dgl_mgpu.placement.xgnn import xgnn_pattern

Clique = tuple[int, ...]

#: Policy → what it does.  ``auto`` may use any pattern; the others the ones named.
POLICIES: dict[str, str] = {
    "auto": "whatever minimises the modelled time of the slowest GPU",
    "xgnn": "partitions with XGNN's extra copies, the rest in host memory",
    "clique": "partitions within cliques of linked GPUs, the same in each (Quiver)",
    "clique_opt": "as clique, with the hottest rows on every GPU (CliqueOpt)",
    "replicated": "the hottest rows on every GPU, the rest in host memory (DGL with a cache)",
    "partitioned": "everything partitioned over all GPUs, nothing in host memory (WholeGraph)",
    "host": "everything in host memory (PyTorch-Direct)",
}


def patterns_of(policy: str, topology: Topology) -> list[ReplicationPattern]:
    """Patterns on GPUs that a policy other than ``auto`` chooses from.

    Raises
    ------
    UnreachableError
        If the policy needs links that the machine lacks.
    """
    if policy == "xgnn":
        return [xgnn_pattern(topology)]
    if policy == "clique":
        return [clique_pattern(cliques(topology), topology.num_gpus)]
    if policy == "clique_opt":
        return [replicated(topology), clique_pattern(cliques(topology), topology.num_gpus)]
    if policy == "replicated":
        return [replicated(topology)]
    if policy == "host":
        return []
    if not topology.fully_linked:
        gpu = next(gpu for gpu in range(topology.num_gpus)
                   if len(topology.neighbors(gpu)) < topology.num_gpus - 1)  # fmt: skip
        raise UnreachableError(
            f"partition tables over all GPUs of '{topology.name}'",
            f"GPU {gpu} is linked only to GPUs {topology.neighbors(gpu)}",
            "use the policy 'auto' or 'xgnn', or GPUs that are all linked",
        )
    return [clique_pattern([tuple(range(topology.num_gpus))], topology.num_gpus)]


def replicated(topology: Topology) -> ReplicationPattern:
    """A copy of every row on every GPU."""
    everyone = tuple(range(topology.num_gpus))
    return ReplicationPattern("gpu", (everyone,), tuple((gpu,) for gpu in everyone))


def clique_pattern(groups: list[Clique], num_gpus: int) -> ReplicationPattern:
    """The same rows partitioned within each clique."""
    parts = math.lcm(*map(len, groups))
    copies = tuple(
        tuple(sorted(group[part % len(group)] for group in groups)) for part in range(parts)
    )
    source: list[tuple[int, ...]] = [()] * num_gpus
    for group in groups:
        for gpu in group:
            source[gpu] = tuple(group[part % len(group)] for part in range(parts))
    return ReplicationPattern("gpu", copies, tuple(source))


def cliques(topology: Topology) -> list[Clique]:
    """GPUs split into groups in which every two are linked, both ways.

    All groups hold the same rows, so the smallest one limits what fits: it is made as large as
    possible, then the largest as small as possible, then the slowest link within a group as
    fast as possible.  This gives the groups of XGNN's section 6.6.
    """
    width = topology.link_bandwidth

    def rank(groups: list[Clique]) -> tuple[int, int, float]:
        sizes = [len(group) for group in groups]
        links = [width[i, j] for group in groups for i in group for j in group if i != j]
        return (min(sizes), -max(sizes), float(min(links, default=0.0)))

    if topology.fully_linked:
        return [tuple(range(topology.num_gpus))]
    return max(_clique_partitions(topology), key=rank)


def _clique_partitions(topology: Topology) -> Iterator[list[Clique]]:
    """Every way to split the GPUs into groups of linked ones."""
    # Access that is proved by reading may turn out to be there one way only.
    reads = topology.link_bandwidth > 0
    linked = reads & reads.T

    def extend(gpu: int, groups: list[Clique]) -> Iterator[list[Clique]]:
        if gpu == topology.num_gpus:
            yield groups
            return
        for index, group in enumerate(groups):
            if linked[gpu, list(group)].all():
                yield from extend(gpu + 1, [*groups[:index], (*group, gpu), *groups[index + 1 :]])
        yield from extend(gpu + 1, [*groups, (gpu,)])

    yield from extend(0, [])
