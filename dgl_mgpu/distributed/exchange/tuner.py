"""The fastest strategy to exchange rows, found while a model trains.

MGG, section 4: a model tells what is worth trying, and the first iterations try it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.cost import Model, RankLoad, Rates
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning
from dgl_mgpu.distributed.exchange.search import Search, search
from dgl_mgpu.distributed.exchange.strategies import ExchangeStrategies
from dgl_mgpu.distributed.exchange.strategy import ExchangeStrategy
from dgl_mgpu.distributed.memory import free_bytes
from dgl_mgpu.ops.spmm_remote import DTYPES, Pipeline
from dgl_mgpu.utils.stages import StageClock
from dgl_mgpu.utils.tuning_cache import TuningCache

#: Ways that are estimated to take so many times as long as the fastest are not tried.
_WORTH_TRYING = 1.5
#: Calls that are timed together: of one alone, the launch may take longer than the work.
_CALLS = 4
_ASKED = "choose how to exchange rows"
#: Which strategy was the fastest.
FOUND = TuningCache("exchanges.json", 1, str)


class Case(NamedTuple):
    """What the fastest strategy depends on, beside the graph and the machine.

    Attributes
    ----------
    transposed : bool
    row_bytes : int
    dtype : torch.dtype
    num_weights : int
        Of an edge; 0 for none.
    """

    transposed: bool
    row_bytes: int
    dtype: torch.dtype
    num_weights: int

    def __str__(self) -> str:
        what = "transposed sums" if self.transposed else "sums"
        return f"{what} of {self.row_bytes} B, {self.dtype}, {self.num_weights} weights"

    def allows(self, strategy: ExchangeStrategy) -> bool:
        """Whether a strategy is one of its own: not all sums are a matter of reading rows."""
        may_be_read = not self.transposed and self.num_weights <= 1 and self.dtype in DTYPES
        return strategy.pipeline is None or may_be_read


class Stopwatch(Protocol):
    """Runs from when it is made; see `StageClock`."""

    def ends(self, stage: str) -> None: ...

    def seconds(self) -> dict[str, float]: ...


class _Trials:
    """A search under way.

    Attributes
    ----------
    strategy : ExchangeStrategy
        What is tried now.
    watches : list of Stopwatch
        Of its calls so far.
    """

    def __init__(self, steps: Search) -> None:
        self._steps = steps
        self._begin(next(steps))

    def _begin(self, asked: tuple[ExchangeStrategy, int]) -> None:
        self.strategy, self._calls = asked
        self.watches: list[Stopwatch] = []

    @property
    def enough(self) -> bool:
        return len(self.watches) == self._calls

    def go_on(self, seconds: float) -> ExchangeStrategy | None:
        """Go on to the next strategy, after one that takes so long; the fastest if that was all."""
        try:
            self._begin(self._steps.send(seconds))
        except StopIteration as end:
            return end.value
        return None


class Auto(CommSchedule):
    """Takes each strategy to exchange rows for some calls, and then the one that was the fastest.

    Each width and type of rows, with weights or without, forwards and backwards, has its own.
    Sums are right whatever strategy is taken, but have the same bits from one call to the next only
    once it is found: strategies differ in the order of additions.  A strategy that is named gives
    the same bits always.

    What was found is kept in a file (`FOUND`) for the same graph, partitioned the same
    strategy, on such a machine.

    Parameters
    ----------
    strategies : ExchangeStrategies
        That there are between the ranks.
    stopwatch : callable, optional
        Makes what times a call, by default a `StageClock` of the part's device.
    cached : bool
        Whether to use what was found before, and to keep what is found.

    Attributes
    ----------
    found : dict of Case to ExchangeStrategy
        The fastest, of what has been tried out.
    model : Model
    """

    def __init__(
        self,
        strategies: ExchangeStrategies,
        *,
        stopwatch: Callable[[], Stopwatch] | None = None,
        cached: bool = True,
    ) -> None:
        super().__init__(strategies.part, strategies.group)
        self.found: dict[Case, ExchangeStrategy] = {}
        self._strategies = strategies
        self._trials: dict[Case, _Trials] = {}
        self._device = strategies.part.halo.device
        self._stopwatch = stopwatch or partial(StageClock, self._device)
        self._cached = cached
        self._ranks = Communicator.of_all_machines()
        loads = self._ranks.all_gather(RankLoad.of(strategies.part))
        rates = self._ranks.broadcast_from_rank0(
            _ASKED, lambda: Rates.of_this_machine(self._device)
        )
        self.model = Model(loads, rates, strategies.part.relation.idtype.itemsize)
        self._about = f"{_graph(loads)}; {_machine(self._ranks, self._device)}"
        self._known = self._ranks.broadcast_from_rank0(_ASKED, FOUND.read) if cached else {}

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        return self._strategies[self._strategies.default].columns()

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        return self._strategies[self._strategies.default].start(number, rows)

    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        return self._strategies[self._strategies.default].start_return(number, rows)

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self._summed(False, rows, weights)

    def transposed_sums(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._summed(True, rows, weights)

    def _summed(
        self, transposed: bool, rows: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        num_weights = 0 if weights is None else math.prod(weights.shape[1:])
        case = Case(transposed, row_bytes, rows.dtype, num_weights)

        def by(strategy: ExchangeStrategy) -> torch.Tensor:
            rounds = self._strategies[strategy]
            return (rounds.transposed_sums if transposed else rounds.sums)(rows, weights)

        if self.part.num_ranks == 1 or row_bytes == 0:
            return by(self._strategies.default)
        if case not in self.found and case not in self._trials:
            self._begin(case)
        if case in self.found:
            return by(self.found[case])
        return self._tried(case, by)

    def _begin(self, case: Case) -> None:
        before = self._strategies.by_name.get(self._known.get(self._key(case), ""))
        if before is not None:
            self.found[case] = before
            return
        room = min(self._ranks.all_gather(free_bytes(self._device)))
        strategies = self._worth_trying(case, room)
        if len(strategies) == 1:
            self.found[case] = strategies[0]
        else:
            fits = partial(self._fits, case.row_bytes, room)
            self._trials[case] = _Trials(search(strategies, self.model.fills, fits))

    def _fits(self, row_bytes: int, room: float, pipeline: Pipeline) -> bool:
        return self.model.extra_bytes(ExchangeStrategy(pipeline=pipeline), row_bytes) <= room

    def _worth_trying(self, case: Case, room: float) -> list[ExchangeStrategy]:
        """Ways that may be the fastest and have room, the most promising first."""
        allowed = [strategy for strategy in self._strategies.candidates if case.allows(strategy)]
        needs = {strategy: self.model.extra_bytes(strategy, case.row_bytes) for strategy in allowed}
        fitting = [strategy for strategy in allowed if needs[strategy] <= room]
        if not fitting:
            return [min(needs, key=needs.__getitem__)]
        seconds = {strategy: self.model.seconds(strategy, case.row_bytes) for strategy in fitting}
        in_order = sorted(seconds, key=seconds.__getitem__)
        limit = _WORTH_TRYING * seconds[in_order[0]]
        return [strategy for strategy in in_order if seconds[strategy] <= limit]

    def _tried(self, case: Case, by: Callable[[ExchangeStrategy], torch.Tensor]) -> torch.Tensor:
        trials = self._trials[case]
        # Once before it is timed: that makes tiles and kernels, and keeps the GPU busy while the
        # host prepares what is timed, as it does in a training.
        by(trials.strategy)
        self._line_up()
        watch = self._stopwatch()
        for _ in range(_CALLS):
            total = by(trials.strategy)
        watch.ends("sums")
        trials.watches.append(watch)
        if trials.enough:
            self._go_on(case, trials)
        return total

    def _line_up(self) -> None:
        """Have all ranks begin at once: else those that are early wait while they are timed."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.group)

    def _go_on(self, case: Case, trials: _Trials) -> None:
        # From the last to the first: the GPU is waited for once.
        spent = [sum(watch.seconds().values()) / _CALLS for watch in reversed(trials.watches)]
        of_calls = zip(*self._ranks.all_gather(spent), strict=True)
        # The least: what disturbs a call only makes it longer.
        fastest = trials.go_on(min(map(max, of_calls)))
        if fastest is not None:
            self.found[case] = fastest
            del self._trials[case]
            if self._cached and self._ranks.rank == 0:
                FOUND.keep({self._key(case): str(fastest)})
        tried_now = (other.strategy for other in self._trials.values())
        self._strategies.keep({*self.found.values(), *tried_now})

    def _key(self, case: Case) -> str:
        return f"{self._about}; {case}"


def _graph(loads: list[RankLoad]) -> str:
    """What tells graphs and their partitions apart."""
    nodes = sum(load.own_src for load in loads)
    edges = sum(sum(load.edges) for load in loads)
    digest = hashlib.sha256(repr(loads).encode()).hexdigest()[:16]
    return f"{nodes} nodes, {edges} edges, parts {digest}"


def _machine(ranks: Communicator, where: torch.device) -> str:
    """All of the ranks' machines that times depend on."""
    if where.type == "cuda":
        name = f"{torch.cuda.get_device_name(where)}, CUDA {torch.version.cuda}"
    else:
        name = f"CPU with {torch.get_num_threads()} threads"
    name += f", torch {torch.__version__}, {Communicator.of_this_machine().size} on a machine"
    names = sorted(set(ranks.all_gather(name)))
    return f"{ranks.size} x {' and '.join(names)}"
