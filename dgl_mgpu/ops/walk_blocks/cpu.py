"""All layers of a PinSAGE mini-batch one after another, each by the operators for one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.ops.walk.op import TieredPath
from dgl_mgpu.ops.walk_blocks.op import VisitedHops, pinsage_hops_op


@pinsage_hops_op.cpu
def hop_by_hop(
    seeds: torch.Tensor,
    path: TieredPath,
    stops: Sequence[int],
    num_walks: int,
    num_neighbors: int,
    keys: Sequence[int],
) -> VisitedHops:
    """``pinsage_hops`` on the device of ``seeds``, whatever it is."""
    nodes = seeds
    indptrs, sources, counts = [], [], []
    for key in keys:
        visited = torch.ops.dgl_mgpu.pinsage_neighbors.default(
            nodes, *path, stops, num_walks, num_neighbors, key
        )
        nodes, local = torch.ops.dgl_mgpu.append_unique.default(nodes, visited[1])
        indptrs.append(visited[0])
        sources.append(local)
        counts.append(visited[2])
    return nodes.clone() if nodes is seeds else nodes, indptrs, sources, counts
