from __future__ import annotations

import itertools
import json
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange import tuner as auto
from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.cost import Model, RankLoad, Rates
from dgl_mgpu.distributed.exchange.schedule import Sum
from dgl_mgpu.distributed.exchange.strategies import (
    BROADCAST,
    HALO_BLOCKING,
    STEPS,
    ExchangeStrategies,
    ExchangeStrategy,
    Rows,
    rows_in_flight,
)
from dgl_mgpu.distributed.exchange.tuner import Auto, Case, search
from dgl_mgpu.distributed.local_part import Part, cut
from dgl_mgpu.distributed.partition import ranges
from dgl_mgpu.ops.spmm_remote import Pipeline
from tests.distributed.exchange.test_exchange import _Whole
from tests.distributed.exchange.windows import MappedWindow
from tests.distributed.graphs import KINDS, edges

#: Of three ranks: both others' rows at once, one's after the other's, and each one's in two.
WHOLE, HALF, QUARTER = (ExchangeStrategy(chunks=count) for count in (1, 2, 4))
REMOTE = ExchangeStrategy(pipeline=Pipeline())
PIPELINES = [
    ExchangeStrategy(pipeline=Pipeline(*each)) for each in itertools.product(*STEPS.values())
]
FLOAT64 = torch.float64

Cost = Callable[[ExchangeStrategy, int], float]


def _always(pipeline: Pipeline) -> bool:
    return True


def _searched(
    candidates: list[ExchangeStrategy],
    cost: Callable[[ExchangeStrategy], float],
    fills=_always,
    fits=_always,
):
    """What a search ends with, and what it has tried."""
    steps, tried = search(candidates, fills, fits), []
    asked = next(steps)
    while True:
        tried.append(asked[0])
        try:
            asked = steps.send(cost(asked[0]))
        except StopIteration as end:
            return end.value, tried


# -- the search ---------------------------------------------------------------------------------


def test_a_search_finds_the_fastest_of_all():
    candidates = [BROADCAST, WHOLE, HALF, ExchangeStrategy(chunks=4), ExchangeStrategy(chunks=7)]
    for seed in range(50):
        draw = random.Random(seed)
        cost = {strategy: draw.uniform(1, 2) for strategy in candidates}
        best, tried = _searched(candidates, cost.__getitem__)
        assert best == min(candidates, key=cost.__getitem__)
        assert set(tried) == set(candidates)


def test_a_search_of_pipelines_is_as_good_as_trying_all():
    for seed in range(50):
        draw = random.Random(seed)
        best_at = {name: draw.choice(steps) for name, steps in STEPS.items()}

        def cost(strategy: ExchangeStrategy, best_at=best_at) -> float:
            if strategy.pipeline is None:
                return 1e3
            ratios = (getattr(strategy.pipeline, name) / best for name, best in best_at.items())
            return sum(max(ratio, 1 / ratio) for ratio in ratios)

        best, tried = _searched([HALF, REMOTE], cost)
        assert best == ExchangeStrategy(pipeline=Pipeline(**best_at)) == min(PIPELINES, key=cost)
        assert len(set(tried)) <= len(PIPELINES) / 6


def test_with_parameters_that_depend_on_each_other_the_best_is_come_close_to():
    def cost(
        strategy: ExchangeStrategy,
    ) -> float:  # best at a product of 64, and then with a large ps
        if strategy.pipeline is None:
            return 100.0
        product = strategy.pipeline.ps * strategy.pipeline.dist * strategy.pipeline.wpb
        return max(product / 64, 64 / product) + 0.1 / strategy.pipeline.ps

    best, _ = _searched([HALF, REMOTE], cost)
    assert cost(best) <= 1.05 * min(map(cost, PIPELINES))


def test_what_comes_close_is_timed_once_more():
    first = {BROADCAST: 1.0, WHOLE: 1.05, HALF: 1.5}
    later = {BROADCAST: 1.1, WHOLE: 1.05}
    found: dict[ExchangeStrategy, float] = {}

    def cost(strategy: ExchangeStrategy) -> float:
        seconds = later[strategy] if strategy in found else first[strategy]
        found[strategy] = seconds
        return seconds

    best, tried = _searched(list(first), cost)
    assert best == WHOLE and tried.count(HALF) == 1


