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
from tests.distributed.both import Both, Rows, of_all_ranks, random_rows, same, uneven
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
    if of_last:
        operations |= {
            f"the first {k} by {sortby}": lambda graph, k=k, sortby=sortby: (
                dgl.topk_nodes(graph, "x", k, sortby=sortby)[0].flatten(1)
                + dgl.topk_edges(graph, "z", k, descending=False, sortby=sortby)[0]
                .repeat(1, 1, 2)
                .flatten(1)[:, : 3 * k]
            )
            for k in (1, 4, 60)
            for sortby in (None, -1)
        }
    torch.manual_seed(3)
    gate = torch.nn.Linear(3, 1).double()
    for name, operation in operations.items():
        _compare(both, operation, nodes, edges, gate, name)


def _compare(
    both: Both,
    operation: Callable[[dgl.DGLGraph], torch.Tensor],
    nodes: Rows,
    edges: Rows,
    model: torch.nn.Module,
    what: str,
) -> None:
    """Compare a readout, the same on every rank, and the gradients of all it is made of."""
    results = []
    for graph in (both.g, both.pg):
        whole = graph is both.g
        given = {k: v.clone() if whole else both.own_nodes(v) for k, v in nodes.items()}
        given |= {k: v.clone() if whole else both.own_edges(v) for k, v in edges.items()}
        for rows in given.values():
            rows.requires_grad_()
        model.to(graph.device)
        with graph.local_scope():
            graph.ndata.update({key: given[key] for key in nodes})
            graph.edata.update({key: given[key] for key in edges})
            out = operation(graph)
        # Of a loss of all ranks, each has its share.
        loss = (out * random_rows(*out.shape).to(out.device)).sum()
        loss = loss if whole else loss / dist.get_world_size()
        wanted = [*given.values(), *model.parameters()]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        results.append((out, dict(zip(given, found, strict=False)), found[len(given) :]))
    (expected, of_given, of_model), (out, grads, of_part) = results
    same(out, expected, what)
    for key, gradient in grads.items():
        assert (gradient is None) == (of_given[key] is None), (what, key)
        if gradient is not None:
            own = both.own_nodes if key in nodes else both.own_edges
            same(gradient, own(of_given[key]), (what, key))
    for gradient, mine in zip(of_model, of_part, strict=True):
        if gradient is not None:
            same(of_all_ranks(mine, gradient), gradient, (what, "parameters"))


@pytest.mark.parametrize("of_last", ["no nodes", "no edges", ""])
def test_readouts_are_of_all_ranks(ranks, of_last):
    ranks.run(_readouts, of_last)


_POOLS: dict[str, Callable[[], torch.nn.Module]] = {
    "SumPooling": nn.SumPooling,
    "AvgPooling": nn.AvgPooling,
    "MaxPooling": nn.MaxPooling,
    "SortPooling": lambda: nn.SortPooling(4),
    "SortPooling of more nodes than there are": lambda: nn.SortPooling(60),
    "GlobalAttentionPooling": lambda: nn.GlobalAttentionPooling(
        torch.nn.Linear(6, 1), torch.nn.Linear(6, 4)
    ),
    "Set2Set": lambda: nn.Set2Set(6, 3, 2),
    "SetTransformerDecoder": lambda: nn.SetTransformerDecoder(6, 2, 3, 8, 2, 3),
    "WeightAndSum": lambda: nn.WeightAndSum(6),
}


def _pool(name: str, of_last: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous())
    torch.manual_seed(4)
    pool = _POOLS[name]().double()
    _compare(
        both,
        lambda graph: pool(graph, graph.ndata["x"]),
        {"x": random_rows(both.g.num_nodes(), 6)},
        {},
        pool,
        name,
    )


@pytest.mark.parametrize("of_last", ["no nodes", ""])
@pytest.mark.parametrize("name", _POOLS)
def test_pools_are_of_all_ranks(ranks, name, of_last):
    ranks.run(_pool, name, of_last)


def _encoder(of_last: str, **options) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous())
    torch.manual_seed(4)
    model = nn.SetTransformerEncoder(6, 2, 3, 8, 2, **options).double()
    both.compare(
        lambda graph, rows: model(graph, rows["x"]),
        {"x": random_rows(both.g.num_nodes(), 6)},
        model=model,
    )


@pytest.mark.parametrize("of_last", ["no nodes", ""])
def test_a_set_transformer_attends_to_all_nodes(ranks, of_last):
    ranks.run(_encoder, of_last)
    ranks.run(_induced_encoder, of_last)


def _induced_encoder(of_last: str) -> None:
    _encoder(of_last, block_type="isab", m=3)


def _first_ids() -> None:
    both = Both(homogeneous("skewed"))
    both.g.ndata["x"], both.g.edata["z"] = random_rows(40, 3), random_rows(300, 3)
    both.pg.ndata["x"] = both.own_nodes(both.g.ndata["x"])
    both.pg.edata["z"] = both.own_edges(both.g.edata["z"])
    for sortby in (None, 1):
        for of in (
            lambda graph: dgl.topk_nodes(graph, "x", 7, sortby=sortby)[1],  # noqa: B023
            lambda graph: dgl.topk_edges(graph, "z", 7, descending=False, sortby=sortby)[1],  # noqa: B023
        ):
            assert torch.equal(of(both.pg).cpu().long(), of(both.g))
    both.pg.ndata["kind"] = both.pg.nodes().unsqueeze(1)
    with pytest.raises(UnsupportedByPartitionError, match="int64"):
        dgl.topk_nodes(both.pg, "kind", 1)
    both.pg.ndata["row"] = both.pg.ndata["x"][:, 0]
    with pytest.raises(dgl.DGLError, match="'row'"):
        dgl.topk_nodes(both.pg, "row", 1)


def test_the_first_rows_are_named_by_ids_of_the_whole_graph(ranks):
    ranks.run(_first_ids)


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
