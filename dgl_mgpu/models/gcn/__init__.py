"""A graph convolutional network with as few buffers as MG-GCN's, and exact gradients.

`module` has the module and what it remembers of its graph and input; `passes` has the forward and
the backward pass, which buffers there are when, and dropout that keeps no masks.
"""

from typing import Any

from dgl_mgpu.models.gcn.module import FullGraphGCN
from dgl_mgpu.utils.deprecation import deprecated_alias

__all__ = ["FullGraphGCN"]


def __getattr__(name: str) -> Any:
    if name == "GCN":
        return deprecated_alias(f"{__name__}.GCN", FullGraphGCN, f"{__name__}.FullGraphGCN")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
