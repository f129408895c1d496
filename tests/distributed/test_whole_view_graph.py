"""A partitioned graph that looks whole, against DGL's whole one."""

from __future__ import annotations

import copy

import dgl
import dgl.function as fn
import pytest
import torch
from dgl import nn
from dgl.base import DGLError

from dgl_mgpu.distributed.whole_view import script
from dgl_mgpu.distributed.whole_view.graph import is_whole_view, partition, unpartitioned
from dgl_mgpu.distributed.whole_view.tensor import PartitionedTensor
from dgl_mgpu.errors import InvalidInputError, UnsupportedByPartitionError
from tests.distributed.both import random_rows, same
from tests.distributed.graphs import homogeneous


def _graph() -> dgl.DGLGraph:
    g = homogeneous()
    g.ndata["x"] = random_rows(g.num_nodes(), 5)
    g.ndata["m"] = torch.arange(g.num_nodes()) % 3 == 0
    g.edata["w"] = random_rows(g.num_edges(), 1)
    return g


def _typed() -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(5)
    sizes = {"paper": 40, "author": 17}
    kinds = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")]
    g = dgl.heterograph(
        {
            kind: tuple(torch.randint(sizes[end], (90,), generator=draw) for end in kind[::2])
            for kind in kinds
        },
        sizes,
    )
    for ntype, size in sizes.items():
        g.nodes[ntype].data["x"] = random_rows(size, 5)
    g.nodes["paper"].data["y"] = torch.arange(40) % 4
    return g


def _view(g: dgl.DGLGraph) -> dgl.DGLGraph:
    return partition(g, torch.device("cpu"), "random")


def _whole(rows: torch.Tensor) -> torch.Tensor:
    return rows.full_tensor() if isinstance(rows, PartitionedTensor) else rows


def _same_graphs(found: dgl.DGLGraph, expected: dgl.DGLGraph) -> None:
    """Of any kind: structure, and all features."""
    assert found.ntypes == expected.ntypes and found.canonical_etypes == expected.canonical_etypes
    assert found.idtype == expected.idtype
    for ntype in expected.ntypes:
        assert found.num_nodes(ntype) == expected.num_nodes(ntype)
        assert set(found.nodes[ntype].data) == set(expected.nodes[ntype].data)
        for key, rows in expected.nodes[ntype].data.items():
            assert torch.equal(_whole(found.nodes[ntype].data[key]), rows), key
    for etype in expected.canonical_etypes:
        for one, other in zip(
            found.edges(etype=etype, form="all"), expected.edges(etype=etype, form="all"),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(one, other)
        assert set(found.edges[etype].data) == set(expected.edges[etype].data)
        for key, rows in expected.edges[etype].data.items():
            assert torch.equal(_whole(found.edges[etype].data[key]), rows), key


def _looks_whole() -> None:
    for g in (_graph(), _typed(), _graph().int()):
        view = _view(g)
        assert type(view) is type(g) and is_whole_view(view) and not is_whole_view(g)
        _same_graphs(view, g)
        _same_graphs(unpartitioned(view), g)
        _same_graphs(dgl.reverse(view, copy_edata=True), dgl.reverse(g, copy_edata=True))
        for etype in g.canonical_etypes:
            assert torch.equal(_whole(view.in_degrees(etype=etype)), g.in_degrees(etype=etype))
            assert torch.equal(_whole(view.out_degrees(etype=etype)), g.out_degrees(etype=etype))
            some = torch.tensor([3, 0, 3], dtype=g.idtype)
            found = view.in_degrees(some, etype=etype)
            assert torch.equal(found, g.in_degrees(some, etype=etype))
            assert torch.equal(view.find_edges(some, etype)[0], g.find_edges(some, etype)[0])
        assert str(view.ntypes) in str(view) or "num_nodes" in str(view)
    column = view.ndata["x"]
    assert isinstance(column, PartitionedTensor) and len(column.local) < len(column)


def test_counts_queries_and_features_are_the_whole_graphs(ranks):
    ranks.run(_looks_whole)


_CHANGES = {
    "add_self_loop": lambda g: dgl.add_self_loop(g),
    "self-loops anew": lambda g: dgl.add_self_loop(dgl.remove_self_loop(g), fill_data=2.0),
    "remove_edges": lambda g: dgl.remove_edges(g, torch.tensor([0, 5])),
    "add_reverse_edges": lambda g: dgl.add_reverse_edges(g, copy_edata=True),
    "to_bidirected": lambda g: dgl.to_bidirected(g, copy_ndata=True),
    "to_simple": lambda g: dgl.to_simple(g),
    "subgraph by ids": lambda g: g.subgraph(torch.tensor([4, 1, 7, 9])),
    "subgraph by a mask": lambda g: dgl.node_subgraph(g, g.ndata["m"]),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, torch.tensor([3, 8, 9])),
    "add_edges": lambda g: dgl.add_edges(g, [0, 3], [5, 5], {"w": torch.ones(2, 1).double()}),
    "add_nodes": lambda g: dgl.add_nodes(g, 2),
    "remove_nodes": lambda g: dgl.remove_nodes(g, torch.tensor([2, 7])),
    "DropEdge": lambda g: (torch.manual_seed(3), dgl.DropEdge(0.3)(g))[1],
    "int": lambda g: g.int(),
    "long": lambda g: g.int().long(),
}  # fmt: skip


