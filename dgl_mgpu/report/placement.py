"""Contents of memories by a plan, and the modelled load of links, as numbers and text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.machine.topology import GB
from dgl_mgpu.placement import Load, Plan, Tier, part_sizes
from dgl_mgpu.placement.cost import tier_bytes
from dgl_mgpu.report.tables import join_runs, plan_table
from dgl_mgpu.utils.units import human_bytes, human_seconds

#: Locations of rows: on every GPU, on several, on one, in host memory, on disk.
LOCATIONS = ("every", "several", "one", "host", "disk")
#: Times of GPUs that are listed; of more, the least and the most.
_MOST_TIMES = 16
#: Characters in a line of a table's name; longer ones are broken between their parts.
_NAME_WIDTH = 20


@dataclass(frozen=True)
class LinkUtilisation:
    """Shares of a step's modelled time, that of its slowest GPU, in which reads keep links busy.

    NaN for what is not there.
    """

    #: float64 (n, n): the link by which the GPU of a row reads that of a column; on the diagonal
    #: its own memory, with what others read of it.
    links: np.ndarray
    #: float64 (n,): ports, by what a GPU reads from all others, and what they read from it.
    taken: np.ndarray
    served: np.ndarray
    host: np.ndarray  # float64 (n,): each GPU's own way to host memory
    shared: dict[tuple[int, ...], float]  # ways to host memory by the GPUs that share them
    network: np.ndarray  # float64 (n,): each GPU's way to other machines
    disk: float

    @classmethod
    def from_plan(cls, plan: Plan) -> LinkUtilisation:
        """The shares of a plan's links.

        Raises InvalidInputError if the plan lacks their loads, because it was made by hand or read
        from a checkpoint of an earlier version.
        """
        if not plan.loads:
            raise InvalidInputError(
                f"tell how busy the links of '{plan.topology}' are",
                "the plan does not say",
                "solve the plan again",
            )
        n = plan.num_gpus
        links = np.full((n, n), np.nan)
        taken, served, host, network = np.full((4, n), np.nan)
        shared: dict[tuple[int, ...], float] = {}
        disk = np.nan
        for load in plan.loads:
            share = load.seconds / plan.step_seconds if plan.step_seconds else 0.0
            if load.kind == "disk":
                disk = share
            elif load.kind == "network":
                network[load.readers[0]] = share
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
                link = load.readers[0], load.holders[0]
                links[link] = np.fmax(links[link], share)  # of two GPUs, a port is a link too
        return cls(links, taken, served, host, shared, network, disk)

    def peer_share(self, gpu: int) -> float:
        """The share of the busiest link or port between a GPU and the others."""
        peers = np.arange(len(self.links)) != gpu
        links = [*self.links[gpu, peers], *self.links[peers, gpu]]
        return float(np.nanmax([*links, self.taken[gpu], self.served[gpu]]))


def is_on_cpu(plan: Plan) -> bool:
    """Whether the plan's ranks share a machine's memory; its bandwidths are assumed then."""
    return plan.topology.split()[0] == "cpu"


def device_noun(plan: Plan) -> str:
    """The noun for a plan's devices: GPU or rank."""
    return "rank" if is_on_cpu(plan) else "GPU"


def short_name(table: str) -> str:
    """A table's name without DGL's names for the only node and edge type."""
    return "/".join(part for part in table.split("/") if set(part.split(":")) - {"_N", "_E"})


def is_shared(load: Load) -> bool:
    """Whether several GPUs share a link to host memory."""
    return load.kind == "host" and len(load.readers) > 1


