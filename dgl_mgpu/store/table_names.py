"""Under which names a store holds what a graph consists of: ``kind/type/feature``.

What divides these parts is quoted in a type, as in addresses of web pages (``a/b`` is ``a%2Fb``),
so that no two tables have one name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dgl_mgpu.utils.types import CanonicalEtype

#: Node ids, by node type in a heterogeneous graph.
Nodes = torch.Tensor | Mapping[str, torch.Tensor]


def topology_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the in-edges of ``etype``."""
    return f"topology/{_quoted(*etype)}"


def ends_table(etype: CanonicalEtype) -> str:
    """Name of the table that holds the ends of each edge of ``etype`` by its id."""
    return f"ends/{_quoted(*etype)}"


def node_table(ntype: str, name: str) -> str:
    """Name of the table that holds node feature ``name``."""
    return f"node/{_quoted(ntype)}/{name}"


def edge_table(etype: CanonicalEtype, name: str) -> str:
    """Name of the table that holds edge feature ``name``."""
    return f"edge/{_quoted(*etype)}/{name}"


def state_table(ntype: str, name: str, state: str) -> str:
    """Name of the table that holds a part of an embedding's optimizer's state."""
    return f"state/{_quoted(ntype)}/{name}/{state}"


def feature_of(table: str) -> str | None:
    """The feature of nodes or edges that a table holds, if it does."""
    kind, _, feature = table.partition("/")
    return feature.partition("/")[2] if kind in ("node", "edge") else None


def _quoted(*types: str) -> str:
    quoted = (part.replace("%", "%25").replace("/", "%2F").replace(":", "%3A") for part in types)
    return ":".join(quoted)
