"""Edge lists and compressed sparse columns (CSC).

CSC lists the in-edges of every node: the in-neighbours of node ``v`` are
``indices[indptr[v]:indptr[v + 1]]``.  The order of the edges of one node is their order in the
edge list (a stable counting sort), so it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

#: ``allocate(name, shape, dtype)`` makes an array to be filled, in memory or in a file.
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


class CSC(NamedTuple):
    """A graph as compressed sparse columns.

    Attributes
    ----------
    indptr : ndarray, int64 [num_nodes + 1]
        Where each node's in-edges begin.
    indices : ndarray, int32 or int64 [num_edges]
        Source node of every edge, ordered by destination.
    eids : ndarray, int64 [num_edges], or None
        Place in the edge list of every edge; None where it was not asked for.
    """

    indptr: np.ndarray
    indices: np.ndarray
    eids: np.ndarray | None


def in_memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array in memory (the default `Allocate`)."""
    return np.empty(shape, dtype)


def in_folder(folder: Path) -> Allocate:
    """Return an `Allocate` that makes memory-mapped .npy files in `folder`."""

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if 0 in shape:  # an empty file cannot be mapped
            np.save(folder / f"{name}.npy", np.empty(shape, dtype))
            return np.empty(shape, dtype)
        return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)

    return allocate


def index_dtype(num_nodes: int) -> np.dtype:
    """Return the narrowest of int32 and int64 that holds every node id."""
    return np.dtype(np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64)


def require_ids(what: str, ids: np.ndarray) -> np.ndarray:
    """Return `ids`; InvalidInputError unless it is a one-dimensional integer array."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidInputError(
            asked=f"read {what} as ids",
            found=f"they are an array of dtype {ids.dtype} and shape {ids.shape}",
            fix="pass a one-dimensional array of an integer dtype",
        )
    return ids


@njit(cache=True, nogil=True)
def _count(src, dst, num_nodes, both_directions, counts):
    """Add this chunk's in-degrees at ``counts[node + 2]``; return the first bad edge or -1."""
    for edge in range(len(src)):
        source, target = src[edge], dst[edge]
        if source < 0 or source >= num_nodes or target < 0 or target >= num_nodes:
            return edge
        counts[target + 2] += 1
        if both_directions:
            counts[source + 2] += 1
    return -1


@njit(cache=True, nogil=True)
def _place(src, dst, both_directions, first, cursor, indices, eids):
    """Put this chunk's edges at their places; ``cursor[node + 1]`` is the next free one."""
    with_eids = len(eids) > 0
    copies = 2 if both_directions else 1
    for edge in range(len(src)):
        source, target = src[edge], dst[edge]
        for copy in range(copies):
            place = cursor[target + 1]
            cursor[target + 1] = place + 1
            indices[place] = source
            if with_eids:
                eids[place] = copies * (first + edge) + copy
            source, target = target, source


@njit(cache=True, nogil=True)
def first_out_of_range(ids, lowest, stop):
    """Return the place of the first value outside ``[lowest, stop)``, or -1."""
    for place in range(len(ids)):
        if ids[place] < lowest or ids[place] >= stop:
            return place
    return -1


@njit(cache=True, nogil=True)
def first_decrease(indptr):
    """Return the first place whose successor is smaller, or -1."""
    for place in range(len(indptr) - 1):
        if indptr[place + 1] < indptr[place]:
            return place
    return -1


def csc_from_chunks(
    chunks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]],
    num_nodes: int,
    *,
    both_directions: bool = False,
    with_eids: bool = False,
    allocate: Allocate = in_memory,
) -> CSC:
    """Build CSC from an edge list that is read twice, a chunk at a time.

    Parameters
    ----------
    chunks : callable
        Starts a pass over the edge list: each call returns the same sequence of pairs
        ``(src, dst)`` of integer arrays of equal length.
    num_nodes : int
        Number of nodes.
    both_directions : bool
        Also add the reverse of every edge.  Edge ``e`` of the list then has id ``2 e`` and its
        reverse ``2 e + 1``, as in OGB.
    with_eids : bool
        Also return the edge ids.
    allocate : callable
        Makes the arrays ``indices`` and ``eids``, so that they can be files.

    Returns
    -------
    CSC

    Raises
    ------
    InvalidInputError
        An id array is not of an integer dtype, or `src` and `dst` differ in length.
    IdOutOfRangeError
        An id is negative or not smaller than `num_nodes`.
    """
    # One array serves both passes: counts sit two places up, so that after the cumulative sum
    # ``indptr[v + 1]`` is where v's edges begin, and after placing them where they end.
    indptr = np.zeros(num_nodes + 2, np.int64)
    first = 0
    for src, dst in chunks():
        if len(require_ids("sources", src)) != len(require_ids("destinations", dst)):
            raise InvalidInputError(
                asked="build CSC from an edge list",
                found=f"there are {len(src)} sources but {len(dst)} destinations",
                fix="pass one source and one destination per edge",
            )
        bad = _count(src, dst, num_nodes, both_directions, indptr)
        if bad >= 0:
            raise IdOutOfRangeError(
                asked=f"build CSC of {num_nodes} nodes",
                found=f"edge {first + bad} is ({src[bad]}, {dst[bad]})",
                fix=f"use node ids in [0, {num_nodes})",
            )
        first += len(src)
    np.cumsum(indptr, out=indptr)

    num_edges = int(indptr[-1])
    indices = allocate("indices", (num_edges,), index_dtype(num_nodes))
    eids = allocate("eids", (num_edges,), np.dtype(np.int64)) if with_eids else None
    no_eids = np.empty(0, np.int64)
    first = 0
    for src, dst in chunks():
        _place(src, dst, both_directions, first, indptr, indices, no_eids if eids is None else eids)
        first += len(src)
    return CSC(indptr[:-1], indices, eids)


