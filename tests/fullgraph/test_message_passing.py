"""Message passing on a partitioned graph, against DGL's C++ on the whole graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist
from dgl import nn
from torch.utils.checkpoint import checkpoint

import dgl_mgpu
from dgl_mgpu.errors import InvalidInputError, UnsupportedByPartitionError
from tests.fullgraph.graphs import heterogeneous, homogeneous

_EXCHANGES = ("halo", "broadcast")


class _Both:
    """A whole graph and this rank's part, on which the same is run and compared."""

    def __init__(self, g: dgl.DGLGraph, by: Any = "random", exchange: str = "halo") -> None:
        self.g = g
        self.pg = dgl_mgpu.partition_graph(g, by=by, exchange=exchange)

    def compare(
        self,
        run: Callable[[dgl.DGLGraph, dict[str, torch.Tensor]], torch.Tensor],
        nodes: dict[str, torch.Tensor] | None = None,
        edges: dict[str, torch.Tensor] | None = None,
        model: torch.nn.Module | None = None,
        of_edges: bool = False,
        turn: bool = False,
        what: object = "",
    ) -> None:
        """Compare what ``run`` returns, and the gradients of all it is given.

        Parameters
        ----------
        run : callable
            Gets a graph and its rows of ``nodes`` and ``edges``.
        nodes, edges : dict of Tensor
            Of the whole graph.
        of_edges : bool
            Whether ``run`` returns rows of edges, not of nodes.
        turn : bool
            Whether graphs are reversed before.
        """
        nodes, edges = nodes or {}, edges or {}
        rows = self.pg.ndata[dgl.NID].long()
        eids = self.pg.edata[dgl.EID].long()
        results = []
        for graph, take_nodes, take_edges in (
            (self.g, slice(None), slice(None)),
            (self.pg, rows, eids),
        ):
            given = {k: v[take_nodes].clone().requires_grad_() for k, v in nodes.items()}
            given |= {k: v[take_edges].clone().requires_grad_() for k, v in edges.items()}
            parameters = [] if model is None else list(model.parameters())
            graph = dgl.reverse(graph, copy_ndata=True, copy_edata=True) if turn else graph
            with graph.local_scope():
                torch.manual_seed(8)
                out = run(graph, given)
                draw = torch.Generator().manual_seed(6)
                size = self.g.num_edges() if of_edges else self.g.num_nodes()
                factors = torch.rand(size, *out.shape[1:], generator=draw, dtype=out.dtype)
                factors = factors[take_edges if of_edges else take_nodes]
                wanted = [*given.values(), *parameters]
                found = torch.autograd.grad((out * factors).sum(), wanted, allow_unused=True)
            results.append(
                (out.detach(), dict(zip(given, found, strict=False)), found[len(given) :])
            )
        (expected, of_given, of_model), (out, grads, of_part) = results
        self._same(out, expected[eids if of_edges else rows], what)
        for key in grads:
            mine = of_given[key]
            assert (mine is None) == (grads[key] is None), (what, key)
            if mine is not None:
                self._same(grads[key], mine[eids if key in edges else rows], (what, key))
        for gradient, mine in zip(of_model, of_part, strict=True):
            if gradient is not None:
                total = torch.zeros_like(gradient) if mine is None else mine.clone()
                dist.all_reduce(total)
                self._same(total, gradient, (what, "parameters"))

    @staticmethod
    def _same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
        )


