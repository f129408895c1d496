"""Parts of a graph by METIS, which is in DGL's binary."""

from __future__ import annotations

import dgl
import torch


def metis_parts(g: dgl.DGLGraph, num_parts: int) -> dict[str, torch.Tensor]:
    """The part of every node by type, int64, such that few edges join parts."""
    g = g.cpu().long()
    whole = dgl.to_homogeneous(g) if len(g.ntypes) > 1 or len(g.etypes) > 1 else g
    num_nodes = whole.num_nodes()
    if num_nodes > num_parts > 1 and whole.num_edges():
        # Many parallel edges have METIS write where it must not.
        simple = dgl.to_simple(whole, copy_ndata=False) if whole.is_multigraph else whole
        parts = dgl.metis_partition_assignment(simple, num_parts, balance_edges=True).long()
    else:  # METIS itself ends the process
        parts = torch.arange(num_nodes) * num_parts // max(num_nodes, 1)
    # to_homogeneous keeps types one after the other.
    by_type = parts.split([g.num_nodes(ntype) for ntype in g.ntypes])
    return dict(zip(g.ntypes, by_type, strict=True))