def _changed(name: str) -> None:
    g = _graph()
    found = _CHANGES[name](_view(g))
    assert is_whole_view(found)
    expected = _CHANGES[name](g)
    _same_graphs(found, expected)
    x = random_rows(expected.num_nodes(), 3)
    for graph in (found, expected):
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
    same(_whole(found.ndata["s"]), expected.ndata["s"], name)


@pytest.mark.parametrize("name", _CHANGES)
def test_changes_of_structure(ranks, name):
    ranks.run(_changed, name)


def _gradients_through_a_change() -> None:
    gradients = []
    for make in (lambda g: g, _view):
        graph = make(_graph())
        weight = random_rows(5, 3).requires_grad_()
        graph.ndata["h"] = graph.ndata["x"] @ weight
        looped = dgl.add_self_loop(graph)
        looped.update_all(fn.copy_u("h", "m"), fn.mean("m", "s"))
        looped.ndata["s"].square().sum().backward()
        gradients.append(weight.grad)
    same(gradients[1], gradients[0])


def test_gradients_go_through_a_change_of_structure(ranks):
    ranks.run(_gradients_through_a_change)


def _relations() -> None:
    def loss(g, reduce):
        torch.manual_seed(1)
        etypes = g.canonical_etypes
        convs = {etype: nn.GraphConv(5, 4, allow_zero_in_degree=True) for _, etype, _ in etypes}
        model = nn.HeteroGraphConv(convs, aggregate=reduce).double()
        out = model(g, {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes})
        logits = out["paper"] if reduce != "stack" else out["paper"].flatten(1)
        loss = torch.nn.functional.cross_entropy(logits, g.nodes["paper"].data["y"])
        return loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    for reduce in ("sum", "mean", "max", "stack"):
        (one, of_view), (other, of_whole) = (loss(make(_typed()), reduce)
                                             for make in (_view, lambda g: g))  # fmt: skip
        same(one.detach(), other.detach(), reduce)
        for found, expected in zip(of_view, of_whole, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                same(found, expected, reduce)

    def homogeneous_loss(g):
        """As DGL's R-GCN example goes about it."""
        torch.manual_seed(1)
        labels = g.nodes["paper"].data.pop("y")
        for etype in g.canonical_etypes:
            g.edges[etype].data["norm"] = dgl.norm_by_dst(g, etype).unsqueeze(1).double()
        category = g.ntypes.index("paper")
        g = dgl.to_homogeneous(g, edata=["norm"])
        nodes = torch.arange(g.num_nodes())[g.ndata[dgl.NTYPE] == category]
        rows = random_rows(g.num_nodes(), 5).requires_grad_()
        conv = nn.RelGraphConv(5, 4, 3, "basis", 2, self_loop=True).double()
        logits = conv(g, rows, g.edata[dgl.ETYPE], g.edata["norm"])[nodes]
        train = torch.nonzero(labels > 0).squeeze()
        loss = torch.nn.functional.cross_entropy(logits[train], labels[train])
        return loss, torch.autograd.grad(loss, [rows, *conv.parameters()])

    (one, of_view), (other, of_whole) = (homogeneous_loss(make(_typed()))
                                         for make in (_view, lambda g: g))  # fmt: skip
    same(one.detach(), other.detach())
    for found, expected in zip(of_view, of_whole, strict=True):
        same(found, expected)


def test_graphs_of_several_types(ranks):
    ranks.run(_relations)


def _functions_of_users() -> None:
    results = []
    for graph in (_view(_graph()), _graph()):
        with graph.local_scope():
            graph.apply_nodes(lambda nodes: {"y": nodes.data["x"] * 2})
            graph.apply_edges(
                lambda edges: {"e": edges.src["y"] - edges.dst["x"] * edges.data["w"]}
            )
            graph.update_all(
                lambda edges: {"m": edges.data["e"]},
                lambda nodes: {"s": nodes.mailbox["m"].max(1)[0].exp()},
                lambda nodes: {"t": nodes.data["s"] + nodes.data["x"]},
            )
            read = [
                dgl.mean_nodes(graph, "x"),
                dgl.sum_edges(graph, "w"),
                dgl.max_nodes(graph, "x"),
            ]
            data = [graph.ndata["t"], graph.edata["e"], *read]
            results.append([_whole(rows) for rows in data])
    for found, expected in zip(*results, strict=True):
        same(found, expected)


def test_functions_of_users_and_readouts(ranks):
    ranks.run(_functions_of_users)


def _refused() -> None:
    g = _graph()
    view = _view(g)
    with pytest.raises(UnsupportedByPartitionError, match="batch of 2 graphs"):
        _view(dgl.batch([g, g]))
    sampler = dgl.dataloading.NeighborSampler([2])
    with pytest.raises(UnsupportedByPartitionError, match="mini-batches"):
        dgl.dataloading.DataLoader(view, torch.arange(4), sampler)
    for refused in (lambda: copy.deepcopy(view), lambda: view.pin_memory_()):
        with pytest.raises(UnsupportedByPartitionError):
            refused()
    with pytest.raises(DGLError, match=f"{g.num_nodes()}"):
        dgl.ops.copy_u_sum(view, torch.ones(7, 2))
    with pytest.raises(DGLError):
        view.ndata["short"] = torch.ones(7)
    other = dgl.rand_graph(9, 20) if torch.distributed.get_rank() else dgl.rand_graph(9, 21)
    with pytest.raises(InvalidInputError, match="another graph"):
        _view(other)


def test_what_cannot_be_right_is_refused(ranks):
    ranks.run(_refused)


def _moved() -> None:
    script.by = "order"
    try:
        g = _graph()
        view = g.to("cpu")
        assert is_whole_view(view) and view.to("cpu") is view and not is_whole_view(g)
        block = dgl.to_block(g)
        assert not is_whole_view(block.to("cpu"))
    finally:
        script.by = None
    assert not is_whole_view(g.to("cpu"))


def test_what_is_moved_is_partitioned(ranks):
    ranks.run(_moved)


def _what_parts_have_of_their_own() -> None:
    """What a rank's part has functions of its own for is DGL's of a graph that looks whole."""
    g = _graph()
    view = _view(g)
    assert torch.equal(view.batch_num_nodes(), g.batch_num_nodes())
    assert torch.equal(view.batch_num_edges(), g.batch_num_edges())
    for one, other in zip(
        dgl.khop_in_subgraph(view, [1, 2], 2), dgl.khop_in_subgraph(g, [1, 2], 2), strict=True
    ):
        if isinstance(one, dgl.DGLGraph):
            _same_graphs(one, other)
        else:
            assert torch.equal(one, other)
    for make in (
        lambda: nn.SetTransformerEncoder(5, 2, 4, 16, block_type="isab", m=3),
        lambda: nn.SetTransformerEncoder(5, 2, 4, 16),
        lambda: nn.SetTransformerDecoder(5, 2, 4, 16, 1, 2),
        lambda: nn.PNAConv(5, 4, ["max", "sum"], ["identity", "amplification"], 2.5),
    ):
        torch.manual_seed(2)
        layer = make().double().eval()
        same(_whole(layer(view, view.ndata["x"])), layer(g, g.ndata["x"]))


def test_what_parts_have_of_their_own(ranks):
    ranks.run(_what_parts_have_of_their_own)
