"""Keys of the random numbers that a store's graph draws."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping

import numpy as np
import torch

from dgl_mgpu.ops import SampleKey


class BatchKeys:
    """Makes the keys of samples: the seed, the epoch, the mini-batch and the hop.

    A sample depends on its key and the node, and on nothing else: not on the number of ranks or
    workers, nor on which of them does the work.  A mini-batch is identified by its seed nodes.
    Samplers that go hop by hop pass neither the batch nor the hop: a call whose seed nodes begin
    with those of the previous call, in the same epoch, is the next hop of that call (DGL keeps
    seeds first when it relabels).

    :meth:`StoreGraph.set_epoch` sets the epoch; otherwise passes over a store's DataLoaders are
    counted.  Seeds are in [0, 2**64).
    """

    def __init__(self, seed: int) -> None:
        # The epoch and the seed, in shared memory: persistent workers see the next ones, too.
        self.__setstate__(torch.zeros(2, dtype=torch.int64).share_memory_())
        self.seed = seed

    @property
    def epoch(self) -> int:
        return int(self._numbers[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._numbers[0] = value
        self._calls.last = None

    @property
    def seed(self) -> int:
        return int(self._numbers[1]) % (1 << 64)

    @seed.setter
    def seed(self, value: int) -> None:
        self._numbers[1] = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        self._calls.last = None

    def batch_key(self, seeds: Mapping[str, torch.Tensor]) -> SampleKey:
        """The key of the first hop of a mini-batch of ``seeds``, by node type.

        If seeds are on a GPU, the host waits for their ids.
        """
        self._calls.last = None
        return SampleKey(self.seed, self.epoch, _digest(seeds), 0)

    def next_key(self, seeds: Mapping[str, torch.Tensor]) -> SampleKey:
        """The key of a call that samples one hop from ``seeds``, by node type."""
        epoch = self.epoch
        last = getattr(self._calls, "last", None)
        if last is not None and last[0] == epoch and _begins_with(seeds, last[3]):
            _, batch, hop, _ = last
            hop += 1
        else:
            batch, hop = _digest(seeds), 0
        self._calls.last = epoch, batch, hop, dict(seeds)
        return SampleKey(self.seed, epoch, batch, hop)

    def start_edges(self, edges: Mapping[str, torch.Tensor]) -> None:
        """Begin a mini-batch of edges, by type."""
        self._calls.edges = dict(edges), 0

    def negative_key(self, etype: int) -> SampleKey:
        """The key of a call that draws negative edges for the last mini-batch of edges."""
        edges, calls = getattr(self._calls, "edges", ({}, 0))
        self._calls.edges = edges, calls + 1
        return SampleKey(self.seed, self.epoch, _digest(edges), calls, etype)

    def __getstate__(self) -> torch.Tensor:
        return self._state

    def __setstate__(self, state: torch.Tensor) -> None:
        self._state = state
        self._numbers = state.numpy()  # of the same memory, for every batch
        self._calls = threading.local()


def _begins_with(seeds: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor]) -> bool:
    matches = [
        ntype in seeds and torch.equal(seeds[ntype][: len(nodes)], nodes)
        for ntype, nodes in earlier.items()
        if len(nodes)
    ]
    return bool(matches) and all(matches)


def _digest(seeds: Mapping[str, torch.Tensor]) -> int:
    """A hash of the seeds, their order and their types.

    Sums the ids of each type, each times the random number of its position: a cryptographic hash
    of all ids takes the host longer than a GPU takes to sample them.
    """
    digest = hashlib.blake2b(digest_size=8)
    for ntype in sorted(seeds):
        ids = seeds[ntype].cpu().numpy().astype(np.uint64)
        total = int(np.dot(ids, _weights(len(ids))))
        digest.update(f"{ntype} {len(ids)} {total} ".encode())
    return int.from_bytes(digest.digest(), "little")


_cached_weights = np.empty(0, dtype=np.uint64)


def _weights(count: int) -> np.ndarray:
    """The first random numbers of a fixed sequence."""
    global _cached_weights
    weights = _cached_weights
    if len(weights) < count:
        weights = _cached_weights = np.random.Philox(key=0).random_raw(2 * count)
    return weights[:count]
