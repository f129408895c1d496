"""Inference that several ranks share, against one call of the model on DGL's graph itself."""

from __future__ import annotations

from pathlib import Path

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl.nn import SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.comm import communicator as exchange
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    InvalidInputError,
    OutputError,
    RankFailedError,
    SharedMemoryError,
    UnsupportedByPartitionError,
)
from dgl_mgpu.layerwise_inference import group as group
from dgl_mgpu.layerwise_inference.rows import leaves
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.layerwise_inference.inference_models import (
    CLASSES,
    HIDDEN,
    MODELS,
    WIDTH,
    Rgcn,
    Stack,
    assert_equal,
    expected_of,
    made,
)
from tests.ranks import on_gpus_too


def _on_ranks() -> None:
    g = homogeneous()
    model = made(MODELS["gat"])
    pg = dgl_mgpu.partition_graph(g, seed=4)
    found = dgl_mgpu.inference(model, pg, "x")
    assert_equal(pg.gather(found), dgl_mgpu.inference(model, g, "x", layerwise=False))
    with pytest.raises(UnsupportedByPartitionError, match="layer by layer"):
        dgl_mgpu.inference(model, pg, "x", batch_size=2)
    parallel = DistributedDataParallel(model)  # this rank alone, as often as it likes
    found = dgl_mgpu.inference(parallel, g, "x", batch_size=5 + dist.get_rank())
    assert_equal(found, dgl_mgpu.inference(model, g, "x", layerwise=False))
    g = heterogeneous()
    model = made(lambda: Rgcn(["follows", "buys", "sees", "has", "marks"]))
    pg = dgl_mgpu.partition_graph(g, exchange="broadcast")
    found = dgl_mgpu.inference(model, pg, "x")
    expected = dgl_mgpu.inference(model, g, "x")
    for ntype, rows in found.items():
        assert_equal(pg.gather(rows, ntype), expected[ntype])


def test_partitioned_graphs(ranks):
    ranks.run(_on_ranks)


class Counting(nn.Module):
    """A convolution that counts the nodes it is done for."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution
        self.nodes: list[torch.Tensor] = []

    def forward(self, block, x):
        self.nodes.append(block.dstdata[dgl.NID].clone())
        return self.convolution(block, x)


def _shared_out(machines: str, folder: Path) -> None:
    """With ranks on machines by these names, a letter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_groups", None)
        patch.setattr(exchange, "_machine_id", lambda: machines[dist.get_rank()])
        _assert_shared_out(folder)


def _assert_shared_out(folder: Path) -> None:
    ranks = Communicator.of_all_machines()
    for g, make, num_layers in (
        (homogeneous(), MODELS["graphsage"], 3),
        (homogeneous(), MODELS["jumping"], 3),
        (homogeneous(), MODELS["gat"], 2),
        (heterogeneous(), lambda: Rgcn(["follows", "buys", "sees", "has", "marks"]), 2),
    ):
        if len(g.ntypes) > 1:
            g.edges["marks"].data.clear()  # of no edge
        model = made(make)
        x = g.ndata["x"]
        expected = expected_of(model, g, x, num_layers)
        for module in model.modules():  # of other batches, as in training with DDP
            if isinstance(module, nn.BatchNorm1d) and ranks.rank:
                module.running_mean += ranks.rank
        with dgl_mgpu.GlobalStore.from_dgl(g) as store:
            model.to(store.device)
            before = [each.clone() for each in model.buffers()]
            for options in ({}, {"batch_size": 4 + ranks.rank}, {"folder": folder}):
                found = dgl_mgpu.inference(model, store.graph, "x", **options)
                assert_equal(found, expected)
                for rows in leaves(found):
                    rows.fill_(ranks.rank)  # of which others see nothing
        assert all(map(torch.equal, before, model.buffers()))


@on_gpus_too
def test_ranks_share_a_stores_nodes_out(ranks, tmp_path):
    ranks.run(_assert_shared_out, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("machines", ["aab", "aba", "abc"])
def test_ranks_of_several_machines_share_a_stores_nodes_out(ranks, machines, tmp_path):
    ranks.run(_shared_out, machines, tmp_path)


def _each_node_once() -> None:
    ranks = Communicator.of_all_machines()
    model = Stack(
        Counting(SAGEConv(WIDTH, HIDDEN, "mean")), Counting(SAGEConv(HIDDEN, CLASSES, "mean"))
    ).double()
    g = homogeneous()
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for options, largest in (({"batch_size": 3}, 3), ({"layerwise": True}, 8)):
            for each in model.convolutions:
                each.nodes.clear()
            dgl_mgpu.inference(model, store.graph, "x", num_layers=2, **options)
            for each in model.convolutions:
                # Batches of the few nodes on which the model is looked at have other sizes or ids.
                mine = [ids for ids in each.nodes if ids.numel() and ids.max() > 4]
                everyones = [
                    n for of_rank in ranks.all_gather(mine) for ids in of_rank for n in ids
                ]
                assert sorted(map(int, everyones)) == list(range(5 - 5 % largest, 23))
                assert max(map(len, mine)) <= largest
                assert len(mine) >= 2 or largest > 3


def test_ranks_do_each_node_of_a_store_once(ranks):
    ranks.run(_each_node_once)


class _FailsOnOne(SAGEConv):
    """Of a rank's own batches of the graph it cannot do one."""

    def forward(self, graph, feat):
        if dist.get_rank() == 1 and graph.num_dst_nodes() and graph.dstdata[dgl.NID].max() > 4:
            raise ValueError("no batch for me")
        return super().forward(graph, feat)


def _one_fails() -> None:
    mine = Communicator.of_all_machines().rank == 1
    g = homogeneous()
    model = Stack(_FailsOnOne(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")).double()
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for x, error, reason in (
            ("x", ValueError, "no batch for me"),
            (None if mine else "x", InvalidInputError, "no node feature 'feat'"),
        ):
            told = error if mine else RankFailedError
            with pytest.raises(told, match=reason):
                dgl_mgpu.inference(model, store.graph, x, batch_size=4)
        # By itself, which nobody else takes part in.
        plain = Stack(SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")).double()
        expected = expected_of(plain, g, g.ndata["x"], 2)
        if mine:
            found = dgl_mgpu.inference(plain.eval(), store.graph, "x", layerwise=False)
            assert_equal(found, expected)


def test_what_fails_on_one_rank_ends_all(ranks):
    ranks.run(_one_fails)


def _no_room(folder: Path) -> None:
    model = made(MODELS["gcn"])
    with dgl_mgpu.GlobalStore.from_dgl(homogeneous()) as store:
        told = OutputError if dist.get_rank() == 0 else RankFailedError
        with pytest.raises(told, match=r"keep results in /proc: .*another folder"):
            dgl_mgpu.inference(model, store.graph, "x", folder=folder)


def test_ranks_that_find_no_room(ranks):
    ranks.run(_no_room, "/proc")


def _no_shared_memory() -> None:
    def create(*arguments: object) -> None:
        raise SharedMemoryError("make a segment", "no space left", "free some there")

    told = OutputError if dist.get_rank() == 0 else RankFailedError
    with (
        pytest.MonkeyPatch.context() as patch,
        dgl_mgpu.GlobalStore.from_dgl(homogeneous()) as store,
    ):
        patch.setattr(group.Segment, "create", create)
        with pytest.raises(told, match=r"in /dev/shm: .*free some there; or use one rank"):
            dgl_mgpu.inference(made(MODELS["gcn"]), store.graph, "x")


def test_ranks_that_find_no_shared_memory(ranks):
    ranks.run(_no_shared_memory)
