"""Making the next mini-batch while the model works on this one.

It knows torch's streams and GPUs, and neither DGL nor the store.
"""

from dgl_mgpu.pipeline.ahead import Ahead, Pace, Source
from dgl_mgpu.pipeline.lane import Lane, Mark, lane_of

__all__ = ["Ahead", "Lane", "Mark", "Pace", "Source", "lane_of"]
