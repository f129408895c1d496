"""Training steps as CUDA graphs, which the host launches at once and not kernel by kernel."""

from dgl_mgpu.minibatch.captured.step import CapturedStep, normalised_batch

__all__ = ["CapturedStep", "normalised_batch"]
