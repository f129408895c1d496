"""A random graph with power-law degrees, planted classes and features that hint at them.

The model is a degree-corrected stochastic block model (Karrer and Newman, «Stochastic
blockmodels and community structure in networks», 2011), directed, with these parts:

* Every node has a class, uniformly at random.
* In-degrees follow a Pareto distribution, ``P(D > d) ~ d ** -exponent``, cut off at the number
  of nodes, and sum to the number of edges exactly.
* The source of an edge is of the destination's class with probability ``homophily``, of another
  one, uniformly, otherwise.  Within its class it is drawn by rank, with probability
  proportional to ``rank ** (-1 / exponent)``: so out-degrees follow the same law, and a node
  with many in-edges has many out-edges.  Parallel edges occur, self-loops too (rarely).
* Features are the class's centroid, of length ``signal * sqrt(2 ln classes)``, plus noise of
  unit variance per dimension.  In that unit, features alone are about equally (in)sufficient
  for any number of classes.

Every random number is a hash of (seed, purpose, place), so that it depends neither on the size
of the chunks nor on the order of the work.
"""

from __future__ import annotations

import itertools

import numpy as np
from numba import njit

from dgl_mgpu.data.csc import index_dtype

# SplitMix64 (Steele, Lea and Flood, «Fast splittable pseudorandom number generators», 2014):
# the k-th number of the stream `key` is the mixed sum of the key and k times the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S11, _S16, _S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (11, 16, 27, 30, 31, 32))
_LOW_16 = np.uint64(0xFFFF)
_LOW_32 = np.uint64(0xFFFFFFFF)

#: Purposes of random numbers; each has its own stream.
CLASS, DEGREE, SPLIT, CLASS_OF_SOURCE, RANK_OF_SOURCE, CENTROID, NOISE, LABEL = range(8)

#: Mean and standard deviation of the sum of four uniform integers below 2**16.
_SUM_MEAN = np.float32(4 * (2**16 - 1) / 2)
_SUM_SD = np.float32(np.sqrt(4 * (2**32 - 1) / 12))


