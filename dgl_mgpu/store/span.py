"""Which machine of a job keeps which rows, where all machines have one copy of the data together.

The nodes of a type are dealt out in runs of ids: machine ``m`` *owns* those in ``[bounds[m],
bounds[m + 1])``, all of their features and their in-edges, about as many bytes on each machine.
What saves most of the network for its bytes is *replicated*: every machine keeps it, whoever owns
it.  Features and in-edges of a node are two things there, since nodes that are read often need not
be sampled from as often, nor their in-edges be few.  How much is replicated, and whether machines
share the data at all or have a copy each, is what takes least time by the cost model: replicas save
the network, and take memory that is nearer from other rows.  What a machine keeps is planned and
stored as a whole graph is elsewhere, by ids of the whole graph; a row that it does not keep has
position -1.  Edge features are on every machine.
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.errors import InvalidInputError, PlanDoesNotFitError
from dgl_mgpu.machine import Network
from dgl_mgpu.placement import MachineShare, Plan, Reads, order_by_hotness
from dgl_mgpu.placement.cost import over_network
from dgl_mgpu.placement.solver import read_ratio
from dgl_mgpu.store.memory import Blueprint, TopologySource
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.utils.units import human_seconds

log = logging.getLogger(__name__)

#: Shares of replicas that are tried: all, a half, a quarter and so on, and none; then some in the
#: middle between the best and those next to it.
_HALVINGS, _REFINEMENTS = 7, 2
#: Halvings of an interval, until its ends are neighbours among numbers in about [0, 1].
_BISECTIONS = 60
_ACTION = "share one store among the machines"

#: By node type, the first id of each machine's run and the end of the last.
Bounds = dict[str, list[int]]


@dataclass(frozen=True)
class Kept:
    """What a machine keeps of all nodes' features and in-edges.

    Attributes
    ----------
    features, in_edges : dict of str to ndarray of int, shape (num_nodes,)
        By node type, of how many machines' mini-batches the node is read here: none where it is not
        kept, this one's where it is a replica, and all machines' where this one alone has it.
    reads : Reads
        Of a mini-batch.
    hottest : dict of str to ndarray of int, shape (num_nodes,)
        Nodes of each type, those that are read most first.
    share : MachineShare
    """

    features: dict[str, np.ndarray]
    in_edges: dict[str, np.ndarray]
    reads: Reads
    hottest: dict[str, np.ndarray]
    share: MachineShare


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
        return len(self.savings) - int(np.searchsorted(self.savings[::-1], saving, side="right"))

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
    reads: Reads
    hottest: dict[str, np.ndarray]

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
        features, in_edges, hottest = {}, {}, {}
        id_bytes = _id_bytes(sources)
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
                    answers += _answer_bytes(degrees, reads, id_bytes)
                else:
                    row_bytes += source.row_bytes
            if ntype not in bounds:
                bounds[ntype] = _dealt_out(row_bytes + edge_bytes, machines)
            features[ntype] = Replicas.of(read * (id_bytes + row_bytes), row_bytes)
            in_edges[ntype] = Replicas.of(reads.sampled[ntype] * answers, edge_bytes)
            hottest[ntype] = order_by_hotness(read).order
        return cls(bounds, features, in_edges, reads, hottest)

    def kept(self, machine: int, ratio: float) -> Kept:
        """What a machine keeps if ``ratio`` of the bytes are replicated."""
        parts = [*self.features.values(), *self.in_edges.values()]
        counts = _replicated(parts, ratio * sum(part.nbytes for part in parts))
        ntypes = [*self.features, *self.in_edges]
        num_machines = len(self.bounds[ntypes[0]]) - 1
        readers = []
        replicated = own = 0.0
        for ntype, part, count in zip(ntypes, parts, counts, strict=True):
            of_nodes = np.zeros(len(part.order), np.int16)
            first, stop = self.bounds[ntype][machine : machine + 2]
            of_nodes[first:stop] = num_machines
            in_order = of_nodes[part.order[count:]] > 0
            own += float(np.diff(part.bytes_so_far, prepend=0.0)[count:][in_order].sum())
            replicated += part.bytes_of(count)
            of_nodes[part.order[:count]] = 1
            readers.append(of_nodes)
        of_types = len(self.features)
        nbytes = sum(part.nbytes for part in parts)
        return Kept(
            dict(zip(self.features, readers[:of_types], strict=True)),
            dict(zip(self.in_edges, readers[of_types:], strict=True)),
            self.reads,
            self.hottest,
            MachineShare(
                num_machines, replicated / nbytes if nbytes else 1.0, round(replicated), round(own)
            ),
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


def with_other_machines(
    plan: Plan, kept: Kept, sources: Mapping[str, Source], network: Network, num_layers: int
) -> Plan:
    """The plan of what a machine keeps, with what a mini-batch reads of others' rows."""
    reads = kept.reads
    id_bytes = _id_bytes(sources)
    remote: dict[str, float] = {}
    # Requests and answers of each hop, and of all features together.
    nbytes, exchanges = 0.0, 2 * (num_layers + 1)
    for name, source in sources.items():
        if source.position not in kept.features:
            continue
        if isinstance(source, TopologySource):
            is_remote = kept.in_edges[source.position] == 0
            accesses = reads.sampled[source.position]
            degrees = np.diff(source.indptr)[is_remote]
            message: np.ndarray | int = _answer_bytes(degrees, reads, id_bytes)
        else:
            is_remote = kept.features[source.position] == 0
            accesses = reads.nodes[source.position]
            message = id_bytes + source.row_bytes
        total = accesses.sum(dtype=np.float64)
        missing = accesses[is_remote]
        remote[name] = float(missing.sum(dtype=np.float64) / total) if total else 0.0
        nbytes += float((missing * message).sum(dtype=np.float64))
    share = replace(kept.share, remote_reads=remote)
    return over_network(plan, share, network, nbytes, exchanges)


