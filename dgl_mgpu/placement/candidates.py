"""Ways to keep a range of rows: every set of GPUs for each part, or a policy's few patterns.

A *pattern* is a :class:`Tier` of one row a part; :func:`with_rows` gives it its rows.

Candidates answer two questions of the solver: what an access costs under each of them at given
prices, and what loads the cheapest form of one brings.  The last two candidates are always the
host and the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.cost import tier_bytes, tier_reads
from dgl_mgpu.placement.plan import HOST, Memory, Tier

# Cost of a read that is impossible; finite, so that no access at all times it is 0.
_FORBIDDEN = 1e30
# Up to so many GPUs every set of GPUs is a candidate for the copies of a part.
_ALL_SETS_UP_TO = 8

#: A candidate's number, then what tells its forms apart.
Key = tuple[int, ...]


class FixedPatterns:
    """The patterns of a named policy, the host and the disk.

    ``storage``, shape (k, n + 2), is the bytes that each of the k candidates takes of every GPU,
    the host and the disk per byte of rows.
    """

    def __init__(self, patterns: Sequence[Tier], num_gpus: int) -> None:
        self._patterns = [*patterns, off_gpu("host", num_gpus), off_gpu("disk", num_gpus)]
        # Of one row a part: a share of rows is then a share of parts.
        self._reads = np.array([tier_reads(tier) for tier in self._patterns])
        self.storage = np.array([tier_bytes(tier, 1.0) for tier in self._patterns])

    def access_costs(self, prices: np.ndarray) -> np.ndarray:
        """Cost of one access of every GPU to each table under each candidate, shape (t, k).

        ``prices``, shape (t, n, n + 2), are those of a read by table, reader and memory.
        """
        return (prices[:, None] * self._reads).sum((2, 3))

    def forms(
        self, choice: np.ndarray, tables: np.ndarray, prices: np.ndarray, loads: np.ndarray
    ) -> tuple[list[Key], np.ndarray]:
        """The forms of candidates that have these costs, and what an access under them loads.

        ``choice`` and ``tables``, shape (c,), are candidates and the tables kept under them;
        ``loads``, shape (t, n, n + 2, r), is what a read loads.  Returns c keys and an array of
        shape (c, r).
        """
        keys: list[Key] = [(index,) for index in choice.tolist()]
        return keys, (self._reads[choice][..., None] * loads[tables]).sum((1, 2))

    def pattern(self, key: Key) -> Tier:
        """The pattern that a key of :meth:`forms` stands for."""
        return self._patterns[key[0]]


class AllSets:
    """Every set of GPUs as holders of a part, every GPU reading the copy cheapest for it.

    Each set counts twice: once read from GPUs alone, once with a copy in host memory that
    those may read for whom it is cheaper.  Sets that the machine's symmetries map to each
    other are one candidate, whose parts are all its images: that is what makes modulo
    partitions of single sets.  Methods are those of :class:`FixedPatterns`.
    """

    def __init__(self, topology: Topology, automorphisms: np.ndarray) -> None:
        n = self._num_gpus = topology.num_gpus
        self._automorphisms = automorphisms
        self._sets = _copy_sets(n, automorphisms)
        self._count = count = len(self._sets)
        linked = topology.link_bandwidth > 0
        # [memory, candidate, reader]: 0 where the reader can use that memory.
        usable = np.zeros((n + 2, 2 * count + 2, n), bool)
        usable[:n, : 2 * count] = np.tile(self._sets.T[:, :, None] & linked.T[:, None], (1, 2, 1))
        usable[n, count : 2 * count + 1] = usable[n + 1, -1] = True
        self._penalty = np.where(usable, 0.0, _FORBIDDEN)
        self.storage = np.zeros((2 * count + 2, n + 2))
        self.storage[: 2 * count, :n] = np.tile(self._sets, (2, 1))
        self.storage[count:-1, n] = self.storage[-1, n + 1] = 1.0

    def access_costs(self, prices: np.ndarray) -> np.ndarray:
        n, count = self._num_gpus, self._count
        holders = prices[:, :, :n].transpose(2, 0, 1)[:, :, None]
        nearest = (self._penalty[:n, None, :count] + holders).min(0)
        costs = np.empty((len(prices), 2 * count + 2))
        costs[:, :count] = nearest.sum(2)
        np.minimum(nearest, prices[:, None, :, n], out=nearest)
        costs[:, count:-2] = nearest.sum(2)
        costs[:, -2:] = prices[:, :, n:].sum(1)
        return costs

    def forms(
        self, choice: np.ndarray, tables: np.ndarray, prices: np.ndarray, loads: np.ndarray
    ) -> tuple[list[Key], np.ndarray]:
        source = (self._penalty[:, choice] + prices[tables].transpose(2, 0, 1)).argmin(0)
        keys = list(map(tuple, np.column_stack([choice, source]).tolist()))
        return keys, loads[tables[:, None], np.arange(self._num_gpus), source].sum(1)

    def pattern(self, key: Key) -> Tier:
        index, *source = key
        if index >= 2 * self._count:
            return off_gpu("host" if index == 2 * self._count else "disk", self._num_gpus)
        # The part and its readers, moved through all symmetries: each image is a part.
        holders = np.flatnonzero(self._sets[index % self._count]).tolist()
        images = set()
        for automorphism in self._automorphisms.tolist():
            reads = [HOST] * self._num_gpus
            for gpu, holder in enumerate(source):
                if holder < self._num_gpus:
                    reads[automorphism[gpu]] = automorphism[holder]
            images.add((tuple(sorted(automorphism[gpu] for gpu in holders)), tuple(reads)))
        copies, by_part = zip(*sorted(images), strict=True)
        return gpu_pattern(copies, zip(*by_part, strict=True))


Candidates = AllSets | FixedPatterns


def gpu_pattern(copies: Sequence[tuple[int, ...]], source: Iterable[tuple[int, ...]]) -> Tier:
    """Parts on GPUs; ``copies`` and ``source`` as in :class:`Tier`."""
    return Tier(0, len(copies), "gpu", len(copies), tuple(copies), tuple(source))


def off_gpu(memory: Memory, num_gpus: int) -> Tier:
    """The pattern of rows in host memory or on disk."""
    return Tier(0, 1, memory, 1, ((),), ((HOST,),) * num_gpus)


def with_rows(pattern: Tier, start: int, stop: int) -> Tier:
    """A pattern for positions ``[start, stop)``."""
    return replace(pattern, start=start, stop=stop)


def find_automorphisms(topology: Topology, budget: Sequence[float]) -> np.ndarray:
    """Renumberings of the GPUs that change nothing: a group of k <= n permutations, shape (k, n),
    the identity first.

    Looks among the rotations and the bit flips of GPU numbers, whichever are more: real
    machines are numbered regularly.  A symmetry that is missed costs the solver time and gives
    tiers of fewer parts, nothing else.
    """
    gpus = np.arange(topology.num_gpus)
    flips = [gpus ^ mask for mask in gpus]
    groups = (
        [(gpus + step) % len(gpus) for step in gpus],
        [flip for flip in flips if flip.max() < len(gpus)],
    )
    valid = ([p for p in group if _is_automorphism(topology, budget, p)] for group in groups)
    return np.array(max(valid, key=len))


def _is_automorphism(topology: Topology, budget: Sequence[float], permutation: np.ndarray) -> bool:
    links = topology.link_bandwidth
    per_gpu = (topology.ports(), topology.host_bandwidth, np.asarray(budget))
    groups = {(frozenset(group.gpus), group.bandwidth) for group in topology.host_groups}
    moved = {
        (frozenset(permutation[list(members)].tolist()), bandwidth) for members, bandwidth in groups
    }
    return (
        np.array_equal(links[np.ix_(permutation, permutation)], links)
        and all(np.array_equal(values[permutation], values) for values in per_gpu)
        and moved == groups
    )


def _copy_sets(num_gpus: int, automorphisms: np.ndarray) -> np.ndarray:
    """Sets of GPUs to keep a part on, one of each orbit: bool, shape (number of sets, n).

    All sets, for up to 8 GPUs; beyond that single GPUs, all GPUs, and every k-th GPU, which is
    what machines of so many equal GPUs need.
    """
    gpus = np.arange(num_gpus)
    if num_gpus <= _ALL_SETS_UP_TO:
        codes = np.arange(1, 1 << num_gpus)
        sets = (codes[:, None] >> gpus & 1).astype(bool)
        images = np.stack([sets[:, automorphism] @ (1 << gpus) for automorphism in automorphisms])
        return sets[images.min(0) == codes]
    steps = [step for step in range(1, num_gpus + 1) if num_gpus % step == 0]
    return np.array([(gpus - first) % step == 0 for step in steps for first in range(step)])
