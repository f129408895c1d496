"""What the solver needs to know of a table: two curves over its rows, hottest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dgl_mgpu.errors import InvalidInputError

TableKind = Literal["topology", "features"]

#: Points that a curve is kept at, whatever the number of rows.
MAX_BREAKPOINTS = 256
# Rows of neighbours between breakpoints, at least: fewer would be placed apart from others beside
# them only because they happen to be short.
_ROWS_TOGETHER = 32
# Positions that breakpoints are chosen from: one by one at first, then in geometric steps.
_CANDIDATES = 4096
#: What memory is read in, at least.
SECTOR_BYTES = 32


@dataclass(frozen=True, eq=False)
class TableSpec:
    """A table, its rows in the order of hotness, described at a few breakpoints.

    Between breakpoints both curves are straight.  Expected accesses are those of one GPU in
    one step, whatever the step is (a mini-batch, an epoch); modelled times are per that step.

    Attributes
    ----------
    name : str
    kind : 'topology' or 'features'
        Which ratio of the solver applies.
    positions : ndarray, int64, shape (b,)
        Breakpoints, ascending from 0 to the number of rows.
    nbytes : ndarray, float64, shape (b,)
        Bytes of all rows before each breakpoint.
    accesses : ndarray, float64, shape (b,)
        Expected accesses of all rows before each breakpoint.
    access_bytes : float
        Bytes one access moves.
    request_bytes : float
        Size of the single reads that an access consists of; small ones waste bandwidth.
    """

    name: str
    kind: TableKind
    positions: np.ndarray
    nbytes: np.ndarray
    accesses: np.ndarray
    access_bytes: float
    request_bytes: float

    def __post_init__(self) -> None:
        curves = (self.positions, self.nbytes, self.accesses)
        shapes = {np.shape(curve) for curve in curves}
        rising = all((np.diff(curve) >= 0).all() and curve[0] == 0 for curve in curves)
        finite = all(np.isfinite(curve).all() for curve in curves)
        if len(shapes) != 1 or not rising or not finite or not (np.diff(self.positions) > 0).all():
            raise _error(
                self.name, "its curves do not rise from 0 over the same breakpoints",
                "build it with TableSpec.features or TableSpec.topology",
            )  # fmt: skip
        if not (0 < self.access_bytes < np.inf and 0 < self.request_bytes < np.inf):
            found = f"an access has {self.access_bytes} bytes and a read {self.request_bytes}"
            raise _error(self.name, found, "pass positive sizes")

    @property
    def num_rows(self) -> int:
        return int(self.positions[-1])

    @property
    def total_bytes(self) -> float:
        return float(self.nbytes[-1])

    @property
    def total_accesses(self) -> float:
        return float(self.accesses[-1])

    def bytes_before(self, position: float | Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes of the rows before a position."""
        return _between(position, self.positions, self.nbytes)

    def accesses_before(self, position: float | Sequence[int] | np.ndarray) -> np.ndarray:
        """Expected accesses of the rows before a position."""
        return _between(position, self.positions, self.accesses)

    def accesses_before_bytes(self, nbytes: float | Sequence[int] | np.ndarray) -> np.ndarray:
        """Expected accesses of the rows that the first so many bytes hold."""
        return _between(nbytes, self.nbytes, self.accesses)

    def rows_in(self, nbytes: int, rounding: Literal["down", "up", "nearest"]) -> int:
        """How many rows the first so many bytes hold."""
        sizes = self.whole_bytes
        at = int(np.searchsorted(sizes, nbytes, side="right")) - 1
        if at < 0 or at + 1 == len(sizes):
            return 0 if at < 0 else self.num_rows
        size = int(sizes[at + 1] - sizes[at])
        first, rows = int(self.positions[at]), int(self.positions[at + 1] - self.positions[at])
        wanted = (nbytes - int(sizes[at])) * rows
        extra = {"down": 0, "up": size - 1, "nearest": size // 2}[rounding]
        return first + (wanted + extra) // size

    @property
    def whole_bytes(self) -> np.ndarray:
        """``nbytes`` in whole bytes, int64, shape (b,)."""
        return np.rint(self.nbytes).astype(np.int64)

    def with_breakpoint(self, position: int) -> TableSpec:
        """The same curves, kept at one more point."""
        if position in self.positions:
            return self
        at = int(np.searchsorted(self.positions, position))
        return replace(
            self,
            positions=np.insert(self.positions, at, position),
            nbytes=np.insert(self.nbytes, at, self.bytes_before(position)),
            accesses=np.insert(self.accesses, at, self.accesses_before(position)),
        )

    @classmethod
    def features(
        cls,
        name: str,
        num_rows: int,
        row_bytes: int,
        hotness: np.ndarray | None = None,
        accesses_per_step: float | None = None,
    ) -> TableSpec:
        """Rows of one size, each read whole.

        Parameters
        ----------
        name : str
        num_rows, row_bytes : int
        hotness : ndarray, shape (num_rows,), optional
            Relative number of reads of each row **by position**; equal when not given.
        accesses_per_step : float, optional
            Rows that one GPU reads in a step; by default as many as the hotness adds up to, and 1
            without a hotness.

        Raises
        ------
        InvalidInputError
            If sizes are not positive or the hotness is negative, NaN or not one number a row.
        """
        if row_bytes <= 0:
            raise _error(name, f"its rows have {row_bytes} bytes", "pass a positive size")
        sizes = np.broadcast_to(np.float64(row_bytes), (num_rows,))
        return _spec(name, "features", sizes, hotness, accesses_per_step, row_bytes, row_bytes)

    @classmethod
    def topology(
        cls,
        name: str,
        degrees: np.ndarray,
        hotness: np.ndarray | None = None,
        accesses_per_step: float | None = None,
        *,
        fanout: float = 10.0,
        id_bytes: int = 8,
        stored_eids: bool = False,
    ) -> TableSpec:
        """Rows of neighbours, of which an access reads the bounds and ``fanout`` ids.

        Parameters
        ----------
        name : str
        degrees : ndarray, shape (num_rows,)
            Neighbours of each row **by position**.
        hotness : ndarray, shape (num_rows,), optional
            Relative number of reads of each row by position; the degree when not given.
        accesses_per_step : float, optional
            Rows that one GPU samples from in a step; by default as :meth:`features`.
        fanout : float
            Number of neighbours drawn from a row that has so many.
        id_bytes : int
            Size of a node id.
        stored_eids : bool
            Whether every edge's id is kept beside its neighbour, and not one for each row.

        Raises
        ------
        InvalidInputError
            As :meth:`features`.
        """
        degrees = np.asarray(degrees)
        if degrees.ndim != 1 or (len(degrees) and degrees.min() < 0) or id_bytes <= 0:
            raise _error(
                name,
                "some degrees are negative, there is not one for each row, or an id has no size",
                "pass the in-degrees by position and positive sizes",
            )
        bound, edge = (8, 2 * id_bytes) if stored_eids else (16, id_bytes)
        if hotness is None:
            hotness = degrees
            accesses_per_step = 1.0 if accesses_per_step is None else accesses_per_step
        # Two bounds side by side, and the id of the row's first edge where ids are not stored.
        bounds = 1 + 8 / SECTOR_BYTES + (not stored_eids)
        arrays = 2 if stored_eids else 1
        moved = SECTOR_BYTES * (bounds + arrays * _sectors(degrees, hotness, fanout, id_bytes))
        return _spec(
            name, "topology", degrees, hotness, accesses_per_step, moved, SECTOR_BYTES,
            scale=float(edge), offset=float(bound),
        )  # fmt: skip


def _error(name: str, found: str, fix: str) -> InvalidInputError:
    return InvalidInputError(f"describe table '{name}'", found, fix)


def _spec(
    name: str, kind: TableKind, sizes: np.ndarray, hotness: np.ndarray | None,
    accesses_per_step: float | None, access_bytes: float, request_bytes: float,
    scale: float = 1.0, offset: float = 0.0,
) -> TableSpec:  # fmt: skip
    """A table of rows of ``scale * sizes + offset`` bytes."""
    num_rows = len(sizes)
    uniform = hotness is None
    hotness = np.asarray(np.broadcast_to(1.0, num_rows) if hotness is None else hotness)
    at = _candidates(num_rows)
    sums = _running_sum(hotness, at) if hotness.shape == (num_rows,) else np.array([np.nan])
    if not np.isfinite(sums).all() or hotness.min(initial=0) < 0:
        raise _error(
            name, f"the hotness has shape {hotness.shape}, or holds NaN or negative values",
            f"pass {num_rows} numbers >= 0, one for each position",
        )  # fmt: skip
    if accesses_per_step is None:
        accesses_per_step = 1.0 if uniform else float(sums[-1])
    if not 0 <= accesses_per_step < np.inf:
        raise _error(name, f"accesses_per_step is {accesses_per_step}", "pass a number >= 0")
    nbytes = scale * _running_sum(sizes, at) + offset * at
    if sums[-1] == 0:  # rows that were never read are all equally hot
        sums = at.astype(np.float64)
    accesses = sums * (accesses_per_step / sums[-1]) if num_rows else sums
    together = _ROWS_TOGETHER if kind == "topology" else 1
    keep = _breakpoints(nbytes, accesses, min(MAX_BREAKPOINTS, 2 + num_rows // together))
    curves = at[keep], nbytes[keep], accesses[keep]
    return TableSpec(name, kind, *curves, float(access_bytes), float(request_bytes))


def _sectors(degrees: np.ndarray, hotness: np.ndarray, fanout: float, id_bytes: int) -> float:
    """Mean number of sectors in which the drawn ids of a row lie, over rows weighted by hotness.

    All that a row has if all are drawn; of few from a long one, a sector for each.
    """
    weight = hotness.sum(dtype=np.float64)
    if not weight > 0 or hotness.shape != degrees.shape:
        return 1.0  # nothing is read, or is refused
    in_one = max(SECTOR_BYTES // id_bytes, 1)
    spanned = np.divide(degrees, in_one, dtype=np.float32)
    spanned += np.minimum(degrees, 1) * np.float32(1 - 1 / in_one)  # rows begin anywhere
    left = np.maximum(1 - fanout / np.maximum(degrees, 1, dtype=np.float32), 0)
    spanned *= 1 - np.multiply.reduce([left] * in_one)
    np.minimum(spanned, np.minimum(degrees, fanout), out=spanned)
    spanned *= hotness
    return float(spanned.sum(dtype=np.float64) / weight)


def _between(
    at: float | Sequence[int] | np.ndarray, points: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Linear interpolation, by operations that round alike on every processor."""
    at = np.asarray(at, np.float64)
    if len(points) == 1:
        return np.broadcast_to(values[0], at.shape)
    index = np.searchsorted(points[1:-1], at, side="right")
    length = (points[index + 1] - points[index]).astype(np.float64)
    share = (at - points[index]) / np.where(length > 0, length, 1.0)
    share = np.minimum(np.maximum(share, 0.0), 1.0)
    return values[index] + share * (values[index + 1] - values[index])


def _candidates(num_rows: int) -> np.ndarray:
    if num_rows <= _CANDIDATES:
        return np.arange(num_rows + 1)
    count = _CANDIDATES // 2
    ratio = round(num_rows ** (1 / (count - 1)), 12)  # digits that every processor agrees about
    steps = np.minimum(np.multiply.accumulate([1.0, *[ratio] * (count - 2)]), num_rows)
    even = np.arange(count) * num_rows // (count - 1)
    return np.unique(np.concatenate([np.rint(steps).astype(np.int64), even]))


def _running_sum(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Sum of the values before each candidate position, without a copy of the values."""
    if len(at) == 1:
        return np.zeros(1)
    sums = np.add.reduceat(values, at[:-1], dtype=np.float64)
    return np.concatenate([[0.0], np.cumsum(sums)])


def _breakpoints(nbytes: np.ndarray, accesses: np.ndarray, most: int) -> np.ndarray:
    """Candidates that split bytes and accesses most evenly."""
    if len(nbytes) <= most:
        return np.arange(len(nbytes))
    progress = nbytes / max(nbytes[-1], 1e-300) + accesses / max(accesses[-1], 1e-300)
    wanted = np.linspace(0, progress[-1], most)
    keep = np.searchsorted(progress, wanted)
    return np.unique(np.concatenate([[0], np.minimum(keep, len(nbytes) - 1), [len(nbytes) - 1]]))