def _rows(*shape: int, seed: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


# -- built-in functions ---------------------------------------------------------------------------

_REDUCERS = ("sum", "mean", "max", "min")
_OPERATIONS = ("add", "sub", "mul", "div")


def _operands(g: dgl.DGLGraph, shapes: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    """Rows of sources, edges and destinations, none near zero."""
    counts = (g.num_nodes(), g.num_edges(), g.num_nodes())
    return {
        key: rows.sign() * (rows.abs() + 0.5)
        for seed, (key, count, shape) in enumerate(zip("uev", counts, shapes, strict=True))
        for rows in [_rows(count, *shape, seed=seed)]
    }


def _builtin(exchange: str, kind: str, shapes: tuple[tuple[int, ...], ...], turn: bool) -> None:
    both = _Both(homogeneous(kind), exchange=exchange)
    given = _operands(both.g, shapes)
    messages = [("copy_u", fn.copy_u("u", "m")), ("copy_e", fn.copy_e("e", "m"))]
    for (lhs, rhs), op in itertools.product(itertools.permutations("uev", 2), _OPERATIONS):
        name = f"{lhs}_{op}_{rhs}"
        messages.append((name, getattr(fn, name)(lhs, rhs, "m")))
    for (name, message), reducer in itertools.product(messages, _REDUCERS):
        if turn and reducer in ("max", "min"):
            continue

        def run(graph, rows, message=message, reducer=reducer):
            graph.ndata.update({key: rows[key] for key in "uv"})
            graph.edata["e"] = rows["e"]
            graph.update_all(message, getattr(fn, reducer)("m", "out"))
            return graph.ndata["out"]

        nodes, edges = {key: given[key] for key in "uv"}, {"e": given["e"]}
        both.compare(run, nodes, edges, turn=turn, what=(name, reducer))


_SHAPES = {
    "same": ((4,), (4,), (4,)),
    "heads": ((2, 3), (2, 1), (3,)),
    "scalars": ((), (), ()),
}


@pytest.mark.parametrize("turn", [False, True], ids=["", "reversed"])
@pytest.mark.parametrize("shapes", _SHAPES)
def test_all_operations_and_reducers(ranks, shapes, turn):
    exchange = "broadcast" if shapes == "same" else "halo"
    ranks.run(_builtin, exchange, "random", _SHAPES[shapes], turn)


@pytest.mark.parametrize("kind", ["isolated", "no edges", "self-loops", "one node", "two nodes"])
def test_ranks_without_edges_or_nodes(ranks, kind):
    for exchange in _EXCHANGES:
        ranks.run(_few_messages, exchange, kind)


def _few_messages(exchange: str, kind: str) -> None:
    both = _Both(homogeneous(kind), exchange=exchange)
    given = _operands(both.g, ((2,), (2,), (2,)))
    # Of a maximum of no messages DGL's gradient is not zero where a graph has no edges at all.
    reducers = _REDUCERS[:2] if kind == "no edges" else _REDUCERS
    for message, reducer in itertools.product(
        (fn.copy_u("u", "m"), fn.u_mul_e("u", "e", "m"), fn.u_sub_v("u", "v", "m")), reducers
    ):

        def run(graph, rows, message=message, reducer=reducer):
            graph.ndata.update({key: rows[key] for key in "uv"})
            graph.edata["e"] = rows["e"]
            graph.update_all(message, getattr(fn, reducer)("m", "out"))
            return graph.ndata["out"]

        both.compare(run, {"u": given["u"], "v": given["v"]}, {"e": given["e"]}, what=reducer)
    for norm_by in ("dst", "src"):
        both.compare(_softmax(norm_by), {}, {"e": given["e"]}, of_edges=True)


def _edge_results(turn: bool) -> None:
    both = _Both(homogeneous())
    given = _operands(both.g, ((2, 3), (2, 3), (2, 3)))
    for (lhs, rhs), op in itertools.product(
        itertools.permutations("uev", 2), (*_OPERATIONS, "dot")
    ):
        name = f"{lhs}_{op}_{rhs}"

        def run(graph, rows, name=name, lhs=lhs, rhs=rhs):
            graph.ndata.update({key: rows[key] for key in "uv"})
            graph.edata["e"] = rows["e"]
            graph.apply_edges(getattr(fn, name)(lhs, rhs, "out"))
            return graph.edata["out"]

        nodes, edges = {key: given[key] for key in "uv"}, {"e": given["e"]}
        both.compare(run, nodes, edges, of_edges=True, turn=turn, what=name)


@pytest.mark.parametrize("turn", [False, True], ids=["", "reversed"])
def test_results_of_edges(ranks, turn):
    ranks.run(_edge_results, turn)


def _softmax(norm_by: str) -> Callable[..., torch.Tensor]:
    return lambda graph, rows: dgl.ops.edge_softmax(graph, rows["e"], norm_by=norm_by)


def _edge_softmax(kind: str) -> None:
    both = _Both(homogeneous(kind))
    size = both.g.num_edges()
    for norm_by, turn in itertools.product(("dst", "src"), (False, True)):
        # Scores whose exponentials are all 0, and all infinite.
        for scores in (_rows(size, 1), _rows(size, 2, 1) - 2000.0, _rows(size, 3) * 1000.0):
            both.compare(_softmax(norm_by), {}, {"e": scores}, of_edges=True, turn=turn)


@pytest.mark.parametrize("kind", ["random", "skewed"])
def test_edge_softmax(ranks, kind):
    ranks.run(_edge_softmax, kind)


# -- users' functions -----------------------------------------------------------------------------


def _of_edges(edges):
    return {"out": edges.src["u"] * edges.data["e"] - edges.dst["v"] * edges.src["u"].abs()}


def _of_mailbox(nodes):
    box = nodes.mailbox["out"]
    return {"out": box.cumsum(1).amax(1) + nodes.data["v"]}


def _user_functions(kind: str) -> None:
    both = _Both(homogeneous(kind))
    given = _operands(both.g, ((3,), (1,), (3,)))
    nodes, edges = {key: given[key] for key in "uv"}, {"e": given["e"]}

    def set_up(graph, rows):
        graph.ndata.update({key: rows[key] for key in "uv"})
        graph.edata["e"] = rows["e"]

    def of_edges(graph, rows):
        set_up(graph, rows)
        graph.apply_edges(_of_edges)
        return graph.edata["out"]

    def summed(graph, rows):
        set_up(graph, rows)
        graph.update_all(_of_edges, fn.sum("out", "out"))
        return graph.ndata["out"]

    def reduced(graph, rows):
        set_up(graph, rows)
        graph.ndata["out"] = torch.zeros_like(rows["u"])
        graph.update_all(_of_edges, _of_mailbox)
        return graph.ndata["out"]

    def applied(graph, rows):
        set_up(graph, rows)
        graph.update_all(
            fn.u_mul_e("u", "e", "out"), _of_mailbox, lambda n: {"out": n.data["out"] + 1}
        )
        return graph.ndata["out"]

    both.compare(of_edges, nodes, edges, of_edges=True, what="apply_edges")
    both.compare(of_edges, nodes, edges, of_edges=True, turn=True, what="reversed")
    both.compare(summed, nodes, edges, what="sum of a function's messages")
    if kind != "no edges":  # DGL has no shape of results then
        both.compare(reduced, nodes, edges, what="a function of the mailbox")
        both.compare(applied, nodes, edges, what="a function of nodes")


@pytest.mark.parametrize("kind", ["random", "isolated", "self-loops", "no edges"])
def test_users_functions(ranks, kind):
    ranks.run(_user_functions, kind)


def _some_edges() -> None:
    both = _Both(homogeneous())
    g, pg = both.g, both.pg
    chosen = (pg.edata[dgl.EID] % 3 == 0).nonzero().squeeze(1)
    pg.apply_edges(lambda edges: {"out": edges.src["x"] - edges.dst["x"]}, chosen)
    src, dst = g.find_edges(pg.edata[dgl.EID][chosen])
    assert torch.equal(pg.edata["out"][chosen], g.ndata["x"][src] - g.ndata["x"][dst])
    pg.apply_edges(lambda edges: {"ends": edges.src[dgl.NID] * 100 + edges.dst[dgl.NID]}, chosen)
    assert torch.equal(pg.edata["ends"][chosen], src * 100 + dst)


def test_a_function_of_some_edges(ranks):
    ranks.run(_some_edges)


# -- several relations -----------------------------------------------------------------------------


class _BothHeterographs:
    def __init__(self, g: dgl.DGLGraph, exchange: str) -> None:
        self.g = g
        self.pg = dgl_mgpu.partition_graph(g, exchange=exchange)

    def compare(self, run: Callable[..., dict[str, torch.Tensor]], what: str) -> None:
        """Compare the rows of nodes that ``run`` returns, and their gradients."""
        results = []
        for graph in (self.g, self.pg):
            given = {t: graph.nodes[t].data["x"].clone().requires_grad_() for t in graph.ntypes}
            with graph.local_scope():
                out = run(graph, given)
            total = sum(
                (
                    rows * graph.nodes[ntype].data["x"].mean(1).view(-1, *[1] * (rows.dim() - 1))
                ).sum()
                for ntype, rows in out.items()
            )
            found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
            results.append((out, dict(zip(given, found, strict=True))))
        for expected, found in zip(*results, strict=True):
            assert expected.keys() == found.keys()
            for ntype in expected:
                if expected[ntype] is not None:
                    torch.testing.assert_close(
                        self.pg.gather(found[ntype], ntype), expected[ntype].detach(), msg=f"{what}"
                    )


def _with_rows(graph, given):
    for ntype, rows in given.items():
        graph.nodes[ntype].data["h"] = rows


def _received(graph):
    return {ntype: graph.nodes[ntype].data["out"] for ntype in ("user", "item", "tag")}


def _all_relations(exchange: str) -> None:
    both = _BothHeterographs(heterogeneous(num_marks=15), exchange)
    for reducer in ("sum", "max", "min"):

        def run(graph, given, reducer=reducer):
            _with_rows(graph, given)
            graph.update_all(fn.copy_u("h", "m"), getattr(fn, reducer)("m", "out"))
            return _received(graph)

        both.compare(run, reducer)


@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_all_relations_at_once(ranks, exchange):
    ranks.run(_all_relations, exchange)


def _each_relation(exchange: str) -> None:
    both = _BothHeterographs(heterogeneous(), exchange)
    g, pg = both.g, both.pg
    for cross in ("sum", "mean", "max", "min", "stack"):

        def several(graph, given, cross=cross):
            _with_rows(graph, given)
            functions = {
                "follows": (fn.copy_u("h", "m"), fn.sum("m", "out")),
                "buys": (fn.u_mul_e("h", "w", "m"), fn.mean("m", "out")),
                "sees": (fn.copy_u("h", "m"), fn.max("m", "out")),
                "has": (lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "out")),
                "marks": (fn.copy_u("h", "m"), fn.sum("m", "out")),
            }
            graph.multi_update_all(functions, cross)
            return _received(graph)

        both.compare(several, cross)

    def one(graph, given):
        _with_rows(graph, given)
        graph["buys"].update_all(fn.copy_u("h", "m"), fn.max("m", "out"))
        graph.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "out"), etype="follows")
        return {ntype: graph.nodes[ntype].data["out"] for ntype in ("user", "item")}

    both.compare(one, "one relation")

    def scored(graph, given):
        _with_rows(graph, given)
        graph.apply_edges(fn.u_dot_v("h", "h", "s"), etype="sees")
        graph.edges["sees"].data["a"] = dgl.ops.edge_softmax(
            graph["sees"], graph.edges["sees"].data["s"]
        )
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "out"), etype="sees")
        return {"item": graph.nodes["item"].data["out"]}

    both.compare(scored, "attention")

    def module(graph, given):
        torch.manual_seed(1)
        convs = {
            etype: nn.SAGEConv(5, 4, "mean")
            if etype != "has"
            else nn.GATConv(5, 4, 1, allow_zero_in_degree=True)
            for etype in graph.etypes
        }
        model = nn.HeteroGraphConv(convs, aggregate="sum").double()
        found = model(graph, given)
        return {t: rows.reshape(len(rows), -1) for t, rows in found.items()}

    both.compare(module, "HeteroGraphConv")
    for etype in g.canonical_etypes:
        own_dst = pg.nodes[etype[2]].data[dgl.NID]
        own_src = pg.nodes[etype[0]].data[dgl.NID]
        assert torch.equal(pg.in_degrees(etype=etype), g.in_degrees(own_dst, etype=etype))
        assert torch.equal(pg.out_degrees(etype=etype), g.out_degrees(own_src, etype=etype))


