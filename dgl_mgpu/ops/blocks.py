"""All hops of a mini-batch, neighbour sampling and append-unique in turn.

The CPU samples one hop after another with the operators for one hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_integer, narrow_indptr
from dgl_mgpu.ops.edges import HopsOptions, to_idtype
from dgl_mgpu.ops.etype_blocks import SampledHops, TypedEdges, typed_hops_async
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample_future import SampleFuture, start
from dgl_mgpu.ops.sample_weighted import EdgeTimes
from dgl_mgpu.ops.view import GraphView, RowView, TieredGraph

ACTION = "sample blocks"

#: What the operator returns: nodes, and of each hop ``indptr``, sources and edge ids.
Hops = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]


@Operator
def sample_hops_op(
    seeds: Tensor, graph: TieredGraph, options: HopsOptions, ordered_from: int = 0
) -> Hops:
    context, idtype, fanouts = torch.library.get_ctx(), graph.idtype, options.fanouts
    # Sizes have to be those of tensors: an ``indptr`` has one, the number of its nodes is none.
    starts: list[Any] = [seeds.shape[0] + 1, *(context.new_dynamic_size() for _ in fanouts[1:])]
    num_edges: list[Any] = [context.new_dynamic_size() for _ in fanouts]
    return (
        seeds.new_empty(context.new_dynamic_size(), dtype=idtype),
        [seeds.new_empty(size, dtype=idtype) for size in starts],
        [seeds.new_empty(edges, dtype=idtype) for edges in num_edges],
        [seeds.new_empty(edges, dtype=idtype) for edges in num_edges],
    )


class SampledBlock(NamedTuple):
    """A message-flow graph: the edges into a layer's destination nodes.

    Attributes
    ----------
    indptr : Tensor, the graph's idtype, shape (num_dst + 1,)
        Destination node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    src : Tensor, the graph's idtype, shape (E,)
        Source of each edge, as an index into ``src_nodes``.
    eids : Tensor, the graph's idtype, shape (E,)
        Edge ids in the whole graph.
    src_nodes : Tensor, the graph's idtype, shape (num_src,)
        Ids of the source nodes; the first ``num_dst`` are the destination nodes.
    num_dst : int
    src_times : Tensor, int64 or float64, shape (num_src,), optional
        With times: up to when each source node was sampled.
    """

    indptr: Tensor
    src: Tensor
    eids: Tensor
    src_nodes: Tensor
    num_dst: int
    src_times: Tensor | None = None


def check_one_node_type(view: GraphView, action: str) -> None:
    """Raise InvalidInputError if source nodes cannot be destination nodes of the next hop."""
    if view.num_rows != view.num_cols:
        raise InvalidInputError(
            action,
            f"the graph has {view.num_cols} source nodes, but {view.num_rows} destination nodes",
            "sample a graph of several node types with sample_etype_blocks",
        )


def sample_blocks(
    view: GraphView,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: RowView | None = None,
    times: EdgeTimes | None = None,
    sms: int = 0,
) -> list[SampledBlock]:
    """Sample the message-flow graphs of a mini-batch.

    Parameters
    ----------
    view : GraphView
        Topology of a graph whose sources and destinations are the same nodes.
    seeds : Tensor, int32 or int64, shape (n,)
        Destination nodes of the last layer.
    fanouts : sequence of int
        Edges per node for each layer, the one nearest the input first, as DGL's
        ``NeighborSampler`` takes them.
    key : SampleKey
        Its ``hop`` is that of the last layer; each layer before it has one more.
    replace, weights
        As in :func:`dgl_mgpu.ops.sample_neighbors`.
    times : EdgeTimes, optional
        Temporal sampling: a node is sampled at the time of the seed from which it was reached,
        however many hops away, and is a source node of its own for each time that it is reached
        at.  So no seed sees an edge later than itself, whatever seeds it shares a batch with.
    sms : int
        Most multiprocessors of a GPU to use; 0 for ``view.sms``.

    Returns
    -------
    list of SampledBlock
        In the order of ``fanouts``: the ``src_nodes`` of the first are the input nodes, the
        destination nodes of the last are ``seeds``.

    Raises
    ------
    InvalidInputError
        If sources and destinations differ; else as :func:`dgl_mgpu.ops.sample_neighbors`.

    Notes
    -----
    On a GPU the host waits once, after all hops (XGNN, section 5).  Uniform hops are one kernel,
    others a few kernels each.  Outputs are made as large as fanouts allow and returned as their
    beginnings; where that is unknown (a fanout of -1) or too much, the hops are sampled one by
    one.
    """
    return sample_blocks_async(
        view, seeds, fanouts, key, replace=replace, weights=weights, times=times, sms=sms
    ).result()


def sample_blocks_async(
    view: GraphView,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: RowView | None = None,
    times: EdgeTimes | None = None,
    sms: int = 0,
) -> SampleFuture[list[SampledBlock]]:
    """Start :func:`sample_blocks` on the GPU without waiting for the result.

    Parameters and errors are those of :func:`sample_blocks`.

    Returns
    -------
    SampleFuture of list of SampledBlock
        Waits for the blocks.  Where one kernel cannot sample all hops, it samples them when the
        result is asked for.  Call ``result()`` on the stream that was current at the start; until
        then the host can queue other work on it.
    """
    check_one_node_type(view, ACTION)
    seeds = to_idtype(seeds, view, view.num_rows)
    sms = check_integer(sms, "sms", 0, ACTION) or view.sms
    hops = [check_integer(fanout, "fanout", -1, ACTION) for fanout in reversed(fanouts)]
    if not hops:
        return SampleFuture(list)
    if weights is not None or times is not None:
        return _weighted_async(view, seeds, hops, key, replace, weights, times, sms)
    tensors = (seeds, view.tiers, view.pointers, view.position)
    keys = key.fold_hops(len(hops))
    others = (
        view.num_rows, view.num_cols, view.idtype, hops, replace, keys, sms, view.ordered_from
    )  # fmt: skip
    future = start("sample_hops", tensors, (*tensors, *others))
    return future.then(lambda sampled: _blocks(*sampled))


def _blocks(
    nodes: Tensor, indptrs: Sequence[Tensor], sources: Sequence[Tensor], eids: Sequence[Tensor]
) -> list[SampledBlock]:
    """Results of the hops, the last hop first."""
    blocks: list[SampledBlock] = []
    for hop in reversed(range(len(indptrs))):
        # The sources of a hop are the destinations of the one before it here.
        num_dst = indptrs[hop].shape[0] - 1
        src_nodes = nodes[: blocks[-1].num_dst] if blocks else nodes
        blocks.append(SampledBlock(indptrs[hop], sources[hop], eids[hop], src_nodes, num_dst))
    return blocks


def _weighted_async(
    view: GraphView,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    replace: bool,
    weights: RowView | None,
    times: EdgeTimes | None,
    sms: int,
) -> SampleFuture[list[SampledBlock]]:
    edges = TypedEdges(0, 0, view, weights, None if times is None else times.edges, key)
    until = None if times is None else [times.until]
    by_type = [[fanout] for fanout in fanouts]

    def blocks(sampled: SampledHops) -> list[SampledBlock]:
        nodes, src_times, indptrs, sources, eids, sizes = sampled
        return [
            SampledBlock(
                narrow_indptr(indptrs[hop], len(sources[hop]), view.idtype, ACTION),
                sources[hop],
                eids[hop],
                nodes[0][: sizes[hop + 1][0]],
                sizes[hop][0],
                None if src_times is None else src_times[0][: sizes[hop + 1][0]],
            )
            for hop in reversed(range(len(fanouts)))
        ]

    return typed_hops_async([seeds], until, [edges], by_type, replace, sms).then(blocks)


@sample_hops_op.cpu
def hop_by_hop(seeds: Tensor, graph: TieredGraph, options: HopsOptions, ordered_from: int) -> Hops:
    """``sample_hops`` on the device of ``seeds``, whatever it is."""
    nodes = seeds
    indptrs, sources, eids = [], [], []
    rows, idtype = graph[:4], graph.idtype
    for hop in options.by_hop():
        sampled = torch.ops.dgl_mgpu.sample_neighbors.default(nodes, *rows, idtype, *hop)
        nodes, local = torch.ops.dgl_mgpu.append_unique.default(nodes, sampled[1])
        indptrs.append(narrow_indptr(sampled[0], len(local), idtype, ACTION))
        sources.append(local)
        eids.append(sampled[2])
    return nodes.clone() if nodes is seeds else nodes, indptrs, sources, eids