@njit(cache=True, nogil=True, inline="always")
def random_bits(key, place):
    """Return the 64 random bits at `place` of the stream `key`."""
    mixed = key + (np.uint64(place) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> _S30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_2
    return mixed ^ (mixed >> _S31)


@njit(cache=True, nogil=True, inline="always")
def uniform(bits):
    """Return a float64 in [0, 1) from 64 random bits."""
    return float(bits >> _S11) * 2.0**-53


@njit(cache=True, nogil=True, inline="always")
def _normal(bits):
    """Return the scaled sum of four uniform numbers, which is close to a normal one.

    Whole-number arithmetic makes it fast and the same on every machine.
    """
    total = (
        (bits & _LOW_16)
        + ((bits >> _S16) & _LOW_16)
        + ((bits >> _S32) & _LOW_16)
        + (bits >> np.uint64(48))
    )
    return (np.float32(np.int64(total)) - _SUM_MEAN) / _SUM_SD


@njit(cache=True)
def _stream(seed, purpose):
    return random_bits(random_bits(np.uint64(seed), np.uint64(0)), np.uint64(purpose))


def stream(seed: int, purpose: int) -> np.uint64:
    """Return the key of the random numbers that `seed` has for `purpose`."""
    return np.uint64(_stream(np.uint64(seed), np.uint64(purpose)))


@njit(cache=True, nogil=True)
def _uniforms(key, count):
    out = np.empty(count, np.float64)
    for place in range(count):
        out[place] = uniform(random_bits(key, place))
    return out


def classes(num_nodes: int, num_classes: int, seed: int) -> np.ndarray:
    """Return the class of every node, int64 [num_nodes]; none is empty."""
    labels = (_uniforms(stream(seed, CLASS), num_nodes) * num_classes).astype(np.int64)
    labels[:num_classes] = np.arange(num_classes)
    return labels


def labels_of_classes(num_classes: int, num_labels: int, seed: int) -> np.ndarray:
    """Return which labels each class has, int64 [num_classes, num_labels] of 0 and 1.

    Half of the classes, rounded down, have each label.
    """
    draws = _uniforms(stream(seed, LABEL), num_classes * num_labels)
    order = draws.reshape(num_classes, num_labels).argsort(0).argsort(0)
    return (order < num_classes // 2).astype(np.int64)


def split(num_nodes: int, fractions: tuple[float, float, float], seed: int) -> list[np.ndarray]:
    """Return the sorted node ids of the training, validation and test part, each int64."""
    at = _uniforms(stream(seed, SPLIT), num_nodes)
    edges = np.cumsum((0.0, *fractions))
    return [
        np.flatnonzero((at >= start) & (at < stop)) for start, stop in itertools.pairwise(edges)
    ]


def in_degrees(num_nodes: int, num_edges: int, exponent: float, seed: int) -> np.ndarray:
    """Return indptr, int64 [num_nodes + 1], with Pareto-distributed in-degrees.

    The exponent, above 1, is that of the tail of the distribution function.
    """
    # A bounded Pareto distribution on [1, ratio] has this mean; the largest degree, ratio times
    # the smallest, is to be the number of nodes, which settles the ratio (a fixed point).
    ratio = float(num_nodes)
    for _ in range(50):
        mean = exponent / (exponent - 1) * (1 - ratio ** (1 - exponent)) / (1 - ratio**-exponent)
        ratio = max(2.0, num_nodes * mean * num_nodes / num_edges)
    weight = _uniforms(stream(seed, DEGREE), num_nodes)
    weight *= -(1 - ratio**-exponent)
    weight += 1
    np.power(weight, -1 / exponent, out=weight)
    # Rounding the running sum, not each degree, makes the total exact.
    np.cumsum(weight, out=weight)
    weight *= num_edges / weight[-1]
    indptr = np.zeros(num_nodes + 1, np.int64)
    indptr[1:] = weight
    indptr[-1] = num_edges
    return indptr


def members_by_rank(
    labels: np.ndarray, indptr: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes by class and falling in-degree, and where each class begins.

    int32 or int64 [num_nodes], and int64 [num_classes + 1].
    """
    largest = int(np.diff(indptr).max()) + 1
    key = labels * largest  # one sort key instead of two: memory counts here
    key -= np.diff(indptr)
    members = np.argsort(key, kind="stable").astype(index_dtype(len(labels)))
    first = np.zeros(num_classes + 1, np.int64)
    np.cumsum(np.bincount(labels, minlength=num_classes), out=first[1:])
    return members, first


@njit(cache=True, nogil=True)
def sources(start, stop, indptr, labels, members, first, homophily, exponent, class_key, rank_key):
    """Return the sources of the edges ``[start, stop)``, int64; edges lie by destination."""
    out = np.empty(stop - start, np.int64)
    num_others = np.uint64(len(first) - 2)
    power = exponent / (exponent - 1.0)
    node = np.searchsorted(indptr, start, side="right") - 1
    for edge in range(start, stop):
        while indptr[node + 1] <= edge:
            node += 1
        cls = labels[node]
        bits = random_bits(class_key, edge)
        if float(bits >> _S32) * 2.0**-32 >= homophily:
            other = np.int64(((bits & _LOW_32) * num_others) >> _S32)
            cls = other if other < cls else other + 1
        begin, size = first[cls], first[cls + 1] - first[cls]
        rank = np.int64(size * uniform(random_bits(rank_key, edge)) ** power)
        out[edge - start] = members[begin + rank]
    return out


@njit(cache=True, nogil=True)
def destinations(start, stop, indptr):
    """Return the destinations of the edges ``[start, stop)``, int64."""
    out = np.empty(stop - start, np.int64)
    node = np.searchsorted(indptr, start, side="right") - 1
    for edge in range(start, stop):
        while indptr[node + 1] <= edge:
            node += 1
        out[edge - start] = node
    return out


def centroids(num_classes: int, num_features: int, signal: float, seed: int) -> np.ndarray:
    """Return the mean feature vector of every class, float32 [num_classes, num_features]."""
    zero = np.zeros((num_classes, num_features), np.float32)
    direction = features(0, num_classes, np.arange(num_classes), zero, stream(seed, CENTROID))
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    return (direction * (signal * np.sqrt(2 * np.log(num_classes)) / length)).astype(np.float32)


@njit(cache=True, nogil=True)
def features(start, stop, labels, centroid, noise_key):
    """Return the features of the nodes ``[start, stop)``, float32 [stop - start, features]."""
    width = centroid.shape[1]
    out = np.empty((stop - start, width), np.float32)
    for node in range(start, stop):
        mean = centroid[labels[node]]
        for column in range(width):
            out[node - start, column] = mean[column] + _normal(
                random_bits(noise_key, node * width + column)
            )
    return out
