"""What a tier may be kept as: every set of GPUs for each part, or a policy's few patterns.

Both answer two questions of the solver.  Given the price of each read, what does an access cost
under each candidate; and what loads does the cheapest form of a candidate bring.  The last two
candidates are always the host and the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement.cost import tier_bytes, tier_reads
from dgl_mgpu.placement.patterns import ReplicationPattern, copy_sets, off_gpu, spread
from dgl_mgpu.placement.plan import HOST

#: Cost of what cannot be; finite, so that no access at all times it is 0.
FORBIDDEN = 1e30

#: A candidate's number, then whatever tells its forms apart.
Key = tuple[int, ...]


class Candidates(Protocol):
    """Ways to keep a run of rows.

    Attributes
    ----------
    storage : ndarray, shape (k, n + 2)
        Bytes that each candidate takes of every GPU, the host and the disk per byte of rows.
    """

    storage: np.ndarray

    def access_costs(self, prices: np.ndarray) -> np.ndarray:
        """Cost of one access of every GPU to each table under each candidate.

        Parameters
        ----------
        prices : ndarray, shape (t, n, n + 2)
            Price of a read of table, by reader, from memory.

        Returns
        -------
        ndarray, shape (t, k)
        """

    def forms(
        self, choice: np.ndarray, tables: np.ndarray, prices: np.ndarray, loads: np.ndarray
    ) -> tuple[list[Key], np.ndarray]:
        """The forms of candidates that cost that, and what an access under them loads.

        Parameters
        ----------
        choice, tables : ndarray of int, shape (c,)
            Candidate and table of each.
        prices : ndarray, shape (t, n, n + 2)
        loads : ndarray, shape (t, n, n + 2, r)
            What a read loads.

        Returns
        -------
        keys : list of length c
        loads : ndarray, shape (c, r)
        """

    def pattern(self, key: Key) -> ReplicationPattern:
        """What a key stands for."""


class FixedPatterns:
    """The patterns of a named policy, the host and the disk."""

    def __init__(self, patterns: Sequence[ReplicationPattern], num_gpus: int) -> None:
        self._patterns = [*patterns, off_gpu("host", num_gpus), off_gpu("disk", num_gpus)]
        # One row a part: a share of rows is then a share of parts.
        tiers = [entry.tier(0, len(entry.copies)) for entry in self._patterns]
        self._reads = np.array([tier_reads(tier) for tier in tiers])
        self.storage = np.array([tier_bytes(tier, 1.0) for tier in tiers])

    def access_costs(self, prices: np.ndarray) -> np.ndarray:
        return (prices[:, None] * self._reads).sum((2, 3))

    def forms(
        self, choice: np.ndarray, tables: np.ndarray, prices: np.ndarray, loads: np.ndarray
    ) -> tuple[list[Key], np.ndarray]:
        keys: list[Key] = [(index,) for index in choice.tolist()]
        return keys, (self._reads[choice][..., None] * loads[tables]).sum((1, 2))

    def pattern(self, key: Key) -> ReplicationPattern:
        return self._patterns[key[0]]


class AllSets:
    """Every set of GPUs as holders of a part, every GPU reading the copy cheapest for it.

    Each set counts twice: once read from GPUs alone, once with a copy in host memory that
    those may read for whom it is cheaper.  Sets that the machine's symmetries turn into each
    other are one candidate, whose parts are all its images: that is what makes modulo
    partitions of single sets.
    """

    def __init__(self, topology: Topology, automorphisms: np.ndarray) -> None:
        n = self._num_gpus = topology.num_gpus
        self._automorphisms = automorphisms
        self._sets = copy_sets(n, automorphisms)
        self._count = count = len(self._sets)
        linked = topology.link_bandwidth > 0
        # [memory, candidate, reader]: 0 where the reader can use that memory.
        usable = np.zeros((n + 2, 2 * count + 2, n), bool)
        usable[:n, : 2 * count] = np.tile(self._sets.T[:, :, None] & linked.T[:, None], (1, 2, 1))
        usable[n, count : 2 * count + 1] = usable[n + 1, -1] = True
        self._penalty = np.where(usable, 0.0, FORBIDDEN)
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
        by_memory = prices[tables].transpose(2, 0, 1)
        source = (self._penalty[:, choice] + by_memory).argmin(0)
        brought = loads[tables[:, None], np.arange(self._num_gpus), source].sum(1)
        keys = list(map(tuple, np.column_stack([choice, source]).tolist()))
        return keys, brought

    def pattern(self, key: Key) -> ReplicationPattern:
        n = self._num_gpus
        index, *source = key
        if index >= 2 * self._count:
            return off_gpu("host" if index == 2 * self._count else "disk", n)
        holders = tuple(np.flatnonzero(self._sets[index % self._count]).tolist())
        return spread(holders, tuple(HOST if j == n else j for j in source), self._automorphisms)
