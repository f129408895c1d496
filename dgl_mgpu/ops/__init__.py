"""Operators on graphs and features in the store, in whichever memory these are kept.

An operator's module has the public function, the specification
(:class:`dgl_mgpu.ops.library.Operator`) and the CPU implementation.  The CUDA implementation is in
the same module or, where that would be long, in one whose name ends in ``_cuda``.
"""

from __future__ import annotations

from dgl_mgpu.ops import (  # noqa: F401  (registers the CUDA implementations)
    attention_cpu,
    attention_cuda,
    blocks_cuda,
    sample_weighted_cuda,
    spmm_cuda,
)
from dgl_mgpu.ops.attention import attention
from dgl_mgpu.ops.blocks import SampledBlock, sample_blocks, sample_blocks_async
from dgl_mgpu.ops.edge_softmax import edge_softmax, edge_softmax_backward
from dgl_mgpu.ops.etype_blocks import (
    BlockEdges,
    EtypeBlock,
    sample_etype_blocks,
    sample_etype_blocks_async,
)
from dgl_mgpu.ops.gather import count_tiers, gather_rows, pick_rows
from dgl_mgpu.ops.negative import NegativeEdges, negative_destinations, negative_edges
from dgl_mgpu.ops.padded_blocks import PaddedBlock, sample_padded_blocks
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.sample import SampledNeighbors, sample_etype_neighbors, sample_neighbors
from dgl_mgpu.ops.sample_future import SampleFuture, returning_wait
from dgl_mgpu.ops.sample_weighted import EdgeTimes, check_weights
from dgl_mgpu.ops.scatter import SGD, Adagrad, Adam, AlignedTables, scatter_rows, update_rows
from dgl_mgpu.ops.sddmm import sddmm
from dgl_mgpu.ops.spmm import add_spmm, spmm, spmm_shares
from dgl_mgpu.ops.spmm_transposed import spmm_transposed
from dgl_mgpu.ops.transpose import transpose
from dgl_mgpu.ops.unique import append_unique
from dgl_mgpu.ops.view import GraphView, RowView
from dgl_mgpu.ops.walk import VisitedNeighbors, pinsage_neighbors, random_walk
from dgl_mgpu.ops.walk_blocks import VisitedBlock, pinsage_blocks, pinsage_blocks_async
from dgl_mgpu.utils.deprecation import deprecated_alias

begin_sample_blocks = deprecated_alias(
    "dgl_mgpu.ops.begin_sample_blocks",
    returning_wait(sample_blocks_async),
    "dgl_mgpu.ops.sample_blocks_async",
)
begin_sample_etype_blocks = deprecated_alias(
    "dgl_mgpu.ops.begin_sample_etype_blocks",
    returning_wait(sample_etype_blocks_async),
    "dgl_mgpu.ops.sample_etype_blocks_async",
)
begin_pinsage_blocks = deprecated_alias(
    "dgl_mgpu.ops.begin_pinsage_blocks",
    returning_wait(pinsage_blocks_async),
    "dgl_mgpu.ops.pinsage_blocks_async",
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AlignedTables",
    "BlockEdges",
    "EdgeTimes",
    "EtypeBlock",
    "GraphView",
    "NegativeEdges",
    "PaddedBlock",
    "RowView",
    "SampleFuture",
    "SampleKey",
    "SampledBlock",
    "SampledNeighbors",
    "VisitedBlock",
    "VisitedNeighbors",
    "add_spmm",
    "append_unique",
    "attention",
    "check_weights",
    "count_tiers",
    "edge_softmax",
    "edge_softmax_backward",
    "gather_rows",
    "negative_destinations",
    "negative_edges",
    "pick_rows",
    "pinsage_blocks",
    "pinsage_blocks_async",
    "pinsage_neighbors",
    "random_walk",
    "sample_blocks",
    "sample_blocks_async",
    "sample_etype_blocks",
    "sample_etype_blocks_async",
    "sample_etype_neighbors",
    "sample_neighbors",
    "sample_padded_blocks",
    "scatter_rows",
    "sddmm",
    "spmm",
    "spmm_shares",
    "spmm_transposed",
    "transpose",
    "update_rows",
]
