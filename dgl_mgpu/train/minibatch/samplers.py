"""The order of seeds in mini-batches, and PinSAGE's sampler of neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import dgl
import numpy as np
import torch
from dgl.dataloading import BlockSampler
from torch.utils.data import IterableDataset, get_worker_info

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.sampling.async_blocks import finish_blocks
from dgl_mgpu.sampling.block_sampling import Sampled
from dgl_mgpu.store.graph import StoreGraph


class SeedBatches(IterableDataset):
    """One rank's mini-batches of seeds, for DGL's DataLoader.

    An epoch is one sequence of batches, drawn from the seed and the epoch alone; rank ``r`` of
    ``n`` takes batches ``r``, ``r + n``, …, and its workers take those in turn. An epoch that was
    begun by another number of ranks can continue at any batch.

    ``seeds``, int32 or int64 of shape (n,), are distinct nodes, or edges.  With ``shuffle``, epochs
    visit them in an order drawn from ``seed``.  In a heterogeneous graph they have the type
    ``ntype``, and batches are dicts.  With ``every_round`` a rank for which the last round has no
    batch gets one without seeds.
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`: batches depend on nothing else that changes.
    prefetch_safe = True

    def __init__(
        self,
        seeds: torch.Tensor,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        ntype: str | None = None,
        every_round: bool = False,
    ) -> None:
        if len(seeds) == 0:
            raise InvalidInputError(
                "iterate over seed nodes",
                "there are no seed nodes",
                "check the split of the data set",
            )
        self._seeds = seeds
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self.ntype = ntype
        self.num_ranks = num_ranks
        self._every_round = every_round
        # The epoch and its first batch; in shared memory, for persistent workers.
        self._at = torch.zeros(2, dtype=torch.int64).share_memory_()

    def in_order(self, seeds: torch.Tensor) -> SeedBatches:
        """Batches of this size of other seeds, in their order, which ranks take in turn."""
        return SeedBatches(
            seeds,
            self.batch_size,
            shuffle=False,
            rank=self._rank,
            num_ranks=self.num_ranks,
            ntype=self.ntype,
            every_round=self._every_round,
        )

    @property
    def device(self) -> torch.device:
        """The device of the seeds, which DGL's DataLoader reads."""
        return self._seeds.device

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch that the next iteration is, and at which of its batches it begins."""
        self._at.copy_(torch.tensor([epoch, first]))

    def __len__(self) -> int:
        """Batches of this rank in the epoch."""
        return len(self._own_batches())

    def rounds(self) -> list[int]:
        """Seeds of all ranks together in each round of the epoch, one batch a rank.

        In the last round, ranks may have smaller batches than others, or none.
        """
        whole, first = self.batch_size * self.num_ranks, int(self._at[1]) * self.batch_size
        return [
            min(whole, len(self._seeds) - start) for start in range(first, len(self._seeds), whole)
        ]

    @property
    def num_batches(self) -> int:
        """Batches of all ranks in an epoch."""
        return -(-len(self._seeds) // self.batch_size)

    def _own_batches(self) -> range:
        """Numbers of this rank's batches."""
        first, stop = int(self._at[1]), self.num_batches
        if self._every_round:
            stop = first + len(self.rounds()) * self.num_ranks
        return range(first + self._rank, stop, self.num_ranks)

    def __iter__(self) -> Iterator[torch.Tensor | dict[str, torch.Tensor]]:
        order = None
        if self._shuffle:
            random = np.random.Generator(np.random.Philox(key=[self._seed, int(self._at[0])]))
            order = torch.from_numpy(random.permutation(len(self._seeds)))
        mine = self._own_batches()
        worker = get_worker_info()
        if worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        for batch in mine:
            span = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            seeds = self._seeds[span] if order is None else self._seeds[order[span]]
            yield seeds if self.ntype is None else {self.ntype: seeds}


class RandomWalkSampler(BlockSampler):
    """PinSAGE's blocks: neighbours are the nodes that random walks visit most.

    In each layer ``num_walks`` walks of ``walk_length`` steps from a node give ``num_neighbors``
    neighbours (Ying et al., 2018; XGNN, section 6.1).
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`: samples depend on attributes and the graph alone.
    prefetch_safe = True

    def __init__(
        self,
        num_layers: int,
        num_neighbors: int,
        num_walks: int,
        walk_length: int,
        **prefetch: object,
    ) -> None:
        super().__init__(**prefetch)
        self._num_layers = num_layers
        self._num_neighbors = num_neighbors
        self._num_walks = num_walks
        self._walk_length = walk_length

    def sample_blocks_async(
        self, g: StoreGraph, nodes: torch.Tensor, *, on_host: torch.Tensor | None = None
    ) -> SampleFuture[Sampled]:
        """Start what :meth:`sample_blocks` does on a GPU."""
        walks = self._num_walks, self._walk_length, self._num_neighbors
        return g.pinsage_blocks_async(nodes, self._num_layers, *walks, on_host=on_host)

    def sample_blocks(
        self, g: StoreGraph, seed_nodes: torch.Tensor, exclude_eids: object = None
    ) -> tuple[torch.Tensor, torch.Tensor, list[dgl.DGLGraph]]:
        """Input nodes, ``seed_nodes`` and one block a layer, with visit counts as edge data."""
        return finish_blocks(self, self.sample_blocks_async(g, seed_nodes).result())
