"""Maxima and minima on partitioned graphs, against DGL's C++ on the whole graph."""

from __future__ import annotations

import dgl
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from tests.distributed.both import Both, random_rows
from tests.distributed.graphs import homogeneous
from tests.distributed.live_bytes import peak_bytes
from tests.ranks import on_gpus_too

_KINDS = ("random", "skewed", "isolated", "one node")
_EXCHANGES = ("halo", "broadcast", "halo at first")


def _finite(out: torch.Tensor) -> torch.Tensor:
    """As update_all has it: 0 where there is no message."""
    return out.masked_fill(out.isinf(), 0)


def _ties(kind: str, exchange: str, shape: tuple[int, ...]) -> None:
    both = Both(homogeneous(kind), exchange=exchange)
    # Of so few numbers most maxima are those of several edges, of several ranks' nodes.
    x = random_rows(both.g.num_nodes(), *shape).clamp(-0.5, 0.5)
    e = random_rows(both.g.num_edges(), *shape[:1]).round().clamp(1, 2)
    e = e.view(-1, *shape[:1], *[1] * len(shape[1:]))
    for reduce in ("max", "min"):
        both.compare(
            lambda g, rows, reduce=reduce: _finite(
                dgl.ops.gspmm(g, "copy_lhs", reduce, rows["x"], None)
            ),
            {"x": x},
            what=(kind, exchange, reduce),
        )
        for op in ("mul", "sub"):
            both.compare(
                lambda g, rows, reduce=reduce, op=op: _finite(
                    dgl.ops.gspmm(g, op, reduce, rows["x"], rows["e"])
                ),
                {"x": x},
                {"e": e},
                what=(kind, exchange, reduce, op),
            )


@on_gpus_too
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_the_first_of_equal_messages_wins(ranks, kind, exchange):
    for shape in ((), (3,), (2, 3)):
        ranks.run(_ties, kind, exchange, shape)


def _not_numbers() -> None:
    both = Both(homogeneous())
    x = random_rows(both.g.num_nodes(), 4)
    x[::3, 0], x[1::3, 1], x[:, 2] = torch.nan, torch.inf, torch.nan
    x[::2, 3] = -torch.inf
    for reduce in ("max", "min"):
        expected = dgl.ops.gspmm(both.g, "copy_lhs", reduce, x, None)
        found = dgl.ops.gspmm(both.pg, "copy_lhs", reduce, both.own_nodes(x), None)
        assert torch.equal(found, both.own_nodes(expected)), reduce


@on_gpus_too
def test_nan_is_never_chosen(ranks):
    ranks.run(_not_numbers)


def _second_derivatives() -> None:
    both = Both(dgl.add_self_loop(homogeneous("skewed")))

    def run(g, rows):
        out = dgl.ops.gspmm(g, "copy_lhs", "max", rows["x"] ** 2, None)
        (first,) = torch.autograd.grad((out**2).sum(), rows["x"], create_graph=True)
        return first

    both.compare(run, {"x": random_rows(both.g.num_nodes(), 3)})


@on_gpus_too
def test_second_derivatives(ranks):
    ranks.run(_second_derivatives)


def _element_types() -> None:
    both = Both(homogeneous())
    x = random_rows(both.g.num_nodes(), 3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        expected = dgl.ops.gspmm(both.g, "copy_lhs", "max", x.to(dtype).float(), None)
        found = dgl.ops.gspmm(both.pg, "copy_lhs", "max", both.own_nodes(x).to(dtype), None)
        assert found.dtype == dtype
        assert torch.equal(found, both.own_nodes(expected).to(dtype))


@on_gpus_too
def test_maxima_of_other_element_types(ranks):
    ranks.run(_element_types)


class _Counting:
    """Counts the rounds that a schedule begins."""

    def __init__(self, rounds) -> None:
        self.started, self._start = 0, rounds.start
        rounds.start = self._count

    def _count(self, *args):
        self.started += 1
        return self._start(*args)


def _fetches() -> tuple[int, int]:
    both = Both(homogeneous())
    rounds = _Counting(both.pg._graph.parts[0].rounds)
    x = both.pg.ndata["x"].clone().requires_grad_()
    out = dgl.ops.gspmm(both.pg, "copy_lhs", "max", x, None)
    forwards = rounds.started
    out.sum().backward()
    return forwards, rounds.started - forwards


def test_gradients_of_maxima_fetch_nothing(ranks):
    assert {forwards > 0 and backwards for forwards, backwards in ranks.run(_fetches)} == {0}


def _in_buffers(of_all: int) -> tuple[float, float]:
    """Peaks of a maximum and of its gradient, in buffers of one rank."""
    draw = torch.Generator().manual_seed(1)
    count = of_all * dist.get_world_size()
    g = dgl.graph(torch.randint(count, (2, count * 40), generator=draw).unbind())
    pg = dgl_mgpu.partition_graph(g.int())
    x = torch.rand(pg.num_nodes(), 64, requires_grad=True)

    def forward():
        return dgl.ops.gspmm(pg, "copy_lhs", "max", x, None)

    forward().sum().backward()  # makes tiles
    out = []
    forwards = peak_bytes(lambda: out.append(forward()))
    gradient = torch.ones_like(out[0])
    x.grad = None
    backwards = peak_bytes(lambda: out[0].backward(gradient))
    return forwards / x.nbytes, backwards / x.nbytes


def test_maxima_take_few_buffers_on_five_ranks(five_ranks):
    for forwards, backwards in five_ranks.run(_in_buffers, 150):
        assert forwards <= 11.5 and backwards <= 8.5