def test_short_calls_are_timed_more_often_and_the_fastest_of_them_counts():
    slowed = {BROADCAST: iter([0.9e-3, 0.3e-3]), WHOLE: iter([0.5e-3, 0.6e-3])}
    best, tried = _searched([BROADCAST, WHOLE], lambda strategy: next(slowed[strategy]))
    assert best == BROADCAST and tried == [BROADCAST, BROADCAST, WHOLE, WHOLE]


def test_hopeless_remote_reads_are_not_searched():
    best, tried = _searched([HALF, REMOTE], lambda strategy: 1.0 if strategy == HALF else 2.5)
    assert best == HALF and tried == [HALF, REMOTE]


def test_pipelines_that_leave_multiprocessors_idle_are_not_tried():
    def fills(pipeline: Pipeline) -> bool:
        return pipeline.dist * pipeline.wpb <= 32

    best, tried = _searched(
        [REMOTE], lambda strategy: 1 / (strategy.pipeline.dist * strategy.pipeline.wpb), fills
    )
    assert all(fills(strategy.pipeline) for strategy in tried)
    assert best.pipeline.dist * best.pipeline.wpb == 32


# -- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_loads_count_edges_and_rows(kind):
    for part in _three_parts(kind):
        load = RankLoad.of(part)
        indptr, columns, _ = part.relation.csc()
        positions = torch.cat(
            [torch.arange(part.num_own_src) + part.src.bounds[part.rank], part.halo]
        )
        owners = part.src.owners(positions[columns.long()])
        assert load.edges == [int((owners == rank).sum()) for rank in range(3)]
        assert sum(load.edges) == int(indptr[-1])
        assert (load.wanted, load.sending) == (part.wanted, len(part.sent))


def _three_parts(kind: str) -> list[Part]:
    num_src, num_dst, src, dst = edges(kind)
    of_src, of_dst = (ranges(None, torch.ones(count), 3) for count in (num_src, num_dst))
    return [cut(src, dst, of_src, of_dst, rank) for rank in range(3)]


RATES = Rates(link=3e11, network=2e10, memory=2e12, latency=2e-5, multiprocessors=132)


def _model(edges_from_others: int, wanted: int, rank_size: int = 10**6, ranks: int = 4) -> Model:
    """All ranks have as much, and all other ranks' rows are as wanted."""
    loads = [
        RankLoad(
            rank_size,
            rank_size,
            [10 * rank_size if owner == rank else edges_from_others for owner in range(ranks)],
            [0 if owner == rank else wanted for owner in range(ranks)],
            (ranks - 1) * wanted,
        )
        for rank in range(ranks)
    ]
    return Model(loads, RATES, 4)


def test_a_broadcast_costs_more_than_a_small_halo():
    model = _model(edges_from_others=10**6, wanted=10**4)
    assert model.seconds(WHOLE, 512) < model.seconds(BROADCAST, 512)


def test_reading_a_row_for_each_edge_costs_more_than_once():
    dense, sparse = _model(5 * 10**7, 10**6), _model(10**5, 10**5)
    assert dense.seconds(WHOLE, 512) < dense.seconds(REMOTE, 512)
    assert sparse.seconds(REMOTE, 512) <= 1.2 * sparse.seconds(WHOLE, 512)


def test_more_chunks_overlap_better_but_begin_more_often():
    model = _model(10**7, 10**6)
    assert model.seconds(ExchangeStrategy(chunks=3), 1024) < model.seconds(WHOLE, 1024)
    empty = _model(10**2, 10**2, rank_size=10**3)
    assert empty.seconds(ExchangeStrategy(chunks=3), 4) > empty.seconds(WHOLE, 4)


