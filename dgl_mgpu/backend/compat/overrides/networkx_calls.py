"""networkx as modules of DGL call it that rely on a default that networkx has changed."""

from __future__ import annotations

from functools import partial

from networkx.readwrite import json_graph

from .modules import module_with

# Files that networkx 2 wrote, such as PPI's, keep edges under "links".
json_graph_of_links = module_with(
    json_graph, node_link_graph=partial(json_graph.node_link_graph, edges="links")
)
