"""PPI's graphs with networkx from version 3.4 on."""

from __future__ import annotations

from functools import partial

from networkx.readwrite import json_graph

from dgl_mgpu.utils.modules import module_with

# Files that networkx 2 wrote, such as PPI's, keep edges under "links".
json_graph_of_links = module_with(
    json_graph, node_link_graph=partial(json_graph.node_link_graph, edges="links")
)