def test_rows_that_go_to_a_machine_once_save_the_network():
    one = _model(10**7, 9 * 10**5)
    machines = [[0, 1], [2, 3]]
    two = Model(one._loads, RATES, 4, machines=machines)
    slower = two.seconds(WHOLE, 512)
    assert slower > one.seconds(WHOLE, 512)  # as rows come over the network
    by_machine = ExchangeStrategy.named("halo by machine")
    assert two.seconds(by_machine, 512) < 0.65 * slower
    # Where nobody wants what another one does, nothing is saved, and rows are sent twice.
    few = Model(_model(10**5, 10**4)._loads, RATES, 4, machines=machines)
    assert few.seconds(by_machine, 512) > few.seconds(WHOLE, 512)


def test_rows_by_machine_take_as_many_buffers_for_any_number_of_machines():
    for count in (2, 4, 16):
        size = 4 * count
        machines = [list(range(first, first + 4)) for first in range(0, size, 4)]
        rows = [Rows(100, [0 if o == r else 100 for o in range(size)]) for r in range(size)]
        in_flight = rows_in_flight(ExchangeStrategy(is_by_machine=True), rows, False, machines)
        assert in_flight == 300


def test_estimates_are_of_the_slowest_rank():
    model = _model(10**6, 10**5)
    loads = list(model._loads)
    loads[2] = loads[2]._replace(edges=[10**8] * 4)
    slower = Model(loads, model._rates, 4)
    for strategy in (BROADCAST, WHOLE, HALF, REMOTE):
        assert slower.seconds(strategy, 256) > model.seconds(strategy, 256)
        assert slower.extra_bytes(strategy, 256) > model.extra_bytes(strategy, 256)


def test_a_broadcast_needs_room_for_whole_ranks():
    model = _model(10**6, 10**3)
    more = model.extra_bytes(BROADCAST, 512) - model.extra_bytes(WHOLE, 512)
    assert more > 10**6 * 512


def test_rows_shared_by_warps_need_room():
    model = _model(10**6, 10**5)
    many = ExchangeStrategy(pipeline=Pipeline(ps=1, dist=1))
    assert model.extra_bytes(many, 512) > model.extra_bytes(REMOTE, 512) + 2 * 10**6 * 512


def test_a_pipeline_without_room_is_not_tried():
    def fits(pipeline: Pipeline) -> bool:
        return pipeline.ps >= REMOTE.pipeline.ps and pipeline.dist >= REMOTE.pipeline.dist

    def cost(strategy: ExchangeStrategy) -> float:  # the smaller the faster
        return strategy.pipeline.ps + strategy.pipeline.dist + strategy.pipeline.wpb

    found, tried = _searched([REMOTE], cost, fits=fits)
    assert all(fits(strategy.pipeline) for strategy in tried)
    assert found.pipeline == Pipeline(REMOTE.pipeline.ps, REMOTE.pipeline.dist, 1)


def test_a_pipeline_fills_a_gpu_if_each_multiprocessor_has_a_block():
    model = _model(0, 0, rank_size=132 * 16, ranks=1)  # a pair a row, as rows have 10 edges
    assert model.fills(Pipeline(ps=16, dist=8, wpb=2))
    assert not model.fills(Pipeline(ps=16, dist=16, wpb=2))
    assert model.fills(Pipeline(ps=1, dist=16, wpb=8))  # ten pairs a row


def test_rates_are_known_without_timing():
    rates = Rates.of_this_machine(torch.device("cpu"))
    assert rates.link > 0 and rates.memory > 0 and rates.latency > 0


# -- ways ---------------------------------------------------------------------------------------


def test_names_tell_ways_apart():
    part = _three_parts("random")[0]
    of_gpus = ExchangeStrategies(part, None, object())  # type: ignore[arg-type]
    assert len(of_gpus.by_name) == 5 + len(PIPELINES)
    assert all(
        of_gpus.by_name[str(strategy)] == strategy for strategy in [*of_gpus.candidates, *PIPELINES]
    )
    without = ExchangeStrategies(part, None)
    expected = [BROADCAST, HALO_BLOCKING, WHOLE, HALF, QUARTER]
    assert without.candidates == expected == list(without.by_name.values())
    assert without.default == HALF


