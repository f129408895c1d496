"""Inference on all nodes of a graph with a model for mini-batches: at once, or layer by layer."""

from dgl_mgpu.fullgraph.inference.repeated import RepeatedInference
from dgl_mgpu.fullgraph.inference.run import inference

__all__ = ["RepeatedInference", "inference"]