def modelled_time(plan: Plan) -> str:
    """The modelled time, and what takes most of it."""
    busiest = max(plan.loads, key=lambda load: load.seconds)
    name = device_noun(plan)
    where = {
        "local": f"a {name}'s own memory",
        "peer": f"links between {name}s",
        "host": f"the way to host memory that {name}s share"
        if is_shared(busiest)
        else f"a {name}'s way to host memory",
        "network": "the network between machines",
        "disk": "the disk",
    }[busiest.kind]
    share = busiest.seconds / plan.step_seconds if plan.step_seconds else 0.0
    slowest = f" on the slowest {name}" if plan.num_gpus > 1 else ""
    return (
        f"modelled: one step's reads take {human_seconds(plan.step_seconds)}{slowest}; "
        f"busiest: {where}, {100 * share:.0f}% of that time"
    )


def contents(plan: Plan) -> list[dict[str, float]]:
    """Bytes on each GPU, in host memory and on the disk by location, without zeros."""
    n = plan.num_gpus
    memories: list[dict[str, float]] = [{} for _ in range(n + 2)]

    def add(memory: int, location: str, nbytes: float) -> None:
        if nbytes:
            memories[memory][location] = memories[memory].get(location, 0.0) + nbytes

    for tier, nbytes in _tiers(plan):
        *_, host, disk = tier_bytes(tier, nbytes).tolist()
        add(n, "host", host)
        add(n + 1, "disk", disk)
        for holders, part in zip(tier.copies, nbytes * _part_shares(tier), strict=True):
            for holder in holders:
                add(holder, _location(len(holders), n), part)
    return memories


def bytes_by_location(plan: Plan, table: str) -> dict[str, float]:
    """Bytes of one copy of a table's rows, by location, in the order of `LOCATIONS`."""
    sizes = dict.fromkeys(LOCATIONS, 0.0)
    for tier, nbytes in _tiers(plan, table):
        for holders, part in zip(tier.copies, nbytes * _part_shares(tier), strict=True):
            location = (
                _location(len(holders), plan.num_gpus) if tier.memory == "gpu" else tier.memory
            )
            sizes[location] += part
    return {location: nbytes for location, nbytes in sizes.items() if nbytes}


def tier_bandwidths(plan: Plan) -> dict[str, float]:
    """Bytes per second at which a GPU can read each tier, in a plan's model.

    That of the GPU worst off when all of them read; tiers that it cannot reach are left out.
    """
    gpus = range(plan.num_gpus)
    bandwidths = {
        "device": [min(load.bandwidth for load in plan.loads if load.kind == "local")],
        "peer": [_from_peers(plan, gpu) for gpu in gpus],
        "host": [_off_gpu(plan, "host", gpu) for gpu in gpus],
        "disk": [_off_gpu(plan, "disk", gpu) for gpu in gpus],
    }
    return {tier: GB * min(widths) for tier, widths in bandwidths.items() if min(widths)}


def _from_peers(plan: Plan, gpu: int) -> float:
    loads = [load for load in plan.loads if load.kind == "peer" and load.readers == (gpu,)]
    links: dict[int, float] = {}
    for load in loads:
        if len(load.holders) == 1:  # of two GPUs, a port is a link too
            holder = load.holders[0]
            links[holder] = min(load.bandwidth, links.get(holder, load.bandwidth))
    ports = [load.bandwidth for load in loads if len(load.holders) > 1]
    # Of many GPUs a port alone counts that is no wider than its links.
    return min([sum(links.values()), *ports] if links else ports, default=0.0)


def _off_gpu(plan: Plan, kind: str, gpu: int) -> float:
    loads = [load for load in plan.loads if load.kind == kind and gpu in load.readers]
    return min((load.bandwidth / len(load.readers) for load in loads), default=0.0)


def _tiers(plan: Plan, only: str | None = None) -> list[tuple[Tier, float]]:
    """Tiers and the bytes of one copy, of one table or of all that the plan counts."""
    tiers: list[tuple[Tier, float]] = []
    for name, table in plan.tables.items():
        sizes = [row["bytes"] for row in plan.rows if row["table"] == name]
        if sizes and only in (None, name):
            tiers += zip(table.tiers, sizes, strict=True)
    return tiers