@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_several_relations(ranks, exchange):
    ranks.run(_each_relation, exchange)


# -- modules of DGL --------------------------------------------------------------------------


def _plain(model, graph, rows):
    return model(graph, rows["x"])


def _weighted(model, graph, rows):
    return model(graph, rows["x"], edge_weight=rows["w"])


def _with_edges(model, graph, rows):
    return model(graph, rows["x"], rows["z"])


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
        lambda m, g, r: m(g, r["x"], lambda_max=torch.tensor([1.7], dtype=torch.float64)),
    ),
    "ChebConv without lambda_max": (lambda: nn.ChebConv(5, 4, 3), _plain),
    "GMMConv": (
        lambda: nn.GMMConv(5, 4, 2, 3),
        lambda m, g, r: m(g, r["x"], r["z"][:, :2]),
    ),
    "NNConv": (lambda: nn.NNConv(5, 4, torch.nn.Linear(5, 20), "mean"), _with_edges),
    "CFConv": (lambda: nn.CFConv(5, 5, 4, 4), _with_edges),
    "HGTConv": (
        lambda: nn.HGTConv(5, 2, 2, 2, 3),
        lambda m, g, r: m(g, r["x"], _node_types(g), _types(g)),
    ),
    "EGNNConv": (lambda: nn.EGNNConv(5, 4, 4, 5), lambda m, g, r: m(
        g, r["x"], r["x"][:, :3] * 2, r["z"])[0]),
}  # fmt: skip


