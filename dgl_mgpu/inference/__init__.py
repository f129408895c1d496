"""Inference on all nodes of a graph with a model for mini-batches: at once, or layer by layer."""

from dgl_mgpu.inference.repeated_blocks import RepeatedInference
from dgl_mgpu.inference.run import inference

__all__ = ["RepeatedInference", "inference"]
