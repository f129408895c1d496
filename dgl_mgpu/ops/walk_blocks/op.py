"""All layers of a PinSAGE mini-batch, neighbors by walks and append-unique in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.etype_blocks.op import to_idtype
from dgl_mgpu.ops.library import Operator, direct
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.ops.walk.op import TieredPath, check_traversals, graphs

_ASKED = "sample PinSAGE blocks"

#: What the operator returns.
VisitedHops = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


@Operator
def pinsage_hops_op(
    seeds: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    keys: Sequence[int],
) -> VisitedHops:
    context, idtype = torch.library.get_ctx(), path.idtype
    num_nodes: list[Any] = [seeds.shape[0], *(context.new_dynamic_size() for _ in keys)]
    num_edges: list[Any] = [context.new_dynamic_size() for _ in keys]
    return (
        seeds.new_empty(num_nodes[-1], dtype=idtype),
        [seeds.new_empty(nodes + 1, dtype=torch.int64) for nodes in num_nodes[:-1]],
        [seeds.new_empty(edges, dtype=idtype) for edges in num_edges],
        [seeds.new_empty(edges, dtype=torch.int64) for edges in num_edges],
    )


class VisitedBlock(NamedTuple):
    """A message-flow graph: the nodes that walks from a layer's destination nodes visit most.

    Attributes
    ----------
    indptr : Tensor, int64, shape (num_dst + 1,)
        Destination node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``.
    src : Tensor, the graph's idtype, shape (E,)
        Source of each edge, as an index into ``src_nodes``; the most visited first.
    counts : Tensor, int64, shape (E,)
        Number of visits to each.
    src_nodes : Tensor, the graph's idtype, shape (num_src,)
        Ids of the source nodes; the first ``num_dst`` are the destination nodes.
    num_dst : int
    """

    indptr: torch.Tensor
    src: torch.Tensor
    counts: torch.Tensor
    src_nodes: torch.Tensor
    num_dst: int


def pinsage_blocks(
    views: GraphView | Sequence[GraphView],
    seeds: torch.Tensor,
    num_layers: int,
    key: SampleKey,
    *,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
) -> list[VisitedBlock]:
    """Sample the message-flow graphs of a mini-batch for PinSAGE.

    Parameters
    ----------
    views, num_traversals, termination_prob, num_random_walks, num_neighbors
        As in :func:`dgl_mgpu.ops.pinsage_neighbors`, alike in all layers.
    seeds : Tensor, int32 or int64, shape (n,)
        Destination nodes of the last layer.
    num_layers : int
    key : SampleKey
        Its ``hop`` is that of the last layer; each layer before it has one more.

    Returns
    -------
    list of VisitedBlock
        The ``src_nodes`` of the first are the input nodes, the destination nodes of the last are
        ``seeds``.  New source nodes come in the order in which they first occur.

    Raises
    ------
    InvalidInputError, IdOutOfRangeError
        As :func:`dgl_mgpu.ops.pinsage_neighbors`.

    Notes
    -----
    On a GPU the host waits once, after all layers.  Outputs are made as large as ``num_neighbors``
    allows and returned as their beginnings; where that, or room for the walks, is too much, layers
    are sampled one by one.
    """
    return pinsage_blocks_async(
        views,
        seeds,
        num_layers,
        key,
        num_traversals=num_traversals,
        termination_prob=termination_prob,
        num_random_walks=num_random_walks,
        num_neighbors=num_neighbors,
    ).result()


def pinsage_blocks_async(
    views: GraphView | Sequence[GraphView],
    seeds: torch.Tensor,
    num_layers: int,
    key: SampleKey,
    *,
    num_traversals: int,
    termination_prob: float,
    num_random_walks: int,
    num_neighbors: int,
) -> SampleFuture[list[VisitedBlock]]:
    """Start :func:`pinsage_blocks` on the GPU without waiting for the result.

    Parameters and errors are those of :func:`pinsage_blocks`.

    Returns
    -------
    SampleFuture of list of VisitedBlock
        As that of :func:`dgl_mgpu.ops.sample_blocks_async`.
    """
    path, stops = check_traversals(
        views, _ASKED, num_traversals, termination_prob, num_random_walks, num_neighbors
    )
    seeds = to_idtype(seeds, path[0], path[0].num_rows)
    if check_integer(num_layers, "num_layers", 0, _ASKED) == 0:
        return SampleFuture(list)
    keys = key.fold_hops(num_layers)
    arguments = (seeds, *graphs(path), stops, num_random_walks, num_neighbors, keys)
    start = direct("pinsage_hops_async", (seeds,), even_profiled=True)
    if start is None:
        future = SampleFuture(partial(torch.ops.dgl_mgpu.pinsage_hops.default, *arguments))
    else:
        future = start(*arguments)
    return future.then(lambda hops: _blocks(*hops))


def _blocks(
    nodes: torch.Tensor,
    indptrs: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
) -> list[VisitedBlock]:
    """What hops found, the last of them first."""
    num_dst = [len(indptr) - 1 for indptr in indptrs]
    num_src = [*num_dst[1:], len(nodes)]
    hops = zip(indptrs, sources, counts, (nodes[:count] for count in num_src), num_dst, strict=True)
    return [VisitedBlock(*hop) for hop in hops][::-1]
