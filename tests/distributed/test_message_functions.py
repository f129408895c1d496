"""Functions of messages on a partitioned graph, against DGL's C++ on the whole graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.errors import UnsupportedByPartitionError
from tests.distributed.both import Both, operands, random_rows, same, uneven
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too

# -- built-in functions ---------------------------------------------------------------------------

_REDUCERS = ("sum", "mean", "max", "min")
_OPERATIONS = ("add", "sub", "mul", "div")


def _builtin(exchange: str, shapes: tuple[tuple[int, ...], ...], turn: bool) -> None:
    both = Both(homogeneous(), exchange=exchange)
    given = operands(both.g, shapes)
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
    for exchange in ranks.exchanges:
        ranks.run(_builtin, exchange, _SHAPES[shapes], turn)


@pytest.mark.parametrize("kind", ["isolated", "no edges", "self-loops", "one node", "two nodes"])
def test_ranks_without_edges_or_nodes(ranks, kind):
    for exchange in ranks.exchanges:
        ranks.run(_few_messages, exchange, kind)


def _few_messages(exchange: str, kind: str) -> None:
    both = Both(homogeneous(kind), exchange=exchange)
    given = operands(both.g, ((2,), (2,), (2,)))
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
    both = Both(homogeneous())
    given = operands(both.g, ((2, 3), (2, 3), (2, 3)))
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
    both = Both(homogeneous(kind))
    size = both.g.num_edges()
    for norm_by, turn in itertools.product(("dst", "src"), (False, True)):
        # Scores whose exponentials are all 0, and all infinite.
        for scores in (
            random_rows(size, 1),
            random_rows(size, 2, 1) - 2000.0,
            random_rows(size, 3) * 1000.0,
        ):
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
    both = Both(homogeneous(kind))
    given = operands(both.g, ((3,), (1,), (3,)))
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
    both = Both(homogeneous())
    g, pg = both.g, both.pg
    chosen = (pg.edata[dgl.EID] % 3 == 0).nonzero().squeeze(1)
    pg.apply_edges(lambda edges: {"out": edges.src["x"] - edges.dst["x"]}, chosen)
    src, dst = g.find_edges(both.edges[both.edges % 3 == 0])
    same(pg.edata["out"][chosen], g.ndata["x"][src] - g.ndata["x"][dst])
    pg.apply_edges(lambda edges: {"ends": edges.src[dgl.NID] * 100 + edges.dst[dgl.NID]}, chosen)
    same(pg.edata["ends"][chosen], src * 100 + dst)


def test_a_function_of_some_edges(ranks):
    ranks.run(_some_edges)


def _functions_without_edges(of_last: str, kind: str) -> None:
    both = Both(*uneven(of_last)) if of_last else Both(homogeneous(kind))
    count = both.g.num_nodes()
    given = {"x": random_rows(count, 3), "y": random_rows(count)}

    def run(graph, rows):
        graph.ndata.update(rows)
        graph.ndata["old"] = rows["y"].float()

        def of_mailbox(nodes):
            box = nodes.mailbox["m"]
            shape = len(nodes), 2, 3
            return {
                "sum": box.tanh().prod(1) + nodes.data["y"].unsqueeze(1),
                "wide": box.tanh().amax(1).unsqueeze(1).expand(shape).float(),
                "ids": box.new_full((len(nodes),), box.shape[1], dtype=torch.int32),
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
            rows = {k: both.own_nodes(v).requires_grad_() for k, v in given.items()}
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


def _views_of_no_rows(of_last: str) -> None:
    both = Both(*uneven(of_last))

    def of_edges(edges):
        products = torch.einsum("ij,ik->ijk", edges.src["x"], edges.dst["x"])
        return {"m": products.view(len(edges), -1)}

    def of_mailbox(nodes):
        return {"out": torch.reshape(nodes.mailbox["m"].tanh().prod(1), (len(nodes), 3, -1))}

    x = random_rows(both.g.num_nodes(), 3)
    for graph, rows in ((both.g, x), (both.pg, both.own_nodes(x))):
        graph.ndata["x"] = rows
        graph.update_all(of_edges, of_mailbox)  # in nobody's scope
    out = both.pg.ndata["out"]
    assert out.shape[1:] == (3, 3)
    same(out, both.own_nodes(both.g.ndata["out"]))
    with pytest.raises(RuntimeError, match="ambiguous"):
        x[:0].view(0, -1)


@pytest.mark.parametrize("of_last", ["no nodes", "no edges"])
def test_users_functions_may_have_a_size_found_where_there_are_no_rows(ranks, of_last):
    ranks.run(_views_of_no_rows, of_last)


def _no_chosen_edges() -> None:
    both = Both(homogeneous())
    given = {"x": random_rows(both.g.num_nodes(), 2)}
    last = dist.get_rank() == dist.get_world_size() - 1

    def run(graph, rows):
        graph.ndata["x"] = rows["x"]
        graph.edata["out"] = rows["x"].new_zeros(graph.num_edges(), 2)
        mine = torch.arange(0 if last else graph.num_edges(), device=graph.device)
        ids = mine if graph is both.pg else everyone
        graph.apply_edges(lambda edges: {"out": edges.src["x"] * edges.dst["x"]}, ids)
        return graph.edata["out"]

    chosen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, [] if last else both.edges.tolist())
    everyone = torch.tensor([edge for each in chosen for edge in each])
    both.compare(run, given, of_edges=True)


def test_a_function_of_edges_that_a_rank_has_none_of(ranks):
    ranks.run(_no_chosen_edges)


# -- half types, and what is refused --------------------------------------------------------------


def _half_types() -> None:
    g = homogeneous("skewed", torch.float32)
    both = Both(g)
    x, w = both.pg.ndata["x"], both.pg.edata["w"]
    expected = both.own_nodes(dgl.ops.u_mul_e_mean(g, g.ndata["x"], g.edata["w"]))
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
    rows = torch.full((pg.num_nodes(), 1), 2.0**-10, device=pg.device).half()
    found = dgl.ops.copy_u_mean(pg, rows)
    # A sum of 97 and 100,003 edges, a number that float16 does not have.
    mine = pg.ndata[dgl.NID] == 3
    torch.testing.assert_close(found[mine], torch.full_like(found[mine], 2.0**-10))


def test_the_mean_of_more_messages_than_a_half_type_can_count(ranks):
    ranks.run(_mean_of_many)


def _refusals() -> None:
    both = Both(homogeneous())
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
        (x, x.new_ones(both.pg.num_edges(), 3), "broadcast|shape"),
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
