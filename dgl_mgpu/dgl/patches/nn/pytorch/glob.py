"""Set transformers over the nodes of all processes."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import is_partitioned
from dgl_mgpu.graph.originals import originals

_MODULE = "dgl.nn.pytorch.glob:"


def encode(self: Any, graph: Any, feat: Any) -> Any:
    """In place of ``SetTransformerEncoder.forward``: own nodes attend to all."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    index = graph._graph
    if not isinstance(index, DistributedGraphIndex) or is_partitioned(graph):
        return originals[_MODULE + "SetTransformerEncoder.forward"](self, graph, feat)
    for layer in self.layers:
        everyone = index.rows_of_all(feat)
        if self.block_type == "sab":
            feat = layer.mha(feat, everyone, [len(feat)], [len(everyone)])
        else:
            from_all, to_own = layer.mha
            induced = from_all(layer.inducing_points, everyone, [layer.m], [len(everyone)])
            feat = to_own(feat, induced, [len(feat)], [layer.m])
    return feat


def decode(self: Any, graph: Any, feat: Any) -> Any:
    """In place of ``SetTransformerDecoder.forward``: a readout of all nodes."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    index = graph._graph
    if not isinstance(index, DistributedGraphIndex) or is_partitioned(graph):
        return originals[_MODULE + "SetTransformerDecoder.forward"](self, graph, feat)
    everyone = index.rows_of_all(feat)
    feat = self.pma(everyone, [len(everyone)])
    for layer in self.layers:
        feat = layer(feat, [self.k])
    return feat.view(1, -1)
