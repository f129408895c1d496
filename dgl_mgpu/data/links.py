"""Edges that are kept from training, to be told from pairs of nodes that are none."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numba import njit

from ..errors import InvalidInputError
from .dataset import Dataset

#: Numbers of the parts that edges belong to.
_TRAIN, _VALID, _TEST = 0, 1, 2


class HeldOut(NamedTuple):
    """A data set without the edges that were taken out of it.

    Attributes
    ----------
    dataset : Dataset
        With the other edges, whose ids are their places in the CSC, and their features.
    valid, test : ndarray, the dtype of the data set's indices, shape (2, n)
        Sources and destinations of the edges of each split, ordered by destination.
    """

    dataset: Dataset
    valid: np.ndarray
    test: np.ndarray


def hold_out(dataset: Dataset, valid: float, test: float, seed: int) -> HeldOut:
    """Take shares of the edges out of a graph.

    What is drawn, from the seed alone, are pairs of nodes: an edge goes with its reverse and with
    others between the same two nodes, or a model would see what it is to predict.  Self-loops stay.

    Parameters
    ----------
    dataset : Dataset
    valid, test : float
        Shares of the edges, above 0 and together below 1; about so many are drawn.
    seed : int
        In [0, 2**64).

    Returns
    -------
    HeldOut

    Raises
    ------
    InvalidInputError
        If a split or training is left without edges.
    """
    parts = np.empty(dataset.num_edges, np.uint8)
    indptr = np.zeros_like(dataset.indptr)
    _draw_parts(dataset.indptr, dataset.indices, np.uint64(seed), valid, test, parts, indptr)
    np.cumsum(indptr, out=indptr)
    stay = parts == _TRAIN
    places = np.flatnonzero(stay)
    eids = places if dataset.eids is None else dataset.eids[places]
    rest = dataclasses.replace(
        dataset,
        indptr=indptr,
        indices=dataset.indices[stay],
        eids=None,
        edge_features={name: rows[eids] for name, rows in dataset.edge_features.items()},
        description=f"{dataset.description}; without edges held out: {valid:g} to validate on, "
        f"{test:g} to test on, seed {seed}",
        checked=True,
    )
    found = HeldOut(rest, *(_ends(dataset, np.flatnonzero(parts == p)) for p in (_VALID, _TEST)))
    counts = {
        "training": len(edges_to_learn(rest)),
        "validation": found.valid.shape[1],
        "test": found.test.shape[1],
    }
    for part, count in counts.items():
        if not count:
            raise InvalidInputError(
                f"hold {valid:g} and {test:g} of the edges of {dataset.name!r} out",
                f"no edges left for {part}: it has {dataset.num_edges}, self-loops among them",
                "choose other shares (links.valid, links.test), or a larger graph",
            )
    return found


def edges_to_learn(dataset: Dataset) -> np.ndarray:
    """Ids of the edges that are no self-loops, of a data set whose ids are places in the CSC.

    Returns
    -------
    ndarray, int64, ascending
    """
    return np.flatnonzero(dataset.indices != _destinations(dataset))


class Rings(NamedTuple):
    """Edges between the same two nodes, in either direction, as rings.

    Attributes
    ----------
    next_edge : ndarray, int64, shape (num_edges,)
        For each edge the next one in its ring, which is itself if there is no other, as of a
        self-loop: of an undirected graph without parallel edges its reverse.
    longest : int
        Edges of the longest ring: one that is followed so often has been gone round.
    """

    next_edge: np.ndarray
    longest: int


def rings_of_edges(dataset: Dataset) -> Rings:
    """Which edges join the same nodes, of a data set whose edge ids are places in the CSC.

    Returns
    -------
    Rings
    """
    edges = edges_to_learn(dataset)
    sources, destinations = dataset.indices[edges].astype(np.int64), _destinations(dataset)[edges]
    pairs = np.minimum(sources, destinations) * dataset.num_nodes
    pairs += np.maximum(sources, destinations)
    del sources, destinations
    order = np.argsort(pairs, kind="stable")
    edges, pairs = edges[order], pairs[order]
    begins = np.flatnonzero(np.diff(pairs, prepend=-1))
    lengths = np.diff(begins, append=len(pairs))
    after = np.arange(1, len(pairs) + 1)
    after[begins + lengths - 1] = begins
    next_edge = np.arange(dataset.num_edges)
    next_edge[edges] = edges[after]
    return Rings(next_edge, int(lengths.max(initial=1)))


def _destinations(dataset: Dataset) -> np.ndarray:
    """Of every edge, by its place."""
    return np.repeat(np.arange(dataset.num_nodes), np.diff(dataset.indptr))


def _ends(dataset: Dataset, places: np.ndarray) -> np.ndarray:
    """Sources and destinations of the edges at ascending places."""
    destinations = np.searchsorted(dataset.indptr, places, side="right") - 1
    return np.stack([dataset.indices[places], destinations.astype(dataset.indices.dtype)])


@njit(cache=True, nogil=True)
def _mixed(state):
    """The output function of splitmix64."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@njit(cache=True, nogil=True)
def _draw_parts(indptr, indices, seed, valid, test, parts, counts):
    """The part of every edge, and at ``counts[node + 1]`` how many in-edges are trained on."""
    for node in range(len(indptr) - 1):
        for place in range(indptr[node], indptr[node + 1]):
            source = indices[place]
            part = _TRAIN
            if source != node:
                low, high = np.uint64(min(source, node)), np.uint64(max(source, node))
                number = _mixed(_mixed(_mixed(seed) ^ low) ^ high)
                share = np.float64(number >> np.uint64(11)) * 2.0**-53
                if share < test:
                    part = _TEST
                elif share < test + valid:
                    part = _VALID
            parts[place] = part
            if part == _TRAIN:
                counts[node + 1] += 1
