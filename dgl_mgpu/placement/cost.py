"""The cost model: how long each GPU needs for one step's reads.

Every GPU makes the same expected accesses in a step.  What it reads from each memory loads the
*resources* on the way, and time is load over bandwidth:

- GPU memories: each GPU's own memory (its reads and those it serves), each link, and each
  port where a switch limits what a GPU takes in or serves in all;
- the host: each GPU's own way to it, and the ways that several GPUs share;
- the disk, which all share and whose rows come through host memory;
- the network, where several machines have one copy of the rows together
  (:func:`over_network`).

Links work side by side, so the time for GPU memories is that of the busiest resource that
belongs to a GPU; a link belongs to its reader.  Rows of the host, of the disk and of other
machines come on top: they are not assumed to hide behind the others.  The time of a plan is that of
its slowest GPU, since gradients are synchronised every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from dgl_mgpu.machine.cluster import Network
from dgl_mgpu.machine.topology import GB, Topology
from dgl_mgpu.placement.plan import HOST, Load, MachineShare, Plan, TablePlan, Tier, part_sizes
from dgl_mgpu.placement.table_spec import TableSpec

#: Share of a link's bandwidth that reads of a size (bytes) reach, random rows, measured with plain
#: kernels on H200s (2026-11): of GPUs on 8 at once; of the host in the order of addresses, as all
#: hops of a mini-batch and its rows are read, small ones on one GPU (as ids come it gets a tenth
#: as many: docs/benchmarks/host_reads.json), and never a larger share than of a GPU's own memory:
#: where both are one memory, as without GPUs, the nearer is to be chosen.
EFFICIENCY: dict[str, tuple[tuple[float, float], ...]] = {
    "local": ((4, 0.055), (16, 0.22), (64, 0.62), (128, 0.82), (512, 0.92), (4096, 1.0)),
    "peer": ((4, 0.085), (16, 0.34), (64, 0.83), (128, 0.93), (512, 0.94), (4096, 1.0)),
    "host": ((4, 0.045), (16, 0.19), (64, 0.61), (128, 0.81), (512, 0.92), (4096, 0.95)),
    "disk": ((4, 0.001), (4096, 1.0)),
}

#: Up to so many GPUs a link between two of them is a resource also where a port is no wider.
_MOST_LINKED = 16
#: Names of GPUs, or of parts, that a text has all of.
_MOST_NAMES = 16


@cache
def efficiency(link: str, request_bytes: float) -> float:
    """Share of the bandwidth of a kind of link that reads of one size reach."""
    sizes, shares = zip(*EFFICIENCY[link], strict=True)
    logs = [math.log(size) for size in sizes]
    # Logarithms differ in the last digit between processors.
    return round(float(np.interp(math.log(request_bytes), logs, shares)), 6)


@dataclass(frozen=True, eq=False)
class Resources:
    """The r resources of one machine.

    ``reads`` arguments are matrices of shape (n, n + 2): what each GPU reads from every GPU,
    then from the host, then from disk.
    """

    num_gpus: int
    users: np.ndarray  # float64, shape (r, n, n + 2): 1 for the reads that load each resource
    seconds_per_byte: np.ndarray  # shape (r,)
    link: tuple[str, ...]  # of each resource, the row of EFFICIENCY that applies
    owners: np.ndarray  # bool, shape (r, n): GPUs that wait for each resource

    @classmethod
    def of(cls, topology: Topology) -> Resources:
        """The resources of a machine."""
        n = topology.num_gpus
        links = topology.link_bandwidth
        ports = topology.ports()
        entries: list[tuple[str, float, list[int], np.ndarray]] = []

        def add(kind: str, bandwidth: float, owners: list[int], readers: Any, holders: Any) -> None:
            users = np.zeros((n, n + 2))
            users[readers, holders] = 1.0
            entries.append((kind, bandwidth, owners, users))

        everyone = list(range(n))
        off_gpu = slice(n, n + 2)
        for gpu in everyone:
            add("local", links[gpu, gpu], [gpu], everyone, gpu)
            peers = list(topology.neighbors(gpu))
            for peer in peers:
                # What goes over a link goes through its reader's port, too.
                if n <= _MOST_LINKED or links[gpu, peer] < ports[gpu]:
                    add("peer", links[gpu, peer], [gpu], gpu, peer)
            readers = [peer for peer in everyone if peer != gpu and links[peer, gpu]]
            # A port as wide as all its links together never holds anything up.
            if links[gpu, peers].sum() > ports[gpu]:
                add("peer", ports[gpu], [gpu], gpu, peers)
            if links[readers, gpu].sum() > ports[gpu]:
                add("peer", ports[gpu], [gpu], readers, gpu)
            add("host", topology.host_bandwidth[gpu], [gpu], gpu, off_gpu)
        for group in topology.host_groups:
            add("host", group.bandwidth, list(group.gpus), list(group.gpus), off_gpu)
        if topology.disk_bandwidth:
            add("disk", topology.disk_bandwidth, everyone, everyone, n + 1)
        kinds, bandwidths, owners, users = zip(*entries, strict=True)
        return cls(
            num_gpus=n,
            users=np.array(users),
            seconds_per_byte=np.array([1.0 / (bandwidth * GB) for bandwidth in bandwidths]),
            link=kinds,
            owners=np.array([np.isin(everyone, gpus) for gpus in owners]),
        )

    def access_seconds(self, table: TableSpec) -> np.ndarray:
        """Seconds that one access to a table takes of each resource.  Shape (r,)."""
        shares = {kind: efficiency(kind, table.request_bytes) for kind in EFFICIENCY}
        return table.access_bytes * self.seconds_per_byte / [shares[kind] for kind in self.link]

    def load(self, table: TableSpec, reads: np.ndarray) -> np.ndarray:
        """Seconds of each resource for so many accesses.  Shape (r,)."""
        return self.access_seconds(table) * (self.users * reads).sum((1, 2))

    def gpu_seconds(self, load: np.ndarray) -> np.ndarray:
        """Time of each GPU under a load.  Shape (n,)."""
        waits = np.where(self.owners, load[:, None], 0.0)
        total = np.zeros(self.num_gpus)
        for kind in self._kinds:
            total += waits[kind].max(0, initial=0.0)
        return total

    def loads(self, nbytes: np.ndarray, seconds: np.ndarray) -> tuple[Load, ...]:
        """Each resource with the bytes read over it and what they take, both of shape (r,)."""
        return tuple(
            Load(
                self.link[i],
                tuple(np.flatnonzero(self.users[i].any(1)).tolist()),
                tuple(np.flatnonzero(self.users[i, :, : self.num_gpus].any(0)).tolist()),
                float(1.0 / (self.seconds_per_byte[i] * GB)),
                float(nbytes[i]),
                float(seconds[i]),
            )
            for i in range(len(self.link))
        )

    @cached_property
    def _kinds(self) -> tuple[np.ndarray, ...]:
        """Resources whose times add up: those of GPU memories, of the host, of the disk."""
        link = np.array(self.link)
        return tuple(
            np.isin(link, kind).nonzero()[0] for kind in (("local", "peer"), "host", "disk")
        )


@dataclass(frozen=True)
class Estimate:
    """Modelled time and memory of a placement; the fields are those of ``Plan``."""

    seconds: tuple[float, ...]
    gpu_bytes: tuple[int, ...]
    host_bytes: int
    disk_bytes: int
    hit_rates: dict[str, dict[str, float]]
    rows: tuple[dict, ...]
    loads: tuple[Load, ...]


def tier_reads(tier: Tier) -> np.ndarray:
    """Share of a tier's accesses that each GPU sends to every GPU, the host and the disk: float64,
    shape (n, n + 2).
    """
    n = len(tier.source)
    reads = np.zeros((n, n + 2))
    if tier.memory != "gpu":
        reads[:, n if tier.memory == "host" else n + 1] = 1.0
        return reads
    share = part_sizes(tier) / tier.num_rows
    for gpu, sources in enumerate(tier.source):
        for part, holder in enumerate(sources):
            reads[gpu, n if holder == HOST else holder] += share[part]
    return reads


def tier_bytes(tier: Tier, nbytes: float) -> np.ndarray:
    """Bytes that a tier takes of each GPU, the host and the disk.  Shape (n + 2,)."""
    n = len(tier.source)
    held = np.zeros(n + 2)
    if tier.memory != "gpu":
        held[n if tier.memory == "host" else n + 1] = nbytes
        return held
    shares = (nbytes * part_sizes(tier) / tier.num_rows).tolist()
    for part, (share, holders) in enumerate(zip(shares, tier.copies, strict=True)):
        held[list(holders)] += share
        if tier.on_host(part):
            held[n] += share
    return held


def copies_per_row(tier: Tier) -> float:
    """Copies on GPUs, on average."""
    return sum(map(len, tier.copies)) / tier.parts


def over_tiers(curve: Callable[[np.ndarray], np.ndarray], tiers: Sequence[Tier]) -> list[float]:
    """What a table's curve rises by over each tier."""
    starts = np.array([tier.start for tier in tiers])
    stops = np.array([tier.stop for tier in tiers])
    return (curve(stops) - curve(starts)).tolist()


