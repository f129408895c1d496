"""Which machine of a job keeps which rows, where all machines have one copy of the data together.

The nodes of a type are dealt out in runs of ids: machine ``m`` *owns* those in ``[bounds[m],
bounds[m + 1])``, all of their features and their in-edges, about as many bytes on each machine.
The hottest nodes are *replicated*: every machine keeps them, whoever owns them.  What a machine
keeps is planned and stored as a whole graph is elsewhere, by ids of the whole graph; a row that it
does not keep has position -1.  Edge features are on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, PlanDoesNotFitError
from dgl_mgpu.placement import order_by_hotness
from dgl_mgpu.placement.solver import read_ratio
from dgl_mgpu.store.memory import Blueprint, TopologySource
from dgl_mgpu.store.memory.format import Source

#: Shares of replicas that are tried, evenly spaced in [0, 1].
_STEPS = 32
_ACTION = "share one store among the machines"

#: By node type, the first id of each machine's run and the end of the last.
Bounds = dict[str, list[int]]


@dataclass(frozen=True)
class Shares:
    """Who owns which nodes, and how many bytes there are of the hottest.

    ``bytes_so_far`` has for each node type the bytes of the hottest nodes up to each position.
    """

    bounds: Bounds
    orders: Mapping[str, np.ndarray]
    bytes_so_far: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls, sources: Mapping[str, Source], hotness: Mapping[str, np.ndarray], machines: int
    ) -> Shares:
        """Deal out the nodes of each type."""
        bounds, so_far = {}, {}
        orders = {ntype: order_by_hotness(counts).order for ntype, counts in hotness.items()}
        for ntype, order in orders.items():
            row_bytes = np.zeros(len(order), np.float64)
            for source in sources.values():
                if source.position != ntype:
                    continue
                if isinstance(source, TopologySource):
                    edge_bytes = source.idtype.itemsize * (1 if source.eids is None else 2)
                    row_bytes += np.diff(source.indptr) * edge_bytes + np.dtype(np.int64).itemsize
                else:
                    row_bytes += source.row_bytes
            by_id = np.cumsum(row_bytes)
            total = by_id[-1] if len(by_id) else 0.0
            inner = np.searchsorted(by_id, total * np.arange(1, machines) / machines, side="right")
            bounds[ntype] = [0, *inner.tolist(), len(order)]
            so_far[ntype] = np.cumsum(row_bytes[order])
        return cls(bounds, orders, so_far)

    def kept(self, machine: int, ratio: float) -> dict[str, np.ndarray]:
        """By node type, which nodes a machine keeps if ``ratio`` of the bytes are replicated."""
        kept = {}
        for ntype, order in self.orders.items():
            so_far = self.bytes_so_far[ntype]
            total = so_far[-1] if len(so_far) else 0.0
            count = int(np.searchsorted(so_far, ratio * total, side="right"))
            kept[ntype] = np.zeros(len(order), bool)
            kept[ntype][order[:count]] = True
            first, stop = self.bounds[ntype][machine : machine + 2]
            kept[ntype][first:stop] = True
        return kept

    def checksums(self) -> dict[str, str]:
        """What is the same on all machines if they deal out the same data, by what it describes."""
        checksums = {}
        for ntype, order in self.orders.items():
            in_order = f"{zlib.crc32(np.ascontiguousarray(order).data):08x}"
            checksums[f"the order of nodes of type '{ntype}'"] = in_order
            checksums[f"the first nodes of type '{ntype}' of machines"] = str(self.bounds[ntype])
        return checksums


def plan_share(
    machines: Communicator,
    sources: Mapping[str, Source],
    hotness: Mapping[str, np.ndarray],
    ratio: float | str,
    facts: Mapping[str, str],
    plan: Callable[[Mapping[str, np.ndarray], bool], Blueprint],
) -> tuple[Blueprint, Bounds]:
    """Plan this machine's share of a store, on its first rank.

    Collective of the machines' first ranks.  ``facts`` describe what else all machines have to be
    asked for.  ``plan(kept, in_memory)`` plans what a machine keeps, and raises PlanDoesNotFitError
    if it does not fit.  With ``ratio='auto'`` all machines have the largest share of replicas that
    fits into the memory of each.

    Raises InvalidInputError if the machines have other data or were asked for other stores, and
    PlanDoesNotFitError if the parts do not fit.
    """
    shares = machines.run_all(_ACTION, lambda: Shares.of(sources, hotness, machines.size))
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
