"""Which rows are read most, and the order of rows that follows."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.utils.atomic_write import atomic_write

_VERSION = 1
_PREFIX = "accesses/"
# What NumPy's reader raises at bytes that make no sense to it.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError,
    TypeError, LookupError, AttributeError, SyntaxError,
)  # fmt: skip


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
        Degrees, or how often each row was read.

    Raises
    ------
    InvalidInputError
        If it is not one number a row, or one is NaN.
    """
    hotness = np.asarray(hotness)
    if hotness.ndim != 1 or hotness.dtype.kind not in "iuf":
        raise InvalidInputError(
            "order rows by hotness",
            f"the hotness has shape {hotness.shape} and dtype {hotness.dtype}",
            "pass one number for each row",
        )
    if hotness.dtype.kind == "f" and np.isnan(hotness).any():
        raise InvalidInputError(
            "order rows by hotness", "the hotness holds NaN", "replace NaN by numbers"
        )
    n = len(hotness)
    dtype = np.int32 if n <= np.iinfo(np.int32).max else np.int64
    # Sorting the reversed array and reversing the result makes a stable sort descend.
    order = np.argsort(hotness[::-1], kind="stable").astype(dtype, copy=False)[::-1]
    order = np.subtract(dtype(n - 1), order, dtype=dtype)
    position = np.empty(n, dtype)
    position[order] = np.arange(n, dtype=dtype)
    return RowOrder(order, position)


def expected_reads(counts: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """How often rows will be read, from how often a sample of mini-batches read them.

    A count of 0 does not say never.  Of what comes, rows not seen so far take about the share that
    rows seen once had of the sample (I. J. Good, «The population frequencies of species and the
    estimation of population parameters», 1953).  They divide it in proportion to ``prior``, but
    none gets as much as one that was seen.

    Parameters
    ----------
    counts : ndarray of int, shape (num_rows,)
        Reads in the sample.
    prior : ndarray, shape (num_rows,)
        What hotness goes by without a sample, such as degrees.

    Returns
    -------
    ndarray, float64, shape (num_rows,)
        In reads of the sample.
    """
    reads = counts.astype(np.float64)
    unseen = np.flatnonzero(counts == 0)
    weight = prior[unseen].astype(np.float64)
    if not weight.any():
        weight[:] = 1
    if len(unseen):
        reads[unseen] = np.minimum(np.count_nonzero(counts == 1) * weight / weight.sum(), 0.99)
    return reads


def save_accesses(path: str | Path, counts: Mapping[str, np.ndarray]) -> None:
    """Write how often nodes were read to a file, for a store that is built later.

    The file is an .npz archive: ``version``, which is 1, and for each node type an array of
    counts, int64, shape (num_nodes,), by the name ``accesses/`` and the type.  It appears under
    its name when it is complete, in a folder that is made if need be.

    Parameters
    ----------
    path : str or Path
    counts : mapping of str to ndarray
        By node type.

    Raises
    ------
    InvalidInputError
        If it cannot be written.
    """
    path = Path(path)
    arrays: dict[str, Any] = {
        f"{_PREFIX}{ntype}": np.asarray(each, np.int64) for ntype, each in counts.items()
    }
    try:
        with atomic_write(path) as file:
            np.savez(file, version=_VERSION, **arrays)
    except OSError as error:
        raise InvalidInputError(
            f"save to {path} how often nodes were read",
            str(error),
            "free space there, or choose another file",
        ) from error


def load_accesses(path: str | Path, num_nodes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Read how often each node was read, as :func:`save_accesses` wrote it.

    Parameters
    ----------
    path : str or Path
    num_nodes : mapping of str to int
        The node types of the graph that is to be stored, and how many nodes each has.

    Returns
    -------
    dict of ndarray, int64, shape (num_nodes,)
        By node type.

    Raises
    ------
    ConfigError
        If there is no such file, it holds something else, or counts of another graph.
    """
    asked = f"order rows by the counts in {path}"
    again = "name a file that count_accesses saved, or use hotness=degree or presample"
    try:
        with np.load(path, allow_pickle=False) as archive:
            version = int(archive["version"])
            counts = {
                name.removeprefix(_PREFIX): archive[name]
                for name in archive.files
                if name.startswith(_PREFIX)
            }
    except FileNotFoundError as error:
        raise ConfigError(asked, "there is no such file", again) from error
    except _DAMAGE as error:
        raise ConfigError(
            asked, f"it is not a file of counts, or it is damaged ({error})", again
        ) from error
    if version != _VERSION:
        raise ConfigError(asked, f"its version is {version}, not {_VERSION}", again)
    for each in counts.values():
        if each.ndim != 1 or each.dtype.kind not in "iu" or (len(each) and each.min() < 0):
            raise ConfigError(asked, "some of its arrays are not counts", again)
    found = {ntype: len(each) for ntype, each in counts.items()}
    if found != dict(num_nodes):
        raise ConfigError(
            asked,
            f"they are of {_nodes(found)}, but the graph has {_nodes(num_nodes)}",
            "count accesses to this graph, or use hotness=degree or presample",
        )
    return {ntype: each.astype(np.int64, copy=False) for ntype, each in counts.items()}


def _nodes(num_nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{num} nodes of type '{ntype}'" for ntype, num in num_nodes.items()) or "none"
