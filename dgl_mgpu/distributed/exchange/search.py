"""Which strategies to exchange rows to time, and in which order, to find the fastest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from dgl_mgpu.distributed.exchange.strategy import STEPS, ExchangeStrategy
from dgl_mgpu.ops.spmm_remote import Pipeline

#: How often a strategy is timed at first, and when it is one of the fastest.
_CALLS, _FINAL_CALLS = 3, 7
#: Seconds below which a call's time is as much the host's, which is now and then held up: more
#: calls are timed then, of which the fastest was not.
_SHORT, _MORE_CALLS = 1e-3, 6
#: So many are timed again, if they are this close to the fastest.
_FINALISTS, _CLOSE = 3, 1.15
#: Remote reads that take so many times as long as the fastest strategy are not searched any
#: further.
_HOPELESS = 2.0

#: Yields a strategy and how often to time it, is sent the least seconds of a call; returns the
#: fastest strategy.
Search = Generator[tuple[ExchangeStrategy, int], float, ExchangeStrategy]


Condition = Callable[[Pipeline], bool]


def search(strategies: Sequence[ExchangeStrategy], fills: Condition, fits: Condition) -> Search:
    """Time each strategy, remote reads' parameters one by one, and the fastest once more.

    Parameters
    ----------
    strategies : sequence of ExchangeStrategy
        Of remote reads at most one.
    fills, fits : callable
        Whether a pipeline has work for the whole GPU, and whether there is memory for it.
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
        seconds[strategy] = yield strategy, _FINAL_CALLS
    return min(finalists, key=seconds.__getitem__)


def _timed(strategy: ExchangeStrategy) -> Generator[tuple[ExchangeStrategy, int], float, float]:
    seconds = yield strategy, _CALLS
    if seconds < _SHORT:
        seconds = min(seconds, (yield strategy, _MORE_CALLS))
    return seconds


def _climb(
    best: Pipeline, seconds: dict[ExchangeStrategy, float], fills: Condition, fits: Condition
) -> Generator[tuple[ExchangeStrategy, int], float, None]:
    """MGG's cross-iteration optimisation (section 4), one parameter after the other.

    It begins in the middle of the ranges rather than at ones, and where more of a parameter does
    not help tries less; MGG's retreat is another turn with the parameters that others were found
    for.  What was timed is looked up.
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
