"""From data and options to a plan: how hot each row is, and where the solver puts it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from dgl_mgpu.comm.cuda_runtime import DEVICES
from dgl_mgpu.errors import ConfigError, PlanDoesNotFitError, nearest
from dgl_mgpu.machine import Topology
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.placement import (
    Degrees,
    Plan,
    Reads,
    TableSpec,
    minibatch_reads,
    order_by_hotness,
    solve,
)
from dgl_mgpu.placement.cost import Resources, estimate
from dgl_mgpu.placement.solver import read_ratio, require_policy
from dgl_mgpu.store.memory.links import linked
from dgl_mgpu.store.memory.table import position_dtype
from dgl_mgpu.store.memory.tables import Blueprint, Source
from dgl_mgpu.store.sources import FeatureSource, TopologySource

#: Types in which wider features can be kept.
NARROW_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Ways to tell how often a row will be read, beside a file of counts.
HOTNESS = ("degree", "presample")

_TO_DISK = "give a folder for the rest as store.disk_path"
_GPU_MEMORY, _STAGING = "store.gpu_memory", "store.staging_memory"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Fewer bytes without a unit, in a text or counted by a program, are meant in another one.
_LEAST_SAID, _LEAST_COUNTED = 2**20, 2**10
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)


def parse_bytes(text: str | int, action: str) -> int | None:
    """A number of bytes: ``16GiB``, ``512MB`` (powers of 1024 both), or None for ``auto``.

    Raises
    ------
    ConfigError
        If it is no size, or a number without a unit that is too small to be one of bytes;
        ``action`` says of what.
    """
    if text == "auto":
        return None
    match = _SIZE.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise ConfigError(
            f"{action}={text}", "it is not a size", "write it like 16GiB, 512MiB or auto"
        )
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    least = _LEAST_SAID if isinstance(text, str) else _LEAST_COUNTED
    if str(text).rstrip()[-1].isdigit() and 0 < nbytes < least:
        raise ConfigError(
            f"{action}={text}",
            f"that would be {text} bytes, without a unit",
            f"write it with one, like 16GiB, or {text}B if it is bytes",
        )
    return int(nbytes)


@dataclass(frozen=True)
class StoreOptions:
    """How a store uses the machine's memory.

    Attributes
    ----------
    policy : str
        'auto', which minimises the modelled time, or a named placement
        (:data:`dgl_mgpu.placement.POLICIES`).
    gpu_memory, host_memory : int or str
        Bytes for the store on each GPU and in host memory: ``'16GiB'``, or 'auto' for what
        the machine has; on a GPU, what is free less what training needs, for which a quarter of
        the GPU or 4 GiB is kept, whichever is more.  Without GPUs all ranks' and the host's
        together get no more than nine tenths of what ``/dev/shm`` and the machine have free.
    disk_path : str or Path, optional
        Folder for what neither holds; without one the disk is not used.  A store on GPUs keeps
        features there, and topology not.
    staging_memory : int or str
        Bytes of each GPU's share that cache rows on disk, where there is a ``disk_path``; all of
        the share if that is less.
    device : 'auto', 'cpu' or 'cuda'
        Where what the plan calls GPU memory is: on the GPUs, or with 'cpu' in shared memory.
        'auto' takes GPUs where every rank has one and CuPy can be imported.
    links : 'auto', str or sequence of (int, int)
        Which GPUs may read each other: all that can, those linked in a preset (so that another
        machine's links are tried out on this one), or the pairs of ranks given.
    sms : 'auto' or int
        Most multiprocessors of a GPU that a gather or a sampler takes, which leaves the others to
        the model: as many as fill its links, found by measuring when the store is built
        (:mod:`dgl_mgpu.store.calibration`), or so many, of which host memory gets no more than
        the default of :class:`~dgl_mgpu.ops.view.RowView`; 0 for all.
    graph_ratio, feature_ratio : float in [0, 1] or 'auto'
        Share of topology and of features, hottest rows first, that goes to GPU memory; with
        'auto' the solver chooses (XGNN, section 4.3).
    feature_dtypes : mapping of str to str
        Types in which node features are kept, by the features' names: 'float16', 'bfloat16',
        'float8_e4m3fn' or 'float8_e5m2', also as torch's.  A feature has to be of a wider
        floating-point type, at all nodes that have one of the name, and within the type's range.
        Memory holds more of such rows, and links carry them sooner; they are given in the
        type that they had, rounded, which they are cast to as they are gathered.
    hotness : 'degree', 'presample', str or Path
        What rows are ordered by: how often a node is another's neighbour; how often it was
        read by mini-batches sampled for the purpose (XGNN, section 4.3), on the first rank's GPU
        where the store is on GPUs; or, by the path of the file, how often it was read while
        an earlier store counted (:meth:`dgl_mgpu.GlobalStore.count_accesses`).
    batch_size : int
    fanouts : sequence of int
        The mini-batch that times are modelled for; -1 takes all neighbours.

    Raises
    ------
    ConfigError
        If ``policy``, ``hotness``, ``device``, ``sms`` or a type is none of these, ``links`` no
        pairs of ranks, a memory no size, or a ratio not in [0, 1].
    """

    policy: str = "auto"
    gpu_memory: int | str = "auto"
    host_memory: int | str = "auto"
    disk_path: str | Path | None = None
    staging_memory: int | str = "256MiB"
    device: str = "auto"
    links: str | Sequence[Sequence[int]] = "auto"
    sms: int | Literal["auto"] = "auto"
    graph_ratio: float | Literal["auto"] = "auto"
    feature_ratio: float | Literal["auto"] = "auto"
    feature_dtypes: Mapping[str, str | torch.dtype] = field(default_factory=dict)
    hotness: str | Path = "degree"
    batch_size: int = 1024
    fanouts: Sequence[int] = (15, 10, 5)

    def __post_init__(self) -> None:
        is_named = isinstance(self.hotness, str | Path)
        if not is_named or (self.hotness not in HOTNESS and not Path(self.hotness).is_file()):
            raise ConfigError(
                f"order rows by hotness='{self.hotness}'",
                f"it is none of {', '.join(HOTNESS)}, and there is no such file",
                "use one of these, or name a file of counts that an earlier store saved",
            )
        if self.device not in DEVICES:
            raise ConfigError(
                f"keep a store on device='{self.device}'",
                f"the device is none of {', '.join(DEVICES)}",
                "use one of these; with 'cuda' each rank takes its current GPU"
                " (torch.cuda.set_device)",
            )
        if parse_bytes(self.staging_memory, _STAGING) is None:
            raise ConfigError(
                f"{_STAGING}={self.staging_memory}", "it is not a size", "write it like 256MiB"
            )
        if self.sms != "auto" and not (type(self.sms) is int and self.sms >= 0):
            raise ConfigError(
                f"use store.sms={self.sms!r} multiprocessors",
                "it is not a whole number of 0 or more",
                "give 'auto', a number, or 0 for all",
            )
        require_policy(self.policy)
        for name in ("gpu_memory", "host_memory"):
            parse_bytes(getattr(self, name), f"store.{name}")
        for name in ("graph_ratio", "feature_ratio"):
            read_ratio(name, getattr(self, name))
        self.narrow_features()
        whole = isinstance(self.fanouts, Sequence) and all(type(n) is int for n in self.fanouts)
        has_size = isinstance(self.batch_size, Integral) and self.batch_size >= 1
        if not whole or not self.fanouts or min(self.fanouts) < -1 or not has_size:
            raise ConfigError(
                f"plan for batch_size={self.batch_size} and fanouts={self.fanouts}",
                "these make no mini-batch",
                "give a batch size of 1 or more, and a whole number for each layer, -1 for all",
            )

    def narrow_features(self) -> dict[str, torch.dtype]:
        """What ``feature_dtypes`` says, as torch's types."""
        named = self.feature_dtypes
        action = f"keep features as store.feature_dtypes={named!r}"
        if not isinstance(named, Mapping):
            raise ConfigError(
                action, "it does not give types by name", "write them like {feat: float16}"
            )
        found = {}
        for name, dtype in named.items():
            word = str(dtype).removeprefix("torch.")
            if word not in NARROW_DTYPES:
                raise ConfigError(
                    action, f"'{name}' cannot be kept as {word}", nearest(word, NARROW_DTYPES)
                )
            found[str(name)] = getattr(torch, word)  # also of a number, as YAML has keys
        return found

    def reads(self, hotness: Mapping[str, np.ndarray], topologies: Collection[Degrees]) -> Reads:
        """Expected reads of one mini-batch, by :func:`~dgl_mgpu.placement.minibatch_reads`."""
        # Counts are of reads, and degrees of draws.
        return minibatch_reads(
            hotness, topologies, self.batch_size, self.fanouts, distinct=self.hotness != "degree"
        )


def make_blueprint(
    sources: Mapping[str, Source],
    hotness: Mapping[str, np.ndarray],
    topology: Topology,
    options: StoreOptions,
    *,
    on_gpus: bool = False,
    shared: SharedMemory | None = None,
) -> Blueprint:
    """Order rows by hotness and solve the placement.

    Parameters
    ----------
    sources : mapping of str to FeatureSource or TopologySource
    hotness : mapping of str to ndarray
        Expected accesses of each row id, for each order that a source names.
    topology : Topology
        The machine, one GPU for each rank.
    options : StoreOptions
    on_gpus : bool
        Whether every rank has its GPU hold the orders too, which then count there.
    shared : SharedMemory, optional
        As for :func:`plan_tables`.

    Raises
    ------
    ConfigError, PlanDoesNotFitError, UnreachableError
    """
    orders = {name: order_by_hotness(counts).order for name, counts in hotness.items()}
    topologies = [
        Degrees(source.position, np.diff(source.indptr))
        for source in sources.values()
        if isinstance(source, TopologySource)
    ]
    reads = options.reads(hotness, topologies)
    specs = [
        _spec(name, source, reads, orders.get(source.position)) for name, source in sources.items()
    ]
    disk_path = None if options.disk_path is None else Path(options.disk_path)
    rows = [len(order) for order in orders.values()]
    plan = plan_tables(specs, topology, options, rows, on_gpus=on_gpus, shared=shared)
    return Blueprint(sources, orders, plan, disk_path, _staging_bytes(options, rows))


def plan_tables(
    specs: list[TableSpec],
    topology: Topology,
    options: StoreOptions,
    order_rows: Sequence[int] = (),
    *,
    on_gpus: bool = False,
    shared: SharedMemory | None = None,
) -> Plan:
    """Solve the placement of tables that need not exist yet.

    Parameters
    ----------
    specs : list of TableSpec
    topology : Topology
    options : StoreOptions
    order_rows : sequence of int
        Rows of each order.
    on_gpus : bool
        Whether GPUs hold the store: then each holds the orders and a cache of rows on disk, too,
        and topology does not go to disk.
    shared : SharedMemory, optional
        What holds all that is not on disk, where ranks have no memory of their own: what a plan
        calls GPU memory and host memory are both taken from it.  None where each is one of its
        own.

    Raises
    ------
    ConfigError, PlanDoesNotFitError, UnreachableError
    """
    limit = parse_bytes(options.gpu_memory, _GPU_MEMORY)
    budgets = topology.gpu_memory if limit is None else np.full(topology.num_gpus, limit)
    if on_gpus:
        held = _order_bytes(order_rows)
        if options.disk_path is not None:
            held += _staging_bytes(options, order_rows)
        budgets = np.maximum(budgets - held, 0)
    machine = linked(topology, options.links)
    host = parse_bytes(options.host_memory, "store.host_memory")
    place = partial(
        solve,
        machine,
        policy=options.policy,
        graph_ratio=options.graph_ratio,
        feature_ratio=options.feature_ratio,
    )
    if shared is not None:
        return _in_shared_memory(
            partial(place, specs),
            np.asarray(budgets),
            topology.host_memory if host is None else host,
            shared,
            _order_bytes(order_rows),
            options,
        )
    try:
        plan = place(
            specs,
            gpu_budget_bytes=budgets.tolist(),
            host_budget=host,
            allow_disk=options.disk_path is not None,
        )
        if not on_gpus or not any(_is_on_disk(plan, spec) for spec in _graphs(specs)):
            return plan
        return _without_graph_on_disk(plan, specs, machine, place)
    except PlanDoesNotFitError as error:
        raise _in_options_words(error) from error


def _in_options_words(error: PlanDoesNotFitError) -> PlanDoesNotFitError:
    """The same advice in the words of a store's options."""
    fix = error.fix.replace("host_budget", "store.host_memory").replace("allow the disk", _TO_DISK)
    return PlanDoesNotFitError(error.asked, error.found, fix, error.needed, error.available)


def _in_shared_memory(
    place: Callable[..., Plan],
    ranks: np.ndarray,
    host: int,
    shared: SharedMemory,
    order_bytes: int,
    options: StoreOptions,
) -> Plan:
    """A plan whose ranks' memory and host memory are one, of which it takes no more than there is.

    Where the plan for all that was asked of both takes more, ranks keep what they have in it and
    the host gets the rest, or the host comes first; what is faster, without the disk if it can be.
    """
    found: list[Plan] = []
    errors: list[PlanDoesNotFitError] = []

    def attempt(ranks: np.ndarray, host: int, disk: bool) -> Plan | None:
        try:
            plan = place(gpu_budget_bytes=ranks.tolist(), host_budget=host, allow_disk=disk)
        except PlanDoesNotFitError as error:
            errors.append(error)
            return None
        # Positions are kept for tables whose rows lie in several places.
        in_order = all(len(table.tiers) == 1 for table in plan.tables.values())
        beside = 0 if in_order else order_bytes
        if sum(plan.gpu_bytes) + plan.host_bytes + beside <= shared.room:
            found.append(plan)
        return plan

    ranks = np.minimum(ranks, shared.room // len(ranks))
    has_disk = options.disk_path is not None
    action = attempt(ranks, min(host, shared.room), has_disk)
    taken = ranks if action is None else np.array(action.gpu_bytes)
    for disk in (False, True)[: 1 + has_disk]:
        if found:
            break
        errors.clear()
        for room in dict.fromkeys((max(shared.room - order_bytes, 0), shared.room)):
            first = np.minimum(taken, room // len(ranks))
            attempt(first, min(host, room - int(first.sum())), disk)
            left = min(host, room)
            attempt(np.minimum(ranks, (room - left) // len(ranks)), left, disk)
    if not found:
        error = min(errors, key=lambda error: error.needed - error.available)
        raise _too_little_shared_memory(error, len(ranks), shared, options) from error
    plan = min(found, key=lambda plan: plan.step_seconds)
    budget = plan.gpu_budget
    if sum(budget) + plan.host_bytes > shared.room:
        budget = plan.gpu_bytes
    return replace(plan, gpu_budget=budget, host_budget=min(host, shared.room - sum(budget)))


def _too_little_shared_memory(
    error: PlanDoesNotFitError, num_ranks: int, shared: SharedMemory, options: StoreOptions
) -> PlanDoesNotFitError:
    """What a plan lacked, where ranks' memory and the host's are one."""
    told = _in_options_words(error)
    of_each_rank = options.policy == "partitioned" or any(
        ratio not in ("auto", None) for ratio in (options.graph_ratio, options.feature_ratio)
    )
    needed = error.needed * (num_ranks if of_each_rank else 1)
    if needed <= shared.room:  # it is options that leave too little of it
        return told
    room, advice = f"shared memory can take {shared.room:,} bytes", shared.advice(needed)
    found = f"{error.found} ({room}, all ranks' and the host's together)"
    fix = f"{told.fix}; {advice}" if of_each_rank else f"{advice}, or {_TO_DISK}"
    return PlanDoesNotFitError(error.asked, found, fix, error.needed, error.available)


def _order_bytes(order_rows: Sequence[int]) -> int:
    return sum(position_dtype(rows).itemsize * rows for rows in order_rows)


def _staging_bytes(options: StoreOptions, order_rows: Sequence[int]) -> int:
    """Bytes of each GPU that cache rows on disk: what its share has beside orders, if that is less
    than what was asked for."""
    action = parse_bytes(options.staging_memory, _STAGING) or 0
    limit = parse_bytes(options.gpu_memory, _GPU_MEMORY)
    return action if limit is None else min(action, max(0, limit - _order_bytes(order_rows)))


def _graphs(specs: list[TableSpec]) -> list[TableSpec]:
    return [spec for spec in specs if spec.kind == "topology"]


def _is_on_disk(plan: Plan, spec: TableSpec) -> bool:
    return any(tier.memory == "disk" for tier in plan.tables[spec.name].tiers)


def _without_graph_on_disk(
    plan: Plan, specs: list[TableSpec], machine: Topology, place: Callable[..., Plan]
) -> Plan:
    """A plan for the same budgets that has topology in memory, before features have the rest.

    Topology keeps its share of the GPUs, if with host memory that is enough.
    """
    graphs = _graphs(specs)
    resources = Resources.of(machine)
    memory = {"host_budget": plan.host_budget, "allow_disk": False}
    try:
        share = estimate(resources, graphs, plan.tables).gpu_bytes
        first = place(graphs, gpu_budget_bytes=share, **memory)
    except PlanDoesNotFitError:
        try:
            first = place(graphs, gpu_budget_bytes=plan.gpu_budget, **memory)
        except PlanDoesNotFitError as error:
            raise ConfigError(
                "keep topology off the disk, which a store on GPUs cannot sample from",
                error.found,
                "raise store.host_memory or store.gpu_memory, or use store.device=cpu",
            ) from error
    tables = dict(first.tables)
    others = [spec for spec in specs if spec.kind != "topology"]
    if others:
        left = np.subtract(plan.gpu_budget, first.gpu_bytes).tolist()
        host = plan.host_budget - first.host_bytes
        rest = place(others, gpu_budget_bytes=left, host_budget=host, allow_disk=True)
        tables.update(rest.tables)
    found = estimate(resources, specs, tables)
    return replace(plan, tables={name: tables[name] for name in plan.tables}, **vars(found))


def _spec(name: str, source: Source, reads: Reads, order: np.ndarray | None) -> TableSpec:
    """A table's, with its rows by position, and as they come where they have no order."""
    if isinstance(source, TopologySource):
        degrees = np.diff(source.indptr)
        sampled = np.zeros(source.num_rows, np.float32)
        if order is not None:
            degrees, sampled = degrees[order], reads.sampled[source.position][order]
        return TableSpec.topology(
            name,
            degrees,
            sampled,
            fanout=reads.fanout,
            id_bytes=source.idtype.itemsize,
            stored_eids=source.eids is not None,
        )
    assert isinstance(source, FeatureSource)
    if order is None:
        return TableSpec.features(name, source.num_rows, source.row_bytes, None, reads.edges)
    rows = reads.nodes[source.position][order]
    return TableSpec.features(name, source.num_rows, source.row_bytes, rows)
