"""A graph's parts as DGL graphs, one a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
import torch.distributed as dist
from dgl import DGLGraph

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import PARTITIONS
from dgl_mgpu.distributed.batch_norm import normalise_over_ranks, rows_of_all_ranks
from dgl_mgpu.distributed.exchange.by_machine import Machines
from dgl_mgpu.distributed.exchange.halo import Halo
from dgl_mgpu.distributed.exchange.schedule import CommSchedule, sendable
from dgl_mgpu.distributed.exchange.strategies import AUTO, ExchangeStrategies, ExchangeStrategy
from dgl_mgpu.distributed.exchange.tuner import Auto
from dgl_mgpu.distributed.exchange.window import Window, reaches_all
from dgl_mgpu.distributed.index import PartitionedIndex, PartitionedRelation
from dgl_mgpu.distributed.local_part import Part, cut
from dgl_mgpu.distributed.partition import (
    Ownership,
    assigned,
    check_assignment,
    fingerprint,
    ranges,
    shuffled,
)
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.distributed import DistributedGraphIndex, allow_empty_views
from dgl_mgpu.graph.index import GraphSchema
from dgl_mgpu.graph.metis import metis_parts
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.utils.types import CanonicalEtype

By = str | torch.Tensor | np.ndarray | Mapping[str, torch.Tensor | np.ndarray]
_Assigned = str | torch.Tensor | dict[str, torch.Tensor]

_ACTION = "partition a graph"
_BY = f"use one of {', '.join(PARTITIONS)}, or a tensor or array of each node's rank"


class PartitionedGraph(DGLGraph):
    """A rank's part of a graph: its own nodes, and the in-edges of these.

    ``ndata`` and ``edata`` have a row for each of them, ``ndata[dgl.NID]`` and ``edata[dgl.EID]``
    their ids in the whole graph.  ``num_nodes()`` and ``num_edges()`` count these.

    Message passing fetches what the edges' sources have on other ranks, and takes gradients back.
    So it is collective, also on a rank without nodes or edges: every rank runs the same operations
    in the same order, with gradients asked for of the same tensors, and goes backward where the
    others do.  Users' functions of edges and nodes read the same columns on every rank; they are
    called without any rows where a rank has none.

    Readouts (``dgl.sum_nodes``, ``dgl.softmax_edges``, …) are of all ranks' nodes or edges, and the
    same on every rank.  Their gradients, as those of parameters, are of the sum of all ranks'
    losses: of a loss that every rank computes, each takes its share.
    """

    @property
    def ownership(self) -> dict[str, Ownership]:
        """Which rank has which nodes, of each node type."""
        return dict(zip(self.ntypes, self._graph.owned, strict=True))

    def to(self, device: torch.device | str | None, **kwargs: Any) -> DGLGraph:
        """As ``DGLGraph.to``; the part stays on its device, others raise."""
        if device is not None and torch.device(device).type not in ("cpu", "cuda"):
            self._graph.refuse_to_move()
        return super().to(device, **kwargs)

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """As ``DGLGraph.local_scope``.

        Modules, which work in one, may view rows there as if each rank had some.
        """
        nodes = map(self.num_nodes, self.ntypes)
        edges = map(self.num_edges, self.canonical_etypes)
        with super().local_scope(), allow_empty_views([*nodes, *edges]):
            yield

    def sync_batch_norm(self) -> contextlib.AbstractContextManager:
        """A context in which torch's batch normalisation is over all ranks' rows; collective.

        Modules that are called with the graph work in one.  Others are to be called in one if they
        normalise rows of the graph: without it they raise an UnsupportedByPartitionError.
        """
        return rows_of_all_ranks(self._graph)

    def gather(self, rows: torch.Tensor, ntype: str | None = None) -> torch.Tensor:
        """All nodes' rows on every rank, by node id in the whole graph; collective.

        Parameters
        ----------
        rows : Tensor, shape (num_nodes of this rank, \\*shape)
        ntype : str, optional
            May be left out where there is one.

        Returns
        -------
        Tensor, shape (num_nodes of the whole graph, \\*shape)
            Without gradients.

        Raises
        ------
        InvalidInputError
            If there is not a row for each of this rank's nodes, or they are of another shape or
            dtype than on the first rank.
        RankFailedError
            If that is so on another rank.
        """
        ranks = Communicator.of_all_machines()
        ntype = self.ntypes[self.get_ntype_id(ntype)]
        owned = self.ownership[ntype]
        action = f"gather rows of node type {ntype!r}"

        def check() -> None:
            if not isinstance(rows, torch.Tensor):
                found = f"rows is of type {type(rows).__name__}, not a tensor"
            elif not rows.dim() or len(rows) != self.num_nodes(ntype):
                shape = tuple(rows.shape)
                found = f"rows has shape {shape}, but this rank has {self.num_nodes(ntype)} nodes"
            else:
                return
            raise InvalidInputError(action, found, "pass a row for each of this rank's nodes")

        ranks.run_all(action, check)
        kinds = ranks.all_gather((rows.shape[1:], rows.dtype))
        for rank, (shape, dtype) in enumerate(kinds):
            if (shape, dtype) != kinds[0]:
                raise InvalidInputError(
                    action,
                    f"rank {rank} passed rows of shape {tuple(shape)} and dtype {dtype}, but the "
                    f"first rank rows of shape {tuple(kinds[0][0])} and dtype {kinds[0][1]}",
                    "pass rows of one shape and dtype on every rank",
                )
        rows = rows.detach().contiguous()
        counts = [owned.count(rank) for rank in range(owned.num_ranks)]
        longest = rows.new_zeros(max(counts), *rows.shape[1:])
        longest[: len(rows)] = rows
        by_rank = [torch.empty_like(longest) for _ in counts]
        if owned.num_ranks > 1:
            dist.all_gather([sendable(padded) for padded in by_rank], sendable(longest))
        else:
            by_rank = [longest]
        everyone = torch.cat([part[:count] for part, count in zip(by_rank, counts, strict=True)])
        if owned.order is None:
            return everyone
        order = owned.order.to(everyone.device)
        return torch.empty_like(everyone).index_copy_(0, order, everyone)

    def scatter(
        self,
        rows: torch.Tensor | None,
        ntype: str | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """This rank's rows of all nodes', which are by node id in the whole graph; collective.

        For features that are not to be in ``ndata``, such as those that stay in the host's memory.

        Parameters
        ----------
        rows : Tensor, shape (num_nodes of the whole graph, \\*shape), or None
            Ranks other than the first may pass None and are sent theirs.
        ntype : str, optional
            May be left out where there is one.
        device : torch.device, optional
            Of the result; by default that of the graph.

        Returns
        -------
        Tensor, shape (num_nodes of this rank, \\*shape)

        Raises
        ------
        InvalidInputError
            If the first rank passes None, or there is not a row for each node.
        RankFailedError
            If that is so on another rank.
        """
        ranks = Communicator.of_all_machines()
        ntype = self.ntypes[self.get_ntype_id(ntype)]
        owned = self.ownership[ntype]
        action = f"scatter rows of node type {ntype!r}"

        def check() -> None:
            fix = f"pass a row for each of the graph's {owned.num_nodes} nodes"
            if rows is None:
                if not ranks.rank:
                    raise InvalidInputError(action, "the first rank passed None", fix)
            elif rows.dim() == 0 or len(rows) != owned.num_nodes:
                raise InvalidInputError(action, f"rows has shape {tuple(rows.shape)}", fix)

        ranks.run_all(action, check)
        row_shape, dtype = ranks.broadcast_from_rank0(action, lambda: (rows.shape[1:], rows.dtype))  # type: ignore[union-attr]
        ids = owned.nodes(ranks.rank, self.device if device is None else device)
        return _deal_rows(ranks, rows, ids, row_shape, dtype)


class _Feature(NamedTuple):
    key: str
    row_shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Outline:
    """What ranks must agree on about a graph."""

    num_nodes: dict[str, int]
    num_edges: dict[CanonicalEtype, int]
    idtype: torch.dtype
    #: Features of each node type, and of each edge type.
    node_data: dict[str, list[_Feature]]
    edge_data: dict[CanonicalEtype, list[_Feature]]

    @classmethod
    def of(cls, g: DGLGraph) -> _Outline:
        return cls(
            {ntype: g.num_nodes(ntype) for ntype in g.ntypes},
            {etype: g.num_edges(etype) for etype in g.canonical_etypes},
            g.idtype,
            {ntype: _columns(g.nodes[ntype].data) for ntype in g.ntypes},
            {etype: _columns(g.edges[etype].data) for etype in g.canonical_etypes},
        )


def _columns(data: Mapping[str, torch.Tensor]) -> list[_Feature]:
    return [
        _Feature(key, value.shape[1:], value.dtype, value.requires_grad)
        for key, value in sorted(data.items())
    ]


def partition_graph(
    g: DGLGraph | None,
    *,
    by: By | np.ndarray = "random",
    exchange: str = "halo",
    seed: int = 0,
    device: torch.device | str | None = None,
) -> PartitionedGraph:
    """Give each rank its part of a graph, as a DGL graph on which layers of ``dgl.nn`` train.

    What needs the whole graph raises UnsupportedByPartitionError there.  Collective where
    torch.distributed is initialised: every rank calls it.  Nodes are dealt out (1D by rows; MGG,
    section 3.1, MG-GCN, section 4.1), and a rank has the in-edges of its own.

    Parameters
    ----------
    g : DGLGraph or None
        Homogeneous or heterogeneous, with its features; a batch is one graph.  Ranks other than the
        first may pass None and are sent what they need; else every rank passes the same graph.
    by : str, or Tensor or ndarray of integers, shape (num_nodes,), or dict of these
        'random' deals out nodes in a random order, which balances all ranks (MG-GCN, section 5.2);
        'order' cuts the order they have, which keeps neighbours together where it has locality;
        'metis' has METIS keep neighbours together.  A tensor or array gives the rank of every
        node (a dict of tensors, of every node of each type).
    exchange : str
        How sums over in-edges get other ranks' rows.  'halo': each row that a rank needs once, in
        chunks, while those that are there are added up; in so many that rows in flight take a few
        times the memory of a rank's own, on any number of ranks.  'broadcast': all rows of one rank
        after the other's to all (MG-GCN, section 4.3).  'remote': nothing is sent, a kernel reads
        the rows in other GPUs' memory, once for each edge (MGG, section 3).  All give the same
        sums, in another order.  'auto' tries those that a model finds promising in the first
        iterations, and keeps the fastest for each width and direction; none whose rows in flight
        grow with the ranks.  In full: 'halo in 3', in so many chunks; 'halo at first', before all
        sums; 'remote reads, ps=16 dist=8 wpb=2', with MGG's size of neighbour partitions,
        interleaving distance and warps a block.  For all but sums and means, 'auto' and 'remote'
        are as 'halo'.
    seed : int
        For 'random'.
    device : torch.device, optional
        Where the part is to be; by default this rank's GPU, if it has one.

    Returns
    -------
    PartitionedGraph
        With the features of this rank's nodes and of their in-edges.

    Raises
    ------
    InvalidInputError
        If ranks pass different graphs, ``by``, ``exchange`` or ``seed`` is none of these, or there
        is no such device.
    RankFailedError
        If another rank failed.
    """
    ranks = Communicator.of_all_machines()
    by = ranks.run_all(_ACTION, partial(_as_tensors, by))
    request, where = ranks.run_all(_ACTION, partial(_checked, g, by, exchange, seed, device))
    requests = ranks.all_gather(request)
    outlines = [outline for outline, _ in requests]
    outline = outlines[0]
    _check_alike(outlines, [options for _, options in requests])
    assert outline is not None  # as has been checked
    source = _Source(None if None in outlines and ranks.rank else g, ranks, where)
    owned = ranks.run_all(_ACTION, partial(_deal, source, outline, by, seed))
    parts, fingerprints = {}, {}
    for etype in outline.num_edges:
        ends = source.ends(etype, outline)
        fingerprints[etype] = fingerprint(*ends)
        parts[etype] = cut(*ends, owned[etype[0]], owned[etype[2]], ranks.rank)
        del ends
    _check_edges(ranks.all_gather(fingerprints))
    owned = {ntype: ownership.cpu() for ntype, ownership in owned.items()}
    for etype, part in parts.items():
        parts[etype] = replace(part, src=owned[etype[0]], dst=owned[etype[2]])
    graph = assemble(parts, owned, exchange, where)
    _fill(graph, source, outline, parts)
    return graph


def assemble(
    parts: Mapping[CanonicalEtype, Part],
    owned: Mapping[str, Ownership],
    exchange: str,
    where: torch.device,
) -> PartitionedGraph:
    """A rank's part of a graph, without features, of its parts of all relations; collective."""
    ranks = Communicator.of_all_machines()
    group = dist.group.WORLD if ranks.size > 1 else None
    window = ranks.run_all(
        "let GPUs read each other's memory", partial(_window, group, where, exchange)
    )
    machines = Machines.of_job() if group is not None and window is None else None
    relations = [
        _partition_relation(part, group, window, machines, exchange) for part in parts.values()
    ]
    ntypes = list(owned)
    schema = GraphSchema.of(
        len(ntypes), [(ntypes.index(src), ntypes.index(dst)) for src, _, dst in parts]
    )
    index = PartitionedIndex(schema, list(owned.values()), relations)
    return PartitionedGraph(index, ntypes, [etype for _, etype, _ in parts])