def _readers() -> None:
    whole = _Whole("skewed", "shuffled")
    windows = MappedWindow(whole.group)
    kinds = ExchangeStrategies(whole.part, whole.group, windows)  # type: ignore[arg-type]
    x = whole.rows(whole.of_src.num_nodes, 4)
    expected = whole.own_dst(whole.matrix() @ x)
    made = []
    for strategy in (
        REMOTE,
        ExchangeStrategy(pipeline=Pipeline(ps=2, dist=1)),
        ExchangeStrategy(pipeline=Pipeline(ps=2)),
    ):
        assert torch.equal(kinds[strategy].sums(whole.own_src(x)), expected)
        assert kinds[strategy].pipeline == strategy.pipeline
        made.append(kinds[strategy])
    assert made[0] is not made[1] is made[2]
    assert made[0].tiles is made[1].tiles
    # Neither disturbs the other's pairs.
    assert [each._known_pairs.ps for each in made[:2]] == [16, 2]
    kinds.keep([HALF])
    assert kinds[REMOTE] is not made[0]


def test_pipelines_share_tiles(ranks):
    ranks.run(_readers)


# -- choosing -----------------------------------------------------------------------------------


class _Watch:
    def __init__(self, clock: _Clock) -> None:
        self._clock, self._begin = clock, clock.now

    def ends(self, stage: str) -> None:
        self._spent = self._clock.now - self._begin

    def seconds(self) -> dict[str, float]:
        return {"sums": self._spent}


class _Clock:
    now = 0.0


class _TimedWays(ExchangeStrategies):
    """Ways that take as long as is said, by way and rank; and what was taken.

    All are candidates, however many rows they have in flight.
    """

    def __init__(self, whole: _Whole, cost: Cost, window: MappedWindow | None) -> None:
        super().__init__(whole.part, whole.group, window)  # type: ignore[arg-type]
        self.clock, self.taken = _Clock(), []
        self.alive = weakref.WeakSet()
        self._cost = cost

    def _is_bounded(self, strategy: ExchangeStrategy, part: int = 1) -> bool:
        return True

    def __getitem__(self, strategy: ExchangeStrategy):
        self.taken.append(strategy)
        self.clock.now += self._cost(strategy, self.part.rank)
        made = super().__getitem__(strategy)
        self.alive.add(made)
        return made


def _auto(
    whole: _Whole, cost: Cost, cached: bool = False, window: MappedWindow | None = None
) -> tuple[Auto, _TimedWays]:
    """Ways are all estimated to be as fast."""
    timed = _TimedWays(whole, cost, window)
    rounds = Auto(timed, stopwatch=lambda: _Watch(timed.clock), cached=cached)
    rounds.model.seconds = lambda *_: 1.0  # type: ignore[method-assign]
    return rounds, timed


def _until_found(rounds: Auto, rows: torch.Tensor, transposed: bool = False) -> ExchangeStrategy:
    for _ in range(50):
        (rounds.transposed_sums if transposed else rounds.sums)(rows)
        case = Case(transposed, rows.shape[1] * rows.element_size(), rows.dtype, 0)
        if case in rounds.found:
            return rounds.found[case]
    raise AssertionError("nothing was found")


def _in_folder(folder: str, check: Callable[[], None]) -> None:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    try:
        check()
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _slowest_decides() -> None:
    # By each rank's own clock another way is the fastest; by the slowest's it is the halo whole.
    own = [
        {BROADCAST: 1.0, WHOLE: 3.0, HALF: 2.0, HALO_BLOCKING: 4.0, QUARTER: 9.0},
        {BROADCAST: 3.0, WHOLE: 3.5, HALF: 3.0, HALO_BLOCKING: 2.0, QUARTER: 9.0},
        {BROADCAST: 9.0, WHOLE: 3.0, HALF: 5.0, HALO_BLOCKING: 3.8, QUARTER: 9.0},
    ]
    whole = _Whole("random", "shuffled")
    rounds, timed = _auto(whole, lambda strategy, rank: own[rank][strategy])
    rows = whole.own_src(whole.rows(whole.of_src.num_nodes, 3))
    assert _until_found(rounds, rows) == WHOLE
    found: list[list[ExchangeStrategy]] = [None] * 3  # type: ignore[list-item]
    dist.all_gather_object(found, timed.taken)
    assert found[0] == found[1] == found[2] and set(found[0]) >= set(own[0])


