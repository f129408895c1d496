"""GraphBolt's graph: typed errors for what it asserts."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.errors import typed_assertions
from dgl_mgpu.graph.originals import originals

_HERE = "dgl.graphbolt.impl.fused_csc_sampling_graph"


def check_sampler_arguments(self: Any, nodes: Any, fanouts: Any, probs_name: Any) -> None:
    """In place of ``FusedCSCSamplingGraph._check_sampler_arguments``."""
    fix = (
        "pass ids of one dimension and of the graph's dtype, one fanout or one for each edge type,"
        " and as probabilities the name of an edge attribute of one dimension"
    )
    with typed_assertions("sample neighbors", fix):
        check = originals[f"{_HERE}:FusedCSCSamplingGraph._check_sampler_arguments"]
        check(self, nodes, fanouts, probs_name)


def fused_csc_sampling_graph(
    csc_indptr: Any,
    indices: Any,
    node_type_offset: Any = None,
    type_per_edge: Any = None,
    node_type_to_id: Any = None,
    edge_type_to_id: Any = None,
    node_attributes: Any = None,
    edge_attributes: Any = None,
) -> Any:
    """In place of GraphBolt's."""
    fix = "number types from 0 on, and name edge types 'source:type:destination'"
    with typed_assertions("make a graph", fix):
        return originals[f"{_HERE}:fused_csc_sampling_graph"](
            csc_indptr,
            indices,
            node_type_offset,
            type_per_edge,
            node_type_to_id,
            edge_type_to_id,
            node_attributes,
            edge_attributes,
        )
