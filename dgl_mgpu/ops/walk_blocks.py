"""All layers of a PinSAGE mini-batch, neighbors by walks and append-unique in turn.

The CPU samples one layer after another.  On CUDA nothing waits between them: each is the kernels of
the operators for one layer, launched for as many nodes as there can be.  How many there are they
read from the GPU, where the kernels before them have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_integer, raise_at_bad_id
from dgl_mgpu.ops.edges import to_idtype
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.padded_blocks import max_sizes
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample_future import SampleFuture, start
from dgl_mgpu.ops.unique import numbering_launch
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.ops.walk import TieredPath, WalkLauncher, check_traversals
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

_ACTION = "sample PinSAGE blocks"

#: What the operator returns.
VisitedHops = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]


@Operator
def pinsage_hops_op(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, keys: Sequence[int]
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

    indptr: Tensor
    src: Tensor
    counts: Tensor
    src_nodes: Tensor
    num_dst: int


def pinsage_blocks(
    views: GraphView | Sequence[GraphView],
    seeds: Tensor,
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
    seeds: Tensor,
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
    path = check_traversals(
        views, _ACTION, num_traversals, termination_prob, num_random_walks, num_neighbors
    )
    first = views if isinstance(views, GraphView) else views[0]
    seeds = to_idtype(seeds, first, first.num_rows)
    if check_integer(num_layers, "num_layers", 0, _ACTION) == 0:
        return SampleFuture(list)
    keys = key.fold_hops(num_layers)
    arguments = (seeds, *path, num_random_walks, num_neighbors, keys)
    future = start("pinsage_hops", (seeds,), arguments)
    return future.then(lambda hops: _blocks(*hops))


def _blocks(
    nodes: Tensor, indptrs: Sequence[Tensor], sources: Sequence[Tensor], counts: Sequence[Tensor]
) -> list[VisitedBlock]:
    """Results of the hops, the last hop first."""
    num_dst = [len(indptr) - 1 for indptr in indptrs]
    num_src = [*num_dst[1:], len(nodes)]
    hops = zip(indptrs, sources, counts, (nodes[:count] for count in num_src), num_dst, strict=True)
    return [VisitedBlock(*hop) for hop in hops][::-1]


@pinsage_hops_op.cpu
def layer_by_layer(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, keys: Sequence[int]
) -> VisitedHops:
    """``pinsage_hops`` on the device of ``seeds``, whatever it is."""
    nodes = seeds
    indptrs, sources, counts = [], [], []
    for key in keys:
        visited = torch.ops.dgl_mgpu.pinsage_neighbors.default(
            nodes, *path, num_walks, num_neighbors, key
        )
        nodes, local = torch.ops.dgl_mgpu.append_unique.default(nodes, visited[1])
        indptrs.append(visited[0])
        sources.append(local)
        counts.append(visited[2])
    return nodes.clone() if nodes is seeds else nodes, indptrs, sources, counts


#: Nodes on the walks of all layers up to which room for the largest possible sample is made in
#: advance; there are more of them than of edges and of nodes of the sample.
_MAX_STEPS = 1 << 26
#: Words of the kernels' report on a layer: edges, then the first bad index, the overflow and the
#: nodes of the numbering.
_REPORT_WORDS = 4


@pinsage_hops_op.start
def pinsage_hops_async(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, keys: Sequence[int]
) -> SampleFuture[VisitedHops]:
    """Launch ``pinsage_hops`` without waiting for it.

    Ask for the result on the same stream, or drop the future.
    """
    device = seeds.device
    gpu.raise_faults(device, wait=False)
    steps = len(path.stops)
    neighbors = min(num_neighbors, num_walks * (steps // len(path.tiers)))
    nodes, _ = max_sizes(len(seeds), [neighbors] * len(keys), path.num_rows[0])
    if sum(nodes[:-1]) * num_walks * (steps + 1) <= _MAX_STEPS:
        space = workspace(device)
        with space.lock:
            try:
                walks = WalkLauncher(device, path)
                batch = _Batch(space, seeds, walks, num_walks, neighbors, keys, nodes)
                return SampleFuture(batch.finish)
            except torch.cuda.OutOfMemoryError:
                space.release()
    return SampleFuture(partial(layer_by_layer, seeds, *path, num_walks, num_neighbors, keys))


@pinsage_hops_op.cuda
def _pinsage_hops_cuda(*arguments: Any) -> VisitedHops:
    return pinsage_hops_async(*arguments).result()


class _Batch:
    """A mini-batch whose layers have been launched; ``max_nodes`` is how many
    can be known before each and after the last."""

    def __init__(
        self,
        space: Workspace,
        seeds: Tensor,
        walks: WalkLauncher,
        num_walks: int,
        num_neighbors: int,
        keys: Sequence[int],
        max_nodes: Sequence[int],
    ) -> None:
        self._seeds, self._num_rows = seeds, walks.num_rows
        words = 1 + _REPORT_WORDS * len(keys)
        report = torch.full((words,), -1, dtype=torch.int64, device=seeds.device)
        self._nodes = torch.empty(max_nodes[-1], dtype=seeds.dtype, device=seeds.device)
        self._nodes[: len(seeds)] = seeds
        self._layers: list[tuple[Tensor, ...]] = []
        known = None
        for layer, (key, most) in enumerate(zip(keys, max_nodes, strict=False)):
            first = 1 + _REPORT_WORDS * layer
            end, numbered, after = report[first:], report[first + 1 :], report[first + 3 :]
            seen = NodePrefix(self._nodes, most, known)
            visited = walks.visited_neighbors(
                space, seen, num_walks, num_neighbors, key, report, end
            )
            numbering_launch(space, seen, visited[1], end, max_nodes[layer + 1], numbered)()
            self._layers.append(visited)
            known = after
        self._host_report = gpu.driver.host_buffer(words).copy_(report, non_blocking=True)
        self._reported = gpu.driver.mark(seeds.device)

    def finish(self) -> VisitedHops:
        """Wait for the GPU, and cut its results to size.  Raises IdOutOfRangeError."""
        self._reported.synchronize()
        bad, *numbers = self._host_report.tolist()
        raise_at_bad_id([bad], self._seeds, self._num_rows, "walk")
        num_edges = numbers[0::_REPORT_WORDS]
        num_nodes = [len(self._seeds), *numbers[3::_REPORT_WORDS]]
        indptrs, sources, counts = [], [], []
        for visited, known, edges in zip(self._layers, num_nodes, num_edges, strict=False):
            indptrs.append(beginning(visited[0], known + 1))
            sources.append(beginning(visited[1], edges))
            counts.append(beginning(visited[2], edges))
        return beginning(self._nodes, num_nodes[-1]), indptrs, sources, counts
