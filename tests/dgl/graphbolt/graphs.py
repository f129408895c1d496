"""Random graphs of GraphBolt's, of one type and of several."""

from __future__ import annotations

import dgl.graphbolt as gb
import torch

NODES, EDGES = 60, 600
ETYPES = {"a:to:a": 0, "b:to:a": 1, "a:to:b": 2}


def random_graph(dtype=torch.int64, with_types=False, **attributes):
    """A graph whose nodes 0 and 59 have no in-edges; edge ``e`` has the original id 1000 + e."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, NODES - 1, (EDGES,), generator=generator).sort().values
    indptr = torch.searchsorted(targets, torch.arange(NODES + 1))
    indices = torch.randint(NODES, (EDGES,), generator=generator)
    options = {}
    if with_types:
        # Nodes 0 to 39 are of type a, others of b.
        types = torch.where(targets < 40, (indices >= 40).long(), 2)
        indices = torch.where(targets < 40, indices, indices % 40)
        order = (targets * 3 + types).argsort(stable=True)
        indices, types = indices[order], types[order]
        options = {
            "node_type_offset": torch.tensor([0, 40, NODES]),
            "type_per_edge": types,
            "node_type_to_id": {"a": 0, "b": 1},
            "edge_type_to_id": ETYPES,
        }
    return gb.fused_csc_sampling_graph(
        indptr.to(dtype),
        indices.to(dtype),
        **options,
        edge_attributes={gb.ORIGINAL_EDGE_ID: torch.arange(EDGES) + 1000, **attributes},
    )
