"""Operations of edges and sums of them, against DGL's C++ on the whole graph.

Of operands that broadcast, and second derivatives.
"""

from __future__ import annotations

import itertools

import dgl
import pytest
import torch

from tests.distributed.both import Both, operands
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too

pytestmark = on_gpus_too

_OPERATIONS = ("add", "sub", "mul", "div", "dot")
#: Of the left and of the right operand.
_SHAPES = [((), ()), ((), (3,)), ((2, 3), (2, 1)), ((1, 3), (2, 1)), ((3,), (2, 3))]


def _of_edges(shapes: tuple[tuple[int, ...], ...], exchange: str, turn: bool) -> None:
    both = Both(homogeneous(), exchange=exchange)
    left, right = (operands(both.g, (shape,) * 3) for shape in shapes)
    for (lhs, rhs), op in itertools.product(itertools.product("uev", repeat=2), _OPERATIONS):
        if "u" not in (lhs, rhs) and not turn:
            continue  # which are of this rank's rows alone
        nodes, edges = {}, {}
        for name, target, rows in (("left", lhs, left), ("right", rhs, right)):
            (edges if target == "e" else nodes)[name] = rows[target]

        def run(g, rows, op=op, lhs=lhs, rhs=rhs):
            return dgl.ops.gsddmm(g, op, rows["left"], rows["right"], lhs, rhs)

        what = lhs, op, rhs, shapes
        if op == "dot" and (not all(shapes) or shapes[0][-1] != shapes[1][-1]):
            continue  # which DGL does not take
        both.compare(run, nodes, edges, of_edges=True, turn=turn, what=what)


@pytest.mark.parametrize("turn", [False, True], ids=["", "reversed"])
@pytest.mark.parametrize("shapes", _SHAPES)
def test_operands_of_edges_broadcast(ranks, shapes, turn):
    ranks.run(_of_edges, shapes, "halo", turn)
    ranks.run(_of_edges, shapes, "halo at first", turn)


def _summed(shapes: tuple[tuple[int, ...], ...], turn: bool) -> None:
    both = Both(homogeneous())
    u, e = (operands(both.g, (shape,) * 3)[key] for shape, key in zip(shapes, "ue", strict=True))
    for op, reduce in itertools.product(_OPERATIONS[:4], ("sum", "mean", "max")):
        if turn and reduce == "max":
            continue

        def run(g, rows, op=op, reduce=reduce):
            out = dgl.ops.gspmm(g, op, reduce, rows["u"], rows["e"])
            return out.masked_fill(out.isinf(), 0)

        both.compare(run, {"u": u}, {"e": e}, turn=turn, what=(op, reduce, shapes))


@pytest.mark.parametrize("turn", [False, True], ids=["", "reversed"])
@pytest.mark.parametrize("shapes", _SHAPES)
def test_operands_of_sums_broadcast(ranks, shapes, turn):
    ranks.run(_summed, shapes, turn)


def _second_derivatives() -> None:
    both = Both(homogeneous("skewed"))
    given = operands(both.g, ((2, 3), (2, 1), (2, 1)))
    for target, op in itertools.product("ev", ("sub", "mul", "div")):
        nodes, edges = {"u": given["u"]}, {}
        (edges if target == "e" else nodes)[target] = given[target]

        def run(g, rows, op=op, target=target):
            of_edges = dgl.ops.gsddmm(g, op, rows["u"], rows[target], "u", target)
            total = dgl.ops.gspmm(g, "copy_rhs", "sum", None, of_edges**2)
            (first,) = torch.autograd.grad((total**2).sum(), rows["u"], create_graph=True)
            return first

        both.compare(run, nodes, edges, what=(target, op))


def test_second_derivatives(ranks):
    ranks.run(_second_derivatives)