def _as_tensors(by: By) -> _Assigned:
    """The same, with tensors alone."""
    if isinstance(by, str):
        if by not in PARTITIONS:
            raise InvalidInputError(
                _ACTION, f"by={by!r} is not a way to assign nodes to ranks", _BY
            )
        return by
    if isinstance(by, Mapping):
        return {ntype: _as_tensor(ranks, f"by of {ntype!r}") for ntype, ranks in by.items()}
    return _as_tensor(by, "by")


def _as_tensor(ranks: Any, what: str) -> torch.Tensor:
    if not isinstance(ranks, (torch.Tensor, np.ndarray)):
        raise InvalidInputError(
            _ACTION, f"{what} is of type {type(ranks).__name__}: {ranks!r:.60}", _BY
        )
    try:
        return torch.as_tensor(ranks)
    except TypeError as error:  # an array of what no tensor holds
        raise InvalidInputError(_ACTION, f"{what} is an array of {ranks.dtype}", _BY) from error


def _window(group: dist.ProcessGroup | None, device: torch.device, exchange: str) -> Window | None:
    if group is None:
        return None
    if reaches_all(group, device):
        window = Window(group, device)
        window.turn(1)  # where that fails, let it be here
        return window
    if exchange != AUTO and ExchangeStrategy.named(exchange).pipeline is not None:
        raise InvalidInputError(
            _ACTION,
            f"exchange={exchange!r} reads other ranks' memory, which these ranks cannot",
            "use a GPU of its own for each rank, all of them linked, or exchange='halo'",
        )
    return None


