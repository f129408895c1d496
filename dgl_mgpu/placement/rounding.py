"""From shares of bytes to whole rows that respect the budgets, in a form that people can read.

The linear program places ranges of bytes, and many placements are equally good: rows as hot as
each other may lie in any order, and ranges under patterns of as many copies may alternate.  What
it finds is therefore a patchwork.  :func:`simplify` puts a table's ranges in one order, more
copies for hotter rows, then host memory, then disk, and makes ranges of as many copies one tier
whose parts are a mixture of their patterns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dgl_mgpu.placement.candidates import off_gpu, with_rows
from dgl_mgpu.placement.cost import copies_per_row, over_tiers, tier_bytes
from dgl_mgpu.placement.linear_program import NOWHERE, LinearProgram, RowRange, range_accesses
from dgl_mgpu.placement.plan import Tier
from dgl_mgpu.placement.table_spec import TableSpec

# Shares of a table (bytes and accesses) too small for a tier of their own.
_SLIVER = 1e-4
_MAX_STEPS = 200
# Parts of one tier, at most: each is a segment on every GPU that holds a copy.
_MAX_PARTS = 32
# Relative error of the shares of patterns in a mixture.
_MIXTURE_ERROR = 0.02
# Rows that each part must at least get, on average.
_ROWS_PER_PART = 8


def whole_rows(
    specs: Sequence[TableSpec],
    program: LinearProgram,
    row_ranges: Sequence[RowRange],
    more_copies: bool,
) -> dict[str, list[Tier]]:
    """Ranges of bytes as tiers of whole rows.

    A row that a boundary cuts goes to the side with more copies, or with fewer; ranges too small
    to be worth a tier, or to be dealt out evenly, join a neighbour.
    """
    tables = {}
    for index, spec in enumerate(specs):
        here = [row_range for row_range in row_ranges if row_range.table == index]
        large = [
            row_range
            for row_range, accesses in zip(here, range_accesses(spec, here), strict=True)
            if row_range.pattern != NOWHERE
            and (
                row_range.end - row_range.begin >= _SLIVER * spec.total_bytes
                or accesses >= _SLIVER * spec.total_accesses
            )
        ]
        keys = [program.keys[row_range.pattern] for row_range in large]
        copies = [float(program.candidates.storage[key[0]].sum()) for key in keys]
        tiers: list[Tier] = []
        start = 0
        for i, row_range in enumerate(large):
            if i + 1 == len(large):
                stop = spec.num_rows
            else:
                fewer_after = copies[i + 1] < copies[i]
                stop = spec.rows_in(row_range.end, "up" if fewer_after == more_copies else "down")
            if stop <= start:
                continue
            tier = with_rows(program.candidates.pattern(keys[i]), start, stop)
            if tiers and with_rows(tiers[-1], start, stop) == tier:
                tiers[-1] = replace(tiers[-1], stop=stop)
            else:
                tiers.append(tier)
            start = stop
        tables[spec.name] = tiers
    return tables


def excess_bytes(
    budgets: np.ndarray, specs: Sequence[TableSpec], tables: Mapping[str, Sequence[Tier]]
) -> np.ndarray:
    """Bytes over the budget that tiers take of each GPU, the host and the disk.  Shape (n + 2,)."""
    held = np.zeros(len(budgets))
    for spec in specs:
        tiers = tables[spec.name]
        for tier, nbytes in zip(tiers, over_tiers(spec.bytes_before, tiers), strict=True):
            held += _tier_bytes(tier, nbytes)
    return np.ceil(held - 1e-6) - budgets


def fit(
    specs: Sequence[TableSpec],
    tables: dict[str, list[Tier]],
    budgets: np.ndarray,
    may_leave: Sequence[bool],
) -> bool:
    """Hand rows on until every budget is respected, since rounding may have exceeded some by a few.

    The coldest rows of a tier that takes too much go to the tier after it, and from the last
    one to the host, then to the disk.  Boundaries move towards hotter rows only, so this ends.
    ``tables`` is changed in place; ``may_leave`` tells of each table whether rows may leave the
    GPUs.  Returns whether it succeeded.
    """
    for _ in range(_MAX_STEPS):
        excess = excess_bytes(budgets, specs, tables)
        if (excess <= 0).all():
            return True
        if not _hand_on(specs, tables, excess, may_leave):
            return False
    return False


def _hand_on(
    specs: Sequence[TableSpec],
    tables: dict[str, list[Tier]],
    excess: np.ndarray,
    may_leave: Sequence[bool],
) -> bool:
    """Relieve the fullest memory at the coldest boundary after which it holds less; False if
    there is none."""
    n = len(excess) - 2
    memory = int(excess.argmax())
    coldest: tuple[float, TableSpec, int, float] | None = None
    for spec, may in zip(specs, may_leave, strict=True):
        tiers = tables[spec.name]
        # Share of each tier's rows that this memory holds, and of those after the last.
        shares = [_tier_bytes(with_rows(tier, 0, tier.parts), 1.0)[memory] for tier in tiers]
        shares.append(float(memory == n + 1))
        if tiers and tiers[-1].memory == "gpu" and not may:
            shares[-1] = shares[-2]
        bounds = [(max(tier.stop - 4 * n, tier.start), tier.stop) for tier in tiers]
        edges = np.array(bounds, dtype=np.int64).reshape(-1, 2)
        nbytes = np.diff(spec.bytes_before(edges))[:, 0]
        accesses = np.diff(spec.accesses_before(edges))[:, 0]
        for index, heat in enumerate((accesses / np.maximum(nbytes, 1e-300)).tolist()):
            relief = shares[index] - shares[index + 1]
            if relief > 0 and (coldest is None or heat <= coldest[0]):
                coldest = heat, spec, index, relief
    if coldest is None:
        return False
    _, spec, index, relief = coldest
    tiers = tables[spec.name]
    tier = tiers[index]
    target = float(spec.bytes_before(tier.stop)) - excess[memory] / relief
    stop = spec.rows_in(math.floor(target), "down")
    stop = max(min(stop, tier.stop - 1), tier.start)
    if index + 1 == len(tiers):
        colder = off_gpu("host" if tier.memory == "gpu" else "disk", n)
        tiers.append(with_rows(colder, stop, tier.stop))
    else:
        tiers[index + 1] = replace(tiers[index + 1], start=stop)
    tiers[index] = replace(tier, stop=stop)
    if stop == tier.start:
        del tiers[index]
    return True


# Handing rows on changes two tiers of many, and asks for all of them again.
_tier_bytes = lru_cache(maxsize=4096)(tier_bytes)


def simplify(spec: TableSpec, tiers: Sequence[Tier]) -> list[Tier]:
    """The tiers of one table, each kind of memory and number of copies once.

    Every kind keeps its bytes, up to whole rows; budgets and time have to be checked again.
    """
    kinds: dict[tuple[int, float, bool], list[tuple[Tier, float]]] = {}
    for tier, nbytes in zip(tiers, over_tiers(spec.bytes_before, tiers), strict=True):
        kinds.setdefault(_kind(tier), []).append((tier, nbytes))
    result: list[Tier] = []
    end_bytes, start = 0.0, 0
    for index, kind in enumerate(sorted(kinds)):
        members = kinds[kind]
        end_bytes += sum(nbytes for _, nbytes in members)
        stop = spec.rows_in(round(end_bytes), "nearest")
        if index + 1 == len(kinds):
            stop = spec.num_rows
        if stop > start:
            result.append(_mixture(members, start, stop))
            start = stop
    return result


def _kind(tier: Tier) -> tuple[int, float, bool]:
    """What tiers have in common that may be merged; sorts from near to far."""
    if tier.memory != "gpu":
        return (1 if tier.memory == "host" else 2), 0.0, False
    return 0, -copies_per_row(tier), any(map(tier.on_host, range(tier.parts)))


def _mixture(members: Sequence[tuple[Tier, float]], start: int, stop: int) -> Tier:
    """One tier of the members' patterns, each with its share of the bytes."""
    weights: dict[Tier, float] = {}
    for tier, nbytes in members:
        pattern = with_rows(tier, start, stop)
        weights[pattern] = weights.get(pattern, 0.0) + nbytes
    patterns = sorted(weights, key=lambda pattern: -weights[pattern])
    most = min(_MAX_PARTS, (stop - start) // _ROWS_PER_PART)
    while len(patterns) > 1 and sum(pattern.parts for pattern in patterns) > most:
        patterns.pop()  # the one of the smallest share
    parts = np.array([pattern.parts for pattern in patterns])
    times = _multiplicities(
        np.array([weights[pattern] for pattern in patterns]) / parts, parts, most
    )
    chosen = [pattern for pattern, count in zip(patterns, times, strict=True) for _ in range(count)]
    return replace(
        chosen[0],
        parts=sum(pattern.parts for pattern in chosen),
        copies=sum((pattern.copies for pattern in chosen), ()),
        source=tuple(
            sum(reads, ()) for reads in zip(*(pattern.source for pattern in chosen), strict=True)
        ),
    )


def _multiplicities(shares: np.ndarray, parts: np.ndarray, most: int) -> list[int]:
    """How often to repeat each pattern, so that its parts get about their share each."""
    wanted = shares / shares.min()
    best, error = np.ones(len(shares), int), np.inf
    for scale in range(1, _MAX_PARTS + 1):
        times = np.maximum(np.rint(wanted * scale), 1).astype(int)
        if (times * parts).sum() > most:
            break
        off = float(np.abs(times / times.min() / (wanted / wanted.min()) - 1).max())
        if off < error:
            best, error = times, off
        if error <= _MIXTURE_ERROR:
            break
    return best.tolist()
