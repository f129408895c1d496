"""Rows that exchanges have in flight: their bytes, at more ranks than two."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.distributed.attention import attend
from dgl_mgpu.distributed.exchange.halo import Halo
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.strategies import (
    BROADCAST,
    HALO_BLOCKING,
    ExchangeStrategies,
    ExchangeStrategy,
    Rows,
    rows_in_flight,
)
from dgl_mgpu.distributed.extremes import extreme
from dgl_mgpu.distributed.local_part import Part, cut
from dgl_mgpu.distributed.partition import ranges
from dgl_mgpu.ops.attention import AttentionScore
from tests.distributed.exchange.windows import MappedWindow
from tests.distributed.live_bytes import peak_bytes

#: A buffer of 240 rows; what is not rows, as places of few, is less than a tenth of it.
_OWN, _WIDTH = 240, 64


def _part(neighbours: int) -> Part:
    """Of a ring of nodes, each with in-edges from so many before it: all, if that is their number;
    a rank has those of its neighbours in the ring.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    count = _OWN * size
    src, dst = torch.meshgrid(torch.arange(neighbours), torch.arange(count), indexing="ij")
    owned = ranges(None, torch.ones(count), size)
    return cut((dst - src).flatten() % count, dst.flatten(), owned, owned, rank)


def _dense() -> Part:
    """Every rank's halo is all other nodes."""
    return _part(_OWN * dist.get_world_size())


def _in_buffers(rounds, part: Part, window: MappedWindow | None) -> tuple[float, float]:
    """Peaks of sums and of transposed sums, without their input and output."""
    x = torch.rand(part.num_own_src, _WIDTH)
    rounds.sums(x), rounds.transposed_sums(x)  # makes tiles
    peaks = []
    for sums in (rounds.sums, rounds.transposed_sums):
        if window is not None:
            window.most = 0
        taken = peak_bytes(lambda sums=sums: sums(x))
        lent = 0 if window is None else 2 * window.most
        peaks.append((taken + lent) / x.nbytes - 1)
    return peaks[0], peaks[1]


def _strategies_in_flight(has_window: bool) -> dict[str, tuple[float, float, float]]:
    part, group = _dense(), dist.group.WORLD
    window = MappedWindow(group) if has_window else None
    strategies = ExchangeStrategies(part, group, window)  # type: ignore[arg-type]
    rows = [Rows(_OWN, [_OWN] * r + [0] + [_OWN] * (4 - r)) for r in range(5)]
    found = {}
    for strategy in (strategies.default, BROADCAST, HALO_BLOCKING, ExchangeStrategy(chunks=2)):
        estimate = rows_in_flight(strategy, rows, has_window) / _OWN
        found[str(strategy)] = (*_in_buffers(strategies[strategy], part, window), estimate)
    return found


@pytest.mark.parametrize("has_window", [False, True])
def test_rows_in_flight_are_a_few_buffers_on_five_ranks(five_ranks, has_window):
    for of_rank in five_ranks.run(_strategies_in_flight, has_window):
        default, *_ = of_rank
        assert default == "halo in 8"
        assert max(of_rank[default]) <= (2.1 if has_window else 1.6)
        assert max(of_rank["broadcast"]) <= 2.1
        for name, (*measured, estimate) in of_rank.items():
            # What is estimated is enough, and not much more than is taken.
            assert 0.75 * estimate <= max(measured) <= estimate + 0.4, (name, measured, estimate)


def _remote_in_flight() -> tuple[float, float]:
    part, window = _dense(), MappedWindow(dist.group.WORLD)
    halo = ExchangeStrategies(part, dist.group.WORLD, window)  # type: ignore[arg-type]
    rounds = halo[ExchangeStrategy.named("remote")]
    assert isinstance(rounds, RemoteReads)
    return _in_buffers(rounds, part, window)


def test_remote_reads_have_the_window_and_back_the_halos_rounds(five_ranks):
    for forwards, backwards in five_ranks.run(_remote_in_flight):
        assert forwards <= 2.1 and backwards <= 2.1


def _fetched(has_window: bool) -> float:
    part, group = _dense(), dist.group.WORLD
    window = MappedWindow(group) if has_window else None
    halo = Halo(part, group, window)  # type: ignore[arg-type]
    x = torch.rand(part.num_own_src, _WIDTH)
    taken = peak_bytes(lambda: halo.give_back(halo.fetch(x)))
    lent = 0 if window is None else 2 * window.most
    return (taken + lent) / x.nbytes - 4


