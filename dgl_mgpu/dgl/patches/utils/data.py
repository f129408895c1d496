"""networkx graphs whose edge ids are arrays of one element."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np

from dgl_mgpu.graph.originals import originals


def networkx2tensor(
    nx_graph: networkx.Graph, idtype: Any, edge_id_attr_name: str | None = None
) -> Any:
    """Edges of a graph; their ids may be arrays of one element, which ``int()`` refuses."""
    original = originals["dgl.utils.data:networkx2tensor"]
    return original(_with_int_ids(nx_graph, edge_id_attr_name), idtype, edge_id_attr_name)


def networkxbipartite2tensors(
    nx_graph: networkx.Graph, idtype: Any, top_map: Any, bottom_map: Any,
    edge_id_attr_name: str | None = None,
) -> Any:  # fmt: skip
    """The same of a bipartite graph."""
    original = originals["dgl.utils.data:networkxbipartite2tensors"]
    graph = _with_int_ids(nx_graph, edge_id_attr_name)
    return original(graph, idtype, top_map, bottom_map, edge_id_attr_name)


def _with_int_ids(nx_graph: networkx.Graph, name: str | None) -> networkx.Graph:
    if name is None or not any(np.ndim(ids) for _, _, ids in nx_graph.edges(data=name)):
        return nx_graph
    copied = nx_graph.copy()
    for _, _, attributes in copied.edges(data=True):
        attributes[name] = np.asarray(attributes[name]).item()
    return copied
