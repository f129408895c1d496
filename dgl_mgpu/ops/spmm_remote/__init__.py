"""Sums of rows that lie in several memories."""

from __future__ import annotations

from dgl_mgpu.ops.spmm_remote import cpu as _cpu  # noqa: F401  (registers the CPU kernels)
from dgl_mgpu.ops.spmm_remote import cuda as _cuda  # noqa: F401  (registers the CUDA kernels)
from dgl_mgpu.ops.spmm_remote.op import Entries, Pairs, Pipeline, Sources, pair_up, spmm_remote

__all__ = ["Entries", "Pairs", "Pipeline", "Sources", "pair_up", "spmm_remote"]
