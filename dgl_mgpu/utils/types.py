"""Types that many modules name."""

from __future__ import annotations

#: Source node type, edge type, destination node type.
CanonicalEtype = tuple[str, str, str]
#: DGL's names of the only node type and edge type of a homogeneous graph.
NTYPE, ETYPE = "_N", "_E"
