"""A placement: which rows lie in which memory, and from which copy each GPU reads them.

A tier's positions are dealt out modulo over its parts (XGNN, section 4.3)::

    part  = (position - start) %  parts
    local = (position - start) // parts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dgl_mgpu.errors import (
    DataFormatError,
    IdOutOfRangeError,
    PlanDoesNotFitError,
    UnreachableError,
)
from dgl_mgpu.machine.topology import Topology

Memory = Literal["gpu", "host", "disk"]
MEMORIES: tuple[Memory, ...] = ("gpu", "host", "disk")

#: In ``Tier.source``: the GPU reads this part from a copy in host memory.
HOST = -1


@dataclass(frozen=True)
class Tier:
    """A run of positions kept in one kind of memory, dealt out modulo over its parts.

    Attributes
    ----------
    start, stop : int
        Positions ``[start, stop)``.
    memory : 'gpu', 'host' or 'disk'
    parts : int
        1 for host and disk.
    copies : tuple of tuple of int, ``parts`` entries
        GPUs that hold each part; empty tuples for host and disk.
    source : tuple of tuple of int, one a GPU with ``parts`` entries
        Whose copy a GPU reads: a GPU, or ``HOST`` where host memory keeps this part too,
        for GPUs that no copy can be reached by (or reached fast enough).
    """

    start: int
    stop: int
    memory: Memory
    parts: int
    copies: tuple[tuple[int, ...], ...]
    source: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def on_host(self, part: int) -> bool:
        """Whether host memory holds a copy of a part."""
        return self.memory == "host" or (
            self.memory == "gpu" and any(reads[part] == HOST for reads in self.source)
        )


@dataclass(frozen=True)
class TablePlan:
    """Where the rows of one table lie.

    Attributes
    ----------
    name : str
    tiers : tuple of Tier
        By ascending position, covering every row once.
    """

    name: str
    tiers: tuple[Tier, ...]

    @property
    def num_rows(self) -> int:
        return self.tiers[-1].stop if self.tiers else 0


@dataclass(frozen=True)
class Load:
    """What the reads of one step, of all GPUs, put on a link or on whatever else holds them up.

    Attributes
    ----------
    kind : 'local', 'peer', 'host', 'network' or 'disk'
        A GPU's own memory; a link between GPUs, or a port where a switch limits what a GPU takes
        in or serves in all; a way to host memory; to other machines; the disk.
    readers : tuple of int
        GPUs whose reads go over it.
    holders : tuple of int
        GPUs whose memory they read over it; none for host, network and disk.
    bandwidth : float
        GB/s.
    nbytes : float
        Bytes that are read over it.
    seconds : float
        What they take, by the share of the bandwidth that reads of their size reach; to other
        machines with the time that exchanges take however little they send.
    """

    kind: str
    readers: tuple[int, ...]
    holders: tuple[int, ...]
    bandwidth: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class MachineShare:
    """What one machine has of the rows that several have one copy of together.

    Attributes
    ----------
    num_machines : int
    replica_ratio : float
        Share of the bytes of all rows that every machine has, the hottest.
    replicated_bytes, own_bytes : int
        Bytes of these, and of those that this machine alone has.
    remote_reads : dict of str to float
        Table → share of a mini-batch's reads that other machines answer.
    """

    num_machines: int
    replica_ratio: float
    replicated_bytes: int
    own_bytes: int
    remote_reads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Where the rows of all tables lie, and what the cost model expects of that.

    If several machines have one copy together, it is the plan of one of them: its tables have the
    rows that it keeps, which it reads for the others' mini-batches as well.

    Attributes
    ----------
    topology : str
        Name of the machine it was made for.
    num_gpus : int
    policy : str
    tables : dict of str to TablePlan
    gpu_budget : tuple of int
        Bytes each GPU may hold.
    host_budget, disk_budget : int
    gpu_bytes : tuple of int
        Bytes each GPU holds by the table's curves.
    host_bytes, disk_bytes : int
    seconds : tuple of float
        Modelled time that each GPU needs for one step's reads; see ``cost.py``.
    hit_rates : dict of str to dict
        Table → ``{'local', 'peer', 'host', 'disk'}`` → share of its accesses, over all GPUs.
    rows : tuple of dict
        What :meth:`describe` returns.
    loads : tuple of Load
        Everything on the machine that reads can be held up by, and how long one step's do.
    share : MachineShare, optional
        The machine's share; None if it has all rows.
    """

    topology: str
    num_gpus: int
    policy: str
    tables: Mapping[str, TablePlan]
    gpu_budget: tuple[int, ...]
    host_budget: int
    disk_budget: int
    gpu_bytes: tuple[int, ...]
    host_bytes: int
    disk_bytes: int
    seconds: tuple[float, ...]
    hit_rates: Mapping[str, Mapping[str, float]]
    rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    loads: tuple[Load, ...] = field(default=(), repr=False)
    share: MachineShare | None = None

    @property
    def step_seconds(self) -> float:
        """Modelled time of the slowest GPU."""
        return max(self.seconds)

    def describe(self) -> list[dict[str, Any]]:
        """One row a tier, for printing.

        Each holds ``table``, ``rows``, ``memory``, ``bytes`` (of one copy), ``accesses`` (share
        of the table's), ``copies`` (per row on average), ``where`` (text) and ``seconds`` (per
        GPU, for this tier alone).
        """
        return [dict(row) for row in self.rows]

    def summary(self) -> list[dict[str, Any]]:
        """Fewer rows than :meth:`describe`: tiers of one table, memory and number of copies as
        one, with the patterns they are kept under counted in ``where``."""
        groups: dict[tuple, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            key = (row["table"], row["memory"], round(row["copies"], 2))
            groups.setdefault(key, []).append(row)
        result = []
        for (table, memory, copies), rows in groups.items():
            patterns = list(dict.fromkeys(row["where"] for row in rows))
            result.append({
                "table": table,
                "memory": memory,
                "copies": copies,
                **{key: sum(row[key] for row in rows) for key in ("rows", "bytes", "accesses")},
                "where": patterns[0] if len(patterns) == 1 else f"{len(patterns)} patterns",
            })  # fmt: skip
        return result

    def validate(self, topology: Topology | None = None) -> None:
        """Check that every row is somewhere, within reach, and within the budgets.

        Parameters
        ----------
        topology : Topology, optional
            With it, also that every read goes over a link that exists.

        Raises
        ------
        DataFormatError
            If a table's tiers do not cover its rows once, or name GPUs or parts that are not.
        UnreachableError
            If a GPU reads a part from one that has no copy, or over no link.
        PlanDoesNotFitError
            If a memory holds more than its budget.
        """
        if topology is not None and topology.num_gpus != self.num_gpus:
            raise DataFormatError(
                f"use a plan for {self.num_gpus} GPUs on '{topology.name}'",
                f"that machine has {topology.num_gpus} GPUs",
                "solve the plan for this machine",
            )
        for table in self.tables.values():
            _check_tiers(table, self.num_gpus)
            for tier in table.tiers:
                _check_reach(table.name, tier, topology)
        held = [
            *zip(range(self.num_gpus), self.gpu_bytes, self.gpu_budget, strict=True),
            ("host memory", self.host_bytes, self.host_budget),
            ("the disk", self.disk_bytes, self.disk_budget),
        ]
        for memory, needed, available in held:
            if needed > available:
                name = memory if isinstance(memory, str) else f"GPU {memory}"
                raise PlanDoesNotFitError(
                    f"keep {needed:,} bytes in {name}", f"its budget is {available:,} bytes",
                    "lower a ratio or raise the budget", needed, available,
                )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        parts = ("tables", "loads", "share")
        data = {name: value for name, value in vars(self).items() if name not in parts}
        data["tables"] = {
            name: [tier.__dict__ for tier in table.tiers] for name, table in self.tables.items()
        }
        data["loads"] = [load.__dict__ for load in self.loads]
        if self.share is not None:
            data["share"] = self.share.__dict__
        # A round trip turns tuples into lists, so that what is written equals what is read.
        return json.loads(json.dumps({"format": 1, **data}))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_dict`; validates what it reads.

        Raises
        ------
        DataFormatError
            If a field is missing, of another type, or contradicts the others.
        """
        try:
            if data["format"] != 1:
                raise ValueError(f"its format is {data['format']!r}, not 1")
            # Plans of old checkpoints have neither loads nor a share.
            fields = {name: read(data[name]) for name, read in _FROM_JSON.items()}
            share = data.get("share")
            plan = cls(
                **fields,
                loads=tuple(map(_load, data.get("loads", ()))),
                share=None if share is None else _share(share),
            )
            lengths = {len(plan.gpu_budget), len(plan.gpu_bytes), len(plan.seconds)}
            if lengths != {plan.num_gpus}:
                raise ValueError(
                    f"it has {plan.num_gpus} GPUs, but {sorted(lengths)} entries for them"
                )
            plan.validate()
        except (
            LookupError, TypeError, ValueError, AttributeError, OverflowError,
            UnreachableError, PlanDoesNotFitError,
        ) as error:  # fmt: skip
            raise DataFormatError(
                "read a plan",
                f"it is damaged ({type(error).__name__}: {error})",
                "solve it again, or write it with to_dict()",
            ) from error
        return plan


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_int, values))


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _tier(data: Mapping[str, Any]) -> Tier:
    if data["memory"] not in MEMORIES:
        raise ValueError(f"there is no memory {data['memory']!r}")
    return Tier(
        _int(data["start"]), _int(data["stop"]), data["memory"], _int(data["parts"]),
        tuple(map(_ints, data["copies"])), tuple(map(_ints, data["source"])),
    )  # fmt: skip


def _load(data: Mapping[str, Any]) -> Load:
    return Load(
        str(data["kind"]), _ints(data["readers"]), _ints(data["holders"]),
        float(data["bandwidth"]), float(data["nbytes"]), float(data["seconds"]),
    )  # fmt: skip


def _share(data: Mapping[str, Any]) -> MachineShare:
    return MachineShare(
        _int(data["num_machines"]), float(data["replica_ratio"]), _int(data["replicated_bytes"]),
        _int(data["own_bytes"]),
        {str(table): float(share) for table, share in data["remote_reads"].items()},
    )  # fmt: skip


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "topology": str,
    "num_gpus": int,
    "policy": str,
    "tables": lambda tables: {
        str(name): TablePlan(str(name), tuple(map(_tier, tiers))) for name, tiers in tables.items()
    },
    **dict.fromkeys(("gpu_budget", "gpu_bytes"), _ints),
    **dict.fromkeys(("host_budget", "disk_budget", "host_bytes", "disk_bytes"), int),
    "seconds": lambda seconds: tuple(map(float, seconds)),
    "hit_rates": lambda tables: {
        str(name): {str(kind): float(rate) for kind, rate in rates.items()}
        for name, rates in tables.items()
    },
    "rows": lambda rows: tuple(map(dict, rows)),
}


def _check_tiers(table: TablePlan, num_gpus: int) -> None:
    expected = 0
    for tier in table.tiers:
        whole = tier.start == expected and tier.stop > tier.start and tier.parts >= 1
        shaped = (
            len(tier.copies) == tier.parts
            and len(tier.source) == num_gpus
            and all(len(reads) == tier.parts for reads in tier.source)
        )
        gpus = {gpu for holders in tier.copies for gpu in holders}
        if tier.memory == "gpu":
            placed = all(tier.copies) and gpus <= set(range(num_gpus))
        else:
            placed = tier.parts == 1 and not gpus
        if not (whole and shaped and placed):
            raise DataFormatError(
                f"check the plan of table '{table.name}'",
                f"tier [{tier.start}, {tier.stop}) comes after position {expected}, and has"
                f" {tier.parts} parts, {len(tier.copies)} sets of copies and {len(tier.source)}"
                " readers",
                "solve the plan again",
            )
        expected = tier.stop


def _check_reach(table: str, tier: Tier, topology: Topology | None) -> None:
    if tier.memory != "gpu":
        return
    for gpu, reads in enumerate(tier.source):
        for part, holder in enumerate(reads):
            if holder == HOST:
                continue
            linked = topology is None or topology.link_bandwidth[gpu, holder] > 0
            if holder not in tier.copies[part] or not linked:
                raise UnreachableError(
                    f"read part {part} of '{table}' at [{tier.start}, {tier.stop}) on GPU {gpu}",
                    f"the plan reads it from GPU {holder}, but has copies on {tier.copies[part]}"
                    + ("" if linked else ", and the two are not linked"),
                    "solve the plan for this machine",
                )


def locate(
    positions: np.ndarray, tiers: Sequence[Tier]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where rows are.

    Parameters
    ----------
    positions : ndarray of int, shape (k,)
    tiers : sequence of Tier
        By ascending start, covering the table.

    Returns
    -------
    tier, part, local : ndarray, int64, shape (k,)

    Raises
    ------
    IdOutOfRangeError
        If a position lies in no tier.
    """
    positions = np.asarray(positions, np.int64)
    stops = np.array([tier.stop for tier in tiers], np.int64)
    num_rows = int(stops[-1]) if len(stops) else 0
    if len(positions) and (positions.min() < 0 or positions.max() >= num_rows):
        bad = positions[(positions < 0) | (positions >= num_rows)][0]
        raise IdOutOfRangeError(
            "locate rows", f"there is no position {bad}, there are {num_rows} rows",
            f"pass positions in [0, {num_rows})",
        )  # fmt: skip
    tier = np.searchsorted(stops, positions, side="right")
    start, parts = _starts_and_parts(tiers)
    offset = positions - start[tier]
    return tier, offset % parts[tier], offset // parts[tier]


def position_of(
    tier: np.ndarray, part: np.ndarray, local: np.ndarray, tiers: Sequence[Tier]
) -> np.ndarray:
    """Inverse of :func:`locate`: positions, int64, shape (k,)."""
    start, parts = _starts_and_parts(tiers)
    tier = np.asarray(tier, np.int64)
    return start[tier] + np.asarray(local, np.int64) * parts[tier] + np.asarray(part, np.int64)


def part_sizes(tier: Tier) -> np.ndarray:
    """Rows in each part of a tier, int64, shape (parts,)."""
    return (tier.num_rows - np.arange(tier.parts) + tier.parts - 1) // tier.parts


def _starts_and_parts(tiers: Sequence[Tier]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([tier.start for tier in tiers], np.int64),
        np.array([tier.parts for tier in tiers], np.int64),
    )
