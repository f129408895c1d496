"""Types that many modules name."""

from __future__ import annotations

#: Source node type, edge type, destination node type.
CanonicalEtype = tuple[str, str, str]