def test_the_slowest_rank_decides_and_all_take_the_same(ranks):
    ranks.run(_slowest_decides)


def _one_each() -> None:
    whole = _Whole("random", "shuffled")
    narrow = whole.own_src(whole.rows(whole.of_src.num_nodes, 2))
    fast = {"now": BROADCAST}
    rounds, timed = _auto(whole, lambda strategy, _: 1.0 if strategy == fast["now"] else 2.0)
    assert _until_found(rounds, narrow) == BROADCAST
    fast["now"] = HALF
    assert _until_found(rounds, narrow.repeat(1, 2)) == HALF
    assert _until_found(rounds, narrow.float()) == HALF
    fast["now"] = WHOLE
    own_dst = whole.own_dst(whole.rows(whole.of_dst.num_nodes, 2))
    assert _until_found(rounds, own_dst, transposed=True) == WHOLE
    # What was found stays.
    before = len(timed.taken)
    rounds.sums(narrow)
    rounds.transposed_sums(own_dst)
    assert timed.taken[before:] == [BROADCAST, WHOLE]
    # So many bytes have been looked at; weights are another case.
    rounds.sums(narrow, torch.ones(len(whole.part.edges), 1, dtype=FLOAT64))
    assert timed.taken[-1] == timed.taken[0]
    assert len(rounds.found) == 4


def test_each_width_type_and_direction_has_its_own(ranks):
    ranks.run(_one_each)


def _equal_sums(kind: str) -> None:
    whole = _Whole(kind, "shuffled")
    weights = whole.rows(len(whole.src), 1)
    matrix = whole.matrix(weights[:, 0])
    all_x = whole.rows(whole.of_src.num_nodes, 2).requires_grad_()
    cubes = ((matrix @ all_x) ** 3).sum()
    (expected,) = torch.autograd.grad(cubes, all_x)
    rounds = Auto(ExchangeStrategies(whole.part, whole.group), cached=False)
    mine = weights[whole.part.edges]
    for _ in range(80):
        x = whole.own_src(all_x.detach()).requires_grad_()
        total = Sum.apply(rounds, False, mine, x)
        assert torch.equal(total, whole.own_dst((matrix @ all_x).detach()))
        (found,) = torch.autograd.grad((total**3).sum(), x)
        assert torch.equal(found, whole.own_src(expected))
    assert len(rounds.found) == 2  # forwards and backwards


@pytest.mark.parametrize("kind", ["random", "no edges", "two nodes"])
def test_sums_and_gradients_are_right_from_the_first_call(ranks, kind):
    ranks.run(_equal_sums, kind)


def _remote() -> None:
    whole = _Whole("skewed", "shuffled")
    best = ExchangeStrategy(pipeline=Pipeline(ps=8, dist=4, wpb=4))

    def cost(strategy: ExchangeStrategy, _: int) -> float:
        if strategy.pipeline is None:
            return 8.0
        ratios = (getattr(strategy.pipeline, name) / getattr(best.pipeline, name) for name in STEPS)
        return sum(max(ratio, 1 / ratio) for ratio in ratios)

    rounds, timed = _auto(whole, cost, window=MappedWindow(whole.group))
    rounds.model.fills = _always  # type: ignore[method-assign]
    x = whole.rows(whole.of_src.num_nodes, 3)
    expected = whole.own_dst(whole.matrix() @ x)
    for _ in range(100):
        assert torch.equal(rounds.sums(whole.own_src(x)), expected)
    assert list(rounds.found.values()) == [best] == timed.taken[-1:]
    y = whole.own_dst(whole.rows(whole.of_dst.num_nodes, 3))
    before = len(timed.taken)
    assert _until_found(rounds, y, transposed=True).pipeline is None
    assert all(strategy.pipeline is None for strategy in timed.taken[before:])


