"""PPI's graphs with networkx from version 3.4 on."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any


def _node_link_graph(data: Any, edges: str) -> Any:
    from networkx.readwrite import json_graph

    return json_graph.node_link_graph(data, edges=edges)


# Files that networkx 2 wrote, such as PPI's, keep edges under "links".
json_graph_of_links = ModuleType("networkx.readwrite.json_graph")
vars(json_graph_of_links)["node_link_graph"] = partial(_node_link_graph, edges="links")
