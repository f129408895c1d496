"""DGL's modules on a partitioned graph, against themselves on the whole graph."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl import nn

from dgl_mgpu.errors import InvalidInputError
from tests.distributed.both import Both, of_all_ranks, random_rows, uneven
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too


def _plain(model, graph, rows):
    return model(graph, rows["x"])


def _weighted(model, graph, rows):
    return model(graph, rows["x"], edge_weight=rows["w"])


def _with_edges(model, graph, rows):
    return model(graph, rows["x"], rows["z"])


def _of_default_dtype(model, graph, rows):
    """For modules that make features of it, whatever they are given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(rows["x"].dtype)
    try:
        return model(graph, rows["x"])
    finally:
        torch.set_default_dtype(before)


def _types(graph) -> torch.Tensor:
    ids = graph.edata.get(dgl.EID, torch.arange(graph.num_edges()))
    return ids % 3


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(5, 4)


_MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "GraphConv both": (lambda: nn.GraphConv(5, 4), _plain),
    "GraphConv wider": (lambda: nn.GraphConv(5, 8, norm="right"), _plain),
    "GraphConv left, weighted": (lambda: nn.GraphConv(5, 4, norm="left"), _weighted),
    "EdgeWeightNorm": (
        lambda: nn.GraphConv(5, 4, norm="none"),
        lambda m, g, r: m(g, r["x"], edge_weight=nn.EdgeWeightNorm("both")(g, r["w"])),
    ),
    "EdgeWeightNorm right": (
        lambda: nn.GraphConv(5, 4, norm="none"),
        lambda m, g, r: m(g, r["x"], edge_weight=nn.EdgeWeightNorm("right")(g, r["w"])),
    ),
    "GATConv": (lambda: nn.GATConv(5, 4, 3, residual=True), _plain),
    "GATConv, weighted": (lambda: nn.GATConv(5, 4, 3), _weighted),
    "GATv2Conv": (lambda: nn.GATv2Conv(5, 4, 3, share_weights=True), _plain),
    "GATv2Conv, residual": (lambda: nn.GATv2Conv(5, 4, 3, residual=True), _plain),
    "EdgeGATConv": (lambda: nn.EdgeGATConv(5, 5, 4, 2), _with_edges),
    "EGATConv": (
        lambda: nn.EGATConv(5, 5, 4, 3, 2),
        lambda m, g, r: m(g, r["x"], r["z"])[0],
    ),
    "DotGatConv": (lambda: nn.DotGatConv(5, 4, 2), _plain),
    "AGNNConv": (lambda: nn.AGNNConv(), _plain),
    "SAGEConv mean": (lambda: nn.SAGEConv(5, 4, "mean"), _weighted),
    "SAGEConv gcn": (lambda: nn.SAGEConv(5, 4, "gcn"), _plain),
    "SAGEConv pool": (lambda: nn.SAGEConv(5, 4, "pool"), _plain),
    "SAGEConv lstm": (lambda: nn.SAGEConv(5, 4, "lstm"), _plain),
    "GINConv sum": (lambda: nn.GINConv(_linear(), "sum", learn_eps=True), _weighted),
    "GINConv max": (lambda: nn.GINConv(_linear(), "max"), _plain),
    "GINEConv": (lambda: nn.GINEConv(_linear()), _with_edges),
    "RelGraphConv basis": (
        lambda: nn.RelGraphConv(5, 4, 3, "basis", 2),
        lambda m, g, r: m(g, r["x"], _types(g), norm=r["w"].unsqueeze(1)),
    ),
    "RelGraphConv low memory": (
        lambda: nn.RelGraphConv(5, 5, 3, "bdd", 5, self_loop=False),
        lambda m, g, r: m(g, r["x"], _types(g)),
    ),
    "EdgeConv": (lambda: nn.EdgeConv(5, 4), _plain),
    "EdgeConv, batch norm": (lambda: nn.EdgeConv(5, 4, batch_norm=True), _plain),
    "GatedGCNConv": (
        lambda: nn.GatedGCNConv(5, 5, 4),
        lambda m, g, r: m(g, r["x"], r["z"])[0],
    ),
    "GatedGraphConv": (
        lambda: nn.GatedGraphConv(5, 5, 2, 3),
        lambda m, g, r: m(g, r["x"], _types(g)),
    ),
    "GatedGraphConv, one type": (lambda: nn.GatedGraphConv(5, 5, 2, 1), _plain),
    "TAGConv": (lambda: nn.TAGConv(5, 4, 2), _plain),
    "SGConv": (lambda: nn.SGConv(5, 4, 2), _plain),
    "APPNPConv": (lambda: nn.APPNPConv(3, 0.2), _weighted),
    "GCN2Conv": (lambda: nn.GCN2Conv(5, 1), lambda m, g, r: m(g, r["x"], r["x"].abs())),
    "ChebConv": (
        lambda: nn.ChebConv(5, 4, 3),
        lambda m, g, r: m(g, r["x"], lambda_max=r["x"].new_tensor([1.7])),
    ),
    "ChebConv without lambda_max": (lambda: nn.ChebConv(5, 4, 3), _plain),
    "GMMConv": (
        lambda: nn.GMMConv(5, 4, 2, 3),
        lambda m, g, r: m(g, r["x"], r["z"][:, :2]),
    ),
    "NNConv": (lambda: nn.NNConv(5, 4, torch.nn.Linear(5, 20), "mean"), _with_edges),
    "CFConv": (lambda: nn.CFConv(5, 5, 4, 4), _with_edges),
    "TWIRLSConv": (lambda: nn.TWIRLSConv(5, 4, 6, 3), _of_default_dtype),
    "TWIRLSConv, attention": (
        lambda: nn.TWIRLSConv(5, 4, 6, 3, attention=True, attn_bef=True, p=0.5, use_eta=True),
        _of_default_dtype,
    ),
    "AtomicConv": (
        lambda: nn.AtomicConv(*torch.tensor([[2.0, 1.5, 9.0], [0.5, 1.0, 1.5], [1.0, 0.5, 2.0]])),
        lambda m, g, r: m(g, r["x"][:, :1], r["w"].unsqueeze(1)),
    ),
    "HGTConv": (
        lambda: nn.HGTConv(5, 2, 2, 2, 3),
        lambda m, g, r: m(g, r["x"], _node_types(g), _types(g)),
    ),
    "EGNNConv": (lambda: nn.EGNNConv(5, 4, 4, 5), lambda m, g, r: m(
        g, r["x"], r["x"][:, :3] * 2, r["z"])[0]),
    "PNAConv": (
        lambda: nn.PNAConv(
            6, 4, ["mean", "max", "min", "std", "moment3"], ["identity", "amplification",
            "attenuation"], 1.7, num_towers=2, edge_feat_size=5,
        ),
        lambda m, g, r: m(g, torch.cat([r["x"], r["x"][:, :1]], 1), r["z"]),
    ),
    "DGNConv": (
        lambda: nn.DGNConv(5, 5, ["dir1-av", "dir2-dx", "sum"], ["amplification"], 1.7),
        lambda m, g, r: m(g, r["x"], eig_vec=r["x"].detach()[:, 1:4]),
    ),
}  # fmt: skip


