"""Named policies: the patterns that each system would use, as points of the solver's space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from dgl_mgpu.errors import UnreachableError
from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.candidates import gpu_pattern
from dgl_mgpu.placement.plan import Tier

Clique = tuple[int, ...]
# For each GPU, the parts that it stores.
_Stored = tuple[frozenset[int], ...]

# Complete placements of XGNN's to compare, at most; the 8 GPUs of a DGX-1 have 121.
_MAX_PLACEMENTS = 256

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


def patterns_of(policy: str, topology: Topology) -> list[Tier]:
    """Patterns on GPUs that a policy other than ``auto`` chooses from.

    Raises UnreachableError if the policy needs links that the machine lacks.
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


def replicated(topology: Topology) -> Tier:
    """A copy of every row on every GPU."""
    everyone = tuple(range(topology.num_gpus))
    return gpu_pattern((everyone,), tuple((gpu,) for gpu in everyone))


def clique_pattern(groups: list[Clique], num_gpus: int) -> Tier:
    """The same rows partitioned within each clique."""
    parts = math.lcm(*map(len, groups))
    copies = tuple(
        tuple(sorted(group[part % len(group)] for group in groups)) for part in range(parts)
    )
    source: list[tuple[int, ...]] = [()] * num_gpus
    for group in groups:
        for gpu in group:
            source[gpu] = tuple(group[part % len(group)] for part in range(parts))
    return gpu_pattern(copies, tuple(source))


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


def xgnn_pattern(topology: Topology) -> Tier:
    """Extra copies by XGNN's search (section 4.2, figure 8).

    There are as many parts as GPUs, and part ``g`` starts on GPU ``g``.  For one GPU after
    another, each part it cannot reach is stored once more, on itself or on a neighbour.  Three
    rules choose where: the fewest parts stored so far (balance); then the most GPUs that gain
    access by it, one that needs the part itself before others (less replication); and of the
    complete placements, the one whose slowest link is fastest (bandwidth).
    """
    gpus = range(topology.num_gpus)

    def rank(placement: tuple[_Stored, list[tuple[int, ...]]]) -> tuple[float, int]:
        stored, sources = placement
        counts = [np.bincount(source, minlength=len(gpus)) for source in sources]
        # Of each GPU, min over j of Bandwidth[gpu, j] / AccessCnt[gpu, j].
        narrowest = [
            float((topology.link_bandwidth[gpu, count > 0] / count[count > 0]).min())
            for gpu, count in enumerate(counts)
        ]
        return min(narrowest), -max(map(len, stored))

    placements = (
        (stored, [_read_sources(topology, gpu, stored) for gpu in gpus])
        for stored in itertools.islice(_xgnn_placements(topology), _MAX_PLACEMENTS)
    )
    stored, sources = max(placements, key=rank)
    copies = [tuple(gpu for gpu in gpus if part in stored[gpu]) for part in gpus]
    return gpu_pattern(copies, sources)


def _xgnn_placements(topology: Topology) -> Iterator[_Stored]:
    """Complete placements by XGNN's first two rules."""
    gpus = range(topology.num_gpus)
    reach = [(gpu, *topology.neighbors(gpu)) for gpu in gpus]
    seen: set[tuple[int, _Stored]] = set()

    def reaches(gpu: int, part: int, stored: _Stored) -> bool:
        return any(part in stored[near] for near in reach[gpu])

    def choices(part: int, gpu: int, stored: _Stored) -> list[int]:
        lacking = [reader for reader in gpus if not reaches(reader, part, stored)]
        weights = {
            holder: (
                -len(stored[holder]),
                sum(holder in reach[reader] for reader in lacking),
                holder in lacking,
            )
            for holder in sorted(reach[gpu])
        }
        best = max(weights.values())
        return [holder for holder, weight in weights.items() if weight == best]

    def search(gpu: int, stored: _Stored) -> Iterator[_Stored]:
        if (gpu, stored) in seen:
            return
        seen.add((gpu, stored))
        if gpu == len(gpus):
            yield stored
            return
        missing = [part for part in gpus if not reaches(gpu, part, stored)]
        if not missing:
            yield from search(gpu + 1, stored)
            return
        part = missing[0]
        for holder in choices(part, gpu, stored):
            more = (*stored[:holder], stored[holder] | {part}, *stored[holder + 1 :])
            yield from search(gpu, more)

    yield from search(0, tuple(frozenset((gpu,)) for gpu in gpus))


def _read_sources(topology: Topology, gpu: int, stored: _Stored) -> tuple[int, ...]:
    """Whose copy of each part a GPU reads, its reads spread over links by their bandwidth.

    Parts with fewer copies in reach choose first; a part then moves to another of its copies
    while that makes the slowest link faster.
    """
    width = topology.link_bandwidth[gpu]
    holders = [
        [gpu] if part in stored[gpu]
        else [peer for peer in topology.neighbors(gpu) if part in stored[peer]]
        for part in range(topology.num_gpus)
    ]  # fmt: skip
    count = np.zeros(topology.num_gpus)
    source = [gpu] * topology.num_gpus
    for part in sorted(range(len(holders)), key=lambda part: len(holders[part])):
        source[part] = min(holders[part], key=lambda peer: (count[peer] + 1) / width[peer])
        count[source[part]] += 1
    improved = True
    while improved:
        improved = False
        for part, peers in enumerate(holders):
            for peer in peers:
                current = source[part]
                if (count[peer] + 1) / width[peer] < count[current] / width[current]:
                    count[current] -= 1
                    count[peer] += 1
                    source[part] = peer
                    improved = True
    return tuple(source)