def _id_bytes(sources: Mapping[str, Source]) -> int:
    """Bytes of an id, as machines send them."""
    counts = (
        max(source.num_rows, source.num_edges)
        if isinstance(source, TopologySource)
        else source.num_rows
        for source in sources.values()
    )
    return 4 if max(counts, default=0) <= np.iinfo(np.int32).max else 8


def _answer_bytes(degrees: np.ndarray, reads: Reads, id_bytes: int) -> np.ndarray:
    """Bytes that are sent to sample from each of some nodes: it and its number of edges, and of
    each edge that is drawn a neighbour and an id."""
    return id_bytes * (2 + 2 * np.minimum(degrees, reads.fanout))


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


def best_ratio(seconds: Callable[[float], float]) -> float:
    """The share of replicas with which a step takes least time, the largest of equally good ones.

    ``seconds`` are infinite for a share that does not fit; 0 is returned if none does.
    """
    tried = {ratio: seconds(ratio) for ratio in (0.0, *(0.5**n for n in range(_HALVINGS)))}

    def best() -> float:
        return min(tried, key=lambda ratio: (tried[ratio], -ratio))

    if math.isinf(tried[best()]):
        return 0.0
    for _ in range(_REFINEMENTS):
        ratios = sorted(tried)
        at = ratios.index(best())
        for one, other in itertools.pairwise(ratios[max(at - 1, 0) : at + 2]):
            tried[(one + other) / 2] = seconds((one + other) / 2)
    return best()


def choose_span(
    num_machines: int, options: StoreOptions, seconds: Callable[[float | None], float]
) -> tuple[float | None, str]:
    """How machines are to have the data, as far as options leave it open: so that a step takes
    least time by the cost model.

    ``seconds`` are those of the slowest machine with a share of replicas, or None for a copy on
    each machine; infinite if it does not fit.  Returns what is chosen, and why, in a line.  A copy
    on each, of which more can be asked, is chosen before one together that takes as long.
    """
    if options.span == "machine":
        return None, f"each of {num_machines} machines has a copy of all (store.span=machine)"
    seconds = cache(seconds)
    ratio = read_ratio("store.replica_ratio", options.replica_ratio)
    if ratio is None:
        ratio = best_ratio(seconds)
    together = f"one copy over {num_machines} machines, {100 * ratio:.3g}% of it on each"
    if options.span == "job":
        return ratio, f"{together} (store.span=job)"
    of_one, of_each = seconds(ratio), seconds(None)
    together += f", takes {human_seconds(of_one)}"
    if math.isinf(of_each):
        return ratio, f"store.span=auto: a copy on each machine does not fit; {together} a step"
    each = f"a copy on each of them takes {human_seconds(of_each)}"
    if of_one < of_each:
        return ratio, f"store.span=auto: {together} a step, and {each} (modelled)"
    each = f"a copy on each machine takes {human_seconds(of_each)}"
    if math.isinf(of_one):
        return None, f"store.span=auto: {each} a step (modelled)"
    return None, f"store.span=auto: {each} a step, and {together} (modelled)"


def plan_span(
    machines: Communicator,
    sources: Mapping[str, Source],
    reads: Reads,
    options: StoreOptions,
    facts: Mapping[str, str],
    place: Callable[[Kept | None], Blueprint],
    bounds: Bounds | None = None,
) -> tuple[Blueprint, Bounds]:
    """Plan this machine's store, on its first rank: of its share of the data, or of all of it.

    Collective of the machines' first ranks.  ``facts`` describe what else all machines have to be
    asked for.  ``place`` plans what a machine keeps, or all of it, and raises PlanDoesNotFitError
    if it does not fit.  ``bounds`` are those of a graph whose owners are given; none are returned
    if each machine has a copy.

    Raises InvalidInputError if the machines have other data or were asked for other stores, and
    PlanDoesNotFitError if the parts do not fit.
    """
    shares = machines.run_all(_ACTION, lambda: Shares.of(sources, reads, machines.size, bounds))
    require_same(machines, {**facts, **shares.checksums()})

    def plan(ratio: float | None) -> Blueprint:
        return place(None if ratio is None else shares.kept(machines.rank, ratio))

    def of_slowest(ratio: float | None) -> float:
        seconds = machines.run_all(_ACTION, lambda: modelled_seconds(partial(plan, ratio)))
        return max(machines.all_gather(seconds))

    ratio, reason = choose_span(machines.size, options, of_slowest)
    if machines.rank == 0:
        log.info("%s", reason)
    blueprint = machines.run_all(_ACTION, lambda: plan(ratio))
    return blueprint, {} if ratio is None else shares.bounds


def modelled_seconds(plan: Callable[[], Blueprint]) -> float:
    """What a step takes by a plan; infinity if it does not fit."""
    try:
        return plan().plan.step_seconds
    except PlanDoesNotFitError:
        return math.inf


def require_same(machines: Communicator, facts: Mapping[str, str]) -> None:
    """Raise InvalidInputError if machines have other data or were asked for other stores."""
    every = machines.all_gather(dict(facts))
    for name in dict.fromkeys(itertools.chain(*every)):
        for machine, other in enumerate(every):
            if other.get(name) != every[0].get(name):
                raise InvalidInputError(
                    _ACTION,
                    f"{name} is {every[0].get(name)} on machine 0, but {other.get(name)} on "
                    f"machine {machine}",
                    "pass the same data and options on every machine",
                )
