"""Traversals node by node, as DGL's C++ does them: C functions of its ``traversal``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import TensorIndex

_FORWARD, _REVERSE, _NO_TREE_EDGE = range(3)


def _matrix(index: TensorIndex, is_reversed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    relation = index.relations[0]
    matrix = relation.csc() if is_reversed else relation.csr()
    return matrix.indptr.numpy(), matrix.indices.numpy(), matrix.edge_ids().numpy()


def _by_number(*arrays: np.ndarray) -> Callable[[int], torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays].__getitem__


def bfs_nodes(index: TensorIndex, sources: torch.Tensor, is_reversed: bool) -> Any:
    """Nodes by their distance from the sources, and how many there are of each."""
    indptr, indices, eids = _matrix(index, is_reversed)
    nodes, _, sizes = _breadth_first(indptr, indices, eids, sources.numpy())
    return _by_number(nodes, sizes)


def bfs_edges(index: TensorIndex, sources: torch.Tensor, is_reversed: bool) -> Any:
    """Edges by which nodes were found, and how many for each distance but 0."""
    indptr, indices, eids = _matrix(index, is_reversed)
    _, edges, sizes = _breadth_first(indptr, indices, eids, sources.numpy())
    return _by_number(edges, sizes[1:])


@njit(cache=True, nogil=True)
def _breadth_first(indptr, indices, eids, sources):  # type: ignore[no-untyped-def]
    num_nodes = len(indptr) - 1
    is_found = np.zeros(num_nodes, dtype=np.bool_)
    nodes = np.empty(num_nodes + len(sources), dtype=indices.dtype)
    edges = np.empty(num_nodes, dtype=indices.dtype)
    sizes = np.empty(num_nodes + 1, dtype=np.int64)
    num_found = num_edges = num_sizes = begin = 0
    for node in sources:
        is_found[node] = True
        nodes[num_found] = node
        num_found += 1
    while begin < num_found:
        end = num_found
        sizes[num_sizes] = end - begin
        num_sizes += 1
        for at in range(begin, end):
            for entry in range(indptr[nodes[at]], indptr[nodes[at] + 1]):
                node = indices[entry]
                if not is_found[node]:
                    is_found[node] = True
                    nodes[num_found] = node
                    edges[num_edges] = eids[entry]
                    num_found += 1
                    num_edges += 1
        begin = end
    return nodes[:num_found].copy(), edges[:num_edges].copy(), sizes[:num_sizes].copy()


def topological_nodes(index: TensorIndex, is_reversed: bool) -> Any:
    """Nodes after all those with an edge to them, and how many at a time."""
    indptr, indices, _ = _matrix(index, is_reversed)
    nodes, sizes = _topological(indptr, indices)
    if len(nodes) < len(indptr) - 1:
        raise InvalidCallError(
            "put nodes into a topological order",
            "Error in topological traversal: loop detected in the given graph",
            "pass a graph without cycles",
        )
    return _by_number(nodes, sizes)


@njit(cache=True, nogil=True)
def _topological(indptr, indices):  # type: ignore[no-untyped-def]
    num_nodes = len(indptr) - 1
    missing = np.zeros(num_nodes, dtype=np.int64)
    for node in indices:
        missing[node] += 1
    nodes = np.empty(num_nodes, dtype=indices.dtype)
    sizes = np.empty(num_nodes, dtype=np.int64)
    num_found = num_sizes = begin = 0
    for node in range(num_nodes):
        if missing[node] == 0:
            nodes[num_found] = node
            num_found += 1
    while begin < num_found:
        end = num_found
        sizes[num_sizes] = end - begin
        num_sizes += 1
        for at in range(begin, end):
            for entry in range(indptr[nodes[at]], indptr[nodes[at] + 1]):
                node = indices[entry]
                missing[node] -= 1
                if missing[node] == 0:
                    nodes[num_found] = node
                    num_found += 1
        begin = end
    return nodes[:num_found].copy(), sizes[:num_sizes].copy()


def dfs_edges(index: TensorIndex, sources: torch.Tensor, is_reversed: bool) -> Any:
    """Edges by which nodes are found, depth first, from each source by itself.

    The first ones of all sources, then the second ones; and how many there are at a time.
    """
    edges, _, sizes = _depth_first(index, sources, is_reversed, False, False)
    return _by_number(edges, sizes)


def dfs_labeled_edges(
    index: TensorIndex,
    sources: torch.Tensor,
    is_reversed: bool,
    has_reverse_edge: bool,
    has_nontree_edge: bool,
    return_labels: bool,
) -> Any:
    """The same, also when an edge is left again, and those that find nothing; with labels."""
    edges, labels, sizes = _depth_first(
        index, sources, is_reversed, bool(has_reverse_edge), bool(has_nontree_edge)
    )
    return _by_number(edges, labels, sizes) if return_labels else _by_number(edges, sizes)


def _depth_first(
    index: TensorIndex, sources: torch.Tensor, is_reversed: bool, reverse: bool, nontree: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    matrix = _matrix(index, is_reversed)
    walks = [_depth_first_from(*matrix, source, reverse, nontree) for source in sources.tolist()]
    # Step by step: a stable sort by the step keeps the order of the sources.
    steps = np.concatenate([np.arange(len(edges)) for edges, _ in walks])
    order = np.argsort(steps, kind="stable")
    edges, labels = (np.concatenate(parts)[order] for parts in zip(*walks, strict=True))
    return edges, labels, np.bincount(steps).astype(np.int64)


@njit(cache=True, nogil=True)
def _depth_first_from(indptr, indices, eids, source, reverse, nontree):  # type: ignore[no-untyped-def]
    num_nodes, num_entries = len(indptr) - 1, len(indices)
    is_found = np.zeros(num_nodes, dtype=np.bool_)
    edges = np.empty(2 * num_entries, dtype=indices.dtype)
    labels = np.empty(2 * num_entries, dtype=np.int64)
    # Of each node on the way here, the entry that is looked at, and whether it found a node.
    way = np.empty(num_nodes, dtype=indices.dtype)
    entries = np.empty(num_nodes, dtype=np.int64)
    on_tree = np.empty(num_nodes, dtype=np.bool_)
    count = depth = 0
    is_found[source] = True
    if indptr[source] < indptr[source + 1]:
        way[0], entries[0], on_tree[0] = source, indptr[source], False
        depth = 1
    while depth:
        top = depth - 1
        node, entry = way[top], entries[top]
        other = indices[entry]
        if not is_found[other]:
            is_found[other] = True
            on_tree[top] = True
            edges[count], labels[count] = eids[entry], _FORWARD
            count += 1
            if indptr[other] < indptr[other + 1]:
                way[depth], entries[depth], on_tree[depth] = other, indptr[other], False
                depth += 1
            continue
        if on_tree[top] and reverse:
            edges[count], labels[count] = eids[entry], _REVERSE
            count += 1
        if not on_tree[top] and nontree:
            edges[count], labels[count] = eids[entry], _NO_TREE_EDGE
            count += 1
        if entry + 1 < indptr[node + 1]:
            entries[top], on_tree[top] = entry + 1, False
        else:
            depth -= 1
    return edges[:count].copy(), labels[:count].copy()
