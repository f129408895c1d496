"""Training steps as CUDA graphs, which the host launches at once and not kernel by kernel."""

from dgl_mgpu.train.capture.passes import normalised_batch
from dgl_mgpu.train.capture.step import CapturedStep

__all__ = ["CapturedStep", "normalised_batch"]