#: Modules that normalise by a mean and a variance of all rows, which they learn while training.
_TRAINING = ("EdgeConv, batch norm", "GatedGCNConv", "PNAConv", "DGNConv")


def _node_types(graph) -> torch.Tensor:
    return graph.ndata.get(dgl.NID, torch.arange(graph.num_nodes())) % 2


def _module(name: str, exchange: str, of_last: str = "") -> None:
    if of_last:
        both = Both(*uneven(of_last), exchange=exchange)
    else:
        both = Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    make, call = _MODULES[name]
    torch.manual_seed(4)
    model = make().double().train(name in _TRAINING)
    if of_last == "no edges":
        model._allow_zero_in_degree = True  # for modules that look
    size = both.g.num_edges()
    with torch.backends.cudnn.flags(enabled=False):  # its LSTM has no gradients in evaluation
        both.compare(
            lambda graph, rows: call(model, graph, rows),
            {"x": random_rows(both.g.num_nodes(), 5)},
            {"w": random_rows(size).abs() + 0.5, "z": random_rows(size, 5)},
            model=model,
            what=name,
        )


@pytest.mark.parametrize("name", _MODULES)
def test_dgl_modules(ranks, name):
    for exchange in ranks.exchanges:
        ranks.run(_module, name, exchange)


#: EGATConv refuses nodes without in-edges in any case.
_IN_VAIN = {("EGATConv", "no edges")}


