"""What one mini-batch is expected to read: each row of topology, each node's row, and edges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Degrees(NamedTuple):
    """Of a table of topology.

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
    """Expect of a mini-batch that its seeds are any nodes, and its neighbours hot ones.

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
    num_nodes = sum(len(each) for each in hotness.values())
    total = sum(map(_total, hotness.values()))
    seeds = min(1.0, batch_size / max(num_nodes, 1))
    known = [each for each in topologies if each.ntype in hotness]

    reached = {ntype: np.full(len(hot), seeds, np.float32) for ntype, hot in hotness.items()}
    sampled = {ntype: np.zeros(len(hot), np.float32) for ntype, hot in hotness.items()}
    tables = [_Drawn(each.degrees) for each in known]
    edges, asked = 0.0, 0.0
    widest = max((int(each.degrees.max(initial=0)) for each in known), default=0)
    for fanout in (widest if fanout < 0 else fanout for fanout in reversed(fanouts)):
        # A layer draws for all that was reached so far, seeds among them.
        for ntype, rows in reached.items():
            sampled[ntype] += rows
            asked += fanout * _total(rows)
        for each, table in zip(known, tables, strict=True):
            edges += table.draw(reached[each.ntype], fanout)
        distinct_edges = sum(table.distinct for table in tables)
        for ntype, rows in reached.items():
            rows[:] = _at_least_once(_shares(hotness[ntype], total, num_nodes) * distinct_edges)
            rows *= 1 - seeds
            rows += seeds
    rows_sampled = sum(map(_total, sampled.values()))
    if distinct and total:
        sampled = _in_proportion(hotness, total, sampled)
        reached = _in_proportion(hotness, total, reached)
    return Reads(sampled, reached, edges, asked / rows_sampled if rows_sampled else 0.0)


def _shares(hotness: np.ndarray, total: float, num_nodes: int) -> np.ndarray:
    """Of the draws, those that take each node: the same for all, if none is hot."""
    if not total:
        return np.full(len(hotness), 1 / max(num_nodes, 1), np.float32)
    return np.divide(hotness, total, dtype=np.float32)


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


class _Drawn:
    """Edges of a table that are drawn layer by layer, of rows that each layer may reach.

    Attributes
    ----------
    distinct : float
        Those that any layer has drawn.
    """

    def __init__(self, degrees: np.ndarray) -> None:
        self._degrees = degrees.astype(np.float32)
        self._reached = np.zeros(len(degrees), np.float32)
        # Share of each row that was reached and is not drawn.
        self._left = np.zeros(len(degrees), np.float32)
        self.distinct = 0.0

    def draw(self, reached: np.ndarray, fanout: int) -> float:
        """Draw so many of the rows, those of layers before among them; how many these are."""
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
