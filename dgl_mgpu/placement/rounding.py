"""From shares of bytes to whole rows that respect the budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dgl_mgpu.placement.candidates import Candidates
from dgl_mgpu.placement.cost import over_tiers, tier_bytes
from dgl_mgpu.placement.linear_program import NOWHERE, LinearProgram, RowRange, range_accesses
from dgl_mgpu.placement.patterns import off_gpu
from dgl_mgpu.placement.plan import TablePlan, Tier
from dgl_mgpu.placement.table_spec import TableSpec

# Shares of a table (bytes and accesses) too small for a tier of their own.
_SLIVER = 1e-4
_MAX_STEPS = 200


def whole_rows(
    specs: Sequence[TableSpec],
    linear_program: LinearProgram,
    row_ranges: Sequence[RowRange],
    candidates: Candidates,
    more_copies: bool,
) -> dict[str, list[Tier]]:
    """Runs of bytes as tiers of whole rows.

    A row that a boundary cuts goes to the side with more copies, or with fewer; runs too small to
    be worth a tier, or to be dealt out evenly, join a neighbour.
    """
    tables = {}
    for index, spec in enumerate(specs):
        here = [row_range for row_range in row_ranges if row_range.table == index]
        mine = [
            row_range
            for row_range, accesses in zip(here, range_accesses(spec, here), strict=True)
            if row_range.pattern != NOWHERE and not _is_sliver(spec, row_range, accesses)
        ]
        keys = [linear_program.key(row_range.pattern) for row_range in mine]
        stored = [float(candidates.storage[key[0]].sum()) for key in keys]
        tiers: list[Tier] = []
        for place, row_range in enumerate(mine):
            start = tiers[-1].stop if tiers else 0
            if place + 1 == len(mine):
                stop = spec.num_rows
            else:
                fewer_after = stored[place + 1] < stored[place]
                stop = spec.rows_in(row_range.end, "up" if fewer_after == more_copies else "down")
            if stop > start:
                tiers.append(candidates.pattern(keys[place]).tier(start, stop))
        tables[spec.name] = _joined(tiers)
    return tables


def _is_sliver(spec: TableSpec, row_range: RowRange, accesses: float) -> bool:
    return (
        row_range.end - row_range.begin < _SLIVER * spec.total_bytes
        and accesses < _SLIVER * spec.total_accesses
    )


def _joined(tiers: Sequence[Tier]) -> list[Tier]:
    """Tiers, neighbours that are kept alike as one."""
    joined: list[Tier] = []
    for tier in tiers:
        last = joined[-1] if joined else tier
        alike = (last.memory, last.copies, last.source) == (tier.memory, tier.copies, tier.source)
        joined[-1:] = [replace(last, stop=tier.stop)] if alike else [last, tier]
    return joined


def held_bytes(
    specs: Sequence[TableSpec], tables: Mapping[str, Sequence[Tier]], num_gpus: int
) -> np.ndarray:
    """Bytes that tiers take of each GPU, the host and the disk.  Shape (n + 2,)."""
    held = np.zeros(num_gpus + 2)
    for spec in specs:
        tiers = tables[spec.name]
        for tier, nbytes in zip(tiers, over_tiers(spec.bytes_before, tiers), strict=True):
            held += _tier_bytes(tier, nbytes)
    return held


def fit(
    specs: Sequence[TableSpec],
    tables: dict[str, list[Tier]],
    budgets: np.ndarray,
    may_leave: Sequence[bool],
) -> bool:
    """Hand rows on until every budget is respected: rounding may have exceeded some by a few.

    The coldest rows of a tier that takes too much go to the tier after it, and from the last
    one to the host, then to the disk.  Boundaries move towards hotter rows only, so this ends.

    Parameters
    ----------
    tables : dict of str to list of Tier
        Changed in place.
    budgets : ndarray, shape (n + 2,)
    may_leave : sequence of bool, one a table
        Whether rows may leave the GPUs.

    Returns
    -------
    bool
        Whether it succeeded.
    """
    n = len(budgets) - 2
    for _ in range(_MAX_STEPS):
        excess = np.ceil(held_bytes(specs, tables, n) - 1e-6) - budgets
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
        shares = [*(_shares(tier)[memory] for tier in tiers), float(memory == n + 1)]
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
        tiers.append(colder.tier(stop, tier.stop))
    else:
        tiers[index + 1] = replace(tiers[index + 1], start=stop)
    tiers[index] = replace(tier, stop=stop)
    if stop == tier.start:
        del tiers[index]
    return True


def _shares(tier: Tier) -> np.ndarray:
    """Share of a tier's rows that each GPU, the host and the disk hold."""
    return _tier_bytes(replace(tier, start=0, stop=tier.parts), 1.0)


# Handing rows on changes two tiers of many, and asks for all of them again.
_tier_bytes = lru_cache(maxsize=4096)(tier_bytes)


def as_plans(tables: Mapping[str, Sequence[Tier]]) -> dict[str, TablePlan]:
    """Tiers as table plans."""
    return {name: TablePlan(name, tuple(tiers)) for name, tiers in tables.items()}
