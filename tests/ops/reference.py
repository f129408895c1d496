"""The operators' contracts, written out slowly in plain Python integers and floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np

from tests.ops.views import Graph

MASK32 = 0xFFFFFFFF


def philox_words(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox 4x32-10 as in the paper, on lists of 32-bit words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right >> 32 ^ c[1] ^ k[0], right & MASK32, left >> 32 ^ c[3] ^ k[1], left & MASK32]
        k = [k[0] + 0x9E3779B9 & MASK32, k[1] + 0xBB67AE85 & MASK32]
    return c


def block(node: int, number: int, stream: int, key: int) -> tuple[int, int]:
    counter = [node & MASK32, node >> 32, number, stream]
    words = philox_words(counter, [key & MASK32, key >> 32 & MASK32])
    return words[0] | words[1] << 32, words[2] | words[3] << 32


def draw(node: int, index: int, key: int) -> int:
    return block(node, index // 2, 0, key)[index % 2]


def exponential(random: int) -> float:
    t = 2 * (random >> 12) + 1
    bits = t.bit_length()
    m = t / 2.0**bits
    if m < math.sqrt(0.5):
        m, bits = m * 2, bits - 1
    f = (m - 1.0) / (m + 1.0)
    series = 0.0
    for divisor in range(21, 0, -2):
        series = series * (f * f) + 1.0 / divisor
    return (53 - bits) * 0.6931471805599453 - 2.0 * f * series


def pick_uniform(node: int, degree: int, fanout: int, replace: bool, key: int) -> list[int]:
    if degree == 0 or fanout == 0:
        return []
    if fanout < 0 or (not replace and degree <= fanout):
        return list(range(degree))
    if replace:
        return [draw(node, j, key) * degree >> 64 for j in range(fanout)]
    picks: list[int] = []
    for j, last in enumerate(range(degree - fanout, degree)):
        pick = draw(node, j, key) * (last + 1) >> 64
        picks.append(last if pick in picks else pick)
    return picks


def pick_weighted(
    node: int, weights: np.ndarray, fanout: int, replace: bool, key: int
) -> list[int]:
    positive = [j for j, weight in enumerate(weights) if weight > 0]
    if not positive or fanout == 0:
        return []
    if fanout < 0 or (not replace and len(positive) <= fanout):
        return positive
    largest = float(max(weights))
    scaled = [
        max(1, int(float(weight) / largest * 2.0**32)) if weight > 0 else 0 for weight in weights
    ]
    if replace:
        sums = np.cumsum(np.array(scaled, dtype=object))
        points = [draw(node, j, key) * int(sums[-1]) >> 64 for j in range(fanout)]
        return [next(j for j, total in enumerate(sums) if total > point) for point in points]
    keys = {j: exponential(draw(node, j, key)) / scaled[j] for j in positive}
    return sorted(positive, key=lambda j: (keys[j], j))[:fanout]


def sample(
    graph: Graph,
    seeds: Sequence[int],
    fanout: int,
    key: int,
    replace: bool = False,
    weights: np.ndarray | None = None,
    times: np.ndarray | None = None,
    until: Sequence[float] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """``indptr``, ``neighbors`` and ``eids`` of the sample."""
    indptr, neighbors, eids = [0], [], []
    for place, seed in enumerate(seeds):
        edges = graph.edge_ids(seed)
        if weights is None and times is None:
            picks = pick_uniform(seed, graph.degree(seed), fanout, replace, key)
        else:
            mine = np.ones(len(edges)) if weights is None else weights[edges].astype(np.float64)
            if times is not None and until is not None:
                late = [not time <= until[place] for time in times[edges].tolist()]
                mine[late] = 0
            picks = pick_weighted(seed, mine, fanout, replace, key)
        neighbors += [int(graph.neighbors(seed)[pick]) for pick in picks]
        eids += [int(graph.edge_ids(seed)[pick]) for pick in picks]
        indptr.append(len(neighbors))
    return indptr, neighbors, eids


def append_unique(seeds: Sequence[int], neighbors: Sequence[int]) -> tuple[list[int], list[int]]:
    nodes = list(seeds)
    number: dict[int, int] = {}
    for index, seed in enumerate(seeds):
        number.setdefault(seed, index)
    for neighbor in neighbors:
        if neighbor not in number:
            number[neighbor] = len(nodes)
            nodes.append(neighbor)
    return nodes, [number[neighbor] for neighbor in neighbors]


def walk(
    graphs: Sequence[Graph], start: int, number: int, stop: Sequence[float], key: int
) -> list[int]:
    """The ``number``-th walk from a start; ``stop`` are the probabilities to end."""
    trace = [start]
    for step, probability in enumerate(stop):
        graph = graphs[step % len(graphs)]
        pick, end = block(start, number, 2**31 + step, key)
        if graph.degree(trace[-1]) == 0 or Fraction(end >> 11, 2**53) < Fraction(probability):
            return trace + [-1] * (len(stop) + 1 - len(trace))
        edge = pick * graph.degree(trace[-1]) >> 64
        trace.append(int(graph.neighbors(trace[-1])[edge]))
    return trace


def select_visited(traces: Sequence[Sequence[int]], hops: int, count: int) -> list[tuple[int, int]]:
    """The most visited nodes of one seed's walks and their visits; ties by first visit."""
    visits: dict[int, int] = {}
    for trace in traces:
        for node in trace[hops::hops]:
            if node >= 0:
                visits[node] = visits.get(node, 0) + 1
    return sorted(visits.items(), key=lambda item: -item[1])[:count]  # sorting is stable


def ordered_probabilities(weights: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """Probability of each ordered draw without replacement, by enumeration."""
    result = {}
    for order in permutations(range(len(weights)), count):
        left, probability = float(sum(weights)), 1.0
        for index in order:
            probability *= weights[index] / left
            left -= weights[index]
        result[order] = probability
    return result