def table_load(resources: Resources, spec: TableSpec, tiers: Sequence[Tier]) -> np.ndarray:
    """Seconds of each resource that the reads of one table take.  Shape (r,)."""
    n = resources.num_gpus
    reads = np.zeros((n, n + 2))
    for tier, accesses in zip(tiers, over_tiers(spec.accesses_before, tiers), strict=True):
        reads += accesses * tier_reads(tier)
    return resources.load(spec, reads)


def estimate(
    resources: Resources, specs: Sequence[TableSpec], tables: Mapping[str, TablePlan]
) -> Estimate:
    """Modelled time and memory of a placement."""
    n = resources.num_gpus
    load = np.zeros(len(resources.link))
    moved = np.zeros((n, n + 2))
    held = np.zeros(n + 2)
    hit_rates, rows = {}, []
    for spec in specs:
        table_reads = np.zeros((n, n + 2))
        tiers = tables[spec.name].tiers
        tier_accesses = over_tiers(spec.accesses_before, tiers)
        sizes = over_tiers(spec.bytes_before, tiers)
        for tier, accesses, nbytes in zip(tiers, tier_accesses, sizes, strict=True):
            reads = tier_reads(tier) * accesses
            tier_load = resources.load(spec, reads)
            table_reads += reads
            load += tier_load
            held += tier_bytes(tier, nbytes)
            rows.append({
                "table": spec.name,
                "rows": tier.num_rows,
                "memory": tier.memory,
                "bytes": round(nbytes),
                "accesses": accesses / max(spec.total_accesses, 1e-300),
                "copies": copies_per_row(tier) if tier.memory == "gpu" else 1.0,
                "where": _where(tier),
                "seconds": tuple(resources.gpu_seconds(tier_load).tolist()),
            })  # fmt: skip
        moved += spec.access_bytes * table_reads
        total = max(table_reads.sum(), 1e-300)
        local = np.trace(table_reads[:, :n])
        hit_rates[spec.name] = {
            "local": float(local / total),
            "peer": float((table_reads[:, :n].sum() - local) / total),
            "host": float(table_reads[:, n].sum() / total),
            "disk": float(table_reads[:, n + 1].sum() / total),
        }
    whole_bytes = [math.ceil(nbytes - 1e-6) for nbytes in held]
    return Estimate(
        tuple(resources.gpu_seconds(load).tolist()),
        tuple(whole_bytes[:n]),
        whole_bytes[n],
        whole_bytes[n + 1],
        hit_rates,
        tuple(rows),
        resources.loads((resources.users * moved).sum((1, 2)), load),
    )


