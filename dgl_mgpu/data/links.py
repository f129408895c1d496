"""Link prediction: edges that are held out from training, and edges between the same nodes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numba import njit

from dgl_mgpu.data.blockmodel import random_bits, uniform
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.errors import InvalidInputError

#: Edges of a split, for a metric that means something.
_FEWEST = 10
#: Numbers of the parts that edges belong to.
_TRAIN, _VALID, _TEST = 0, 1, 2


class HeldOut(NamedTuple):
    """A data set without the edges of two splits, and these."""

    dataset: Dataset  # edge ids are places in its CSC
    #: Shape (2, n), the dtype of the data set's indices: sources and destinations, ordered by
    #: destination.
    valid: np.ndarray
    test: np.ndarray


def hold_out(dataset: Dataset, valid: float, test: float, seed: int) -> HeldOut:
    """Take shares of the edges, above 0 and together below 1, out of a graph.

    Pairs of nodes are drawn from the seed, in [0, 2**64), alone: an edge goes with its reverse and
    others between the same nodes, or a model would see what it is to predict.  Self-loops stay.

    Raises
    ------
    InvalidInputError
        Training is left without edges, or a split with fewer than ten.
    """
    parts = np.empty(dataset.num_edges, np.uint8)
    indptr = np.zeros_like(dataset.indptr)
    _draw_parts(dataset.indptr, dataset.indices, np.uint64(seed), valid, test, parts, indptr)
    np.cumsum(indptr, out=indptr)
    stays = parts == _TRAIN
    rest = dataclasses.replace(
        dataset,
        indptr=indptr,
        indices=dataset.indices[stays],
        eids=None,
        edge_features={
            name: rows[np.flatnonzero(stays) if dataset.eids is None else dataset.eids[stays]]
            for name, rows in dataset.edge_features.items()
        },
        description=f"{dataset.description}; without edges held out: {valid:g} to validate on, "
        f"{test:g} to test on, seed {seed}",
        checked=True,
    )
    held_out = HeldOut(rest, *(_ends(dataset, np.flatnonzero(parts == p)) for p in (_VALID, _TEST)))
    for part, count, needed in (
        ("training", len(edges_to_learn(rest)), 1),
        ("validation", held_out.valid.shape[1], _FEWEST),
        ("test", held_out.test.shape[1], _FEWEST),
    ):
        if count < needed:
            raise InvalidInputError(
                f"hold out {valid:g} and {test:g} of the edges of {dataset.name!r}",
                f"{count or 'no'} edges are left for {part}, of {dataset.num_edges} with"
                " self-loops",
                f"choose other shares (links.valid, links.test) that leave it at least {needed}, or"
                " a larger graph",
            )
    return held_out


def edges_to_learn(dataset: Dataset) -> np.ndarray:
    """Ascending ids of the edges that are no self-loops, where ids are places in the CSC.

    Of the data set's ``id_dtype``.
    """
    edges = np.empty(dataset.num_edges, dataset.id_dtype)
    return edges[: _list_edges(dataset.indptr, dataset.indices, edges)]


class Rings(NamedTuple):
    """Edges between the same two nodes, in either direction, as rings."""

    #: The data set's ``id_dtype``, shape (num_edges,): the next edge in each edge's ring, itself if
    #: there is no other.  In an undirected graph without parallel edges it is the reverse.
    next_edge: np.ndarray
    longest: int  # edges of the longest ring


def rings_of_edges(dataset: Dataset) -> Rings:
    """Edges between the same nodes, of a data set whose edge ids are places in the CSC."""
    indptr, indices = dataset.indptr, dataset.indices
    next_edge = np.arange(dataset.num_edges, dtype=dataset.id_dtype)
    # Edges are listed by their lower ends, and then sorted by the higher ones a node at a time: to
    # sort all of them at once takes several times the memory.
    begins = np.zeros(dataset.num_nodes + 1, np.int64)
    _count_by_lower_end(indptr, indices, begins)
    np.cumsum(begins, out=begins)
    edges, higher_ends = np.empty(begins[-1], next_edge.dtype), np.empty(begins[-1], indices.dtype)
    _list_by_lower_end(indptr, indices, begins[:-1].copy(), edges, higher_ends)
    return Rings(next_edge, max(1, _join_rings(begins, edges, higher_ends, next_edge)))


def _ends(dataset: Dataset, places: np.ndarray) -> np.ndarray:
    """Sources and destinations of the edges at ascending places."""
    destinations = np.searchsorted(dataset.indptr, places, side="right") - 1
    return np.stack([dataset.indices[places], destinations.astype(dataset.indices.dtype)])


@njit(cache=True, nogil=True)
def _draw_parts(indptr, indices, seed, valid, test, parts, counts):
    """The part of every edge, and at ``counts[node + 1]`` how many in-edges are trained on."""
    for node in range(len(indptr) - 1):
        for place in range(indptr[node], indptr[node + 1]):
            source = indices[place]
            part = _TRAIN
            if source != node:
                low, high = np.uint64(min(source, node)), np.uint64(max(source, node))
                share = uniform(random_bits(random_bits(random_bits(seed, 0) ^ low, 0) ^ high, 0))
                if share < test:
                    part = _TEST
                elif share < test + valid:
                    part = _VALID
            parts[place] = part
            if part == _TRAIN:
                counts[node + 1] += 1


@njit(cache=True, nogil=True)
def _list_edges(indptr, indices, edges):
    """List the places of edges that are no self-loops; return how many there are."""
    count = 0
    for node in range(len(indptr) - 1):
        for place in range(indptr[node], indptr[node + 1]):
            if indices[place] != node:
                edges[count] = place
                count += 1
    return count


@njit(cache=True, nogil=True)
def _count_by_lower_end(indptr, indices, counts):
    """Count at ``counts[node + 1]`` the edges with this lower end, without self-loops."""
    for node in range(len(indptr) - 1):
        for place in range(indptr[node], indptr[node + 1]):
            if indices[place] != node:
                counts[min(indices[place], node) + 1] += 1


@njit(cache=True, nogil=True)
def _list_by_lower_end(indptr, indices, ends, edges, higher_ends):
    """Places and higher ends of edges by their lower ends, whose lists begin at ``ends``."""
    for node in range(len(indptr) - 1):
        for place in range(indptr[node], indptr[node + 1]):
            source = indices[place]
            if source != node:
                at = ends[min(source, node)]
                edges[at], higher_ends[at] = place, max(source, node)
                ends[min(source, node)] = at + 1


@njit(cache=True, nogil=True)
def _join_rings(begins, edges, higher_ends, next_edge):
    """Link edges with the same ends; return the length of the longest ring."""
    longest = 0
    for node in range(len(begins) - 1):
        listed = edges[begins[node] : begins[node + 1]]
        highers = higher_ends[begins[node] : begins[node + 1]]
        order = np.argsort(highers, kind="mergesort")
        first = 0
        for at in range(len(order)):
            is_last = at + 1 == len(order) or highers[order[at + 1]] != highers[order[at]]
            following = order[first if is_last else at + 1]
            next_edge[listed[order[at]]] = listed[following]
            if is_last:
                longest = max(longest, at + 1 - first)
                first = at + 1
    return longest
