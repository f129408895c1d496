"""Which rows are read most: the order of rows, counts in files, the reads of a mini-batch."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.utils.atomic_write import atomic_write

_VERSION = 1
_PREFIX = "accesses/"
# What NumPy's reader raises for damaged files.
_DAMAGE_ERRORS = (
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

    A count of 0 does not mean never.  Rows not seen so far get about the share of future reads that
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
        f"{_PREFIX}{ntype}": np.asarray(reads, np.int64) for ntype, reads in counts.items()
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
    action = f"order rows by the counts in {path}"
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
        raise ConfigError(action, "there is no such file", again) from error
    except _DAMAGE_ERRORS as error:
        raise ConfigError(
            action, f"it is not a file of counts, or it is damaged ({error})", again
        ) from error
    if version != _VERSION:
        raise ConfigError(action, f"its version is {version}, not {_VERSION}", again)
    for array in counts.values():
        if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and array.min() < 0):
            raise ConfigError(action, "some of its arrays are not counts", again)
    counted = {ntype: len(array) for ntype, array in counts.items()}
    if counted != dict(num_nodes):
        raise ConfigError(
            action,
            f"they are of {_nodes(counted)}, but the graph has {_nodes(num_nodes)}",
            "count accesses to this graph, or use hotness=degree or presample",
        )
    return {ntype: array.astype(np.int64, copy=False) for ntype, array in counts.items()}


def _nodes(num_nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{num} nodes of type '{ntype}'" for ntype, num in num_nodes.items()) or "none"


class Degrees(NamedTuple):
    """Degrees of the rows of one topology table.

    Attributes
    ----------
    ntype : str
        Type of the nodes that have its rows.
    degrees : ndarray, shape (num_nodes,)
        Neighbours of each of them.
    """

    ntype: str
    degrees: np.ndarray


@dataclass(frozen=True, eq=False)
class Reads:
    """Expected reads of one mini-batch.

    Attributes
    ----------
    sampled : dict of ndarray, float, shape (num_nodes,)
        By node type, how often each row is sampled from, in each table of topology that it has a
        row in: once in a layer at most.
    nodes : dict of ndarray, float, shape (num_nodes,)
        By node type, how likely each node's row is read.
    edges : float
        Neighbours that are drawn.
    fanout : float
        Mean number that layers draw from a row that has so many.
    """

    sampled: dict[str, np.ndarray]
    nodes: dict[str, np.ndarray]
    edges: float
    fanout: float


def minibatch_reads(
    hotness: Mapping[str, np.ndarray],
    topologies: Collection[Degrees],
    batch_size: int,
    fanouts: Sequence[int],
    *,
    distinct: bool = False,
) -> Reads:
    """The reads to expect of a mini-batch with any nodes as seeds and hot ones as neighbours.

    A node that is drawn again is not read again, so hot rows have a smaller share of the reads
    than of the draws: a node with the share ``p`` of the hotness is read with a probability of
    ``1 - exp(-e p)``, where ``e`` edges are drawn in any layer.  A layer draws again for the rows
    of those before it, and of a short one the same edges.

    Parameters
    ----------
    hotness : mapping of str to ndarray, shape (num_nodes,)
        By node type, in proportion to what nodes are drawn; those of all types together.
    topologies : collection of Degrees
        The tables of topology; those of types without hotness are left out.
    batch_size : int
        Seeds of a mini-batch.
    fanouts : sequence of int
        Neighbours drawn from each row of each table, those of the seeds last; all, if -1.
    distinct : bool
        Whether hotness is in proportion to reads and not to draws, as it is counted.
    """
    num_nodes = sum(map(len, hotness.values()))
    total = sum(map(_total, hotness.values()))
    seeds = min(1.0, batch_size / max(num_nodes, 1))

    reached = {ntype: np.full(len(hot), seeds, np.float32) for ntype, hot in hotness.items()}
    sampled = {ntype: np.zeros(len(hot), np.float32) for ntype, hot in hotness.items()}
    tables = [_DrawnEdges(*table) for table in topologies if table.ntype in hotness]
    edges, requested = 0.0, 0.0
    widest = max((table.widest for table in tables), default=0)
    for fanout in (widest if fanout < 0 else fanout for fanout in reversed(fanouts)):
        # A layer draws for all that was reached so far, seeds among them.
        for ntype, rows in reached.items():
            sampled[ntype] += rows
            requested += fanout * _total(rows)
        for table in tables:
            edges += table.draw(reached[table.ntype], fanout)
        distinct_edges = sum(table.distinct for table in tables)
        for ntype, rows in reached.items():
            if total:
                shares = np.divide(hotness[ntype], total, dtype=np.float32)
            else:  # all nodes are equally hot
                shares = np.full(len(rows), 1 / max(num_nodes, 1), np.float32)
            rows[:] = _at_least_once(shares * distinct_edges)
            rows *= 1 - seeds
            rows += seeds
    rows_sampled = sum(map(_total, sampled.values()))
    if distinct and total:
        sampled = _in_proportion(hotness, total, sampled)
        reached = _in_proportion(hotness, total, reached)
    return Reads(sampled, reached, edges, requested / rows_sampled if rows_sampled else 0.0)


def _total(rows: np.ndarray) -> float:
    return float(rows.sum(dtype=np.float64))


def _at_least_once(expected: np.ndarray) -> np.ndarray:
    """``1 - exp(-x)``, to seven digits, by operations that round alike on every processor.

    Of a 128th by Taylor's series, then doubled seven times.
    """
    part = np.minimum(expected, np.float32(20)) * np.float32(1 / 128)
    series = np.ones_like(part)
    for term in (5, 4, 3, 2):
        series *= part
        series *= np.float32(-1 / term)
        series += 1
    part *= series
    for _ in range(7):
        part *= 2 - part
    return part


class _DrawnEdges:
    """Edges of a topology table that are drawn layer by layer; ``distinct`` counts each once."""

    def __init__(self, ntype: str, degrees: np.ndarray) -> None:
        self.ntype = ntype
        self.widest = int(degrees.max(initial=0))
        self._degrees = degrees.astype(np.float32)
        self._reached = np.zeros(len(degrees), np.float32)
        # Share of each row that was reached and not drawn.
        self._left = np.zeros(len(degrees), np.float32)
        self.distinct = 0.0

    def draw(self, reached: np.ndarray, fanout: int) -> float:
        """Draw ``fanout`` edges of each row reached so far; returns the number of edges drawn."""
        drawn = np.minimum(self._degrees, fanout)
        edges = _total(reached * drawn)
        self._left += reached - self._reached
        self._left *= 1 - drawn / np.maximum(self._degrees, 1)
        self._reached[:] = reached
        self.distinct = _total((reached - self._left) * self._degrees)
        return edges


def _in_proportion(
    hotness: Mapping[str, np.ndarray], total: float, reads: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    share = sum(map(_total, reads.values())) / total
    return {ntype: share * hot for ntype, hot in hotness.items()}
