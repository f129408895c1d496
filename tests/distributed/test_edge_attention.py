"""Attention layers that read edges, in rounds on any number of ranks, against the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import dgl
import pytest
import torch
from dgl import nn
from torch import Tensor

import dgl_mgpu
from dgl_mgpu.distributed.attention import attend
from dgl_mgpu.distributed.index import PartitionedIndex
from dgl_mgpu.distributed.local_part import cut
from dgl_mgpu.distributed.partition import assigned
from dgl_mgpu.distributed.typed_sources import typed_part
from dgl_mgpu.distributed.whole_view.graph import partition
from dgl_mgpu.distributed.whole_view.tensor import PartitionedTensor, align, whole
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.attention import AttentionScore, EdgeTerms
from tests.distributed.both import Both, of_all_ranks, random_rows, same, uneven
from tests.distributed.graphs import edges, heterogeneous, homogeneous
from tests.ranks import RankProcesses

NODE_TYPES, EDGE_TYPES = 2, 4


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def some_ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    if request.param == 3:
        yield request.getfixturevalue("_cpu_ranks")
        return
    processes = RankProcesses(request.param)
    yield processes
    processes.close()


def _hgt(num_etypes: int = EDGE_TYPES) -> nn.HGTConv:
    layer = nn.HGTConv(5, 4, 3, NODE_TYPES, num_etypes, dropout=0.0, use_norm=True)
    for parameter in (*layer.relation_pri, layer.skip):
        torch.nn.init.normal_(parameter)
    return layer


def _types(graph: dgl.DGLGraph) -> tuple[Tensor, Tensor]:
    """Of nodes and of edges; the third of edges' types has none."""
    nodes = graph.ndata.get(dgl.NID, torch.arange(graph.num_nodes()))
    numbers = graph.edata.get(dgl.EID, torch.arange(graph.num_edges()))
    return nodes % NODE_TYPES, torch.tensor([0, 1, 3])[numbers % 7 % 3]


def _both_outputs(layer: nn.EGATConv, graph: dgl.DGLGraph, rows: Any) -> Tensor:
    """Of nodes, with what edges' become of at their destinations."""
    nodes, of_edges = layer(graph, rows["x"], rows["z"], edge_weight=rows["w"])
    graph.edata["out"] = of_edges.flatten(1)
    graph.update_all(dgl.function.copy_e("out", "m"), dgl.function.sum("m", "out"))
    return torch.cat([nodes.flatten(1), graph.ndata["out"]], 1)


Layer = tuple[Callable[[], torch.nn.Module], Callable[..., Tensor], tuple[str, ...]]
#: With what they call of attention in rounds.
LAYERS: dict[str, Layer] = {
    "GATConv": (
        lambda: nn.GATConv(5, 4, 3, residual=True),
        lambda layer, g, rows: layer(g, rows["x"], edge_weight=rows["w"]),
        ("attend",),
    ),
    "GATConv of pairs": (
        lambda: nn.GATConv((5, 5), 4, 3, bias=False),
        lambda layer, g, rows: layer(g, (rows["x"], rows["x"].sin()), edge_weight=rows["w"]),
        ("attend",),
    ),
    "EGATConv": (lambda: nn.EGATConv(5, 5, 4, 3, 2), _both_outputs, ("attend",)),
    "EdgeGATConv": (
        lambda: nn.EdgeGATConv(5, 5, 4, 3),
        lambda layer, g, rows: layer(g, rows["x"], rows["z"]),
        ("edge_sums",),
    ),
    "HGTConv": (
        _hgt,
        lambda layer, g, rows: layer(g, rows["x"], *_types(g)),
        ("typed_sources", "attend"),
    ),
    "HGTConv of one relation": (
        lambda: _hgt(1),
        lambda layer, g, rows: layer(g, rows["x"], _types(g)[0], 0 * _types(g)[1]),
        ("typed_sources", "attend"),
    ),
}


