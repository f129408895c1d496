"""A graph convolutional network with as few buffers as MG-GCN's, and exact gradients.

The module is in `module`; what it remembers of its graph and input in `known`; forward and backward
pass, and which buffers there are when, in `passes`; dropout that keeps no masks in `dropout`.
"""

from dgl_mgpu.models.gcn.module import GCN

__all__ = ["GCN"]
