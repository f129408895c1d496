"""PNAConv and DGNConv where this process has some of the graph's nodes."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, node_feat: Any, edge_feat: Any = None) -> Any:
    """In place of ``PNAConvTower.forward``, which DGNConv's towers have as well."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(graph._graph, DistributedGraphIndex):
        original = originals["dgl.nn.pytorch.conv.pnaconv:PNAConvTower.forward"]
        return original(self, graph, node_feat, edge_feat)
    import torch

    from dgl_mgpu.errors import InvalidInputError

    if self.edge_feat_size > 0 and edge_feat is None:
        raise InvalidInputError(
            f"run {type(self).__name__}",
            f"edge_feat is None, but edge_feat_size is {self.edge_feat_size}",
            "pass a row of edge_feat for each of this rank's edges",
        )
    # A part that looks like the whole graph has all nodes' number itself.
    owned = getattr(graph, "ownership", None)
    num_nodes = graph.num_nodes() if owned is None else owned[graph.ntypes[0]].num_nodes
    with graph.local_scope():
        graph.ndata["h"] = node_feat
        if self.edge_feat_size > 0:
            graph.edata["a"] = edge_feat
        graph.update_all(self.message, self.reduce_func)
        rows = self.U(torch.cat([node_feat, graph.ndata["h_neigh"]], -1))
        return self.dropout(self.batchnorm(rows / num_nodes**0.5))
