"""The memory that holds the data: segments, their exchange between ranks, tables.

Knows nothing of DGL.  A :class:`Store` gives operators their views; where rows go was decided
by :mod:`dgl_mgpu.placement`.
"""

from dgl_mgpu.store.exchange import Ranks
from dgl_mgpu.store.source import FeatureSource, TopologySource
from dgl_mgpu.store.store import Blueprint, Store, build
from dgl_mgpu.store.table import Table

__all__ = ["Blueprint", "FeatureSource", "Ranks", "Store", "Table", "TopologySource", "build"]
