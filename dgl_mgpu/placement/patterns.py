"""Ways to keep a run of rows: on which GPUs each part lies and who reads which copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.plan import HOST, Memory, Tier

# Up to so many GPUs every set of GPUs is a candidate for the copies of a part.
_ALL_SETS_UP_TO = 8


@dataclass(frozen=True)
class ReplicationPattern:
    """How one tier is kept; a :class:`Tier` without its rows.

    Attributes
    ----------
    memory : 'gpu', 'host' or 'disk'
    copies : tuple of tuple of int, one a part
    source : tuple of tuple of int, one a GPU
    """

    memory: Memory
    copies: tuple[tuple[int, ...], ...]
    source: tuple[tuple[int, ...], ...]

    def tier(self, start: int, stop: int) -> Tier:
        """This pattern for positions ``[start, stop)``."""
        return Tier(start, stop, self.memory, len(self.copies), self.copies, self.source)


def off_gpu(memory: Memory, num_gpus: int) -> ReplicationPattern:
    """Rows in host memory or on disk."""
    return ReplicationPattern(memory, ((),), ((HOST,),) * num_gpus)


def find_automorphisms(topology: Topology, budget: Sequence[float]) -> np.ndarray:
    """Renumberings of the GPUs that change nothing.

    Looks among the rotations and the bit flips of GPU numbers, whichever are more: real
    machines are numbered regularly.  A symmetry that is missed costs the solver time and gives
    tiers of fewer parts, nothing else.

    Returns
    -------
    ndarray, int64, shape (k, n)
        A group of permutations, the identity first; ``k <= n``.
    """
    n = topology.num_gpus
    gpus = np.arange(n)
    rotations = [(gpus + step) % n for step in range(n)]
    flips = [gpus ^ mask for mask in range(n) if (gpus ^ mask).max() < n]
    groups = [
        np.array(
            [
                automorphism
                for automorphism in automorphisms
                if _unchanged(topology, budget, automorphism)
            ]
        )
        for automorphisms in (rotations, flips)
    ]
    return max(groups, key=len)


def _unchanged(topology: Topology, budget: Sequence[float], automorphism: np.ndarray) -> bool:
    links = topology.link_bandwidth
    per_gpu = (topology.ports(), topology.host_bandwidth, np.asarray(budget))
    groups = {(frozenset(group.gpus), group.bandwidth) for group in topology.host_groups}
    moved = {
        (frozenset(int(automorphism[gpu]) for gpu in members), bandwidth)
        for members, bandwidth in groups
    }
    return (
        np.array_equal(links[np.ix_(automorphism, automorphism)], links)
        and all(np.array_equal(values[automorphism], values) for values in per_gpu)
        and moved == groups
    )


def orbits(automorphisms: np.ndarray) -> np.ndarray:
    """Number of the orbit of each GPU under a group of permutations.  Shape (n,)."""
    smallest = automorphisms.min(0)
    return np.unique(smallest, return_inverse=True)[1]


def copy_sets(num_gpus: int, automorphisms: np.ndarray) -> np.ndarray:
    """Sets of GPUs to keep a part on, one of each orbit.

    All sets, for up to 8 GPUs; beyond that single GPUs, all GPUs, and every k-th GPU, which is
    what machines of so many equal GPUs need.

    Returns
    -------
    ndarray of bool, shape (number of sets, n)
    """
    gpus = np.arange(num_gpus)
    if num_gpus <= _ALL_SETS_UP_TO:
        codes = np.arange(1, 1 << num_gpus)
        sets = (codes[:, None] >> gpus & 1).astype(bool)
        images = np.stack([sets[:, automorphism] @ (1 << gpus) for automorphism in automorphisms])
        return sets[images.min(0) == codes]
    every = [
        (gpus - first) % step == 0
        for step in range(1, num_gpus + 1)
        if num_gpus % step == 0
        for first in range(step)
    ]
    return np.array(every)


def spread(
    holders: tuple[int, ...], source: tuple[int, ...], automorphisms: np.ndarray
) -> ReplicationPattern:
    """One part and its readers, moved through all symmetries: each image is a part.

    Parameters
    ----------
    holders : tuple of int
        GPUs that hold the part.
    source : tuple of int, length n
        Whose copy each GPU reads; ``HOST`` for the host's.
    automorphisms : ndarray, shape (k, n)
    """
    images = set()
    for automorphism in automorphisms.tolist():
        reads = [HOST] * len(source)
        for gpu, holder in enumerate(source):
            reads[automorphism[gpu]] = automorphism[holder] if holder != HOST else HOST
        images.add((tuple(sorted(automorphism[gpu] for gpu in holders)), tuple(reads)))
    parts = sorted(images)
    copies = tuple(holders for holders, _ in parts)
    return ReplicationPattern(
        "gpu", copies, tuple(zip(*(reads for _, reads in parts), strict=True))
    )
