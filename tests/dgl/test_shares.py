"""DataLoader with ``use_ddp``: the share of every rank, whatever the numbers of seeds and ranks."""

from __future__ import annotations

from collections import Counter

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading.dataloader import DDPTensorizedDataset

from dgl_mgpu.graph.originals import originals
from dgl_mgpu.train.launch.launch import launch

SEEDS = torch.arange(1000, 1100, dtype=torch.int32)


def share(monkeypatch, indices, rank: int, num_ranks: int, **options) -> list:
    """A rank's seeds of an epoch in their order, of several types with the type."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)
    options = {"batch_size": 3, "drop_last": False, "ddp_seed": 0, "shuffle": True} | options
    dataset = DDPTensorizedDataset(indices, **options)
    if options["shuffle"]:
        dataset.shuffle()
    batches = list(dataset)
    assert len(batches) == len(dataset)
    if isinstance(indices, dict):
        return [(k, i) for batch in batches for k, ids in batch.items() for i in ids.tolist()]
    return [i for batch in batches for i in batch.tolist()]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_seeds", range(12))
def test_shares_are_of_one_size_and_hold_every_seed(
    monkeypatch, num_seeds, num_ranks, typed, drop_last
):
    seeds, everyone = SEEDS[:num_seeds], [*range(1000, 1000 + num_seeds)]
    if typed:
        cut = num_seeds // 3
        seeds = {"a": seeds[:cut], "b": seeds[cut:]}
        everyone = [("a" if i < cut else "b", seed) for i, seed in enumerate(everyone)]
    found = [
        share(monkeypatch, seeds, rank, num_ranks, drop_last=drop_last) for rank in range(num_ranks)
    ]
    assert len({len(of_rank) for of_rank in found}) == 1
    times = Counter(seed for of_rank in found for seed in of_rank)
    assert times.keys() <= set(everyone)
    if not drop_last:
        assert times.keys() == set(everyone)


@pytest.mark.parametrize(("num_seeds", "num_ranks"), [(12, 3), (11, 2), (10, 3), (100, 7)])
def test_where_dgl_can_share_seeds_it_does(monkeypatch, num_seeds, num_ranks):
    for rank in range(num_ranks):
        found = share(monkeypatch, SEEDS[:num_seeds], rank, num_ranks, shuffle=False)
        with monkeypatch.context() as patch:
            original = originals["dgl.dataloading.dataloader:DDPTensorizedDataset.__init__"]
            patch.setattr(DDPTensorizedDataset, "__init__", original)
            assert share(patch, SEEDS[:num_seeds], rank, num_ranks, shuffle=False) == found


def test_workers_that_live_on_see_the_next_order(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    options = {"batch_size": 5, "use_ddp": True, "shuffle": True, "num_workers": 1}
    loader = dgl.dataloading.DataLoader(
        dgl.rand_graph(50, 300), torch.arange(50), dgl.dataloading.NeighborSampler([2]),
        persistent_workers=True, **options,
    )  # fmt: skip
    orders = [[int(i) for _, seeds, _ in loader for i in seeds] for _ in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == [*range(50)]


def _trains_on_few_seeds(folder) -> None:
    g = dgl.rand_graph(50, 300)
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(3), dgl.dataloading.NeighborSampler([2]), batch_size=1, use_ddp=True
    )
    for _, seeds, _ in loader:
        dist.all_reduce(torch.ones(1))  # as DDP does in every step
        (folder / f"{dist.get_rank()}-{int(seeds)}").touch()


@pytest.mark.usefixtures("forked_ranks")
def test_more_ranks_than_seeds_train_together(tmp_path):
    launch(_trains_on_few_seeds, 4, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-1", "2-2", "3-0"]