def _node_types(graph) -> torch.Tensor:
    return graph.ndata.get(dgl.NID, torch.arange(graph.num_nodes())) % 2


def _uneven(of_last: str) -> tuple[dgl.DGLGraph, torch.Tensor]:
    """A graph and its nodes' ranks: the last one has no nodes, or no edges to them.

    Others have edges from them.
    """
    g = dgl.add_self_loop(homogeneous())
    count = g.num_nodes()
    ranks = torch.arange(count) % 2
    if of_last == "no nodes":
        return g, ranks
    g = dgl.add_edges(dgl.add_nodes(g, 4), torch.arange(count, count + 3), torch.tensor([0, 1, 4]))
    return g, torch.cat([ranks, torch.full((4,), 2)])


def _module(name: str, exchange: str, of_last: str = "") -> None:
    if of_last:
        both = _Both(*_uneven(of_last), exchange=exchange)
    else:
        both = _Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    make, call = _MODULES[name]
    torch.manual_seed(4)
    model = make().double().eval()
    if of_last == "no edges":
        model._allow_zero_in_degree = True  # for modules that look
    size = both.g.num_edges()
    both.compare(
        lambda graph, rows: call(model, graph, rows),
        {"x": _rows(both.g.num_nodes(), 5)},
        {"w": _rows(size).abs() + 0.5, "z": _rows(size, 5)},
        model=model,
        what=name,
    )


