"""Changes to graphs: reverse edges, self-loops, means of edges, another order of the nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from dgl_mgpu.data.csc import Allocate, from_edges, in_memory
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

#: Bytes of features moved at a time.
_CHUNK_BYTES = 1 << 26


def add_reverse(src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Append the reverse of every edge: edge ``e`` becomes ``e`` and ``e + num_edges``."""
    return np.concatenate([src, dst]), np.concatenate([dst, src])


def add_self_loops(
    src: np.ndarray, dst: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges between different nodes in their order, then a self-loop for each node."""
    keep = src != dst
    loops = np.arange(num_nodes, dtype=src.dtype)
    return np.concatenate([src[keep], loops]), np.concatenate([dst[keep], loops])


def from_edge_list(src: np.ndarray, dst: np.ndarray, self_loops: bool, **fields: Any) -> Dataset:
    """Return the data set of an edge list and of all other fields of `Dataset`."""
    num_nodes = len(fields["labels"])
    if self_loops:
        src, dst = add_self_loops(src, dst, num_nodes)
    csc = from_edges(src, dst, num_nodes)
    return Dataset(num_nodes=num_nodes, indptr=csc.indptr, indices=csc.indices, **fields)


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


def reorder(
    dataset: Dataset, order: np.ndarray, folder: Path | None = None
) -> tuple[Dataset, np.ndarray]:
    """Relabel the nodes so that node ``order[i]`` becomes node ``i``.

    The in-edges of a node keep their order.  Edge features stay as they are: the edges keep
    their ids through `Dataset.eids`.  Without edge features and eids, the id of an edge remains
    its place, and so changes.

    Parameters
    ----------
    order : ndarray, integer [num_nodes]
        A permutation of the node ids.
    folder : Path, optional
        Write the new indices and node features to .npy files here and memory-map them, for data
        larger than memory.

    Returns
    -------
    dataset : Dataset
        The relabelled graph.
    rank : ndarray, int64 [num_nodes]
        New id of every old node, the inverse of `order`.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        `order` is no permutation.
    """
    rank = _inverse(dataset, np.asarray(order))
    allocate = in_memory if folder is None else in_folder(folder)
    degree = np.diff(dataset.indptr)[order]
    indptr = np.zeros(dataset.num_nodes + 1, np.int64)
    np.cumsum(degree, out=indptr[1:])

    keep_ids = dataset.eids is not None or len(dataset.edge_features) > 0
    indices = allocate("indices", dataset.indices.shape, dataset.indices.dtype)
    eids = allocate("eids", dataset.indices.shape, np.dtype(np.int64)) if keep_ids else None
    nothing = np.empty(0, np.int64)
    _reorder_edges(
        dataset.indptr,
        dataset.indices,
        nothing if dataset.eids is None else dataset.eids,
        np.asarray(order),
        rank,
        indices,
        nothing if eids is None else eids,
    )
    reordered = dataclasses.replace(
        dataset,
        indptr=indptr,
        indices=indices,
        eids=eids,
        labels=dataset.labels[order],
        train=rank[dataset.train],
        valid=rank[dataset.valid],
        test=rank[dataset.test],
        node_features={
            name: _take_rows(name, feature, order, allocate)
            for name, feature in dataset.node_features.items()
        },
        checked=True,
    )
    return reordered, rank


def in_folder(folder: Path) -> Allocate:
    """Return an `Allocate` that makes memory-mapped .npy files in `folder`."""

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if 0 in shape:  # an empty file cannot be mapped
            np.save(folder / f"{name}.npy", np.empty(shape, dtype))
            return np.empty(shape, dtype)
        return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)

    return allocate


def _inverse(dataset: Dataset, order: np.ndarray) -> np.ndarray:
    asked = f"reorder the {dataset.num_nodes} nodes of {dataset.name!r}"
    fix = "pass every node id exactly once"
    if order.dtype.kind not in "iu" or order.shape != (dataset.num_nodes,):
        problem = f"the order has dtype {order.dtype} and shape {order.shape}"
        raise InvalidInputError(asked, problem, fix)
    if len(order) and (order.min() < 0 or order.max() >= dataset.num_nodes):
        problem = f"the order has ids from {order.min()} to {order.max()}"
        raise IdOutOfRangeError(asked, problem, fix)
    rank = np.full(dataset.num_nodes, -1, np.int64)
    rank[order] = np.arange(dataset.num_nodes)
    if (rank < 0).any():
        raise InvalidInputError(asked, f"node {int(rank.argmin())} is not in the order", fix)
    return rank


@njit(cache=True, nogil=True)
def _reorder_edges(indptr, indices, eids, order, rank, new_indices, new_eids):
    to = 0
    for old in order:
        for place in range(indptr[old], indptr[old + 1]):
            new_indices[to] = rank[indices[place]]
            if len(new_eids) > 0:
                new_eids[to] = eids[place] if len(eids) > 0 else place
            to += 1


def _take_rows(name: str, feature: Any, order: np.ndarray, allocate: Allocate) -> Any:
    """Return ``feature[order]``; a torch tensor stays one, an array goes where `allocate` says."""
    if not isinstance(feature, np.ndarray):
        import torch

        return feature.index_select(0, torch.from_numpy(np.ascontiguousarray(order, np.int64)))
    rows = allocate(name, feature.shape, feature.dtype)
    step = max(1, _CHUNK_BYTES * len(feature) // max(1, feature.nbytes))
    for start in range(0, len(order), step):
        rows[start : start + step] = feature[order[start : start + step]]
    return rows
