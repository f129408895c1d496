"""Training steps as CUDA graphs, which the host launches at once and not kernel by kernel."""

from dgl_mgpu.minibatch.captured.passes import normalised_batch
from dgl_mgpu.minibatch.captured.step import CapturedStep

__all__ = ["CapturedStep", "normalised_batch"]
