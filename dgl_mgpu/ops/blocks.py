"""All hops of a mini-batch: neighbour sampling and append-unique in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample import sample_neighbors
from dgl_mgpu.ops.unique import append_unique
from dgl_mgpu.ops.view import GraphView, RowView


class SampledBlock(NamedTuple):
    """A message-flow graph: the edges into a layer's destination nodes.

    Attributes
    ----------
    indptr : Tensor, int64, shape (num_dst + 1,)
        Destination node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    src : Tensor, the graph's idtype, shape (E,)
        Source of each edge, as an index into ``src_nodes``.
    eids : Tensor, the graph's idtype, shape (E,)
        Edge ids in the whole graph.
    src_nodes : Tensor, the graph's idtype, shape (num_src,)
        Ids of the source nodes; the first ``num_dst`` are the destination nodes.
    num_dst : int
    """

    indptr: torch.Tensor
    src: torch.Tensor
    eids: torch.Tensor
    src_nodes: torch.Tensor
    num_dst: int


def sample_blocks(
    view: GraphView,
    seeds: torch.Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    *,
    replace: bool = False,
    weights: RowView | None = None,
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

    Returns
    -------
    list of SampledBlock
        In the order of ``fanouts``: the ``src_nodes`` of the first are the input nodes, the
        destination nodes of the last are ``seeds``.

    Raises
    ------
    InvalidInputError
        If sources and destinations differ; else as :func:`dgl_mgpu.ops.sample_neighbors`.
    """
    if view.num_rows != view.num_cols:
        raise InvalidInputError(
            "sample blocks of several hops",
            f"a graph from {view.num_cols} source nodes to {view.num_rows} destination nodes",
            "sample each edge type with sample_etype_neighbors",
        )
    blocks: list[SampledBlock] = []
    nodes = seeds
    for hop, fanout in enumerate(reversed(fanouts)):
        hop_key = with_fields(key, hop=key.hop + hop)
        sampled = sample_neighbors(view, nodes, fanout, hop_key, replace=replace, weights=weights)
        num_dst = nodes.numel()
        nodes, src = append_unique(nodes.to(view.idtype), sampled.neighbors)
        blocks.append(SampledBlock(sampled.indptr, src, sampled.eids, nodes, num_dst))
    return blocks[::-1]
