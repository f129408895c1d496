"""Training steps as CUDA graphs, which the host launches at once and not kernel by kernel."""

from dgl_mgpu.train.capture.step import CapturedStep, normalised_batch

__all__ = ["CapturedStep", "normalised_batch"]
