"""The order in which seed nodes are visited, the same for any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dgl_mgpu.errors import InvalidInputError


class SeedBatches(IterableDataset):
    """One rank's mini-batches of seed nodes, for DGL's DataLoader.

    An epoch is one sequence of batches, drawn from the seed and the epoch alone; rank ``r``
    of ``n`` takes batches ``r``, ``r + n``, …, and its workers take those in turn.

    Parameters
    ----------
    seeds : Tensor, int32 or int64, shape (n,)
        Distinct seed nodes.
    batch_size : int
    shuffle : bool
        Whether epochs visit them in random order.
    seed : int
        Where that order comes from.
    rank, num_ranks : int

    Raises
    ------
    InvalidInputError
        If there are no seed nodes.
    """

    def __init__(
        self,
        seeds: torch.Tensor,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if len(seeds) == 0:
            raise InvalidInputError(
                "iterate over seed nodes", "none", "check the split of the data set"
            )
        self._seeds = seeds
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self.num_ranks = num_ranks
        # In shared memory: workers that live on see the next epoch too.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def device(self) -> torch.device:
        """Where the seed nodes are (DGL's DataLoader asks)."""
        return self._seeds.device

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration is."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(range(self._rank, self._num_batches, self.num_ranks))

    def rounds(self) -> list[int]:
        """Seeds of all ranks together in each round of an epoch, one batch a rank.

        In the last round, ranks may have smaller batches than others, or none.
        """
        whole = self._batch_size * self.num_ranks
        return [min(whole, len(self._seeds) - start) for start in range(0, len(self._seeds), whole)]

    @property
    def _num_batches(self) -> int:
        return -(-len(self._seeds) // self._batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = None
        if self._shuffle:
            random = np.random.Generator(np.random.Philox(key=[self._seed, int(self._epoch)]))
            order = torch.from_numpy(random.permutation(len(self._seeds)))
        mine = range(self._rank, self._num_batches, self.num_ranks)
        worker = get_worker_info()
        if worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        for batch in mine:
            span = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
            yield self._seeds[span] if order is None else self._seeds[order[span]]
