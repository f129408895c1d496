"""All layers of a PinSAGE mini-batch on CUDA, without waiting between them.

Each is the kernels of the operators for one layer, launched for as many nodes as there can be. How
many there are they read from the GPU, where the kernels before them have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.blocks.padded import rooms
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.unique.cuda import number_nodes
from dgl_mgpu.ops.walk.cuda import WalkLauncher
from dgl_mgpu.ops.walk.op import TieredPath
from dgl_mgpu.ops.walk_blocks.cpu import hop_by_hop
from dgl_mgpu.ops.walk_blocks.op import VisitedHops, pinsage_hops_op
from dgl_mgpu.ops.workspace import Workspace, beginning, workspace

#: Nodes on the walks of all layers up to which room for the largest possible sample is made in
#: advance; there are more of them than of edges and of nodes of the sample.
_MOST_STEPS = 1 << 26
#: Words of the kernels' report on a layer: edges, then the first bad index, the overflow and the
#: nodes of the numbering.
_REPORT_WORDS = 4


@pinsage_hops_op.start
def pinsage_hops_async(
    seeds: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    keys: Sequence[int],
) -> SampleFuture[VisitedHops]:
    """Launch ``pinsage_hops`` without waiting for it.

    Ask for the result on the same stream, or drop the future.
    """
    device = seeds.device
    gpu.raise_faults(device, wait=False)
    neighbors = min(num_neighbors, num_walks * (len(stops) // len(path.tiers)))
    nodes, _ = rooms(len(seeds), [neighbors] * len(keys), path.num_rows[0])
    if sum(nodes[:-1]) * num_walks * (len(stops) + 1) <= _MOST_STEPS:
        space = workspace(device)
        with space.lock:
            try:
                walks = WalkLauncher(device, *path, stops)
                batch = _Batch(space, seeds, walks, num_walks, neighbors, keys, nodes)
                return SampleFuture(batch.finish)
            except torch.cuda.OutOfMemoryError:
                space.release()
    return SampleFuture(partial(hop_by_hop, seeds, *path, stops, num_walks, num_neighbors, keys))


@pinsage_hops_op.cuda
def _pinsage_hops(*arguments: Any) -> VisitedHops:
    return pinsage_hops_async(*arguments).result()


class _Batch:
    """A mini-batch whose layers have been launched; ``rooms`` are the most nodes known before each
    and after the last."""

    def __init__(
        self,
        space: Workspace,
        seeds: torch.Tensor,
        walks: WalkLauncher,
        num_walks: int,
        num_neighbors: int,
        keys: Sequence[int],
        rooms: Sequence[int],
    ) -> None:
        self._seeds, self._num_rows = seeds, walks.num_rows
        words = 1 + _REPORT_WORDS * len(keys)
        report = torch.full((words,), -1, dtype=torch.int64, device=seeds.device)
        self._nodes = torch.empty(rooms[-1], dtype=seeds.dtype, device=seeds.device)
        self._nodes[: len(seeds)] = seeds
        self._layers: list[tuple[torch.Tensor, ...]] = []
        known = None
        for layer, (key, most) in enumerate(zip(keys, rooms, strict=False)):
            first = 1 + _REPORT_WORDS * layer
            end, numbered, after = report[first:], report[first + 1 :], report[first + 3 :]
            found = walks.visited_neighbors(
                space, self._nodes, most, known, num_walks, num_neighbors, key, report, end
            )
            room = rooms[layer + 1]
            number_nodes(space, self._nodes, most, known, found[1], end, room, numbered)
            self._layers.append(found)
            known = after
        self._host_report = gpu.driver.host_buffer(words).copy_(report, non_blocking=True)
        self._reported = gpu.driver.mark(seeds.device)

    def finish(self) -> VisitedHops:
        """Wait for the GPU, and cut what it found to size.

        Raises
        ------
        IdOutOfRangeError
        """
        self._reported.synchronize()
        bad, *numbers = self._host_report.tolist()
        raise_at_bad_id([bad], self._seeds, self._num_rows, "walk")
        num_edges = numbers[0::_REPORT_WORDS]
        num_nodes = [len(self._seeds), *numbers[3::_REPORT_WORDS]]
        indptrs, sources, counts = [], [], []
        for found, known, edges in zip(self._layers, num_nodes, num_edges, strict=False):
            indptrs.append(beginning(found[0], known + 1))
            sources.append(beginning(found[1], edges))
            counts.append(beginning(found[2], edges))
        return beginning(self._nodes, num_nodes[-1]), indptrs, sources, counts
