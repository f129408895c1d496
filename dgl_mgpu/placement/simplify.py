"""From an optimal placement to one that people can read, at next to no cost.

The linear programme places runs of bytes, and many placements are equally good: rows as hot as
each other may lie in any order, and runs under patterns of as many copies may alternate.  What
it finds is therefore a patchwork.  Here a table's runs are put in one order, more copies for
hotter rows, then host memory, then disk, and runs of as many copies become one tier whose parts
are a mixture of their patterns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgl_mgpu.placement.cost import over_tiers
from dgl_mgpu.placement.plan import Tier
from dgl_mgpu.placement.table_spec import TableSpec

#: Parts of one tier, at most: each is a segment on every GPU that holds a copy.
_MAX_PARTS = 32
#: How far the shares of patterns in a mixture may be off, relative to each.
_CLOSE = 0.02
#: Rows that each part must at least get, on average.
_ROWS_PER_PART = 8


def simplify(spec: TableSpec, tiers: Sequence[Tier]) -> list[Tier]:
    """The tiers of one table, each kind of memory and number of copies once.

    Every kind keeps its bytes, up to whole rows; budgets and time have to be looked at again.
    """
    kinds: dict[tuple[int, float, bool], list[tuple[Tier, float]]] = {}
    for tier, nbytes in zip(tiers, over_tiers(spec.bytes_before, tiers), strict=True):
        kinds.setdefault(_kind(tier), []).append((tier, nbytes))
    result: list[Tier] = []
    end_bytes, start = 0.0, 0
    for place, kind in enumerate(sorted(kinds)):
        members = kinds[kind]
        end_bytes += sum(nbytes for _, nbytes in members)
        stop = spec.rows_in(round(end_bytes), "nearest")
        if place + 1 == len(kinds):
            stop = spec.num_rows
        if stop > start:
            result.append(_mixture(members, start, stop))
            start = stop
    return result


def _kind(tier: Tier) -> tuple[int, float, bool]:
    """What tiers have in common that may be merged; sorts from near to far."""
    if tier.memory != "gpu":
        return (1 if tier.memory == "host" else 2), 0.0, False
    copies = sum(map(len, tier.copies)) / tier.parts
    return 0, -copies, any(tier.on_host(part) for part in range(tier.parts))


def _mixture(members: Sequence[tuple[Tier, float]], start: int, stop: int) -> Tier:
    """One tier of the members' patterns, each with its share of the bytes."""
    weights: dict[tuple, float] = {}
    for tier, nbytes in members:
        pattern = (tier.parts, tier.copies, tier.source)
        weights[pattern] = weights.get(pattern, 0.0) + nbytes
    patterns = sorted(weights, key=lambda pattern: -weights[pattern])
    room = min(_MAX_PARTS, (stop - start) // _ROWS_PER_PART)
    while len(patterns) > 1 and sum(parts for parts, _, _ in patterns) > room:
        patterns.pop()  # the one of the smallest share
    times = _multiplicities([weights[p] / p[0] for p in patterns], [p[0] for p in patterns], room)
    chosen = [pattern for pattern, count in zip(patterns, times, strict=True) for _ in range(count)]
    source = tuple(
        tuple(holder for _, _, reads in chosen for holder in reads[gpu])
        for gpu in range(len(tier.source))
    )
    return Tier(
        start,
        stop,
        tier.memory,
        sum(parts for parts, _, _ in chosen),
        tuple(holders for _, copies, _ in chosen for holders in copies),
        source,
    )


def _multiplicities(shares: Sequence[float], parts: Sequence[int], room: int) -> list[int]:
    """How often to repeat each pattern, so that its parts get about their share each."""
    wanted = np.array(shares) / min(shares)
    best, error = np.ones(len(shares), int), np.inf
    for scale in range(1, _MAX_PARTS + 1):
        times = np.maximum(np.rint(wanted * scale), 1).astype(int)
        if (times * parts).sum() > room:
            break
        off = float(np.abs(times / times.min() / (wanted / wanted.min()) - 1).max())
        if off < error:
            best, error = times, off
        if error <= _CLOSE:
            break
    return best.tolist()
