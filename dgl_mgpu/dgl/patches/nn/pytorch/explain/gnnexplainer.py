"""Explanations of what a model makes of a graph of which this process has a part."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import is_partitioned
from dgl_mgpu.graph.originals import originals

_MODULE = "dgl.nn.pytorch.explain.gnnexplainer:"


def explain_graph(self: Any, graph: Any, feat: Any, **kwargs: Any) -> Any:
    """In place of ``GNNExplainer.explain_graph``."""
    if not _is_part(graph):
        return originals[_MODULE + "GNNExplainer.explain_graph"](self, graph, feat, **kwargs)
    from dgl_mgpu.distributed import explain

    return explain.explain_graph(self, graph, feat, **kwargs)


def explain_hetero_graph(self: Any, graph: Any, feat: Any, **kwargs: Any) -> Any:
    """In place of ``HeteroGNNExplainer.explain_graph``."""
    if not _is_part(graph):
        return originals[_MODULE + "HeteroGNNExplainer.explain_graph"](self, graph, feat, **kwargs)
    from dgl_mgpu.distributed import explain

    return explain.explain_graph(self, graph, feat, **kwargs)


def explain_node(self: Any, node_id: Any, graph: Any, feat: Any, **kwargs: Any) -> Any:
    """In place of ``GNNExplainer.explain_node``."""
    if not _is_part(graph):
        original = originals[_MODULE + "GNNExplainer.explain_node"]
        return original(self, node_id, graph, feat, **kwargs)
    from dgl_mgpu.distributed import explain

    return explain.explain_node(self, node_id, graph, feat, **kwargs)


def explain_node_of_type(
    self: Any, ntype: str, node_id: Any, graph: Any, feat: Any, **kwargs: Any
) -> Any:
    """In place of ``HeteroGNNExplainer.explain_node``."""
    if not _is_part(graph):
        original = originals[_MODULE + "HeteroGNNExplainer.explain_node"]
        return original(self, ntype, node_id, graph, feat, **kwargs)
    from dgl_mgpu.distributed import explain

    return explain.explain_node_of_type(self, ntype, node_id, graph, feat, **kwargs)


def _is_part(graph: Any) -> bool:
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    return isinstance(graph._graph, DistributedGraphIndex) and not is_partitioned(graph)
