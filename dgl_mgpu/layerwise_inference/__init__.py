"""Inference on all nodes of a graph with a model for mini-batches: at once, or layer by layer."""

from dgl_mgpu.layerwise_inference.run import RepeatedInference, inference

__all__ = ["RepeatedInference", "inference"]
