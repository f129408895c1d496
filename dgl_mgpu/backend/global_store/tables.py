"""Under which names a store holds what a graph consists of."""

from __future__ import annotations

from collections.abc import Mapping

import torch

CanonicalEtype = tuple[str, str, str]
#: Node ids, by node type in a heterogeneous graph.
Nodes = torch.Tensor | Mapping[str, torch.Tensor]


def topology_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the in-edges of ``etype``."""
    return f"topology/{':'.join(etype)}"


def ends_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the ends of each edge of ``etype`` by its id."""
    return f"ends/{':'.join(etype)}"


def node_table(ntype: str, name: str) -> str:
    """Name of the table that holds node feature ``name``."""
    return f"node/{ntype}/{name}"


def edge_table(etype: CanonicalEtype, name: str) -> str:
    """Name of the table that holds edge feature ``name``."""
    return f"edge/{':'.join(etype)}/{name}"
