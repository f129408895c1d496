"""All hops of a mini-batch over edge types, by weight or by time.

With times, a node is sampled at the time of the seed that it was reached from, however many hops
away, and is one source node for each time that it is reached at.  So no seed learns of an edge
later than itself, and what it sees does not depend on the other seeds of its batch: samples are
those of as many batches of one seed, put together where they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_integer, check_types, fanout_of
from dgl_mgpu.ops.edges import to_idtype
from dgl_mgpu.ops.etype_hops import Hops
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample_future import SampleFuture, start
from dgl_mgpu.ops.sample_weighted import EdgeTimes, weighting
from dgl_mgpu.ops.view import GraphView, RowView, tiered_rows

_ACTION = "sample blocks"


class TypedEdges(NamedTuple):
    """What is sampled of an edge type, between node types known by numbers."""

    source: int
    target: int
    view: GraphView
    weights: RowView | None
    times: RowView | None
    key: SampleKey


class SampledHops(NamedTuple):
    """All hops of a mini-batch: lists by hop, and in it by edge type.

    ``nodes`` and ``times`` are by node type; ``sizes[h]`` is how many of them are known at hop h.
    """

    nodes: list[Tensor]
    times: list[Tensor] | None
    indptrs: list[Tensor]
    sources: list[Tensor]
    eids: list[Tensor]
    sizes: list[list[int]]


def typed_hops_async(
    seeds: list[Tensor],
    until: list[Tensor] | None,
    types: Sequence[TypedEdges],
    fanouts: Sequence[Sequence[int]],
    replace: bool,
    sms: int,
) -> SampleFuture[SampledHops]:
    """Start the operator for seeds, by node type, in the graph's id type.

    ``until`` has the time of each seed.  ``fanouts`` are by hop, and in a hop by edge type.  Ask
    for the result on the stream that was current at the start.
    """
    weights: list[Tensor | None] = []
    times: list[Tensor | None] = []
    for edges in types:
        timed = None
        if edges.times is not None and until is not None:
            timed = EdgeTimes(edges.times, until[edges.target])
        placed, weight_dtype, times_placed, time_dtype, _ = weighting(
            edges.view, seeds[edges.target], edges.weights, timed
        )
        weights += _operands(placed, weight_dtype)
        times += _operands(times_placed, time_dtype)
    table: Tensor | None = None
    moments: list[Tensor] = []
    if until is not None:
        table, moments = _moments(until)
    keys = [edges.key.fold_hops(len(fanouts)) for edges in types]
    arguments = (
        seeds,
        moments,
        table,
        [end for edges in types for end in (edges.source, edges.target)],
        [tensor for edges in types for tensor in tiered_rows(edges.view)[:3]],
        [edges.view.num_rows for edges in types],
        [edges.view.num_cols for edges in types],
        types[0].view.idtype,
        weights,
        times,
        [fanout for hop in fanouts for fanout in hop],
        replace,
        [key for hop in zip(*keys, strict=True) for key in hop],
        sms,
        [edges.view.ordered_from for edges in types],
    )

    def sampled(hops: Hops) -> SampledHops:
        nodes, indptrs, sources, eids, sizes = hops
        node_times = None
        if table is not None:
            counts: dict[int, int] = {}
            for source, target, view, *_ in types:
                counts[source], counts[target] = view.num_cols, view.num_rows
            node_times = [table[ids // counts[number]] for number, ids in enumerate(nodes)]
            nodes = [(ids % counts[number]).to(seeds[0].dtype) for number, ids in enumerate(nodes)]
        return SampledHops(nodes, node_times, indptrs, sources, eids, sizes.tolist())

    return start("sample_etype_hops", tuple(seeds), arguments).then(sampled)


def _operands(view: Sequence[Tensor], dtype: torch.dtype | None) -> Sequence[Tensor | None]:
    return [None] * 4 if dtype is None else [*view, torch.empty(0, dtype=dtype)]


def _moments(until: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Distinct times of seeds, and which of them each seed has, by node type.

    Nothing here waits for a GPU, as ``torch.unique`` would.
    """
    wide = torch.float64 if until[0].dtype.is_floating_point else torch.int64
    ordered, order = torch.cat([of_type.to(wide) for of_type in until]).sort()
    is_new = torch.ones_like(order)
    is_new[1:] = ordered[1:] != ordered[:-1]
    number = is_new.cumsum(0) - 1
    times = torch.zeros_like(ordered).scatter(0, number, ordered)
    moments = torch.empty_like(order).scatter(0, order, number)
    return times, list(moments.split([len(of_type) for of_type in until]))