def from_edges(src: np.ndarray, dst: np.ndarray, num_nodes: int, *, with_eids: bool = False) -> CSC:
    """Build CSC from an edge list in memory; see `csc_from_chunks`.

    Parameters
    ----------
    src, dst : ndarray, integer [num_edges]
        Source and destination of every edge.
    num_nodes : int
        Number of nodes.
    with_eids : bool
        Also return each edge's place in the list.
    """
    src, dst = np.asarray(src), np.asarray(dst)
    return csc_from_chunks(lambda: [(src, dst)], num_nodes, with_eids=with_eids)


def edge_places(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the places of ``counts[i]`` edges from ``first[i]`` on, row by row, int64."""
    ends = np.cumsum(counts)
    within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return np.repeat(first, counts) + within


def edge_chunks(
    first: np.ndarray, counts: np.ndarray, most: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield rows in runs of at most `most` edges: which rows, and of each its first edge and count.

    ``first`` and ``counts`` are those of all rows; a row with more edges is split.
    """
    ends = np.cumsum(counts)
    row = 0
    while row < len(ends):
        before = int(ends[row] - counts[row])
        stop = int(np.searchsorted(ends, before + most, side="right"))
        if stop > row:
            yield slice(row, stop), first[row:stop], counts[row:stop]
        else:
            stop = row + 1
            for part in range(0, int(counts[row]), most):
                some = np.minimum(counts[row:stop] - part, most)
                yield slice(row, stop), first[row:stop] + part, some
        row = stop


def add_self_loops(
    src: np.ndarray, dst: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges between different nodes in their order, then a self-loop for each node."""
    keep = src != dst
    loops = np.arange(num_nodes, dtype=src.dtype)
    return np.concatenate([src[keep], loops]), np.concatenate([dst[keep], loops])


def unique_edges(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each edge once, ordered by destination and then source; at most 2**31 nodes."""
    key = np.unique(dst.astype(np.int64) * num_nodes + src)
    return key % num_nodes, key // num_nodes


def csc_with_self_loops(
    indptr: np.ndarray, indices: np.ndarray, allocate: Allocate = in_memory
) -> tuple[np.ndarray, np.ndarray]:
    """Give every node of a CSC exactly one self-loop, its last in-edge."""
    new_indptr = _indptr_with_self_loops(indptr, indices)
    new_indices = allocate("indices", (int(new_indptr[-1]),), indices.dtype)
    _indices_with_self_loops(indptr, indices, new_indptr, new_indices)
    return new_indptr, new_indices


def in_edge_means(
    indptr: np.ndarray, eids: np.ndarray, rows: np.ndarray, *, both_directions: bool = False
) -> np.ndarray:
    """Return the mean, float32 [num_nodes, F], of the rows of each node's in-edges, or zeros.

    ``rows`` [., F] are those of edge ids.  With `both_directions` edges ``2 e`` and ``2 e + 1``
    share row ``e``, as an edge and its added reverse do.  Sums are float64.
    """
    means = np.zeros((len(indptr) - 1, rows.shape[1]), np.float32)
    _in_edge_means(indptr, eids, rows, int(both_directions), means)
    return means


@njit(cache=True, nogil=True)
def _in_edge_means(indptr, eids, rows, shift, means):
    for node in range(len(indptr) - 1):
        degree = indptr[node + 1] - indptr[node]
        if degree == 0:
            continue
        total = np.zeros(rows.shape[1], np.float64)
        for place in range(indptr[node], indptr[node + 1]):
            row = eids[place] >> shift
            for column in range(rows.shape[1]):
                total[column] += rows[row, column]
        for column in range(rows.shape[1]):
            means[node, column] = total[column] / degree


@njit(cache=True, nogil=True)
def _indptr_with_self_loops(indptr, indices):
    new_indptr = np.zeros(len(indptr), np.int64)
    for node in range(len(indptr) - 1):
        degree = 1
        for place in range(indptr[node], indptr[node + 1]):
            if indices[place] != node:
                degree += 1
        new_indptr[node + 1] = new_indptr[node] + degree
    return new_indptr


@njit(cache=True, nogil=True)
def _indices_with_self_loops(indptr, indices, new_indptr, new_indices):
    for node in range(len(indptr) - 1):
        to = new_indptr[node]
        for place in range(indptr[node], indptr[node + 1]):
            if indices[place] != node:
                new_indices[to] = indices[place]
                to += 1
        new_indices[to] = node