class _Calls:
    """Which methods of a part's index were called, among those of attention."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._patches = [self._watched(it) for it in ("attend", "edge_sums", "typed_sources")]

    def _watched(self, name: str) -> Any:
        method = getattr(PartitionedIndex, name)

        def noted(index: PartitionedIndex, *args: Any) -> Any:
            self.names.append(name)
            return method(index, *args)

        return mock.patch.object(PartitionedIndex, name, noted)

    def __enter__(self) -> list[str]:
        for patch in self._patches:
            patch.start()
        return self.names

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _layer(name: str, both: Both) -> None:
    make, call, expected = LAYERS[name]
    torch.manual_seed(4)
    layer, count = make().double(), both.g.num_edges()
    with _Calls() as names:
        both.compare(
            lambda graph, rows: call(layer, graph, rows),
            {"x": random_rows(both.g.num_nodes(), 5)},
            {"w": random_rows(count, seed=5), "z": random_rows(count, 5, seed=6)},
            model=layer,
            what=name,
        )
    assert tuple(names) == expected


def _on_graph(name: str, kind: str, exchange: str) -> None:
    _layer(name, Both(dgl.add_self_loop(homogeneous(kind)), exchange=exchange))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(some_ranks, name):
    """Values, and gradients of nodes, of edges and of parameters."""
    for exchange in some_ranks.exchanges:
        some_ranks.run(_on_graph, name, "random", exchange)
    some_ranks.run(_on_graph, name, "skewed", "halo in 1")


def _uneven(name: str) -> None:
    _layer(name, Both(*uneven("no nodes")))


@pytest.mark.parametrize("name", LAYERS)
def test_a_rank_without_nodes(ranks, name):
    ranks.run(_uneven, name)


class _HGTOfRelations(torch.nn.Module):
    """As DGL's example of HGT: a softmax for each relation, whose messages are averaged."""

    def __init__(self, etypes: list[str]) -> None:
        super().__init__()
        self.keys = torch.nn.ModuleDict({it: torch.nn.Linear(5, 6) for it in etypes})
        self.values = torch.nn.ModuleDict({it: torch.nn.Linear(5, 6) for it in etypes})
        self.query = torch.nn.Linear(5, 6)

    def forward(self, graph: dgl.DGLGraph, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        fn, functions = dgl.function, {}
        for src, etype, dst in graph.canonical_etypes:
            relation = graph[src, etype, dst]
            relation.srcdata["k"] = self.keys[etype](rows[src]).view(-1, 2, 3)
            relation.srcdata[f"v_{etype}"] = self.values[etype](rows[src]).view(-1, 2, 3)
            relation.dstdata["q"] = self.query(rows[dst]).view(-1, 2, 3)
            relation.apply_edges(fn.v_dot_u("q", "k", "t"))
            relation.edata["t"] = nn.functional.edge_softmax(relation, relation.edata.pop("t"))
            functions[src, etype, dst] = fn.u_mul_e(f"v_{etype}", "t", "m"), fn.sum("m", "out")
        graph.multi_update_all(functions, cross_reducer="mean")
        return {ntype: graph.nodes[ntype].data["out"] for ntype in graph.ntypes}


def _gat_of_relations(etypes: list[str]) -> nn.HeteroGraphConv:
    return nn.HeteroGraphConv(
        {it: nn.GATConv(5, 4, 3, allow_zero_in_degree=True) for it in etypes}, aggregate="sum"
    )


def _edge_gat_of_relations(etypes: list[str]) -> nn.HeteroGraphConv:
    return nn.HeteroGraphConv(
        {it: nn.EdgeGATConv(5, 1, 4, 3, allow_zero_in_degree=True) for it in etypes}
    )


def _of_relations(name: str, exchange: str) -> None:
    """Rows, gradients of rows and of edges' weights, and of parameters."""
    g = heterogeneous(num_marks=15)
    pg = dgl_mgpu.partition_graph(g, exchange=exchange)
    torch.manual_seed(1)
    model = {
        "R-GAT": _gat_of_relations, "EdgeGATConv": _edge_gat_of_relations, "HGT": _HGTOfRelations
    }[name](g.etypes).double()  # fmt: skip
    results = []
    for graph in (g, pg):
        rows = {it: graph.nodes[it].data["x"].clone().requires_grad_() for it in g.ntypes}
        weights = {it: graph.edges[it].data["w"].clone().requires_grad_() for it in g.etypes}
        with graph.local_scope():
            if name == "R-GAT":
                given = {it: {"edge_weight": w.squeeze(1)} for it, w in weights.items()}
                out = model(graph, rows, mod_kwargs=given)
            elif name == "EdgeGATConv":
                given = {it: {"edge_feat": w} for it, w in weights.items()}
                out = model(graph, rows, mod_kwargs=given)
            else:
                out = model(graph, rows)
        of_types = [out[it] for it in sorted(out)]
        factors = [graph.nodes[it].data["x"].mean(1) for it in sorted(out)]
        loss = sum(
            (it.flatten(1) * factor.unsqueeze(1)).sum()
            for it, factor in zip(of_types, factors, strict=True)
        )
        wanted = [*rows.values(), *weights.values(), *model.parameters()]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        results.append((dict(zip(sorted(out), of_types, strict=True)), found))
    (expected, of_whole), (found, of_part) = results
    for ntype, out in found.items():
        same(out, expected[ntype][pg.nodes[ntype].data[dgl.NID].long()], (name, ntype))
    ids = [pg.nodes[it].data[dgl.NID] for it in g.ntypes]
    ids += [pg.edges[it].data[dgl.EID] for it in g.etypes]
    for number, (mine, of_all) in enumerate(zip(of_part, of_whole, strict=True)):
        assert of_all is None or mine is not None or number >= len(ids)
        if of_all is None:
            continue
        if number < len(ids):
            same(mine, of_all[ids[number].long()], (name, number))
        else:
            same(of_all_ranks(mine, of_all), of_all, (name, number))


@pytest.mark.parametrize("name", ["R-GAT", "EdgeGATConv", "HGT"])
def test_layers_across_relations(some_ranks, name):
    for exchange in some_ranks.exchanges:
        some_ranks.run(_of_relations, name, exchange)


def _in_whole_view(name: str, is_partitioned: bool) -> None:
    """Edges' features as the graph has them, or as a script that made them for all edges."""
    g = dgl.add_self_loop(homogeneous())
    view = partition(g, torch.device("cpu"), "random")
    make, call, expected = LAYERS[name]
    torch.manual_seed(4)
    layer, rows = make().double(), {"x": random_rows(g.num_nodes(), 5)}
    rows |= {"w": random_rows(g.num_edges(), seed=5), "z": random_rows(g.num_edges(), 5, seed=6)}
    results = []
    for graph in (g, view):
        leaves = {key: it.clone().requires_grad_() for key, it in rows.items()}
        given = dict(leaves)
        if graph is view:
            nodes, of_edges = graph._graph.nodes[0], graph._graph.edge_rows[0]
            given["x"] = PartitionedTensor(align(leaves["x"], nodes), nodes)
            for key in ("w", "z") if is_partitioned else ():
                given[key] = PartitionedTensor(align(leaves[key], of_edges), of_edges)
        with _Calls() as names:
            out = call(layer, graph, given)
        if graph is view:
            # Rows of pairs would be in no layout.
            assert tuple(names) == (() if name.startswith("HGT") else expected)
        total = (whole(out).sum(-1) * torch.arange(len(out)).view(-1, *[1] * (out.dim() - 2))).sum()
        wanted = [*leaves.values(), *layer.parameters()]
        results.append((whole(out), torch.autograd.grad(total, wanted, allow_unused=True)))
    (expected_out, of_graph), (found, of_view) = results
    same(found.detach(), expected_out.detach(), name)
    for one, other in zip(of_view, of_graph, strict=True):
        if other is not None:
            same(one, other, name)


@pytest.mark.parametrize("is_partitioned", [True, False], ids=["", "plain edges"])
@pytest.mark.parametrize("name", ["GATConv", "EGATConv", "EdgeGATConv", "HGTConv"])
def test_layers_of_scripts_for_one_process(ranks, name, is_partitioned):
    ranks.run(_in_whole_view, name, is_partitioned)


# -- Pairs of a source and a type ------------------------------------------------------------------


def _pairs(kind: str, dealt: str) -> dict[str, Any]:
    """Which pairs this rank owns, and by which its edges begin."""
    ranks = torch.distributed.get_world_size()
    num_src, num_dst, src, dst = edges(kind)
    by = {"in turn": lambda n: torch.arange(n) % ranks, "to the first": lambda n: torch.zeros(n)}
    of_src, of_dst = (assigned(by[dealt](n).long(), ranks) for n in (num_src, num_dst))
    part = cut(src, dst, of_src, of_dst, torch.distributed.get_rank())
    etype = torch.tensor([1, 0, 5])[part.edges % 3]
    typed = typed_part(part, etype)
    assert typed is not None
    sources = of_src.nodes(part.rank)[typed.pairs.csc().indices.long()]
    types = torch.tensor([it for it, n in typed.counts.items() for _ in range(n)]).long()
    return {
        "counts": typed.counts,
        "pairs": list(zip(types.tolist(), sources.tolist(), strict=True)),
        "columns": typed.part.relation.csc().indices.tolist(),
        "halo": typed.part.halo.tolist(),
        "sent": typed.part.sent.split(typed.part.sending),
        "wanted": typed.part.wanted,
        "bounds": typed.part.src.bounds,
        "edges": list(zip(etype.tolist(), src[part.edges].tolist(), strict=True)),
        "all": sorted(set(zip(torch.tensor([1, 0, 5])[torch.arange(len(src)) % 3].tolist(),
                              src.tolist(), strict=True))),
    }  # fmt: skip


@pytest.mark.parametrize("dealt", ["in turn", "to the first"])
@pytest.mark.parametrize("kind", ["random", "bipartite", "no edges", "isolated", "no sources"])
def test_ranks_own_pairs_of_their_sources(some_ranks, kind, dealt):
    found = some_ranks.run(_pairs, kind, dealt)
    by_position = [pair for of_rank in found for pair in of_rank["pairs"]]
    assert sorted(by_position) == found[0]["all"]
    for rank, of_rank in enumerate(found):
        assert of_rank["pairs"] == sorted(of_rank["pairs"], key=lambda pair: pair[0])
        assert list(of_rank["counts"]) == sorted({etype for etype, _ in by_position})
        low, high = of_rank["bounds"][rank : rank + 2]
        of_columns = by_position[low:high] + [by_position[it] for it in of_rank["halo"]]
        assert [of_columns[it] for it in of_rank["columns"]] == of_rank["edges"]
        assert of_rank["halo"] == sorted(set(of_rank["halo"]))
        # What a rank sends to another is that one's halo.
        got = [found[it]["pairs"][row] for it in range(len(found))
               for row in found[it]["sent"][rank].tolist()]  # fmt: skip
        assert got == of_columns[high - low :]
        assert of_rank["wanted"] == [len(it["sent"][rank]) for it in found]


def _types_that_change() -> None:
    both = Both(dgl.add_self_loop(homogeneous()))
    torch.manual_seed(2)
    layer, x = _hgt().double(), random_rows(both.g.num_nodes(), 5)
    etype = _types(both.g)[1]
    mine, ntype = both.own_edges(etype), _types(both.g)[0]

    def check(changed: Tensor) -> None:
        expected = layer(both.g, x, ntype, changed)
        found = layer(both.pg, both.own_nodes(x), both.own_nodes(ntype), mine)
        same(found.detach(), both.own_nodes(expected.detach()))

    with mock.patch("dgl_mgpu.distributed.index.typed_part", wraps=typed_part) as looked:
        for count in (1, 1, 2):
            if count == 2:
                mine.add_(1).remainder_(EDGE_TYPES)
                etype.add_(1).remainder_(EDGE_TYPES)
            check(etype)
            assert looked.call_count == count
        mine = mine.clone()
        check(etype)
        assert looked.call_count == 3
        with torch.inference_mode():
            mine = mine + 0
            check(etype)
    mine = torch.full_like(both.own_edges(etype), 0)
    check(torch.zeros_like(etype))


def test_types_are_looked_at_when_they_change(ranks):
    ranks.run(_types_that_change)


def _composed(case: str) -> None:
    """Where there are as many pairs as edges, or a type's matrix is not there."""
    g = dgl.graph((torch.arange(20), (torch.arange(20) + 3) % 20))
    g.ndata["x"] = random_rows(20, 5)
    both = Both(g if case == "pairs" else dgl.add_self_loop(homogeneous()))
    torch.manual_seed(2)
    layer = _hgt(100 if case == "many types" else EDGE_TYPES).double()
    etype = torch.arange(both.g.num_edges()) % (70 if case == "many types" else 2)
    ntype = _types(both.g)[0]
    expected = layer(both.g, both.g.ndata["x"], ntype, etype)
    own = both.own_nodes(both.g.ndata["x"]), both.own_nodes(ntype), both.own_edges(etype)
    with _Calls() as names:
        found = layer(both.pg, *own)
    assert names == ["typed_sources"]
    same(found.detach(), both.own_nodes(expected.detach()))


@pytest.mark.parametrize("case", ["pairs", "many types"])
def test_hgt_is_composed(ranks, case):
    ranks.run(_composed, case)


def _negative_types() -> list[bool]:
    both = Both(dgl.add_self_loop(homogeneous()))
    index, etype = both.pg._graph, both.own_edges(_types(both.g)[1])
    if torch.distributed.get_rank() == 1:
        etype[0] = -1
    return [index.typed_sources(etype) is None, index.reverse().attention_ends() is None]


def test_a_negative_type_on_one_rank_is_seen_by_all(ranks):
    assert ranks.run(_negative_types) == [[True, True]] * 3


# -- Bad input -------------------------------------------------------------------------------------


def _bad_terms() -> None:
    both = Both(homogeneous())
    rounds, count = both.pg._graph.parts[0].rounds, both.pg.num_edges()
    values, score = both.own_nodes(random_rows(23, 2, 3)), AttentionScore("dot", 0.2, 1.0, 0.0)
    for terms, message in (
        (EdgeTerms(torch.zeros(count + 1, 2).double(), None), "edge_scores has shape"),
        (EdgeTerms(None, torch.zeros(count - 1, 1).double()), "edge_weights has shape"),
        (EdgeTerms(torch.zeros(count, 3).double(), None), "edge_scores has shape"),
        (EdgeTerms(None, torch.zeros(count, 2)), "edge_weights has .* dtype torch.float32"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            attend(rounds, values, None, None, None, None, score, terms)


def test_terms_of_other_edges(ranks):
    ranks.run(_bad_terms)
