"""Making the next mini-batch while the model works on this one.

A leaf of the package: it knows torch's streams, and neither DGL nor the store.
"""

from dgl_mgpu.pipeline.ahead import Ahead, Source
from dgl_mgpu.pipeline.lane import Lane, Mark, lane_of

__all__ = ["Ahead", "Lane", "Mark", "Source", "lane_of"]
