"""What a whole graph amounts to, from its parts, against DGL's C++ on the whole graph."""

from __future__ import annotations

from collections.abc import Callable

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl import nn

import dgl_mgpu
from dgl_mgpu.errors import UnsupportedByPartitionError
from tests.distributed.both import Both, of_all_ranks, random_rows, same, uneven
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


def _readouts(of_last: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous("no edges"))
    nodes = {"x": random_rows(both.g.num_nodes(), 3), "a": random_rows(both.g.num_nodes(), 1)}
    edges = {"z": random_rows(both.g.num_edges(), 2), "b": random_rows(both.g.num_edges(), 1)}
    operations: dict[str, Callable[..., torch.Tensor]] = {
        f"{op} {weight}": lambda graph, op=op, weight=weight: torch.cat(
            [
                getattr(dgl, f"{op}_nodes")(graph, "x", weight and "a"),
                getattr(dgl, f"{op}_edges")(graph, "z", weight and "b"),
            ],
            1,
        )
        for op in ("sum", "mean", "max")
        for weight in (None, "weighted")
        if op == "sum" or of_last  # DGL has no mean of none, and no gradient of their maximum
    }
    operations["min"] = lambda graph: dgl.readout_nodes(graph, "x", op="min")
    operations["several"] = lambda graph: dgl.sum_nodes(graph, "x") * dgl.max_nodes(graph, "x")
    operations["pooled"] = lambda graph: nn.GlobalAttentionPooling(gate)(graph, graph.ndata["x"])
    torch.manual_seed(3)
    gate = torch.nn.Linear(3, 1).double()
    factors = random_rows(1, 5)
    for name, operation in operations.items():
        results = []
        for graph in (both.g, both.pg):
            whole = graph is both.g
            given = {k: v.clone() if whole else both.own_nodes(v) for k, v in nodes.items()}
            given |= {k: v.clone() if whole else both.own_edges(v) for k, v in edges.items()}
            for rows in given.values():
                rows.requires_grad_()
            gate.to(graph.device)
            with graph.local_scope():
                graph.ndata.update({key: given[key] for key in nodes})
                graph.edata.update({key: given[key] for key in edges})
                out = operation(graph)
            # Of a loss of all ranks, each has its share.
            loss = (out * factors[:, : out.shape[1]].to(out.device)).sum()
            loss = loss if whole else loss / dist.get_world_size()
            wanted = [*given.values(), *gate.parameters()]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            results.append((out, dict(zip(given, found, strict=False)), found[len(given) :]))
        (expected, of_given, of_gate), (out, grads, of_part) = results
        same(out, expected, name)
        for key, gradient in grads.items():
            assert (gradient is None) == (of_given[key] is None), (name, key)
            if gradient is not None:
                own = both.own_nodes if key in nodes else both.own_edges
                same(gradient, own(of_given[key]), (name, key))
        for gradient, mine in zip(of_gate, of_part, strict=True):
            if gradient is not None:
                same(of_all_ranks(mine, gradient), gradient, (name, "gate"))


@pytest.mark.parametrize("of_last", ["no nodes", "no edges", ""])
def test_readouts_are_of_all_ranks(ranks, of_last):
    ranks.run(_readouts, of_last)


def _softmax_of_all(of_last: str) -> None:
    both = Both(*uneven(of_last))

    def of_nodes(graph, rows):
        graph.ndata["x"] = rows["x"]
        scale = dgl.broadcast_nodes(graph, dgl.sum_nodes(graph, "x"))
        return dgl.softmax_nodes(graph, "x") * scale

    def of_edges(graph, rows):
        graph.edata["z"] = rows["z"]
        scale = dgl.broadcast_edges(graph, dgl.mean_edges(graph, "z"))
        return dgl.softmax_edges(graph, "z") + scale

    both.compare(of_nodes, {"x": random_rows(both.g.num_nodes(), 2) * 500})
    both.compare(of_edges, {}, {"z": random_rows(both.g.num_edges(), 2)}, of_edges=True)
    single = torch.arange(3.0, device=both.pg.device)
    assert torch.equal(dgl.broadcast_nodes(both.pg, single), single.repeat(both.pg.num_nodes(), 1))
    half = both.pg.ndata["x"].bfloat16()
    both.pg.ndata["x"] = half
    total = dgl.sum_nodes(both.pg, "x")
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(
        total.double().cpu(), both.g.ndata["x"].sum(0, keepdim=True), rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("of_last", ["no nodes", "no edges"])
def test_softmax_over_all_ranks(ranks, of_last):
    ranks.run(_softmax_of_all, of_last)


def _readout_of_types() -> None:
    g = heterogeneous()
    pg = dgl_mgpu.partition_graph(g)
    for ntype in g.ntypes:
        same(dgl.mean_nodes(pg, "x", ntype=ntype), dgl.mean_nodes(g, "x", ntype=ntype))
    for etype in g.canonical_etypes:
        same(dgl.max_edges(pg, "w", etype=etype), dgl.max_edges(g, "w", etype=etype))
    with pytest.raises(UnsupportedByPartitionError, match="multi_update_all"):
        dgl.ops.copy_u_mean(pg, [pg.nodes[ntype].data["x"] for ntype in g.ntypes])


def test_readouts_of_several_types(ranks):
    ranks.run(_readout_of_types)
