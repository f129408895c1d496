"""One store over the machines of a job: as a store of one machine, and as DGL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.comm import communicator
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    PlanDoesNotFitError,
    RankFailedError,
    UnsupportedByStoreError,
)
from dgl_mgpu.store.graph import StoreGraph
from tests.ranks import RankProcesses

NODES, EDGES, WIDTH = 600, 6_000, 16


def power_law() -> dgl.DGLGraph:
    """A few nodes are the sources of most edges."""
    draw = torch.Generator().manual_seed(0)
    hot = (NODES * torch.rand(EDGES, generator=draw) ** 3).long()
    # Hot nodes are anywhere among the ids.
    sources = torch.randperm(NODES, generator=draw)[hot]
    g = dgl.graph((sources, torch.randint(NODES, (EDGES,), generator=draw)), num_nodes=NODES)
    g.ndata["feat"] = torch.randn(NODES, WIDTH, generator=draw)
    g.ndata["label"] = torch.randint(5, (NODES,), generator=draw)
    g.edata["w"] = torch.rand(EDGES, 2, generator=draw)
    return g


def of_two_types() -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(1)

    def ends(first: int, second: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(first, (count,), generator=draw),
            torch.randint(second, (count,), generator=draw),
        )

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): ends(40, 40, 300),
            ("user", "buys", "item"): ends(40, 70, 400),
            ("item", "bought", "user"): ends(70, 40, 350),
        },
        {"user": 40, "item": 70},
    ).int()
    g.nodes["user"].data["feat"] = torch.randn(40, 3, generator=draw).half()
    g.nodes["item"].data["feat"] = torch.randn(70, 5, generator=draw)
    return g


def _on_machines(machines: str, check: Callable[..., Any], *args: Any) -> Any:
    """Run a check with ranks on machines by these names, a letter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_groups", None)
        patch.setattr(communicator, "_across", None)
        patch.setattr(communicator, "_machine_id", lambda: machines[dist.get_rank()])
        return check(*args)


def _batches(graph: StoreGraph, seeds: Any, sampler: Any) -> list[tuple]:
    # A batch of this rank's own; the last is empty on the first rank.
    loader = dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=16)
    return list(loader)


def _seeds(g: dgl.DGLGraph) -> torch.Tensor:
    """As many seeds on each rank, others on each."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    return torch.randperm(g.num_nodes(), generator=draw)[:48].to(g.idtype)


def _assert_same_batches(g: dgl.DGLGraph, spanning: dgl_mgpu.GlobalStore) -> None:
    whole = dgl_mgpu.GlobalStore.from_dgl(g, seed=5)
    features = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    for fanouts, options in (([4, 3, 2], {}), ([-1, 5], {"replace": True}), ([20], {})):
        sampler = dgl.dataloading.NeighborSampler(fanouts, **features, **options)
        found = _batches(spanning.graph, _seeds(g), sampler)
        expected = _batches(whole.graph, _seeds(g), sampler)
        assert len(found) == len(expected) == 3
        for (inputs, outputs, blocks), (other_inputs, other_outputs, others) in zip(
            found, expected, strict=True
        ):
            assert torch.equal(inputs, other_inputs) and torch.equal(outputs, other_outputs)
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs.long()])
            assert torch.equal(blocks[-1].dstdata["label"], g.ndata["label"][outputs.long()])
            for block, other in zip(blocks, others, strict=True):
                assert torch.equal(block.edata[dgl.EID], other.edata[dgl.EID])
                for ends, other_ends in zip(block.edges(), other.edges(), strict=True):
                    assert torch.equal(ends, other_ends)
                assert torch.equal(block.edata["w"], g.edata["w"][block.edata[dgl.EID].long()])


def _held(store: dgl_mgpu.GlobalStore) -> int:
    """Rows of nodes that this machine has."""
    return store.plan.tables["node/_N/feat"].tiers[-1].stop


def _as_one_machine(ratio: float | str) -> int:
    g = power_law()
    store = dgl_mgpu.GlobalStore.from_dgl(g, seed=5, span="job", replica_ratio=ratio)
    with store:
        assert store.graph.num_edges() == EDGES and store.graph.num_nodes() == NODES
        _assert_same_batches(g, store)
        draw = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(NODES, (50 * (dist.get_rank() % 2),), generator=draw)
        assert torch.equal(store.gather("feat", ids), g.ndata["feat"][ids])
        assert torch.equal(store.gather("label", ids.int()), g.ndata["label"][ids])
        double = store.gather("feat", ids, dtype=torch.float64)
        assert torch.equal(double, g.ndata["feat"][ids].double())
        assert torch.equal(store.graph.ndata["feat"][:], g.ndata["feat"])
        return _held(store)


@pytest.mark.parametrize("machines", ["abc", "aab", "abb"])
def test_unlike_machines(ranks: RankProcesses, machines: str) -> None:
    ranks.run(_on_machines, machines, _as_unlike if len({*machines}) < 3 else _as_one_machine, 0.1)


def _as_unlike(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"the machines have \[\d, \d\] ranks"):
        dgl_mgpu.GlobalStore.from_dgl(power_law(), span="job", replica_ratio=ratio)
