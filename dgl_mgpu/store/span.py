"""Which machine of a job keeps which rows, where all machines have one copy of the data together.

The nodes of a type are dealt out in runs of ids: machine ``m`` *owns* those in ``[bounds[m],
bounds[m + 1])``, all of their features and their in-edges, about as many bytes on each machine.
What saves most of the network for its bytes is *replicated*: every machine keeps it, whoever owns
it.  Features and in-edges of a node are two things there, since nodes that are read often need not
be sampled from as often, nor their in-edges be few.  What a machine keeps is planned and stored as
a whole graph is elsewhere, by ids of the whole graph; a row that it does not keep has position -1.
Edge features are on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, PlanDoesNotFitError
from dgl_mgpu.placement import Reads, order_by_hotness
from dgl_mgpu.placement.solver import read_ratio
from dgl_mgpu.store.memory import Blueprint, TopologySource
from dgl_mgpu.store.memory.format import Source

#: Shares of replicas that are tried, evenly spaced in [0, 1].
_STEPS = 32
#: Halvings of an interval, until its ends are neighbours among numbers in about [0, 1].
_BISECTIONS = 60
_ACTION = "share one store among the machines"

#: By node type, the first id of each machine's run and the end of the last.
Bounds = dict[str, list[int]]


#: Bytes of an id, and of a sampled edge, as machines send them.
_ID_BYTES, _EDGE_BYTES = 8, 16


class Kept(NamedTuple):
    """Which nodes' features and which nodes' in-edges a machine keeps, by node type."""

    features: dict[str, np.ndarray]
    in_edges: dict[str, np.ndarray]


@dataclass(frozen=True)
class Replicas:
    """Features or in-edges of the nodes of a type, in the order in which they are replicated.

    Attributes
    ----------
    order : ndarray of int, shape (num_nodes,)
        Nodes, those first that save most of the network for their bytes.
    savings : ndarray of float, shape (num_nodes,)
        Bytes that a mini-batch need not ask for, per byte, in that order.
    bytes_so_far : ndarray of float, shape (num_nodes,)
        Bytes of the nodes up to each one in that order.
    """

    order: np.ndarray
    savings: np.ndarray
    bytes_so_far: np.ndarray

    @classmethod
    def of(cls, saved: np.ndarray, nbytes: np.ndarray) -> Replicas:
        """Of the bytes that each node saves, and those that it takes."""
        savings = np.divide(saved, nbytes, out=np.zeros_like(nbytes), where=nbytes > 0)
        order = order_by_hotness(savings).order
        return cls(order, savings[order], np.cumsum(nbytes[order]))

    @property
    def nbytes(self) -> float:
        """Of all nodes."""
        return float(self.bytes_so_far[-1]) if len(self.order) else 0.0

    def above(self, saving: float) -> int:
        """How many nodes save more than this."""
        return int(np.searchsorted(-self.savings, -saving, side="left"))

    def bytes_of(self, count: int) -> float:
        """Those of the first nodes."""
        return float(self.bytes_so_far[count - 1]) if count else 0.0

    def fitting(self, nbytes: float) -> int:
        """How many of the first nodes take no more than this."""
        return int(np.searchsorted(self.bytes_so_far, nbytes, side="right"))


@dataclass(frozen=True)
class Shares:
    """Who owns which nodes, and what is replicated first."""

    bounds: Bounds
    features: Mapping[str, Replicas]
    in_edges: Mapping[str, Replicas]

    @classmethod
    def of(
        cls,
        sources: Mapping[str, Source],
        reads: Reads,
        machines: int,
        given: Bounds | None = None,
    ) -> Shares:
        """Deal out the nodes of each type, unless their owners are ``given``."""
        bounds: Bounds = dict(given or {})
        features, in_edges = {}, {}
        for ntype, read in reads.nodes.items():
            row_bytes = np.zeros(len(read))
            edge_bytes, answers = np.zeros(len(read)), np.zeros(len(read))
            for source in sources.values():
                if source.position != ntype:
                    continue
                if isinstance(source, TopologySource):
                    degrees = np.diff(source.indptr)
                    stored = source.idtype.itemsize * (1 if source.eids is None else 2)
                    edge_bytes += degrees * stored + np.dtype(np.int64).itemsize
                    drawn = np.minimum(degrees, reads.fanout)
                    answers += _ID_BYTES + _ID_BYTES + _EDGE_BYTES * drawn
                else:
                    row_bytes += source.row_bytes
            if ntype not in bounds:
                bounds[ntype] = _dealt_out(row_bytes + edge_bytes, machines)
            features[ntype] = Replicas.of(read * (_ID_BYTES + row_bytes), row_bytes)
            in_edges[ntype] = Replicas.of(reads.sampled[ntype] * answers, edge_bytes)
        return cls(bounds, features, in_edges)

    def kept(self, machine: int, ratio: float) -> Kept:
        """What a machine keeps if ``ratio`` of the bytes are replicated."""
        parts = [*self.features.values(), *self.in_edges.values()]
        counts = _replicated(parts, ratio * sum(part.nbytes for part in parts))
        ntypes = [*self.features, *self.in_edges]
        kept = []
        for ntype, part, count in zip(ntypes, parts, counts, strict=True):
            is_kept = np.zeros(len(part.order), bool)
            is_kept[part.order[:count]] = True
            first, stop = self.bounds[ntype][machine : machine + 2]
            is_kept[first:stop] = True
            kept.append(is_kept)
        of_types = len(self.features)
        return Kept(
            dict(zip(self.features, kept[:of_types], strict=True)),
            dict(zip(self.in_edges, kept[of_types:], strict=True)),
        )

    def checksums(self) -> dict[str, str]:
        """What is the same on all machines if they deal out the same data, by what it describes."""
        checksums = {}
        for what, parts in (("features", self.features), ("in-edges", self.in_edges)):
            for ntype, part in parts.items():
                in_order = f"{zlib.crc32(np.ascontiguousarray(part.order).data):08x}"
                checksums[f"the order of {what} of nodes of type '{ntype}'"] = in_order
        for ntype, bounds in self.bounds.items():
            checksums[f"the first nodes of type '{ntype}' of machines"] = str(bounds)
        return checksums


def _dealt_out(nbytes: np.ndarray, machines: int) -> list[int]:
    """The first node of each machine and the end of the last, about as many bytes each."""
    by_id = np.cumsum(nbytes)
    total = by_id[-1] if len(by_id) else 0.0
    inner = np.searchsorted(by_id, total * np.arange(1, machines) / machines, side="right")
    return [0, *inner.tolist(), len(nbytes)]


def _replicated(parts: Sequence[Replicas], budget: float) -> list[int]:
    """How many nodes of each part are replicated within a budget of bytes."""
    # A bisection over what the last of them saves: all that saves more is there.
    low, high = -1.0, max((float(part.savings[0]) for part in parts if len(part.order)), default=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        nbytes = sum(part.bytes_of(part.above(middle)) for part in parts)
        low, high = (middle, high) if nbytes > budget else (low, middle)
    counts = [part.above(high) for part in parts]
    # Those that save the same have what is left, part by part.
    left = budget - sum(part.bytes_of(n) for part, n in zip(parts, counts, strict=True))
    for number, part in enumerate(parts):
        before = part.bytes_of(counts[number])
        most = min(part.fitting(before + left), part.above(low))
        counts[number] = max(counts[number], most)
        left -= part.bytes_of(counts[number]) - before
    return counts


def plan_share(
    machines: Communicator,
    sources: Mapping[str, Source],
    reads: Reads,
    ratio: float | str,
    facts: Mapping[str, str],
    plan: Callable[[Kept, bool], Blueprint],
    bounds: Bounds | None = None,
) -> tuple[Blueprint, Bounds]:
    """Plan this machine's share of a store, on its first rank.

    Collective of the machines' first ranks.  ``facts`` describe what else all machines have to be
    asked for.  ``plan(kept, in_memory)`` plans what a machine keeps, and raises PlanDoesNotFitError
    if it does not fit.  With ``ratio='auto'`` all machines have the largest share of replicas that
    fits into the memory of each.  ``bounds`` are those of a graph whose owners are given.

    Raises InvalidInputError if the machines have other data or were asked for other stores, and
    PlanDoesNotFitError if the parts do not fit.
    """
    shares = machines.run_all(_ACTION, lambda: Shares.of(sources, reads, machines.size, bounds))
    _require_same(machines, {**facts, **shares.checksums()})
    given = read_ratio("store.replica_ratio", ratio)  # type: ignore[arg-type]

    def attempt(ratio: float) -> Blueprint | None:
        try:
            return plan(shares.kept(machines.rank, ratio), True)
        except PlanDoesNotFitError:
            return None

    if given is None:
        low, high = 0, _STEPS
        best = None
        while low < high:
            step = (low + high + 1) // 2
            blueprint = machines.run_all(_ACTION, lambda: attempt(step / _STEPS))  # noqa: B023
            if all(machines.all_gather(blueprint is not None)):
                low, best = step, blueprint
            else:
                high = step - 1
        if best is not None:
            return best, shares.bounds
    kept = shares.kept(machines.rank, given or 0.0)
    return machines.run_all(_ACTION, lambda: plan(kept, False)), shares.bounds


def _require_same(machines: Communicator, facts: Mapping[str, str]) -> None:
    every = machines.all_gather(dict(facts))
    for name, expected in every[0].items():
        for machine, other in enumerate(every):
            if other.get(name) != expected:
                raise InvalidInputError(
                    _ACTION,
                    f"{name} is {expected} on machine 0, but {other.get(name)} on machine "
                    f"{machine}",
                    "pass the same data and options on every machine",
                )
