from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train.minibatch.samplers import SeedBatches

SEEDS = torch.arange(100, 1100, dtype=torch.int32)


def sequence(epoch: int, rank: int = 0, num_ranks: int = 1, workers: int = 0) -> list[list[int]]:
    batches = SeedBatches(SEEDS, 64, shuffle=True, seed=3, rank=rank, num_ranks=num_ranks)
    batches.set_epoch(epoch)
    loaded = [batch.tolist() for batch in DataLoader(batches, batch_size=None, num_workers=workers)]
    assert len(loaded) == len(batches)
    return loaded


def test_an_epoch_visits_every_seed_once():
    for epoch in range(3):
        visited = [node for batch in sequence(epoch) for node in batch]
        assert sorted(visited) == SEEDS.tolist()
        assert visited != sorted(visited)
    assert sequence(0) != sequence(1)
    assert sequence(1) == sequence(1)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 20])
def test_ranks_take_the_batches_of_one_sequence_in_turn(num_ranks):
    whole = sequence(2)
    for rank in range(num_ranks):
        assert sequence(2, rank, num_ranks) == whole[rank::num_ranks]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(workers):
    assert sequence(1, 1, 2, workers) == sequence(1, 1, 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 20])
def test_rounds_count_the_seeds_of_all_ranks(num_ranks):
    ranks = [sequence(0, rank, num_ranks) for rank in range(num_ranks)]
    rounds = SeedBatches(SEEDS, 64, shuffle=True, num_ranks=num_ranks).rounds()
    expected = [
        sum(len(batches[step]) for batches in ranks if step < len(batches))
        for step in range(len(ranks[0]))
    ]
    assert rounds == expected


def test_without_shuffling_order_and_dtype_are_kept():
    batches = list(SeedBatches(SEEDS, 300, shuffle=False))
    assert torch.equal(torch.cat(batches), SEEDS)
    assert [len(batch) for batch in batches] == [300, 300, 300, 100]


def test_no_seeds():
    with pytest.raises(InvalidInputError, match="split"):
        SeedBatches(torch.empty(0, dtype=torch.int64), 5, shuffle=False)
