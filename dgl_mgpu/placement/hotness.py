"""Which rows are read most, and the order of rows that follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError


class RowOrder(NamedTuple):
    """A permutation of row ids, both ways; int32 where that holds every id.

    Attributes
    ----------
    order : ndarray, shape (num_rows,)
        Position → id.
    position : ndarray, shape (num_rows,)
        Id → position.
    """

    order: np.ndarray
    position: np.ndarray


def order_by_hotness(hotness: np.ndarray) -> RowOrder:
    """Rows from the hottest to the coldest; equally hot ones by ascending id.

    Parameters
    ----------
    hotness : ndarray of int or float, shape (num_rows,)
        Degrees, or how often each row was read (:func:`count_accesses`).

    Raises
    ------
    InvalidInputError
        If it is not one number a row, or one is NaN.
    """
    hotness = np.asarray(hotness)
    if hotness.ndim != 1 or hotness.dtype.kind not in "iuf":
        raise InvalidInputError(
            "order rows by hotness",
            f"an array of shape {hotness.shape} and dtype {hotness.dtype}",
            "pass one number a row",
        )
    if hotness.dtype.kind == "f" and np.isnan(hotness).any():
        raise InvalidInputError("order rows by hotness", "NaN", "pass numbers")
    n = len(hotness)
    dtype = np.int32 if n <= np.iinfo(np.int32).max else np.int64
    # Sorting the reversed array and reversing the result makes a stable sort descend.
    order = np.argsort(hotness[::-1], kind="stable").astype(dtype, copy=False)[::-1]
    order = np.subtract(dtype(n - 1), order, dtype=dtype)
    position = np.empty(n, dtype)
    position[order] = np.arange(n, dtype=dtype)
    return RowOrder(order, position)


def count_accesses(batches: Iterable[np.ndarray], num_rows: int) -> np.ndarray:
    """How often each row occurs in the id arrays of a pre-sampling pass or an epoch.

    Returns
    -------
    ndarray, int64, shape (num_rows,)

    Raises
    ------
    IdOutOfRangeError
        If an id is not a row.
    """
    counts = np.zeros(num_rows, np.int64)
    for ids in batches:
        ids = np.asarray(ids)
        if len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
            raise IdOutOfRangeError(
                "count accesses", f"ids {ids.min()} to {ids.max()}, but there are {num_rows} rows",
                f"pass ids in [0, {num_rows})",
            )  # fmt: skip
        counts += np.bincount(ids, minlength=num_rows)
    return counts