def test_pipelines_are_searched_while_sums_are_right(ranks):
    ranks.run(_remote)


def _bits() -> None:
    whole = _Whole("skewed", "shuffled")
    rounds, _ = _auto(whole, lambda strategy, _: 1.0 + (strategy != HALF))
    x = torch.randn(whole.part.num_own_src, 3, dtype=FLOAT64)
    assert _until_found(rounds, x) == HALF
    named = Chunks(whole.part, whole.group, 2)
    assert torch.equal(rounds.sums(x), named.sums(x))
    assert torch.equal(rounds.sums(x), rounds.sums(x))


def test_once_found_sums_have_the_bits_of_the_way_named(ranks):
    ranks.run(_bits)


def _forgets() -> None:
    whole = _Whole("skewed", "shuffled")
    rounds, timed = _auto(whole, lambda strategy, _: 1.0 + (strategy != WHOLE))
    x = whole.own_src(whole.rows(whole.of_src.num_nodes, 3))
    assert _until_found(rounds, x) == WHOLE
    assert set(timed.taken) == set(timed.candidates)
    rounds.sums(x)
    assert list(timed.alive) == [timed[WHOLE]]


def test_ways_that_lost_are_forgotten(ranks):
    ranks.run(_forgets)


def _nothing_to_choose() -> None:
    whole = _Whole("random", "shuffled")
    rounds, timed = _auto(whole, lambda strategy, _: 1.0)
    empty = whole.own_src(whole.rows(whole.of_src.num_nodes, 0))
    for _ in range(3):
        assert rounds.sums(empty).shape == (whole.part.num_own_dst, 0)
    assert set(timed.taken) == {timed.default} and not rounds.found


def test_rows_without_columns_need_no_choice(ranks):
    ranks.run(_nothing_to_choose)


def test_one_rank_needs_no_choice():
    _nothing_to_choose()
    whole = _Whole("random", "shuffled")
    rounds, timed = _auto(whole, lambda strategy, _: 1.0)
    x = whole.rows(whole.of_src.num_nodes, 3)
    for _ in range(3):
        assert torch.equal(rounds.sums(whole.own_src(x)), whole.own_dst(whole.matrix() @ x))
    assert not rounds.found and set(timed.taken) == {timed.default}


def _no_room() -> None:
    whole = _Whole("random", "shuffled")
    before = auto.free_bytes
    # One rank has none, which all ranks have to know.
    auto.free_bytes = lambda _: 0.0 if whole.rank == 1 else 1e12
    try:
        rounds, timed = _auto(whole, lambda strategy, _: 1.0)
        x = whole.own_src(whole.rows(whole.of_src.num_nodes, 3))
        needs = {strategy: rounds.model.extra_bytes(strategy, 24) for strategy in timed.candidates}
        least = min(needs, key=needs.__getitem__)
        assert _until_found(rounds, x) == least and set(timed.taken) == {least}
    finally:
        auto.free_bytes = before


def test_without_room_for_any_way_the_one_that_needs_least_is_taken(ranks):
    ranks.run(_no_room)


def _hopeless_estimates() -> None:
    whole = _Whole("random", "shuffled")
    rounds, timed = _auto(whole, lambda strategy, _: 1.0)
    estimates = {BROADCAST: 1.6, WHOLE: 1.4, HALF: 1.0, HALO_BLOCKING: 1.6, QUARTER: 1.6}
    rounds.model.seconds = lambda strategy, _: estimates[strategy]  # type: ignore[method-assign]
    _until_found(rounds, whole.own_src(whole.rows(whole.of_src.num_nodes, 3)))
    assert list(dict.fromkeys(timed.taken)) == [HALF, WHOLE]


def test_what_is_estimated_to_be_slow_is_not_tried(ranks):
    ranks.run(_hopeless_estimates)


def test_remote_reads_are_for_sums_of_rows():
    case = Case(False, 64, torch.float32, 1)
    assert case.allows(REMOTE)
    for other in (
        case._replace(transposed=True),
        case._replace(num_weights=2),
        case._replace(dtype=torch.int64),
    ):
        assert not other.allows(REMOTE) and other.allows(HALF)


