"""The arithmetic that finds a row: position → tier, part and local row, and back.

A tier's positions are dealt out modulo over its parts (XGNN, section 4.3)::

    part  = (position - start) %  parts
    local = (position - start) // parts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.placement.plan import Tier


def locate(
    positions: np.ndarray, tiers: Sequence[Tier]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where rows are.

    Parameters
    ----------
    positions : ndarray of int, shape (k,)
    tiers : sequence of Tier
        By ascending start, covering the table.

    Returns
    -------
    tier, part, local : ndarray, int64, shape (k,)

    Raises
    ------
    IdOutOfRangeError
        If a position lies in no tier.
    """
    positions = np.asarray(positions, np.int64)
    stops = np.array([tier.stop for tier in tiers], np.int64)
    num_rows = int(stops[-1]) if len(stops) else 0
    if len(positions) and (positions.min() < 0 or positions.max() >= num_rows):
        bad = positions[(positions < 0) | (positions >= num_rows)][0]
        raise IdOutOfRangeError(
            "locate rows", f"there is no position {bad}, there are {num_rows} rows",
            f"pass positions in [0, {num_rows})",
        )  # fmt: skip
    tier = np.searchsorted(stops, positions, side="right")
    start, parts = _starts_and_parts(tiers)
    offset = positions - start[tier]
    return tier, offset % parts[tier], offset // parts[tier]


def position_of(
    tier: np.ndarray, part: np.ndarray, local: np.ndarray, tiers: Sequence[Tier]
) -> np.ndarray:
    """Inverse of :func:`locate`: positions, int64, shape (k,)."""
    start, parts = _starts_and_parts(tiers)
    tier = np.asarray(tier, np.int64)
    return start[tier] + np.asarray(local, np.int64) * parts[tier] + np.asarray(part, np.int64)


def part_sizes(tier: Tier) -> np.ndarray:
    """Rows in each part of a tier, int64, shape (parts,)."""
    rows = tier.stop - tier.start
    return (rows - np.arange(tier.parts) + tier.parts - 1) // tier.parts


def _starts_and_parts(tiers: Sequence[Tier]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([tier.start for tier in tiers], np.int64),
        np.array([tier.parts for tier in tiers], np.int64),
    )