class BlockEdges(NamedTuple):
    """The edges of one type into a layer's destination nodes.

    Attributes
    ----------
    indptr : Tensor, int64, shape (num_dst + 1,)
        Destination node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    src : Tensor, the graph's idtype, shape (E,)
        Source of each edge, as an index into the ``src_nodes`` of its type.
    eids : Tensor, the graph's idtype, shape (E,)
        Edge ids in the whole graph.
    """

    indptr: Tensor
    src: Tensor
    eids: Tensor


class EtypeBlock(NamedTuple):
    """A message-flow graph of several node and edge types.

    Attributes
    ----------
    edges : dict of edge type to BlockEdges
    src_nodes : dict of node type to Tensor, the graph's idtype, shape (num_src,)
        Ids of the source nodes; the first ``num_dst`` are the destination nodes.
    num_dst : dict of node type to int
    src_times : dict of node type to Tensor, int64 or float64, shape (num_src,); or None
        With times: up to when each source node was sampled.
    """

    edges: dict[tuple[str, str, str], BlockEdges]
    src_nodes: dict[str, Tensor]
    num_dst: dict[str, int]
    src_times: dict[str, Tensor] | None = None


def sample_etype_blocks(
    views: Mapping[tuple[str, str, str], GraphView],
    seeds: Mapping[str, Tensor],
    fanouts: Sequence[int | Mapping[tuple[str, str, str], int]],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: Mapping[tuple[str, str, str], RowView] | None = None,
    times: Mapping[tuple[str, str, str], RowView] | None = None,
    until: Mapping[str, Tensor] | None = None,
    sms: int = 0,
) -> list[EtypeBlock]:
    """Sample the message-flow graphs of a mini-batch of a heterogeneous graph.

    Parameters
    ----------
    views : mapping of (source type, edge type, destination type) to GraphView
        All edge types of the graph, of one idtype: the place of a type among them enters the
        key, so that two types between the same nodes are sampled independently.
    seeds : mapping of node type to Tensor, int32 or int64, shape (n,)
        Destination nodes of the last layer; a type left out has none.
    fanouts : sequence of int or mapping of edge type to int
        Edges per node and edge type for each layer, the one nearest the input first, as DGL's
        ``NeighborSampler`` takes them.
    key : SampleKey
        Its ``hop`` is that of the last layer; each layer before it has one more.
    replace
        As in :func:`dgl_mgpu.ops.sample_neighbors`.
    weights : mapping of edge type to RowView, optional
        As in :func:`dgl_mgpu.ops.sample_neighbors`; a type left out is uniform.
    times : mapping of edge type to RowView, optional
        Time of each edge id, all of integers or all floating-point.  An edge is drawn only if it
        is no later than the time of the seed from which its destination was reached.  A type left
        out has no times.
    until : mapping of node type to Tensor, shape (n,), with ``times``
        Time of each seed, as in :class:`dgl_mgpu.ops.EdgeTimes`.
    sms : int
        Most multiprocessors of a GPU to use; 0 for those of the first view.

    Returns
    -------
    list of EtypeBlock
        In the order of ``fanouts``.  New source nodes of a type follow in the order of the edge
        types in ``views``, and in each by first occurrence.  With times, a node reached at two
        times is two source nodes.

    Raises
    ------
    InvalidInputError
        If types, shapes, dtypes or numbers of nodes do not fit each other.
    IdOutOfRangeError, InvalidWeightError
        As :func:`dgl_mgpu.ops.sample_neighbors`.

    Notes
    -----
    On a GPU the host waits once: kernels are launched for as many nodes as fanouts allow, and read
    from the GPU how many there are.  Where that bound is unknown (a fanout of -1) or too large,
    and for edge types without times in a batch with times, hops are sampled one by one.
    """
    return sample_etype_blocks_async(
        views,
        seeds,
        fanouts,
        key,
        replace=replace,
        weights=weights,
        times=times,
        until=until,
        sms=sms,
    ).result()


