"""Random walks and PinSAGE's neighbour selection on CUDA; see ``kernels/walk.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type
from dgl_mgpu.ops.walk import TieredPath, pinsage_neighbors_op, random_walk_op
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

_THREADS, _SELECTORS = 128, 512


class WalkLauncher:
    """Launches walks along one metapath on a device."""

    def __init__(self, device: torch.device, path: TieredPath) -> None:
        tiers, pointers, positions, num_rows, idtype, stops = path
        words = list(stops)
        for view_tiers, view_pointers, position in zip(tiers, pointers, positions, strict=True):
            words += [
                view_tiers.data_ptr(),
                len(view_tiers),
                view_pointers.data_ptr(),
                position.data_ptr(),
                position.element_size(),
            ]
        host_table = gpu.driver.host_buffer(len(words)).copy_(torch.tensor(words))
        self._table = host_table.to(device, non_blocking=True)
        self.steps, self.views = len(stops), len(tiers)
        self.device, self.num_rows, self.idtype = device, num_rows[0], idtype

    def trace(
        self,
        starts: NodePrefix,
        numbers: Tensor | None,
        walks_per_start: int,
        key: int,
        edges: Tensor | None,
        bad: Tensor,
    ) -> Tensor:
        """Launch ``walks_per_start`` walks from each start."""
        shape = starts.most * walks_per_start, self.steps + 1
        traces = torch.empty(shape, dtype=torch.int64, device=self.device)
        types = f"{c_type(starts.nodes.dtype)}, {c_type(self.idtype)}"
        kernel = Kernel("walk.cu", f"dgl_mgpu::walk<{types}>")
        wanted = -(-len(traces) // _THREADS)
        blocks = blocks_within(kernel, _THREADS, wanted, self.device) if wanted else 0
        kernel(
            blocks, _THREADS, *starts, numbers, walks_per_start, self._table, self.steps,
            self._table[self.steps :], self.views, self.num_rows, key, traces, edges, bad,
            device=self.device,
        )  # fmt: skip
        return traces

    def visited_neighbors(
        self,
        space: Workspace,
        seeds: NodePrefix,
        num_walks: int,
        num_neighbors: int,
        key: int,
        bad: Tensor,
        end: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch walks from seeds and the selection of the nodes that they visit most.

        ``end``, int64, shape (1,) or more, gets how many nodes are selected.  Returns ``indptr``,
        neighbors and counts as the operator does, in buffers for the largest possible ones.
        """
        _, count, exact = seeds
        traces = self.trace(seeds, None, num_walks, key, None, bad)
        visits = num_walks * (self.steps // self.views)
        size = count * min(num_neighbors, visits)

        def new(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, device=self.device)

        visited = new(count + 1, torch.int64), new(size, self.idtype), new(size, torch.int64)
        name = f"dgl_mgpu::select_visited<{c_type(self.idtype)}>"
        kernel = Kernel("walk.cu", name, cooperative=True)
        wanted = -(-count * visits // _SELECTORS)
        blocks = blocks_within(kernel, _SELECTORS, wanted, self.device)
        kernel(
            blocks, _SELECTORS, traces, count, exact, num_walks, self.steps + 1, self.views,
            num_neighbors, new(count * visits, torch.int32), *visited, space.control(blocks), end,
            device=self.device,
        )  # fmt: skip
        return visited


@random_walk_op.cuda
def _random_walk(
    starts: Tensor, walks: Tensor, path: TieredPath, key: int, edges: Tensor | None
) -> Tensor:
    device = starts.device
    gpu.raise_faults(device, wait=False)
    bad = torch.full((1,), -1, dtype=torch.int64, device=device)
    launcher = WalkLauncher(device, path)
    traces = launcher.trace(NodePrefix(starts, len(starts)), walks, 1, key, edges, bad)
    report = gpu.driver.host_buffer(1).copy_(bad, non_blocking=True)
    gpu.driver.synchronize(device)
    raise_at_bad_id(report.tolist(), starts, path.num_rows[0], "walk")
    return traces


@pinsage_neighbors_op.cuda
def _pinsage_neighbors(
    seeds: Tensor, path: TieredPath, num_walks: int, num_neighbors: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    device = seeds.device
    gpu.raise_faults(device, wait=False)
    report = torch.full((2,), -1, dtype=torch.int64, device=device)
    launcher, prefix = WalkLauncher(device, path), NodePrefix(seeds, len(seeds))
    space = workspace(device)
    with space.lock:
        indptr, neighbors, counts = launcher.visited_neighbors(
            space, prefix, num_walks, num_neighbors, key, report, report[1:]
        )
    host_report = gpu.driver.host_buffer(2).copy_(report, non_blocking=True)
    gpu.driver.synchronize(device)
    bad, total = host_report.tolist()
    raise_at_bad_id([bad], seeds, path.num_rows[0], "walk")
    return indptr, beginning(neighbors, total), beginning(counts, total)