def over_network(
    plan: Plan, share: MachineShare, network: Network, nbytes: float, exchanges: int
) -> Plan:
    """The plan of a machine that has a share of the rows, with the time of reading the others.

    In a step every GPU receives ``nbytes`` from other machines in so many exchanges, and sends as
    many: machines are alike, and messages are long, so that the network's bandwidth is reached.
    """
    seconds = network.seconds(nbytes, exchanges)
    loads = (
        Load("network", (gpu,), (), network.bandwidth, nbytes, seconds)
        for gpu in range(plan.num_gpus)
    )
    return replace(
        plan,
        share=share,
        seconds=tuple(of_gpu + seconds for of_gpu in plan.seconds),
        loads=(*plan.loads, *loads),
    )


def _where(tier: Tier) -> str:
    """GPU lists of the parts, as in ``0+6 | 1+7``; equal ones once."""
    if tier.memory != "gpu":
        return tier.memory
    names = dict.fromkeys("+".join(_ends(list(map(str, holders)))) for holders in tier.copies)
    host = any(tier.on_host(part) for part in range(tier.parts))
    return " | ".join(_ends(list(names))) + (" (and host)" if host else "")


def _ends(names: list[str]) -> list[str]:
    """Names, the first and last ones of many."""
    return names if len(names) <= _MOST_NAMES else [*names[:2], "…", names[-1]]