@pytest.mark.parametrize("name", _MODULES)
def test_dgl_modules(ranks, name):
    for exchange in _EXCHANGES:
        ranks.run(_module, name, exchange)


#: DGL views residuals as rows of so many heads, of which there is no telling without rows; and
#: EGATConv refuses nodes without in-edges in any case.
_IN_VAIN = {("GATConv", "no nodes"), ("EdgeGATConv", "no nodes"), ("EGATConv", "no edges")}


@pytest.mark.parametrize(
    ("name", "of_last"),
    sorted(set(itertools.product(_MODULES, ("no nodes", "no edges"))) - _IN_VAIN),
)
def test_dgl_modules_where_a_rank_has_nothing_to_do(ranks, name, of_last):
    ranks.run(_module, name, "halo", of_last)


def _type_of_few_edges() -> None:
    g, ranks = _uneven("no edges")
    both = _Both(g, ranks)
    kinds = torch.zeros(g.num_edges(), dtype=torch.int64)
    kinds[g.in_edges(0, form="eid")] = 2  # of which one rank has edges; of type 1, none
    g.edata["kind"] = kinds
    both.pg.edata["kind"] = kinds[both.pg.edata[dgl.EID]]
    torch.manual_seed(4)
    model = nn.GatedGraphConv(5, 6, 2, 3).double()
    both.compare(
        lambda graph, rows: model(graph, rows["x"], graph.edata["kind"]),
        {"x": _rows(g.num_nodes(), 5)},
        model=model,
    )
    for kind in (-1, 3):
        with pytest.raises(InvalidInputError, match=f"{kind}"):
            model(both.pg, both.pg.ndata["x"], torch.full((max(both.pg.num_edges(), 1),), kind))


def test_an_edge_type_that_few_ranks_have(ranks):
    ranks.run(_type_of_few_edges)


