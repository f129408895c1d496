"""All layers of a PinSAGE mini-batch on CUDA, without waiting between them.

Each is the kernels of the operators for one layer, launched for as many nodes as there can be. How
many there are they read from the GPU, where the kernels before them have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.blocks.padded import rooms
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.library import direct_cuda, library
from dgl_mgpu.ops.unique.cuda import number_nodes
from dgl_mgpu.ops.walk.cuda import Visited, Walks
from dgl_mgpu.ops.walk_blocks.cpu import hop_by_hop
from dgl_mgpu.ops.walk_blocks.op import VisitedHops
from dgl_mgpu.ops.workspace import Workspace, beginning, workspace

#: Nodes on the walks of all layers up to which room for the largest possible sample is made in
#: advance; there are more of them than of edges and of nodes of the sample.
_MOST_STEPS = 1 << 26
#: Of what numbering tells of a layer, the number of words and which is the number of nodes.
_NUMBERED, _NODES = 3, 2


@direct_cuda("begin_pinsage_hops")
def begin_pinsage_hops(
    seeds: torch.Tensor,
    tiers: Sequence[torch.Tensor],
    pointers: Sequence[torch.Tensor],
    positions: Sequence[torch.Tensor],
    num_rows: Sequence[int],
    idtype: torch.dtype,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    keys: Sequence[int],
) -> Callable[[], VisitedHops]:
    """Launch what ``pinsage_hops`` does; what is returned waits for it.

    It is to be called once, on the same stream, or not at all.
    """
    where = seeds.device
    device.raise_faults(where, wait=False)
    graphs = (tiers, pointers, positions, num_rows, idtype, stops)
    neighbors = min(num_neighbors, num_walks * (len(stops) // len(tiers)))
    nodes, edges = rooms(len(seeds), [neighbors] * len(keys), num_rows[0])
    if sum(nodes[:-1]) * num_walks * (len(stops) + 1) <= _MOST_STEPS:
        space = workspace(where)
        with space.lock:
            try:
                walks = Walks(where, *graphs)
                batch = _Batch(space, seeds, walks, num_walks, neighbors, nodes[-1])
                for key, most_nodes, most_edges in zip(keys, nodes[:-1], edges, strict=True):
                    batch.sample_layer(key, most_nodes, most_edges)
                batch.expect_report()
                return batch.finish
            except torch.cuda.OutOfMemoryError:
                space.release()
    return partial(hop_by_hop, seeds, *graphs, num_walks, num_neighbors, keys)


@torch.library.impl(library, "pinsage_hops", "CUDA")
def _pinsage_hops(*arguments: Any) -> VisitedHops:
    return begin_pinsage_hops(*arguments)()


class _Batch:
    """A mini-batch on its way through the layers; there is ``room`` for its nodes."""

    def __init__(
        self,
        space: Workspace,
        seeds: torch.Tensor,
        walks: Walks,
        num_walks: int,
        num_neighbors: int,
        room: int,
    ) -> None:
        self._space, self._seeds, self._walks = space, seeds, walks
        self._num_walks, self._num_neighbors = num_walks, num_neighbors
        self._nodes = torch.empty(room, dtype=seeds.dtype, device=seeds.device)
        self._nodes[: len(seeds)] = seeds
        self._bad = torch.full((1,), -1, dtype=torch.int64, device=seeds.device)
        # Of each layer what numbering tells, where edges of destinations begin, sources and visits.
        self._layers: list[tuple[torch.Tensor, ...]] = []

    def sample_layer(self, key: int, most_nodes: int, most_edges: int) -> None:
        """Launch one more layer, of so many destination nodes and edges at most."""
        where, nodes = self._nodes.device, self._nodes
        known = self._layers[-1][0][_NODES:] if self._layers else None
        visited = Visited(
            self._walks, nodes, most_nodes, known, self._num_walks, self._num_neighbors, key,
            self._bad,
        )  # fmt: skip
        sources = torch.empty(most_edges, dtype=nodes.dtype, device=where)
        counts = torch.empty(most_edges, dtype=torch.int64, device=where)
        visited.select(sources, counts)
        told = torch.empty(_NUMBERED, dtype=torch.int64, device=where)
        room = min(len(nodes), most_nodes + most_edges)
        end = visited.indptr[most_nodes:]
        number_nodes(self._space, nodes, most_nodes, known, sources, end, room, told)
        self._layers.append((told, visited.indptr, sources, counts))

    def expect_report(self) -> None:
        """Have the GPU tell the host what it found, after the last layer."""
        found = [self._bad]
        for told, indptr, _, _ in self._layers:
            found += [told[_NODES:], indptr[-1:]]
        on_device = torch.cat(found)
        self._told = device.driver.host_buffer(len(on_device))
        self._told.copy_(on_device, non_blocking=True)
        self._is_told = device.driver.mark(self._nodes.device)

    def finish(self) -> VisitedHops:
        """Wait for the GPU, and cut what it found to size.

        Raises
        ------
        IdOutOfRangeError
        """
        self._is_told.synchronize()
        bad, *sizes = self._told.tolist()
        raise_at_bad_id([bad], self._seeds, self._walks.num_rows, "walk")
        num_nodes, num_edges = [len(self._seeds), *sizes[0::2]], sizes[1::2]
        indptrs, sources, counts = [], [], []
        for layer, known, edges in zip(self._layers, num_nodes, num_edges, strict=False):
            indptrs.append(beginning(layer[1], known + 1))
            sources.append(beginning(layer[2], edges))
            counts.append(beginning(layer[3], edges))
        return beginning(self._nodes, num_nodes[-1]), indptrs, sources, counts
