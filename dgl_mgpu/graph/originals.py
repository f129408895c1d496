"""DGL's own functions behind those that stand in their place."""

from __future__ import annotations

from typing import Any

#: What each replaced target was before, keyed by `dgl_mgpu.dgl.registry`'s targets.
originals: dict[str, Any] = {}