def _functions_without_edges(of_last: str, kind: str) -> None:
    both = _Both(*_uneven(of_last)) if of_last else _Both(homogeneous(kind))
    count = both.g.num_nodes()
    given = {"x": _rows(count, 3), "y": _rows(count)}

    def run(graph, rows):
        graph.ndata.update(rows)
        graph.ndata["old"] = rows["y"].float()

        def of_mailbox(nodes):
            box = nodes.mailbox["m"]
            shape = len(nodes), 2, 3
            return {
                "sum": box.tanh().prod(1) + nodes.data["y"].unsqueeze(1),
                "wide": box.tanh().amax(1).unsqueeze(1).expand(shape).float(),
                "ids": torch.full((len(nodes),), box.shape[1], dtype=torch.int32),
            }

        graph.update_all(lambda edges: {"m": edges.src["x"] * edges.dst["x"]}, of_mailbox)
        assert graph.ndata["wide"].dtype == torch.float32
        assert torch.equal(graph.ndata["ids"], graph.in_degrees().int())
        first = graph.ndata["sum"] * graph.ndata["wide"].sum(1)
        graph.ndata["x"] = first
        graph.update_all(fn.copy_u("x", "m"), of_mailbox)
        return graph.ndata["sum"]

    if kind == "no edges":  # of which DGL knows no results, but zeros are what others have
        with both.pg.local_scope():
            rows = {k: v[both.pg.ndata[dgl.NID]].requires_grad_() for k, v in given.items()}
            out = run(both.pg, rows)
            assert out.shape == (both.pg.num_nodes(), 3) and not out.any()
            out.sum().backward()
            assert not any(each.grad.any() for each in rows.values())
        return
    both.compare(run, given)


@pytest.mark.parametrize(
    ("of_last", "kind"),
    [("no nodes", ""), ("no edges", ""), ("", "isolated"), ("", "two nodes"), ("", "no edges")],
)
def test_users_functions_where_a_rank_has_no_messages(ranks, of_last, kind):
    ranks.run(_functions_without_edges, of_last, kind)


def _no_chosen_edges() -> None:
    both = _Both(homogeneous())
    given = {"x": _rows(both.g.num_nodes(), 2)}
    last = dist.get_rank() == 2

    def run(graph, rows):
        graph.ndata["x"] = rows["x"]
        graph.edata["out"] = torch.zeros(graph.num_edges(), 2, dtype=torch.float64)
        mine = torch.arange(0 if last else graph.num_edges())
        ids = mine if graph is both.pg else everyone
        graph.apply_edges(lambda edges: {"out": edges.src["x"] * edges.dst["x"]}, ids)
        return graph.edata["out"]

    chosen: list[Any] = [None] * 3
    dist.all_gather_object(chosen, [] if last else both.pg.edata[dgl.EID].tolist())
    everyone = torch.tensor([edge for each in chosen for edge in each])
    both.compare(run, given, of_edges=True)


def test_a_function_of_edges_that_a_rank_has_none_of(ranks):
    ranks.run(_no_chosen_edges)


# -- what a whole graph amounts to ----------------------------------------------------------------


def _readouts(of_last: str) -> None:
    both = _Both(*_uneven(of_last)) if of_last else _Both(homogeneous("no edges"))
    nodes = {"x": _rows(both.g.num_nodes(), 3), "a": _rows(both.g.num_nodes(), 1)}
    edges = {"z": _rows(both.g.num_edges(), 2), "b": _rows(both.g.num_edges(), 1)}
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
    factors = _rows(1, 5)
    for name, operation in operations.items():
        results = []
        for graph in (both.g, both.pg):
            whole = graph is both.g
            ids = (slice(None),) * 2 if whole else (graph.ndata[dgl.NID], graph.edata[dgl.EID])
            given = {key: rows[ids[0]].clone().requires_grad_() for key, rows in nodes.items()}
            given |= {key: rows[ids[1]].clone().requires_grad_() for key, rows in edges.items()}
            with graph.local_scope():
                graph.ndata.update({key: given[key] for key in nodes})
                graph.edata.update({key: given[key] for key in edges})
                out = operation(graph)
            # Of a loss of all ranks, each has its share.
            loss = (out * factors[:, : out.shape[1]]).sum() / (1 if whole else 3)
            wanted = [*given.values(), *gate.parameters()]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            results.append((out, dict(zip(given, found, strict=False)), found[len(given) :]))
        (expected, of_given, of_gate), (out, grads, of_part) = results
        both._same(out, expected, name)
        for key, gradient in grads.items():
            assert (gradient is None) == (of_given[key] is None), (name, key)
            if gradient is not None:
                own = both.pg.ndata[dgl.NID] if key in nodes else both.pg.edata[dgl.EID]
                both._same(gradient, of_given[key][own], (name, key))
        for gradient, mine in zip(of_gate, of_part, strict=True):
            if gradient is not None:
                total = mine.clone()
                dist.all_reduce(total)
                both._same(total, gradient, (name, "gate"))