def _part_shares(tier: Tier) -> np.ndarray:
    return part_sizes(tier) / tier.num_rows


def _location(copies: int, num_gpus: int) -> str:
    return "every" if copies == num_gpus else "one" if copies == 1 else "several"


def placement_tables(
    plan: Plan, title: str, seeds: int, fanouts: Sequence[int]
) -> list[RenderableType]:
    """The output of ``dgl-mgpu plan``, for mini-batches of some seeds and fanouts."""
    rows, before = [], ""
    for row in plan.summary():
        name = str(row["table"])
        memory = device_noun(plan) if row["memory"] == "gpu" else row["memory"]
        # A name is printed once, to be easily read.
        shown = "" if name == before else _break_name(short_name(name))
        rows.append({**row, "table": shown, "memory": memory})
        before = name
    table = plan_table(rows, title)
    for column in table.columns:
        if column.header == "table":
            column.no_wrap = True
        elif column.header == "accesses":
            column.header = "reads"
    table.title_justify = "left"
    milliseconds = [f"{seconds * 1e3:.3g}" for seconds in plan.seconds]
    times = join_runs(milliseconds)
    if len(times.split(", ")) > _MOST_TIMES:
        times = f"{min(milliseconds, key=float)} to {max(milliseconds, key=float)}"
    of_each = f" (ms of each: {times})" if plan.num_gpus > 1 else ""
    return [
        table,
        *_legend(plan),
        *machines_lines(plan),
        f"{modelled_time(plan)}{of_each}",
        f"a step: a mini-batch of {seeds:,} seeds with fanouts {list(fanouts)}",
    ]


def _legend(plan: Plan) -> list[str]:
    """Explanations of the marks in the table."""
    name, rows = device_noun(plan), plan.summary()
    marks = " ".join(str(row["where"]) for row in rows)
    memories = {row["memory"] for row in rows}
    lines = []
    if "gpu" in memories and name == "rank":
        lines.append("rank: shared memory of the machine, of which each rank has a part")
    if "+" in marks:
        lines.append(f"0+1: {name}s 0 and 1 have a copy of each of these rows")
    if "|" in marks:
        lines.append(f"0 | 1: {name}s 0 and 1 share these rows out, each row on one of them")
    if "+" in marks and "|" in marks:
        lines.append("0+1 | 2+3: both, a half of the rows on 0 and 1, the other on 2 and 3")
    if "(and host)" in marks:
        lines.append(f"(and host): host memory has a copy too, for {name}s that reach no other")
    if "patterns" in marks:
        lines.append("2 patterns: some of these rows lie in one such way, the others in another")
    if "gpu" in memories:
        lines.append(
            f"copies: on how many {name}s each row is; bytes: of one copy; reads: their share"
        )
    return lines


def machines_lines(plan: Plan) -> list[str]:
    """What a machine has of the rows that several share, and what it reads of others'."""
    share = plan.share
    if share is None:
        return []
    name = device_noun(plan)
    remote = ", ".join(
        f"{100 * reads:.3g}% of {short_name(table)}" for table, reads in share.remote_reads.items()
    )
    load = next(load for load in plan.loads if load.kind == "network")
    return [
        f"{share.num_machines} machines: each has {human_bytes(share.own_bytes)} that no other has,"
        f" and {human_bytes(share.replicated_bytes)} that all have,"
        f" {100 * share.replica_ratio:.3g}% of the whole",
        f"over the network: of the reads, {remote}; each {name} receives "
        f"{human_bytes(load.nbytes)} a step at {load.bandwidth:.3g} GB/s, and sends as much, in "
        f"{human_seconds(load.seconds)}",
    ]


def _break_name(name: str) -> str:
    """A name, broken between its parts if it is long."""
    lines = [""]
    for part in re.findall(r"[^/:]+[/:]?", name):
        if lines[-1] and len(lines[-1] + part) > _NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
