"""All hops one after another, each by the operators for one hop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.ops.blocks import op
from dgl_mgpu.ops.blocks.op import sample_hops_op
from dgl_mgpu.ops.check import narrow_indptr
from dgl_mgpu.ops.view import TieredGraph


@sample_hops_op.cpu
def hop_by_hop(
    seeds: torch.Tensor,
    graph: TieredGraph,
    fanouts: Sequence[int],
    replace: bool,
    keys: Sequence[int],
    sms: int,
    ordered_from: int,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """``sample_hops`` on the device of ``seeds``, whatever it is."""
    nodes = seeds
    indptrs, sources, eids = [], [], []
    rows, idtype = graph[:4], graph.idtype
    for fanout, key in zip(fanouts, keys, strict=True):
        sampled = torch.ops.dgl_mgpu.sample_neighbors.default(
            nodes, *rows, idtype, fanout, replace, key, sms
        )
        nodes, local = torch.ops.dgl_mgpu.append_unique.default(nodes, sampled[1])
        indptrs.append(narrow_indptr(sampled[0], len(local), idtype, op.ASKED))
        sources.append(local)
        eids.append(sampled[2])
    return nodes.clone() if nodes is seeds else nodes, indptrs, sources, eids
