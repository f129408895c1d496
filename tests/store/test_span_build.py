"""How a store over machines is built: how many copies, and what machines have to ask for alike."""

from __future__ import annotations

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dgl_mgpu import GlobalStore
from dgl_mgpu.errors import (
    ConfigError,
    InvalidInputError,
    PlanDoesNotFitError,
    RankFailedError,
)
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.store.span_graphs import NODES, assert_same_batches, equal, power_law


def _chosen(little: str) -> tuple[bool, int]:
    """With little memory on the machines of these ranks."""
    g = power_law()
    memory = 250_000 if str(dist.get_rank()) in little else "auto"
    options = {"batch_size": 16, "fanouts": [5], "gpu_memory": 1024}
    with GlobalStore.from_dgl(
        g, seed=5, span="auto", edges=True, host_memory=memory, **options
    ) as store:
        seeds = torch.arange(dist.get_rank(), NODES, 20)
        sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"])
        assert_same_batches(g, store, sampler, seeds)
        sources, _ = store.graph.find_edges(seeds.to(store.device))
        assert equal(sources, g.find_edges(seeds)[0])
        assert (store.plan.share is not None) == store.graph.spans_machines
        return store.graph.spans_machines, store.plan.num_gpus


@machines_on_gpus_too
def test_the_machine_with_least_memory_decides(ranks: RankProcesses) -> None:
    assert {spans for spans, _ in ranks.run(on_machines, "abc", _chosen, "")} == {False}
    assert {spans for spans, _ in ranks.run(on_machines, "abc", _chosen, "1")} == {True}


def _unlike_machines(change: str) -> None:
    g, options = power_law(), {"replica_ratio": 0.1}
    if dist.get_rank() == 1:
        if change == "edges":
            g = dgl.graph(g.edges()[::-1], num_nodes=NODES)
            g.ndata.update(power_law().ndata)
            g.edata.update(power_law().edata)
        elif change == "nodes":
            g.ndata["feat"] = g.ndata["feat"][:, :3]
        elif change == "more":
            g.ndata["more"] = torch.zeros(NODES)
        else:
            options[change] = 0.2
    with pytest.raises(InvalidInputError, match="pass the same data and options on every machine"):
        GlobalStore.from_dgl(g, span="job", **options)


@pytest.mark.parametrize("change", ["edges", "nodes", "more", "replica_ratio"])
def test_machines_ask_for_the_same_store(ranks: RankProcesses, change: str) -> None:
    ranks.run(on_machines, "abc", _unlike_machines, change)


def _does_not_fit() -> None:
    with pytest.raises(PlanDoesNotFitError if dist.get_rank() == 1 else RankFailedError):
        memory = 1024 if dist.get_rank() == 1 else "auto"
        GlobalStore.from_dgl(power_law(), span="job", host_memory=memory, gpu_memory=memory)


def test_a_part_that_does_not_fit_ends_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "abc", _does_not_fit)


def _numbers_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"the machines have \[\d, \d\] ranks"):
        GlobalStore.from_dgl(power_law(), span="job")


def test_machines_have_as_many_ranks(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "aab", _numbers_of_ranks)


def _on_one_machine() -> None:
    with GlobalStore.from_dgl(power_law(), span="job", replica_ratio=0) as store:
        assert not store.graph.spans_machines
        store.graph.view()


def test_one_machine_has_all(ranks: RankProcesses) -> None:
    ranks.run(on_machines, "aaa", _on_one_machine)