def _partition_relation(
    part: Part,
    group: dist.ProcessGroup | None,
    window: Window | None,
    machines: Machines | None,
    exchange: str,
) -> PartitionedRelation:
    strategies = ExchangeStrategies(part, group, window, machines)
    if exchange == AUTO:
        rounds: CommSchedule = Auto(strategies)
    else:
        rounds = strategies[strategies.named(exchange)]
    again = partial(
        _partition_relation, group=group, window=window, machines=machines, exchange=exchange
    )
    relation = PartitionedRelation(Halo(part, group, window), rounds, again)
    if group is not None:
        normalise_over_ranks(relation)
    return relation


def device_of(g: DGLGraph | None, requested: torch.device | str | None) -> torch.device:
    """Where a rank's part is to be: as requested, or where the graph or this rank's GPU is."""
    if requested is not None:
        try:
            device = torch.empty(0, device=requested).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise InvalidInputError(
                _ACTION,
                f"this rank has no device {requested!r} ({error})",
                "pass a device that this rank has",
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise InvalidInputError(
                _ACTION,
                f"device={requested!r} is neither a GPU nor the CPU",
                "pass a GPU, or 'cpu'",
            )
        return device
    if g is not None and g.device.type == "cuda":
        return g.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_Options = tuple[object, str, int]


def _checked(
    g: DGLGraph | None, by: _Assigned, exchange: str, seed: int, device: torch.device | str | None
) -> tuple[tuple[_Outline | None, _Options], torch.device]:
    """A rank's request, in a short form that can be compared with other ranks', and its device."""
    if g is not None and (
        not isinstance(g, DGLGraph) or g.is_block or isinstance(g._graph, DistributedGraphIndex)
    ):
        block = isinstance(g, DGLGraph) and g.is_block
        found = "g is a block" if block else f"g is of type {type(g).__name__}"
        raise InvalidInputError(_ACTION, found, "pass a DGLGraph, the whole graph")
    if exchange != AUTO:
        ExchangeStrategy.named(exchange)
    if g is not None and not g.canonical_etypes:
        raise InvalidInputError(_ACTION, "the graph has no edge types", "pass one with relations")
    seed = check_integer(seed, "seed", 0, _ACTION)
    options = _fingerprint(by), exchange, seed
    return (None if g is None else _Outline.of(g), options), device_of(g, device)


def _fingerprint(by: _Assigned) -> object:
    """What differs where assignments do."""
    if isinstance(by, str):
        return by
    if isinstance(by, dict):
        return {ntype: _fingerprint(ranks) for ntype, ranks in by.items()}
    ranks = by.flatten().long()
    return tuple(by.shape), fingerprint(ranks, ranks)


def _check_alike(outlines: list[_Outline | None], options: list[_Options]) -> None:
    if outlines[0] is None:
        raise InvalidInputError(_ACTION, "the first rank passed None", "pass the graph there")
    for rank, outline in enumerate(outlines):
        if outline is not None and outline != outlines[0]:
            raise InvalidInputError(
                _ACTION,
                f"rank {rank} passed another graph than rank 0: {outline.num_nodes} nodes and"
                f" {outline.num_edges} edges, against {outlines[0].num_nodes} and"
                f" {outlines[0].num_edges}, or other features",
                "pass the same graph on every rank, or None on all but the first",
            )
        if options[rank] != options[0]:
            raise InvalidInputError(
                _ACTION,
                f"rank {rank} passed other values of by, exchange or seed than rank 0",
                "pass the same on every rank",
            )


def _check_edges(fingerprints: list[dict[CanonicalEtype, int]]) -> None:
    for rank, of_rank in enumerate(fingerprints):
        for etype, mark in of_rank.items():
            if mark != fingerprints[0][etype]:
                raise InvalidInputError(
                    _ACTION,
                    f"rank {rank} has other edges of type {etype} than rank 0, or in another order",
                    "pass the same graph on every rank, or None on all but the first",
                )


class _Source:
    """Where a rank reads the whole graph: its own, or without one through the first rank."""

    def __init__(self, g: DGLGraph | None, ranks: Communicator, device: torch.device) -> None:
        self.g = g
        self.device = device
        self.ranks = ranks
        self._asks = any(ranks.all_gather(g is None))

    def in_degrees(self, etype: CanonicalEtype, outline: _Outline) -> torch.Tensor:
        """Of all nodes of the destination type; int64, on this rank's device."""
        size = outline.num_nodes[etype[2]]
        if self.g is not None:
            dst = self.g.edges(etype=etype, order="eid")[1].to(self.device)
            degrees = torch.bincount(dst, minlength=size)
        else:
            degrees = torch.empty(size, dtype=torch.int64, device=self.device)
        if self._asks:
            dist.broadcast(degrees, src=0)
        return degrees

    def ends(self, etype: CanonicalEtype, outline: _Outline) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and destinations of all edges, by edge id, on this rank's device."""
        if self.g is not None:
            ends = [end.to(self.device) for end in self.g.edges(etype=etype, order="eid")]
        else:
            size = outline.num_edges[etype]
            ends = [torch.empty(size, dtype=outline.idtype, device=self.device) for _ in range(2)]
        if self._asks:
            for end in ends:
                dist.broadcast(end, src=0)
        return ends[0], ends[1]

    def rows(
        self, column: torch.Tensor | None, ids: torch.Tensor, feature: _Feature
    ) -> torch.Tensor:
        """The rows of a feature that this rank has, on its device.

        Where it requires gradients, so do they, on every rank and for themselves.
        """
        rows = _deal_rows(self.ranks, column, ids, feature.row_shape, feature.dtype)
        return rows.requires_grad_(feature.requires_grad)


def _deal_rows(
    ranks: Communicator,
    features: torch.Tensor | None,
    ids: torch.Tensor,
    row_shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of a feature, on the device of ``ids``: the first rank's where some rank has none."""
    everyone = ranks.all_gather((features is None, len(ids)))
    if not any(is_without for is_without, _ in everyone):
        assert features is not None
        return _rows_of(features, ids)
    if ranks.rank == 0:
        assert features is not None
        for rank, (_, size) in enumerate(everyone[1:], 1):
            requested = torch.empty(size, dtype=torch.int64, device=ids.device)
            dist.recv(requested, src=rank)
            dist.send(sendable(_rows_of(features, requested)), dst=rank)
        return _rows_of(features, ids)
    dist.send(ids, dst=0)
    rows = torch.empty(len(ids), *row_shape, dtype=dtype, device=ids.device)
    dist.recv(sendable(rows), src=0)
    return rows


def _rows_of(features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Some rows, on the device of ``ids``; without gradients, which would stay on one rank."""
    return features.detach()[ids.to(features.device)].contiguous().to(ids.device)


def _deal(source: _Source, outline: _Outline, by: _Assigned, seed: int) -> dict[str, Ownership]:
    """Which rank gets which nodes."""
    num_ranks, num_nodes = source.ranks.size, outline.num_nodes
    if by == "metis" and num_ranks > 1:  # METIS itself ends the process for one part
        by = source.ranks.broadcast_from_rank0(_ACTION, lambda: _by_metis(source.g, num_ranks))
        return {ntype: assigned(by[ntype], num_ranks) for ntype in num_nodes}
    if not isinstance(by, str):
        given = by if isinstance(by, dict) else dict.fromkeys(num_nodes, by)
        if set(given) != set(num_nodes):
            raise InvalidInputError(
                _ACTION,
                f"by has ranks for nodes of the types {list(given)}",
                f"pass ranks for nodes of the types {list(num_nodes)}",
            )
        for ntype, count in num_nodes.items():
            check_assignment(given[ntype], count, num_ranks)
        return {ntype: assigned(given[ntype].long().cpu(), num_ranks) for ntype in num_nodes}
    degrees = {
        ntype: torch.zeros(count, dtype=torch.int64, device=source.device)
        for ntype, count in num_nodes.items()
    }
    for etype in outline.num_edges:
        degrees[etype[2]] += source.in_degrees(etype, outline)
    return {
        ntype: ranges(
            shuffled(count, seed, source.device) if by == "random" else None,
            degrees[ntype],
            num_ranks,
        )
        for ntype, count in num_nodes.items()
    }


def _by_metis(g: DGLGraph | None, num_ranks: int) -> dict[str, torch.Tensor]:
    assert g is not None  # the first rank has it
    return metis_parts(g, num_ranks)


def _fill(
    graph: PartitionedGraph,
    source: _Source,
    outline: _Outline,
    parts: dict[CanonicalEtype, Part],
) -> None:
    """Copy this rank's rows of all features, and the ids of its nodes and edges."""
    whole = source.g
    for ntype, owned in graph.ownership.items():
        ids, data = owned.nodes(source.ranks.rank, source.device), graph.nodes[ntype].data
        for feature in outline.node_data[ntype]:
            column = None if whole is None else whole.nodes[ntype].data[feature.key]
            data[feature.key] = source.rows(column, ids, feature)
        data[dgl.NID] = ids.to(outline.idtype)
    for etype, part in parts.items():
        data = graph.edges[etype].data
        for feature in outline.edge_data[etype]:
            column = None if whole is None else whole.edges[etype].data[feature.key]
            data[feature.key] = source.rows(column, part.edges, feature)
        data[dgl.EID] = part.edges.to(outline.idtype)
