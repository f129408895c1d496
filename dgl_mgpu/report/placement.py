"""What a plan puts where, and how busy it is modelled to keep each link: the numbers to draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.machine.topology import GB
from dgl_mgpu.placement import Load, Plan, Tier, part_sizes
from dgl_mgpu.placement.cost import tier_bytes
from dgl_mgpu.utils.units import human_seconds

#: Ways to keep rows: on every GPU, on several, on one, and off them.
KEPT = ("every", "several", "one", "host", "disk")


@dataclass(frozen=True)
class Busy:
    """Shares of a step's modelled time in which reads keep things busy; NaN for what is not there.

    A step takes as long as its slowest GPU.

    Attributes
    ----------
    links : ndarray, float64, shape (n, n)
        Of the link by which the GPU of a row reads that of a column; its own memory, with what
        others read of it, on the diagonal.
    taken, served : ndarray, float64, shape (n,)
        Of ports: by what a GPU takes in from all others, and serves to them.
    host : ndarray, float64, shape (n,)
        Of each GPU's own way to host memory.
    shared : dict of tuple of int to float
        Of ways to host memory that several GPUs share.
    disk : float
    """

    links: np.ndarray
    taken: np.ndarray
    served: np.ndarray
    host: np.ndarray
    shared: dict[tuple[int, ...], float]
    disk: float

    @classmethod
    def of(cls, plan: Plan) -> Busy:
        """Of a plan's links.

        Raises
        ------
        InvalidInputError
            If the plan does not say how loaded they are: one that was made by hand or read from a
            checkpoint of an earlier version.
        """
        if not plan.loads:
            raise InvalidInputError(
                f"tell how busy the links of '{plan.topology}' are",
                "the plan does not say",
                "solve the plan again",
            )
        n = plan.num_gpus
        links = np.full((n, n), np.nan)
        taken, served, host = np.full((3, n), np.nan)
        shared: dict[tuple[int, ...], float] = {}
        disk = np.nan
        for load in plan.loads:
            share = load.seconds / plan.step_seconds if plan.step_seconds else 0.0
            if load.kind == "disk":
                disk = share
            elif load.kind == "host" and is_shared(load):
                shared[load.readers] = share
            elif load.kind == "host":
                host[load.readers[0]] = np.fmax(host[load.readers[0]], share)
            elif load.kind == "local":
                links[load.holders[0], load.holders[0]] = share
            elif len(load.holders) > 1:
                taken[load.readers[0]] = share
            elif len(load.readers) > 1:
                served[load.holders[0]] = share
            else:
                way = load.readers[0], load.holders[0]
                links[way] = np.fmax(links[way], share)  # of two GPUs, a port is a link too
        return cls(links, taken, served, host, shared, disk)

    def of_peers(self, gpu: int) -> float:
        """Of the busiest of the links and ports between a GPU and the others."""
        others = np.arange(len(self.links)) != gpu
        ways = [*self.links[gpu, others], *self.links[others, gpu]]
        return float(np.nanmax([*ways, self.taken[gpu], self.served[gpu]]))


def is_on_cpu(plan: Plan) -> bool:
    """Whether the plan is for ranks that share a machine's memory, GPUs or not.

    Its bandwidths are assumed then.
    """
    return plan.topology.split()[0] == "cpu"


def noun(plan: Plan) -> str:
    """What a plan's memories belong to."""
    return "rank" if is_on_cpu(plan) else "GPU"


def short_name(table: str) -> str:
    """A table's name without the types of a graph that has one of each, as DGL calls them."""
    return "/".join(part for part in table.split("/") if set(part.split(":")) - {"_N", "_E"})


def is_shared(load: Load) -> bool:
    """Whether several GPUs read host memory over it."""
    return load.kind == "host" and len(load.readers) > 1