@pytest.mark.parametrize("of_last", ["no nodes", "no edges", ""])
def test_readouts_are_of_all_ranks(ranks, of_last):
    ranks.run(_readouts, of_last)


def _softmax_of_all(of_last: str) -> None:
    both = _Both(*_uneven(of_last))

    def of_nodes(graph, rows):
        graph.ndata["x"] = rows["x"]
        scale = dgl.broadcast_nodes(graph, dgl.sum_nodes(graph, "x"))
        return dgl.softmax_nodes(graph, "x") * scale

    def of_edges(graph, rows):
        graph.edata["z"] = rows["z"]
        scale = dgl.broadcast_edges(graph, dgl.mean_edges(graph, "z"))
        return dgl.softmax_edges(graph, "z") + scale

    both.compare(of_nodes, {"x": _rows(both.g.num_nodes(), 2) * 500})
    both.compare(of_edges, {}, {"z": _rows(both.g.num_edges(), 2)}, of_edges=True)
    single = torch.arange(3.0)
    assert torch.equal(dgl.broadcast_nodes(both.pg, single), single.repeat(both.pg.num_nodes(), 1))
    half = both.pg.ndata["x"].bfloat16()
    both.pg.ndata["x"] = half
    total = dgl.sum_nodes(both.pg, "x")
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(
        total.double(), both.g.ndata["x"].sum(0, keepdim=True), rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("of_last", ["no nodes", "no edges"])
def test_softmax_over_all_ranks(ranks, of_last):
    ranks.run(_softmax_of_all, of_last)


def _readout_of_types() -> None:
    g = heterogeneous()
    pg = dgl_mgpu.partition_graph(g)
    for ntype in g.ntypes:
        torch.testing.assert_close(
            dgl.mean_nodes(pg, "x", ntype=ntype), dgl.mean_nodes(g, "x", ntype=ntype)
        )
    for etype in g.canonical_etypes:
        torch.testing.assert_close(
            dgl.max_edges(pg, "w", etype=etype), dgl.max_edges(g, "w", etype=etype)
        )
    with pytest.raises(UnsupportedByPartitionError, match="multi_update_all"):
        dgl.ops.copy_u_mean(pg, [pg.nodes[ntype].data["x"] for ntype in g.ntypes])


def test_readouts_of_several_types(ranks):
    ranks.run(_readout_of_types)


# -- other ways of autograd ----------------------------------------------------------------------


def _without_gradients(exchange: str) -> None:
    both = _Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    rows, eids = both.pg.ndata[dgl.NID], both.pg.edata[dgl.EID]
    model = nn.GATConv(5, 4, 2).double().eval()
    weights = _rows(both.g.num_edges()).requires_grad_()
    with torch.no_grad():
        expected = model(both.g, both.g.ndata["x"], edge_weight=weights)
        found = model(both.pg, both.pg.ndata["x"], edge_weight=weights[eids])
    assert not found.requires_grad
    torch.testing.assert_close(found, expected[rows])


@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_without_gradients(ranks, exchange):
    ranks.run(_without_gradients, exchange)


def _recomputed(exchange: str, reentrant: bool) -> None:
    both = _Both(dgl.add_self_loop(homogeneous()), exchange=exchange)
    torch.manual_seed(4)
    model = torch.nn.ModuleList([nn.GATConv(5, 4, 2), nn.GraphConv(8, 3)]).double()

    def layers(graph, rows, weights, keep):
        hidden = model[0](graph, rows, edge_weight=weights).flatten(1)
        return keep(model[1], graph, hidden.relu())

    def run(graph, given):
        if graph is both.g:
            return layers(graph, given["x"], given["w"], lambda f, *inputs: f(*inputs))
        again = lambda f, *inputs: checkpoint(f, *inputs, use_reentrant=reentrant)  # noqa: E731
        return again(layers, graph, given["x"], given["w"], again)

    nodes, edges = {"x": _rows(both.g.num_nodes(), 5)}, {"w": _rows(both.g.num_edges())}
    if reentrant:  # which autograd.grad refuses
        given = nodes["x"][both.pg.ndata[dgl.NID]].requires_grad_()
        weights = edges["w"][both.pg.edata[dgl.EID]].requires_grad_()
        found = run(both.pg, {"x": given, "w": weights})
        found.sum().backward()
        whole = nodes["x"].clone().requires_grad_()
        run(both.g, {"x": whole, "w": edges["w"]}).sum().backward()
        both._same(given.grad, whole.grad[both.pg.ndata[dgl.NID]], "recomputed")
    else:
        both.compare(run, nodes, edges, model=model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_recomputed_activations(ranks, exchange, reentrant):
    ranks.run(_recomputed, exchange, reentrant)


def _second_derivatives(exchange: str) -> None:
    both = _Both(homogeneous("skewed"), exchange=exchange)
    model = nn.GraphConv(5, 3, allow_zero_in_degree=True).double()

    def run(graph, rows):
        out = model(graph, rows["x"], edge_weight=graph.edata["w"]) ** 3
        (first,) = torch.autograd.grad(out.sum(), rows["x"], create_graph=True)
        return first

    torch.manual_seed(4)
    model.reset_parameters()
    both.compare(run, {"x": _rows(both.g.num_nodes(), 5)}, model=model)


@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_second_derivatives(ranks, exchange):
    ranks.run(_second_derivatives, exchange)


def _half_types() -> None:
    g = homogeneous("skewed", torch.float32)
    both = _Both(g)
    x, w = both.pg.ndata["x"], both.pg.edata["w"]
    expected = dgl.ops.u_mul_e_mean(g, g.ndata["x"], g.edata["w"])[both.pg.ndata[dgl.NID]]
    for dtype in (torch.bfloat16, torch.float16):
        # 150 in-edges of one node are more than bfloat16 can count by ones and divide by.
        found = dgl.ops.u_mul_e_mean(both.pg, x.to(dtype), w.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
        scores = dgl.ops.edge_softmax(both.pg, w.to(dtype), norm_by="src")
        assert scores.dtype == dtype


def test_half_types(ranks):
    ranks.run(_half_types)


def _mean_of_many() -> None:
    size = 100_003
    g = dgl.graph((torch.arange(size) % 7, torch.full((size,), 3)))
    pg = dgl_mgpu.partition_graph(g, by="order")
    found = dgl.ops.copy_u_mean(pg, torch.full((pg.num_nodes(), 1), 2.0**-10).half())
    # A sum of 97 and 100,003 edges, a number that float16 does not have.
    mine = pg.ndata[dgl.NID] == 3
    torch.testing.assert_close(found[mine], torch.full_like(found[mine], 2.0**-10))


def test_the_mean_of_more_messages_than_a_half_type_can_count(ranks):
    ranks.run(_mean_of_many)


def _refusals() -> None:
    both = _Both(homogeneous())
    turned = dgl.reverse(both.pg)
    x = both.pg.ndata["x"]
    for reducer in ("max", "min"):
        with pytest.raises(UnsupportedByPartitionError, match="partition the reversed graph"):
            getattr(dgl.ops, f"copy_u_{reducer}")(turned, x)
    with pytest.raises(UnsupportedByPartitionError):
        turned.ndata["x"] = x
        turned.update_all(fn.copy_u("x", "m"), _of_mailbox)
    for rows, weights, match in (
        (x[1:], None, "row of features"),
        (x, both.pg.edata["w"][1:], "row of features"),
        (x, both.pg.edata["w"].float(), "dtype|data types"),
        (x, torch.ones(both.pg.num_edges(), 3, dtype=x.dtype), "broadcast|shape"),
    ):
        for reducer in ("sum", "max"):
            with pytest.raises(dgl.DGLError, match=match):
                if weights is None:
                    getattr(dgl.ops, f"copy_u_{reducer}")(both.pg, rows)
                else:
                    getattr(dgl.ops, f"u_mul_e_{reducer}")(both.pg, rows, weights)
    # And go on afterwards.
    assert both.pg.gather(dgl.ops.copy_u_sum(both.pg, x)).shape == (both.g.num_nodes(), 5)


def test_what_is_refused(ranks):
    ranks.run(_refusals)
