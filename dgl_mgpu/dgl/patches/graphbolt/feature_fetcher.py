"""Fetching features: what later versions' scripts pass."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def init_fetcher(
    self: Any,
    datapipe: Any,
    feature_store: Any,
    node_feature_keys: Any = None,
    edge_feature_keys: Any = None,
    *,
    overlap_fetch: bool = True,
) -> None:
    """In place of ``FeatureFetcher.__init__``; mini-batches are made ahead whether told or not."""
    arguments = datapipe, feature_store, node_feature_keys, edge_feature_keys
    originals["dgl.graphbolt.feature_fetcher:FeatureFetcher.__init__"](self, *arguments)
