"""The fastest strategy to exchange rows, found while a model trains.

MGG, section 4: a model tells what is worth trying, and the first iterations try it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.by_machine import ranks_by_machine
from dgl_mgpu.distributed.exchange.cost import Model, RankLoad, Rates
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning, Tile
from dgl_mgpu.distributed.exchange.strategies import STEPS, ExchangeStrategies, ExchangeStrategy
from dgl_mgpu.distributed.memory import free_bytes
from dgl_mgpu.ops.spmm_remote import DTYPES, Pipeline
from dgl_mgpu.utils.stages import StageClock
from dgl_mgpu.utils.tuning_cache import TuningCache

#: How often a strategy is timed at first, and when it is one of the fastest.
_FIRST_TIMINGS, _FINAL_TIMINGS = 3, 7
#: Seconds below which a call's time is as much the host's, which is now and then held up: more
#: calls are timed then, of which the fastest was not.
_SHORT, _MORE_TIMINGS = 1e-3, 6
#: So many are timed again, if they are this close to the fastest.
_FINALISTS, _CLOSE = 3, 1.15
#: Remote reads that take so many times as long as the fastest strategy are searched no further.
_HOPELESS = 2.0

#: Yields a strategy and how often to time it, is sent the least seconds of a call; returns the
#: fastest strategy.
Search = Generator[tuple[ExchangeStrategy, int], float, ExchangeStrategy]

Condition = Callable[[Pipeline], bool]


def search(strategies: Sequence[ExchangeStrategy], fills: Condition, fits: Condition) -> Search:
    """Time each strategy, remote reads' parameters one by one, and the fastest once more.

    Of remote reads there is at most one strategy; ``fills`` and ``fits`` say whether a pipeline has
    work for the whole GPU, and whether there is memory for it.
    """
    seconds: dict[ExchangeStrategy, float] = {}
    for strategy in strategies:
        seconds[strategy] = yield from _timed(strategy)
    for strategy in strategies:
        if strategy.pipeline is not None and seconds[strategy] <= _HOPELESS * min(seconds.values()):
            yield from _climb(strategy.pipeline, seconds, fills, fits)
    in_order = sorted(seconds, key=seconds.__getitem__)
    finalists = [
        strategy
        for strategy in in_order[:_FINALISTS]
        if seconds[strategy] <= _CLOSE * seconds[in_order[0]]
    ]
    if len(finalists) == 1:
        return finalists[0]
    for strategy in finalists:
        seconds[strategy] = yield strategy, _FINAL_TIMINGS
    return min(finalists, key=seconds.__getitem__)


def _timed(strategy: ExchangeStrategy) -> Generator[tuple[ExchangeStrategy, int], float, float]:
    seconds = yield strategy, _FIRST_TIMINGS
    if seconds < _SHORT:
        seconds = min(seconds, (yield strategy, _MORE_TIMINGS))
    return seconds


def _climb(
    best: Pipeline, seconds: dict[ExchangeStrategy, float], fills: Condition, fits: Condition
) -> Generator[tuple[ExchangeStrategy, int], float, None]:
    """MGG's cross-iteration optimisation (section 4), one parameter after the other.

    It begins in the middle of the ranges rather than at ones, and where more of a parameter does
    not help tries less; MGG's retreat is another turn with the parameters found for the others.
    What was timed is looked up.
    """
    before = None
    while before != best:
        before = best
        for name, steps in STEPS.items():
            for direction in (1, -1):
                while True:
                    place = steps.index(getattr(best, name)) + direction
                    if not 0 <= place < len(steps):
                        break
                    tried = replace(best, **{name: steps[place]})
                    if (direction > 0 and not fills(tried)) or not fits(tried):
                        break
                    strategy = ExchangeStrategy(pipeline=tried)
                    if strategy not in seconds:
                        seconds[strategy] = yield from _timed(strategy)
                    if seconds[strategy] >= seconds[ExchangeStrategy(pipeline=best)]:
                        break
                    best = tried


#: Strategies that are estimated to take so many times as long as the fastest are not tried.
_WORTH_TRYING = 1.5
#: Calls that are timed together: of one alone, the launch may take longer than the work.
_CALLS = 4
_ACTION = "choose how to exchange rows"
#: Which strategy was the fastest.
FOUND = TuningCache("exchanges.json", 1, str)


class Case(NamedTuple):
    """What the fastest strategy depends on, besides the graph and the machine."""

    transposed: bool
    row_bytes: int
    dtype: torch.dtype
    num_weights: int  # of an edge; 0 for none

    def __str__(self) -> str:
        what = "transposed sums" if self.transposed else "sums"
        return f"{what} of {self.row_bytes} B, {self.dtype}, {self.num_weights} weights"

    def allows(self, strategy: ExchangeStrategy) -> bool:
        """Whether a strategy can do these sums: not all are a matter of reading rows."""
        may_be_read = not self.transposed and self.num_weights <= 1 and self.dtype in DTYPES
        return strategy.pipeline is None or may_be_read


class _Trials:
    """A search under way: the strategy that is tried now, and the stopwatches of its calls."""

    def __init__(self, steps: Search) -> None:
        self._steps = steps
        self.strategy, self._calls = next(steps)
        self.watches: list[StageClock] = []

    @property
    def enough(self) -> bool:
        return len(self.watches) == self._calls

    def advance(self, seconds: float) -> ExchangeStrategy | None:
        """Go to the next strategy, given the time of this one; the fastest if that was all."""
        try:
            self.strategy, self._calls = self._steps.send(seconds)
        except StopIteration as end:
            return end.value
        self.watches = []
        return None


class Auto(CommSchedule):
    """Tries each strategy to exchange rows for some calls, and then takes the fastest.

    Each width and type of rows, with weights or without, forwards and backwards, has its own.  Sums
    are right whatever strategy is taken, but have the same bits from one call to the next only once
    it is found: strategies differ in the order of additions.  A named strategy always gives the
    same bits.

    With ``cached``, results are kept in a file (`FOUND`) for the same graph, partitioned the same
    way, on such a machine.  ``stopwatch`` makes what times a call.
    """

    def __init__(
        self,
        strategies: ExchangeStrategies,
        *,
        stopwatch: Callable[[], StageClock] | None = None,
        cached: bool = True,
    ) -> None:
        super().__init__(strategies.part, strategies.group)
        #: The fastest, of what has been tried.
        self.found: dict[Case, ExchangeStrategy] = {}
        self._strategies = strategies
        self._trials: dict[Case, _Trials] = {}
        self._device = strategies.part.halo.device
        self._stopwatch = stopwatch or partial(StageClock, self._device)
        self._cached = cached
        self._ranks = Communicator.of_all_machines()
        loads = self._ranks.all_gather(RankLoad.of(strategies.part))
        rates = self._ranks.broadcast_from_rank0(
            _ACTION, lambda: Rates.of_this_machine(self._device)
        )
        id_bytes = strategies.part.relation.idtype.itemsize
        self.model = Model(
            loads, rates, id_bytes, strategies.window is not None, ranks_by_machine()
        )
        self._about = f"{_graph(loads)}; {_machine(self._ranks, self._device)}"
        self._known = self._ranks.broadcast_from_rank0(_ACTION, FOUND.read) if cached else {}

    @cached_property
    def _default(self) -> CommSchedule:
        """For all but sums; kept whatever is found for these."""
        return self._strategies[self._strategies.default]

    @property
    def tiles(self) -> list[Tile]:
        return self._default.tiles

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        return self._default.columns()

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        return self._default.start(number, rows)

    def start_return(
        self, number: int, rows: torch.Tensor, *, own: torch.Tensor | None = None
    ) -> Returning:
        return self._default.start_return(number, rows, own=own)

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self._sum(False, rows, weights)

    def transposed_sums(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._sum(True, rows, weights)

    def _sum(
        self, transposed: bool, rows: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        num_weights = 0 if weights is None else math.prod(weights.shape[1:])
        case = Case(transposed, row_bytes, rows.dtype, num_weights)

        def sum_by(strategy: ExchangeStrategy) -> torch.Tensor:
            rounds = self._strategies[strategy]
            return (rounds.transposed_sums if transposed else rounds.sums)(rows, weights)

        if self.part.num_ranks == 1 or row_bytes == 0:
            return sum_by(self._strategies.default)
        if case not in self.found and case not in self._trials:
            self._begin(case)
        if case in self.found:
            return sum_by(self.found[case])
        return self._try(case, sum_by)

    def _begin(self, case: Case) -> None:
        cached = self._strategies.by_name.get(self._known.get(self._key(case), ""))
        if cached is not None:
            self.found[case] = cached
            return
        room = min(self._ranks.all_gather(free_bytes(self._device)))
        strategies = self._worth_trying(case, room)
        if len(strategies) == 1:
            self.found[case] = strategies[0]
        else:

            def fits(pipeline: Pipeline) -> bool:
                strategy = ExchangeStrategy(pipeline=pipeline)
                return self.model.extra_bytes(strategy, case.row_bytes) <= room

            self._trials[case] = _Trials(search(strategies, self.model.fills, fits))

    def _worth_trying(self, case: Case, room: float) -> list[ExchangeStrategy]:
        """Strategies that may be the fastest and have room, the most promising first."""
        allowed = [strategy for strategy in self._strategies.candidates if case.allows(strategy)]
        needs = {strategy: self.model.extra_bytes(strategy, case.row_bytes) for strategy in allowed}
        fitting = [strategy for strategy in allowed if needs[strategy] <= room]
        if not fitting:
            return [min(needs, key=needs.__getitem__)]
        seconds = {strategy: self.model.seconds(strategy, case.row_bytes) for strategy in fitting}
        in_order = sorted(seconds, key=seconds.__getitem__)
        limit = _WORTH_TRYING * seconds[in_order[0]]
        return [strategy for strategy in in_order if seconds[strategy] <= limit]

    def _try(self, case: Case, sum_by: Callable[[ExchangeStrategy], torch.Tensor]) -> torch.Tensor:
        trials = self._trials[case]
        # Once before it is timed: that makes tiles and kernels, and keeps the GPU busy while the
        # host prepares what is timed, as it does in a training.
        sum_by(trials.strategy)
        if self.group is not None:  # begin at once: else ranks that are early wait while timed
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.group)
        watch = self._stopwatch()
        for _ in range(_CALLS):
            total = sum_by(trials.strategy)
        watch.ends("sums")
        trials.watches.append(watch)
        if trials.enough:
            self._advance(case, trials)
        return total

    def _advance(self, case: Case, trials: _Trials) -> None:
        # From the last to the first: the GPU is waited for once.
        spent = [sum(watch.seconds().values()) / _CALLS for watch in reversed(trials.watches)]
        of_calls = zip(*self._ranks.all_gather(spent), strict=True)
        # The least: what disturbs a call only makes it longer.
        fastest = trials.advance(min(map(max, of_calls)))
        if fastest is not None:
            self.found[case] = fastest
            del self._trials[case]
            if self._cached and self._ranks.rank == 0:
                FOUND.keep({self._key(case): str(fastest)})
        current = (other.strategy for other in self._trials.values())
        self._strategies.keep({*self.found.values(), *current})

    def _key(self, case: Case) -> str:
        return f"{self._about}; {case}"


def _graph(loads: list[RankLoad]) -> str:
    """Tells graphs and their partitions apart."""
    nodes = sum(load.own_src for load in loads)
    edges = sum(sum(load.edges) for load in loads)
    digest = hashlib.sha256(repr(loads).encode()).hexdigest()[:16]
    return f"{nodes} nodes, {edges} edges, parts {digest}"


def _machine(ranks: Communicator, where: torch.device) -> str:
    """What times depend on, of all of the ranks' machines."""
    if where.type == "cuda":
        name = f"{torch.cuda.get_device_name(where)}, CUDA {torch.version.cuda}"
    else:
        name = f"CPU with {torch.get_num_threads()} threads"
    name += f", torch {torch.__version__}, {Communicator.of_this_machine().size} on a machine"
    names = sorted(set(ranks.all_gather(name)))
    return f"{ranks.size} x {' and '.join(names)}"
