"""The memory that holds the data: segments, their exchange between ranks, tables.

Knows nothing of DGL.  A :class:`Store` gives operators their views; where rows go was decided
by :mod:`dgl_mgpu.placement`.
"""

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.store.memory.format import FeatureSource, TopologySource
from dgl_mgpu.store.memory.table import Table
from dgl_mgpu.store.memory.tables import Blueprint, Store, build

__all__ = [
    "Blueprint",
    "Communicator",
    "FeatureSource",
    "Store",
    "Table",
    "TopologySource",
    "build",
]
