"""Features in memory: typed errors for what is asserted of them."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.errors import typed_assertions
from dgl_mgpu.graph.originals import originals

_HERE = "dgl.graphbolt.impl.torch_based_feature_store:TorchBasedFeature"


def init_feature(self: Any, torch_feature: Any, metadata: Any = None) -> None:
    """In place of ``TorchBasedFeature.__init__``."""
    with typed_assertions("make a feature", "pass a tensor of two dimensions or more"):
        originals[f"{_HERE}.__init__"](self, torch_feature, metadata)


def update_feature(self: Any, value: Any, ids: Any = None) -> None:
    """In place of ``TorchBasedFeature.update``."""
    with typed_assertions("update a feature", "pass a row of the feature's shape for each id"):
        originals[f"{_HERE}.update"](self, value, ids)
