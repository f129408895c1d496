"""OGB's tables: CSV without a header, compressed with gzip; DataFormatError if damaged."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dgl_mgpu.data.files import FIX, reading, wrong_content

_CHUNK_ROWS = 1 << 16


def read_table(path: Path, dtype: Any = None) -> np.ndarray:
    """Read a ``.csv.gz`` table of numbers into memory, [rows, columns].

    Without `dtype` the result is int64 where all numbers are whole, float32 otherwise, as in the
    ogb package.
    """
    chunks = list(_chunks(path, dtype)) or [np.empty((0, 1), dtype or np.int64)]
    return np.concatenate(chunks)


def read_texts(path: Path) -> list[list[str]]:
    """Read a small table of texts: the cells of its rows."""
    with reading(path, FIX), gzip.open(path, "rt", newline="") as file:
        return list(csv.reader(file))


def unpack_table(
    path: Path, to: Path, rows: int, dtype: Any = None, transpose: bool = False
) -> None:
    """Write a table of so many rows as .npy file, a chunk at a time; see `read_table`.

    With `transpose` the table's columns become rows.
    """
    done = 0
    out = np.empty((0, 0))
    for chunk in _chunks(path, dtype):
        if done == 0:
            shape = (rows, chunk.shape[1])
            out = np.lib.format.open_memmap(
                to, "w+", chunk.dtype, shape[::-1] if transpose else shape
            )
            out = out.T if transpose else out
        if chunk.dtype != out.dtype:
            raise wrong_content(
                path, "it holds whole numbers in some rows and others in other rows"
            )
        if done + len(chunk) > rows:
            raise wrong_content(path, f"it has more than {rows} rows")
        out[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done < rows:
        raise wrong_content(path, f"it has {done} rows instead of {rows}")


def _chunks(path: Path, dtype: Any) -> Iterator[np.ndarray]:
    import pandas as pd  # slow to import, and only tables need it

    with reading(path, FIX):
        try:
            reader = pd.read_csv(path, compression="gzip", header=None, chunksize=_CHUNK_ROWS)
        except pd.errors.EmptyDataError:
            return
        with reader as frames:
            for frame in frames:
                yield _cast(path, frame.to_numpy(), dtype)


def _cast(path: Path, chunk: np.ndarray, dtype: Any) -> np.ndarray:
    if chunk.dtype.kind not in "iuf":
        raise wrong_content(path, "it holds something that is not a number")
    is_whole = chunk.dtype.kind in "iu"
    if dtype is np.int64 and not is_whole:
        raise wrong_content(path, "it holds numbers that are not whole, or empty cells")
    return chunk.astype(dtype or (np.int64 if is_whole else np.float32))
