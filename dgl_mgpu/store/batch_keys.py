"""How a store's graph knows which random experiment a call is part of."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping

import numpy as np
import torch

from dgl_mgpu.ops import SampleKey


class BatchKeys:
    """Which random experiment the next call of ``sample_neighbors`` is.

    A sample depends on the seed, the epoch, the mini-batch, the hop and the node, and on
    nothing else: not on the number of ranks or workers, nor on which of them does the work.
    A batch is known by its seed nodes.  Who samples hop by hop tells a graph neither the batch
    nor the hop: a call whose seed nodes begin with those of the call before it, in the same
    epoch, is that call's next hop (DGL keeps seeds first when it relabels).

    The epoch is set by :meth:`StoreGraph.set_epoch`; otherwise passes over a store's DataLoaders
    are counted.
    """

    def __init__(self, seed: int) -> None:
        # The epoch and the seed, in shared memory: workers that live on see the next ones too.
        self._state = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._calls = threading.local()
        self.seed = seed

    @property
    def epoch(self) -> int:
        return int(self._state[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._state[0] = value
        self._calls.last = None

    @property
    def seed(self) -> int:
        return int(self._state[1]) % (1 << 64)

    @seed.setter
    def seed(self, value: int) -> None:
        self._state[1] = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        self._calls.last = None

    def batch_key(self, seeds: Mapping[str, torch.Tensor]) -> SampleKey:
        """The key of the first hop of a mini-batch of ``seeds``, by node type.

        Of seeds on a GPU the host waits for their ids.
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

    def begin_edges(self, edges: Mapping[str, torch.Tensor]) -> None:
        """Note the edges, by type, that a mini-batch begins with."""
        self._calls.edges = dict(edges), 0

    def negative_key(self, etype: int) -> SampleKey:
        """The key of a call that draws negative edges, for those that were noted last."""
        edges, calls = getattr(self._calls, "edges", ({}, 0))
        self._calls.edges = edges, calls + 1
        return SampleKey(self.seed, self.epoch, _digest(edges), calls, etype)

    def __getstate__(self) -> torch.Tensor:
        return self._state

    def __setstate__(self, state: torch.Tensor) -> None:
        self._state = state
        self._calls = threading.local()


def _begins_with(seeds: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor]) -> bool:
    found = [
        ntype in seeds and torch.equal(seeds[ntype][: len(nodes)], nodes)
        for ntype, nodes in earlier.items()
        if len(nodes)
    ]
    return bool(found) and all(found)


def _digest(seeds: Mapping[str, torch.Tensor]) -> int:
    """A number of the seeds, their order and their types.

    Of each type a sum of the ids, each times a random number of its place: a cryptographic digest
    of all ids takes the host longer than a GPU takes to sample them.
    """
    digest = hashlib.blake2b(digest_size=8)
    for ntype in sorted(seeds):
        ids = seeds[ntype].to("cpu", torch.int64).numpy().view(np.uint64)
        total = int(np.dot(ids, _weights(len(ids))))
        digest.update(f"{ntype} {len(ids)} {total} ".encode())
    return int.from_bytes(digest.digest(), "little")


_known_weights = np.empty(0, dtype=np.uint64)


def _weights(count: int) -> np.ndarray:
    """Random numbers, the same ones always; of more, the first are those of fewer."""
    global _known_weights
    found = _known_weights
    if len(found) < count:
        found = _known_weights = np.random.Philox(key=0).random_raw(2 * count)
    return found[:count]