@pytest.mark.parametrize(
    ("name", "of_last"),
    sorted(set(itertools.product(_MODULES, ("no nodes", "no edges"))) - _IN_VAIN),
)
def test_dgl_modules_where_a_rank_has_nothing_to_do(ranks, name, of_last):
    ranks.run(_module, name, "halo", of_last)


def _type_of_few_edges() -> None:
    both = Both(*uneven("no edges"))
    g = both.g
    kinds = torch.zeros(g.num_edges(), dtype=torch.int64)
    kinds[g.in_edges(0, form="eid")] = 2  # of which one rank has edges; of type 1, none
    g.edata["kind"] = kinds
    both.pg.edata["kind"] = both.own_edges(kinds)
    torch.manual_seed(4)
    model = nn.GatedGraphConv(5, 6, 2, 3).double()
    both.compare(
        lambda graph, rows: model(graph, rows["x"], graph.edata["kind"]),
        {"x": random_rows(g.num_nodes(), 5)},
        model=model,
    )
    for kind in (-1, 3):
        with pytest.raises(InvalidInputError, match=f"{kind}"):
            kinds = torch.full((max(both.pg.num_edges(), 1),), kind, device=both.pg.device)
            model(both.pg, both.pg.ndata["x"], kinds)


def test_an_edge_type_that_few_ranks_have(ranks):
    ranks.run(_type_of_few_edges)


def _in_bfloat16(name: str, of_last: str) -> None:
    g, by = uneven(of_last) if of_last else (dgl.add_self_loop(homogeneous()), "random")
    both = Both(g, by)
    make, call = _MODULES[name]
    torch.manual_seed(4)
    model = make().bfloat16().train(name in _TRAINING)
    rows = {"x": random_rows(g.num_nodes(), 5), "z": random_rows(g.num_edges(), 5)}
    rows["w"] = random_rows(g.num_edges()).abs() + 0.5
    rows = {key: of_all.bfloat16() for key, of_all in rows.items()}

    def run(graph, given, dtype) -> list[torch.Tensor | None]:
        there = copy.deepcopy(model).to(graph.device, dtype)
        given = {key: own.detach().to(dtype).requires_grad_() for key, own in given.items()}
        factors = random_rows(g.num_nodes(), 1)
        factors = factors if graph is g else both.own_nodes(factors)
        with torch.backends.cudnn.flags(enabled=False), graph.local_scope():
            out = call(there, graph, given)
            wanted = [given["x"], *there.parameters()]
            loss = (out * factors.to(dtype).view(-1, *[1] * (out.dim() - 1))).sum()
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        assert out.dtype == dtype and (found[0] is None or found[0].dtype == dtype)
        return [out.detach(), *found]

    exact, by_dgl = (run(g, rows, dtype) for dtype in (torch.float64, torch.bfloat16))
    own = {k: (both.own_nodes if k == "x" else both.own_edges)(each) for k, each in rows.items()}
    ours = run(both.pg, own, torch.bfloat16)
    for number, (expected, of_dgl, mine) in enumerate(zip(exact, by_dgl, ours, strict=True)):
        if expected is None:
            continue
        if number < 2:  # rows of nodes
            found = torch.zeros_like(expected).index_copy(0, both.nodes, mine.double().cpu())
            dist.all_reduce(found)
        else:
            found = of_all_ranks(None if mine is None else mine.double(), expected)
        size = expected.norm().clamp(min=1)  # some gradients are 0 but for rounding
        error, error_of_dgl = ((rows.double() - expected).norm() for rows in (found, of_dgl))
        assert error <= 2 * error_of_dgl + 0.02 * size, (name, number, error, error_of_dgl, size)


@pytest.mark.parametrize("name", _MODULES)
def test_dgl_modules_in_bfloat16(ranks, name):
    ranks.run(_in_bfloat16, name, "")
    ranks.run(_in_bfloat16, name, "no nodes")