def verdict(plan: Plan) -> str:
    """The modelled time, and what takes most of it."""
    busiest = max(plan.loads, key=lambda load: load.seconds)
    name = noun(plan)
    where = {
        "local": f"a {name}'s own memory",
        "peer": f"links between {name}s",
        "host": f"the way to host memory that {name}s share"
        if is_shared(busiest)
        else f"a {name}'s way to host memory",
        "disk": "the disk",
    }[busiest.kind]
    share = busiest.seconds / plan.step_seconds if plan.step_seconds else 0.0
    slowest = f" on the slowest {name}" if plan.num_gpus > 1 else ""
    return (
        f"modelled: one step's reads take {human_seconds(plan.step_seconds)}{slowest}; "
        f"busiest: {where}, {100 * share:.0f}% of that time"
    )


def contents(plan: Plan) -> list[dict[str, float]]:
    """Bytes by the way in which they are kept (:data:`KEPT`), zeros left out.

    Returns
    -------
    list of dict, length ``num_gpus + 2``
        Of each GPU, of host memory and of the disk.
    """
    n = plan.num_gpus
    found: list[dict[str, float]] = [{} for _ in range(n + 2)]

    def add(memory: int, kept: str, nbytes: float) -> None:
        if nbytes:
            found[memory][kept] = found[memory].get(kept, 0.0) + nbytes

    for tier, nbytes in _tiers(plan):
        *_, host, disk = tier_bytes(tier, nbytes).tolist()
        add(n, "host", host)
        add(n + 1, "disk", disk)
        for holders, part in zip(tier.copies, nbytes * _part_shares(tier), strict=True):
            for holder in holders:
                add(holder, _kept(len(holders), n), part)
    return found


def bytes_kept(plan: Plan, table: str) -> dict[str, float]:
    """Bytes of one copy of a table's rows by the way in which they are kept, in that order."""
    found = dict.fromkeys(KEPT, 0.0)
    for tier, nbytes in _tiers(plan, table):
        for holders, part in zip(tier.copies, nbytes * _part_shares(tier), strict=True):
            kept = _kept(len(holders), plan.num_gpus) if tier.memory == "gpu" else tier.memory
            found[kept] += part
    return {kept: nbytes for kept, nbytes in found.items() if nbytes}


def tier_bandwidths(plan: Plan) -> dict[str, float]:
    """Bytes a second at which a GPU can read each tier, by the bandwidths a plan was made with.

    That of the GPU worst off, when all of them read; tiers that it has no way to are left out.
    """
    gpus = range(plan.num_gpus)
    each = {
        "device": [min(load.bandwidth for load in plan.loads if load.kind == "local")],
        "peer": [_from_peers(plan, gpu) for gpu in gpus],
        "host": [_off_gpu(plan, "host", gpu) for gpu in gpus],
        "disk": [_off_gpu(plan, "disk", gpu) for gpu in gpus],
    }
    return {tier: GB * min(widths) for tier, widths in each.items() if min(widths)}


def _from_peers(plan: Plan, gpu: int) -> float:
    ways = [load for load in plan.loads if load.kind == "peer" and load.readers == (gpu,)]
    links: dict[int, float] = {}
    for way in ways:
        if len(way.holders) == 1:  # of two GPUs, a port is a link too
            holder = way.holders[0]
            links[holder] = min(way.bandwidth, links.get(holder, way.bandwidth))
    return min([sum(links.values()), *(way.bandwidth for way in ways if len(way.holders) > 1)])


def _off_gpu(plan: Plan, kind: str, gpu: int) -> float:
    ways = [load for load in plan.loads if load.kind == kind and gpu in load.readers]
    return min((way.bandwidth / len(way.readers) for way in ways), default=0.0)


def _tiers(plan: Plan, only: str | None = None) -> list[tuple[Tier, float]]:
    """Tiers and the bytes of one copy, of a table or of all that the plan counts."""
    found: list[tuple[Tier, float]] = []
    for name, table in plan.tables.items():
        sizes = [row["bytes"] for row in plan.rows if row["table"] == name]
        if sizes and only in (None, name):
            found += zip(table.tiers, sizes, strict=True)
    return found


def _part_shares(tier: Tier) -> np.ndarray:
    return part_sizes(tier) / tier.num_rows


def _kept(copies: int, num_gpus: int) -> str:
    return "every" if copies == num_gpus else "one" if copies == 1 else "several"
