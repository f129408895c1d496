"""From data and options to a plan: how hot each row is, and where the solver puts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dgl_mgpu.config.store_options import StoreOptions, parse_bytes
from dgl_mgpu.errors import ConfigError, PlanDoesNotFitError
from dgl_mgpu.machine import Network, Topology
from dgl_mgpu.machine.shared_memory import SharedMemory
from dgl_mgpu.placement import Degrees, Plan, Reads, TableSpec, order_by_hotness, solve
from dgl_mgpu.placement.cost import Resources, estimate
from dgl_mgpu.store.memory.format import FeatureSource, Source, TopologySource
from dgl_mgpu.store.memory.machine import restrict_links
from dgl_mgpu.store.memory.table import position_dtype
from dgl_mgpu.store.memory.tables import Blueprint
from dgl_mgpu.store.span import Kept, with_other_machines

_TO_DISK = "give a folder for the rest as store.disk_path"
_GPU_MEMORY, _STAGING = "store.gpu_memory", "store.staging_memory"


def make_blueprint(
    sources: Mapping[str, Source],
    hotness: Mapping[str, np.ndarray],
    topology: Topology,
    options: StoreOptions,
    *,
    on_gpus: bool = False,
    shared: SharedMemory | None = None,
    kept: Kept | None = None,
    network: Network | None = None,
) -> Blueprint:
    """Order rows by hotness and solve the placement.

    ``hotness`` has the expected accesses of each row id, for each order that a source names;
    ``topology`` one GPU for each rank, which with ``on_gpus`` has to hold the orders, too.
    ``kept`` says of a store of several machines what this one keeps, and ``network`` what joins
    them; all is kept by default.  Raises ConfigError, PlanDoesNotFitError or UnreachableError.
    """
    reads = reads_of(sources, hotness, options) if kept is None else kept.reads
    rows = [len(counts) for counts in hotness.values()]
    stored, read_here = dict(sources), reads
    if kept is None:
        orders = {name: order_by_hotness(counts).order for name, counts in hotness.items()}
    else:
        # What a machine alone has, it reads for the mini-batches of all.
        read_here = replace(
            reads,
            nodes={ntype: read * kept.features[ntype] for ntype, read in reads.nodes.items()},
            sampled={ntype: read * kept.in_edges[ntype] for ntype, read in reads.sampled.items()},
        )
        # The in-edges of a type have an order of their own: of other nodes than its features have.
        orders = {}
        for ntype, hottest in kept.hottest.items():
            orders[ntype] = _order(hottest, kept.features[ntype], read_here.nodes[ntype])
            orders[in_edges_order(ntype)] = _order(
                hottest, kept.in_edges[ntype], read_here.sampled[ntype]
            )
        for name, source in sources.items():
            if isinstance(source, TopologySource):
                stored[name] = source.in_order(in_edges_order(source.position))
        rows += rows  # of features and of in-edges
        if shared is not None:  # positions tell which rows are here
            shared = replace(shared, room=max(0, shared.room - _order_bytes(rows)))
    specs = [
        _spec(name, source, read_here, orders.get(stored[name].position))
        for name, source in sources.items()
    ]
    disk_path = None if options.disk_path is None else Path(options.disk_path)
    plan = plan_tables(specs, topology, options, rows, on_gpus=on_gpus, shared=shared)
    if kept is not None:
        assert network is not None  # between machines that keep parts
        plan = with_other_machines(plan, kept, sources, network, len(options.fanouts))
    for position, order in orders.items() if kept is not None else ():
        of_order = (name for name, source in stored.items() if source.position == position)
        if all(len(plan.tables[name].tiers) == 1 for name in of_order):
            order.sort()  # equally fast to read, and files are read from beginning to end
    return Blueprint(stored, orders, plan, disk_path, _staging_bytes(options, rows))


def reads_of(
    sources: Mapping[str, Source], hotness: Mapping[str, np.ndarray], options: StoreOptions
) -> Reads:
    """What a mini-batch is expected to read of a graph, by the hotness of its nodes."""
    topologies = [
        Degrees(source.position, np.diff(source.indptr))
        for source in sources.values()
        if isinstance(source, TopologySource)
    ]
    return options.reads(hotness, topologies)


def _order(hottest: np.ndarray, readers: np.ndarray, read_here: np.ndarray) -> np.ndarray:
    """The nodes that a machine keeps, those that it reads most first."""
    of_each = readers[hottest]
    # Replicas and its own, each in order already, are soon sorted.
    nodes = np.concatenate([hottest[of_each == 1], hottest[of_each > 1]])
    return nodes[order_by_hotness(read_here[nodes]).order]


def in_edges_order(ntype: str) -> str:
    """Of nodes of a type, the order in which their in-edges are kept, if features have another."""
    return f"in-edges of {ntype}"


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

    ``order_rows`` counts the rows of each order.  With ``on_gpus``, each GPU holds the orders and a
    cache of rows on disk, too, and topology does not go to disk.  ``shared`` holds all that is not
    on disk where ranks have no memory of their own: what a plan calls GPU memory and host memory
    are both taken from it.  It is None where each is one of its own.  Raises as
    :func:`make_blueprint`.
    """
    limit = parse_bytes(options.gpu_memory, _GPU_MEMORY)
    budgets = topology.gpu_memory if limit is None else np.full(topology.num_gpus, limit)
    if on_gpus:
        held = _order_bytes(order_rows)
        if options.disk_path is not None:
            held += _staging_bytes(options, order_rows)
        budgets = np.maximum(budgets - held, 0)
    machine = restrict_links(topology, options.links)
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
    plans: list[Plan] = []
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
            plans.append(plan)
        return plan

    ranks = np.minimum(ranks, shared.room // len(ranks))
    has_disk = options.disk_path is not None
    unlimited = attempt(ranks, min(host, shared.room), has_disk)
    taken = ranks if unlimited is None else np.array(unlimited.gpu_bytes)
    for disk in (False, True)[: 1 + has_disk]:
        if plans:
            break
        errors.clear()
        for room in dict.fromkeys((max(shared.room - order_bytes, 0), shared.room)):
            first = np.minimum(taken, room // len(ranks))
            attempt(first, min(host, room - int(first.sum())), disk)
            left = min(host, room)
            attempt(np.minimum(ranks, (room - left) // len(ranks)), left, disk)
    if not plans:
        error = min(errors, key=lambda error: error.needed - error.available)
        raise _too_little_shared_memory(error, len(ranks), shared, options) from error
    plan = min(plans, key=lambda plan: plan.step_seconds)
    budget = plan.gpu_budget
    if sum(budget) + plan.host_bytes > shared.room:
        budget = plan.gpu_bytes
    return replace(plan, gpu_budget=budget, host_budget=min(host, shared.room - sum(budget)))


def _too_little_shared_memory(
    error: PlanDoesNotFitError, num_ranks: int, shared: SharedMemory, options: StoreOptions
) -> PlanDoesNotFitError:
    """What a plan lacked, where ranks' memory and the host's are one."""
    in_words = _in_options_words(error)
    of_each_rank = options.policy == "partitioned" or any(
        ratio not in ("auto", None) for ratio in (options.graph_ratio, options.feature_ratio)
    )
    needed = error.needed * (num_ranks if of_each_rank else 1)
    if needed <= shared.room:  # it is options that leave too little of it
        return in_words
    room, advice = f"shared memory can take {shared.room:,} bytes", shared.advice(needed)
    found = f"{error.found} ({room}, all ranks' and the host's together)"
    fix = f"{in_words.fix}; {advice}" if of_each_rank else f"{advice}, or {_TO_DISK}"
    return PlanDoesNotFitError(error.asked, found, fix, error.needed, error.available)


def _order_bytes(order_rows: Sequence[int]) -> int:
    return sum(position_dtype(rows).itemsize * rows for rows in order_rows)


def _staging_bytes(options: StoreOptions, order_rows: Sequence[int]) -> int:
    """Bytes of each GPU that cache rows on disk: what its share has beside orders, if that is less
    than what was asked for."""
    wanted = parse_bytes(options.staging_memory, _STAGING) or 0
    limit = parse_bytes(options.gpu_memory, _GPU_MEMORY)
    return wanted if limit is None else min(wanted, max(0, limit - _order_bytes(order_rows)))


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
    costs = estimate(resources, specs, tables)
    return replace(plan, tables={name: tables[name] for name in plan.tables}, **vars(costs))


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
    return TableSpec.features(name, len(rows), source.row_bytes, rows)