# -- what is kept -------------------------------------------------------------------------------


def _prefer(fast: ExchangeStrategy) -> Cost:
    return lambda strategy, _: 1.0 if strategy == fast else 2.0


def _round_trip(folder: str) -> None:
    whole = _Whole("random", "shuffled")
    x = whole.own_src(whole.rows(whole.of_src.num_nodes, 3))

    def check() -> None:
        first, _ = _auto(whole, _prefer(WHOLE), cached=True)
        assert _until_found(first, x) == WHOLE
        dist.barrier()
        # Once found, it is taken at once, whatever would now be faster.
        again, timed = _auto(whole, _prefer(BROADCAST), cached=True)
        again.sums(x)
        assert timed.taken == [WHOLE] and list(again.found.values()) == [WHOLE]
        # Not for another width, ...
        wide, timed = _auto(whole, _prefer(BROADCAST), cached=True)
        assert _until_found(wide, x.repeat(1, 2)) == BROADCAST
        # ... another graph, ...
        other = _Whole("skewed", "shuffled")
        y = other.own_src(other.rows(other.of_src.num_nodes, 3))
        rounds, _ = _auto(other, _prefer(HALF), cached=True)
        assert _until_found(rounds, y) == HALF
        # ... or the same one partitioned otherwise.
        moved = _Whole("random", "order")
        z = moved.own_src(moved.rows(moved.of_src.num_nodes, 3))
        rounds, _ = _auto(moved, _prefer(HALF), cached=True)
        assert _until_found(rounds, z) == HALF
        dist.barrier()
        assert len(auto.FOUND.read()) == 4

    _in_folder(folder, check)


def test_what_was_found_is_taken_in_the_next_run(ranks, tmp_path):
    ranks.run(_round_trip, str(tmp_path))
    assert [path.name for path in (tmp_path / "dgl_mgpu").iterdir()] == ["exchanges.json"]


def _rewrites(folder: str, damage: str) -> None:
    whole = _Whole("random", "shuffled")
    x = whole.own_src(whole.rows(whole.of_src.num_nodes, 3))

    def check() -> None:
        first, _ = _auto(whole, _prefer(WHOLE), cached=True)
        assert _until_found(first, x) == WHOLE
        dist.barrier()
        if whole.rank == 0:
            text = auto.FOUND.path.read_text()
            auto.FOUND.path.write_text(_DAMAGES[damage](json.loads(text)))
        dist.barrier()
        again, _ = _auto(whole, _prefer(HALF), cached=True)
        assert _until_found(again, x) == HALF
        dist.barrier()
        assert list(auto.FOUND.read().values()) == ["halo in 2"]

    _in_folder(folder, check)


_DAMAGES = {
    "no JSON": lambda kept: json.dumps(kept)[:-5],
    "empty": lambda kept: "",
    "a list": lambda kept: "[]",
    "no findings": lambda kept: json.dumps({"format": kept["format"]}),
    "another format": lambda kept: json.dumps({**kept, "format": -1}),
    "an unknown way": lambda kept: _with_value(kept, "carrier pigeons"),
    "a way that there is not here": lambda kept: _with_value(kept, str(REMOTE)),
    "no name": lambda kept: _with_value(kept, 2),
}


def _with_value(kept: dict, value: object) -> str:
    return json.dumps({**kept, "found": dict.fromkeys(kept["found"], value)})


@pytest.mark.parametrize("damage", list(_DAMAGES))
def test_a_damaged_file_is_ignored_and_written_anew(ranks, tmp_path, damage):
    ranks.run(_rewrites, str(tmp_path), damage)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept"):
        auto.FOUND.keep({"case": "broadcast"})
    assert auto.FOUND.read() == {}


def test_what_others_found_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    auto.FOUND.keep({"one": "broadcast"})
    auto.FOUND.keep({"other": "halo in 2"})
    assert auto.FOUND.read() == {"one": "broadcast", "other": "halo in 2"}
    assert auto.FOUND.path == Path(tmp_path) / "dgl_mgpu" / "exchanges.json"
