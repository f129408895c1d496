"""Graphs of GraphBolt's data sets."""

from __future__ import annotations

from functools import partial

import torch

from dgl_mgpu.utils.modules import module_with

# Whatever torch's default is: a graph that the C++ library has written is read only so.
torch_of_graphs = module_with(torch, load=partial(torch.load, weights_only=True))