@pytest.mark.parametrize("has_window", [False, True])
def test_a_whole_halo_is_sent_rank_by_rank(five_ranks, has_window):
    """Beside itself and its sum it takes what goes from one rank to another."""
    for beside in five_ranks.run(_fetched, has_window):
        assert beside <= (4.1 if has_window else 2.1)


def _candidates(neighbours: int, has_window: bool) -> tuple[list[str], str]:
    part, group = _part(neighbours), dist.group.WORLD
    window = MappedWindow(group) if has_window else None
    strategies = ExchangeStrategies(part, group, window)  # type: ignore[arg-type]
    return sorted(map(str, strategies.candidates)), str(strategies.default)


@pytest.mark.parametrize("has_window", [False, True])
def test_on_two_ranks_every_strategy_is_tried(has_window):
    rows = [Rows(_OWN, [0, _OWN]), Rows(_OWN, [_OWN, 0])]
    for strategy in (BROADCAST, HALO_BLOCKING, ExchangeStrategy(chunks=1)):
        assert rows_in_flight(strategy, rows, has_window) <= (5 if has_window else 3) * _OWN


@pytest.mark.parametrize("has_window", [False, True])
def test_what_grows_with_the_ranks_is_not_tried(five_ranks, has_window):
    remote = ["remote reads, ps=16 dist=8 wpb=2"] * has_window
    dense = five_ranks.run(_candidates, 5 * _OWN, has_window)
    assert dense == [(["broadcast", "halo in 4", "halo in 8", *remote], "halo in 8")] * 5
    # A small halo may come in few chunks, or at first.
    few = ["broadcast", "halo at first", "halo in 1", "halo in 2", "halo in 4", "halo in 8"]
    small = five_ranks.run(_candidates, 20, has_window)
    assert small == [([*few, *remote], "halo in 2")] * 5


_SCORES = {"additive": (2, 2, _WIDTH // 2), "gatv2": (2, _WIDTH // 2), "dot": None}


def _attended(rounds, kind: str, of_out: torch.Tensor) -> list[torch.Tensor]:
    """Attention to own rows, which are the same for all strategies, and their gradients."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    values = torch.rand(_OWN, 2, _WIDTH // 2, generator=draw).requires_grad_()
    shape = _SCORES[kind]
    vector = None if shape is None else torch.linspace(-1, 1, math.prod(shape)).view(shape)
    out = attend(rounds, values, None, None, vector, None, AttentionScore(kind, 0.2, 0.1, 0.0))
    out.backward(of_out)
    return [out.detach(), values.grad]


def _attention_in_flight(kind: str, has_window: bool) -> dict[str, float]:
    part, group = _dense(), dist.group.WORLD
    window = MappedWindow(group) if has_window else None
    strategies = ExchangeStrategies(part, group, window)  # type: ignore[arg-type]
    of_out = torch.rand(_OWN, 2, _WIDTH // 2)
    expected = _attended(ExchangeStrategies(part, group)[HALO_BLOCKING], kind, of_out)
    found = {}
    names = ("halo in 8", "halo in 4", "broadcast", *(["remote"] if has_window else []))
    for name in names:
        rounds = strategies[ExchangeStrategy.named(name)]
        for one, other in zip(_attended(rounds, kind, of_out), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        if window is not None:
            window.most = 0
        taken = peak_bytes(lambda rounds=rounds: _attended(rounds, kind, of_out))
        found[name] = (taken + (0 if window is None else 2 * window.most)) / of_out.nbytes
    return found


@pytest.mark.parametrize(
    ("kind", "has_window"),
    [("additive", False), ("additive", True), ("gatv2", False), ("dot", True)],
)
def test_attention_takes_a_few_buffers_on_five_ranks(five_ranks, kind, has_window):
    """Its input and output with their gradients are four; a round's rows come, and go back."""
    for of_rank in five_ranks.run(_attention_in_flight, kind, has_window):
        at_once = 0 if kind == "additive" else 1.9
        assert of_rank["halo in 8"] <= 6.5 + at_once
        assert max(of_rank.values()) <= 9.5 + at_once


def _gradient_of_maxima() -> float:
    part = _dense()
    strategies = ExchangeStrategies(part, dist.group.WORLD)
    x = torch.rand(part.num_own_src, _WIDTH, requires_grad=True)
    out = extreme(strategies[strategies.default], "copy_lhs", "max", x, None)
    of_out = torch.rand_like(out)
    return peak_bytes(lambda: torch.autograd.grad(out, x, of_out)) / x.nbytes


def test_the_gradient_of_maxima_fetches_nothing(five_ranks):
    """It makes a round's rows, and takes back what others have made of its own."""
    assert max(five_ranks.run(_gradient_of_maxima)) <= 2.6
