"""XGNN's placement search: which GPUs hold extra copies of which parts (section 4.2, figure 8).

There are as many parts as GPUs, and part ``g`` starts on GPU ``g``.  For one GPU after another,
each part it cannot reach is stored once more, on itself or on a neighbour.  Three rules choose
where: the fewest parts stored so far (balance); then the most GPUs that gain access by it, one
that needs the part itself before others (less replication); and of the complete placements,
the one whose slowest link is fastest (bandwidth).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.patterns import ReplicationPattern

# Complete placements to compare by the third rule, at most; the 8 GPUs of a DGX-1 have 121.
_MAX_PLACEMENTS = 256

#: For each GPU, the parts it stores.
Stored = tuple[frozenset[int], ...]


def xgnn_pattern(topology: Topology) -> ReplicationPattern:
    """The placement that the three rules lead to."""
    best, best_rank = None, (-1.0, 0)
    for stored in _placements(topology):
        sources = [read_sources(topology, gpu, stored) for gpu in range(topology.num_gpus)]
        narrowest = min(
            _bandwidth_per_part(topology, gpu, source) for gpu, source in enumerate(sources)
        )
        rank = (narrowest, -max(map(len, stored)))
        if rank > best_rank:
            best, best_rank = (stored, sources), rank
    assert best is not None  # the search always completes: a GPU can store any part itself
    stored, sources = best
    n = topology.num_gpus
    copies = tuple(tuple(gpu for gpu in range(n) if part in stored[gpu]) for part in range(n))
    return ReplicationPattern("gpu", copies, tuple(sources))


def _reach(topology: Topology) -> list[frozenset[int]]:
    """Each GPU and those it is linked to."""
    return [frozenset((gpu, *topology.neighbors(gpu))) for gpu in range(topology.num_gpus)]


def _placements(topology: Topology) -> Iterator[Stored]:
    """Complete placements by the first two rules, at most so many."""
    n = topology.num_gpus
    reach = _reach(topology)
    seen: set[tuple[int, Stored]] = set()
    found = 0

    def missing(gpu: int, stored: Stored) -> list[int]:
        near: frozenset[int] = frozenset().union(*(stored[peer] for peer in reach[gpu]))
        return [part for part in range(n) if part not in near]

    def choices(part: int, gpu: int, stored: Stored) -> list[int]:
        lacking = {
            reader for reader in range(n) if not any(part in stored[near] for near in reach[reader])
        }

        def weight(place: int) -> tuple[int, int, bool]:
            gain = sum(place in reach[reader] for reader in lacking)
            return (-len(stored[place]), gain, place in lacking)

        weights = {place: weight(place) for place in sorted(reach[gpu])}
        best = max(weights.values())
        return [place for place, value in weights.items() if value == best]

    def search(gpu: int, stored: Stored) -> Iterator[Stored]:
        nonlocal found
        if found >= _MAX_PLACEMENTS or (gpu, stored) in seen:
            return
        seen.add((gpu, stored))
        if gpu == n:
            found += 1
            yield stored
            return
        wanted = missing(gpu, stored)
        if not wanted:
            yield from search(gpu + 1, stored)
            return
        for place in choices(wanted[0], gpu, stored):
            more = (*stored[:place], stored[place] | {wanted[0]}, *stored[place + 1 :])
            yield from search(gpu, more)

    yield from search(0, tuple(frozenset((gpu,)) for gpu in range(n)))


def read_sources(topology: Topology, gpu: int, stored: Stored) -> tuple[int, ...]:
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
        for part, places in enumerate(holders):
            here = source[part]
            for other in places:
                if (count[other] + 1) / width[other] < count[here] / width[here]:
                    count[here] -= 1
                    count[other] += 1
                    source[part] = here = other
                    improved = True
    return tuple(source)


def _bandwidth_per_part(topology: Topology, gpu: int, source: tuple[int, ...]) -> float:
    """min over j of Bandwidth[gpu, j] / AccessCnt[gpu, j]."""
    count = np.bincount(source, minlength=topology.num_gpus)
    used = count > 0
    return float((topology.link_bandwidth[gpu, used] / count[used]).min())