def sample_etype_blocks_async(
    views: Mapping[tuple[str, str, str], GraphView],
    seeds: Mapping[str, Tensor],
    fanouts: Sequence[int | Mapping[tuple[str, str, str], int]],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: Mapping[tuple[str, str, str], RowView] | None = None,
    times: Mapping[tuple[str, str, str], RowView] | None = None,
    until: Mapping[str, Tensor] | None = None,
    sms: int = 0,
) -> SampleFuture[list[EtypeBlock]]:
    """Start :func:`sample_etype_blocks` on the GPU without waiting for the result.

    Parameters and errors are those of :func:`sample_etype_blocks`.

    Returns
    -------
    SampleFuture of list of EtypeBlock
        As that of :func:`dgl_mgpu.ops.sample_blocks_async`.
    """
    first = _check_types(views)
    ntypes = list(dict.fromkeys(ntype for etype in views for ntype in (etype[0], etype[2])))
    check_types(ntypes, _ACTION, seeds=seeds, until=until)
    check_types(views, _ACTION, weights=weights, times=times)
    sms = check_integer(sms, "sms", 0, _ACTION)
    hops = [[fanout_of(of_hop, etype, _ACTION) for etype in views] for of_hop in reversed(fanouts)]
    empty = torch.empty(0, dtype=first.idtype, device=first.tiers.device)
    counts = _num_nodes(views)
    given = [
        to_idtype(seeds[ntype], first, counts[ntype]) if ntype in seeds else empty
        for ntype in ntypes
    ]
    moments = None
    if times or until:
        moments = _check_until(ntypes, given, times or {}, until or {})
    if not hops:
        return SampleFuture(list)
    future = typed_hops_async(
        given,
        moments,
        [
            TypedEdges(
                ntypes.index(etype[0]),
                ntypes.index(etype[2]),
                view,
                (weights or {}).get(etype),
                (times or {}).get(etype),
                with_fields(key, etype=number),
            )
            for number, (etype, view) in enumerate(views.items())
        ],
        hops,
        replace,
        sms or first.sms,
    )

    def blocks(sampled: SampledHops) -> list[EtypeBlock]:
        return [_block(sampled, hop, list(views), ntypes) for hop in reversed(range(len(hops)))]

    return future.then(blocks)


def _block(
    sampled: SampledHops, hop: int, etypes: list[tuple[str, str, str]], ntypes: list[str]
) -> EtypeBlock:
    first = hop * len(etypes)
    num_dst, num_src = sampled.sizes[hop : hop + 2]
    return EtypeBlock(
        {
            etype: BlockEdges(
                sampled.indptrs[first + number],
                sampled.sources[first + number],
                sampled.eids[first + number],
            )
            for number, etype in enumerate(etypes)
        },
        {
            ntype: nodes[:size]
            for ntype, nodes, size in zip(ntypes, sampled.nodes, num_src, strict=True)
        },
        dict(zip(ntypes, num_dst, strict=True)),
        None
        if sampled.times is None
        else {
            ntype: times[:size]
            for ntype, times, size in zip(ntypes, sampled.times, num_src, strict=True)
        },
    )


def _num_nodes(views: Mapping[tuple[str, str, str], GraphView]) -> dict[str, int]:
    counts = {}
    for (source, _, target), view in views.items():
        counts[source], counts[target] = view.num_cols, view.num_rows
    return counts


def _check_types(views: Mapping[tuple[str, str, str], GraphView]) -> GraphView:
    """Return the first view, or raise if the views are not edge types of one graph."""
    if not views:
        raise InvalidInputError(
            _ACTION, "there are no edge types", "pass a view for each edge type"
        )
    counts = _num_nodes(views)
    first = next(iter(views.values()))
    for etype, view in views.items():
        device, first_device = view.tiers.device, first.tiers.device
        if view.idtype != first.idtype or device != first_device:
            raise InvalidInputError(
                _ACTION,
                f"edge type {etype} has ids of {view.idtype} on '{device}', but another has ids of"
                f" {first.idtype} on '{first_device}'",
                "give all edge types the same id type and device",
            )
        for ntype, count in ((etype[0], view.num_cols), (etype[2], view.num_rows)):
            if count != counts[ntype]:
                raise InvalidInputError(
                    _ACTION,
                    f"edge type {etype} has {count} nodes of type {ntype!r}, but another has"
                    f" {counts[ntype]}",
                    "pass the edge types of one graph",
                )
    return first


def _check_until(
    ntypes: list[str],
    seeds: list[Tensor],
    times: Mapping[tuple[str, str, str], RowView],
    until: Mapping[str, Tensor],
) -> list[Tensor]:
    """Times of seeds by node type, or raise if they do not fit the seeds or each other."""
    dtypes = [tensor.dtype for tensor in times.values()] + [
        tensor.dtype for tensor in until.values()
    ]
    if not times or len({dtype.is_floating_point for dtype in dtypes}) > 1:
        raise InvalidInputError(
            _ACTION,
            f"times are given for {len(times)} edge types and the seeds of {len(until)} node types,"
            f" with dtypes {', '.join(map(str, dtypes))}",
            "pass times of edges and of seeds together, all integers or all floating-point",
        )
    seed_times = []
    for ntype, ids in zip(ntypes, seeds, strict=True):
        moments = until.get(ntype, ids.new_empty(0, dtype=dtypes[0]))
        if moments.shape != ids.shape or moments.device != ids.device:
            raise InvalidInputError(
                _ACTION,
                f"the times of seeds of type {ntype!r} have shape {tuple(moments.shape)} on"
                f" '{moments.device}', but there are {len(ids)} such seeds on '{ids.device}'",
                "pass one time for each seed, on the device of the seeds",
            )
        seed_times.append(moments)
    return seed_times
