"""What DGL's DataLoader and NeighborSampler do differently for graphs of this package.

DGL's own protocol (``sample_neighbors``, ``get_node_storage``, …) suffices for them to work.
Two things it lacks: a store's graph is not told that an epoch begins, and a mini-batch goes through
a graph over all nodes at every hop.  For DGL's own graphs on the CPU both classes do what they
always did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from dgl.base import NID
from dgl.dataloading.base import (
    BlockSampler,
    set_dst_lazy_features,
    set_edge_lazy_features,
    set_src_lazy_features,
)
from dgl.dataloading.dataloader import DataLoader
from dgl.dataloading.neighbor_sampler import NeighborSampler
from dgl.heterograph import DGLGraph

from dgl_mgpu.backend.capi.ours import OnTensors


@runtime_checkable
class ServesBlocks(Protocol):
    """What :class:`~dgl_mgpu.backend.graph.StoreGraph` offers beyond DGL's protocol."""

    def for_loader(self) -> ServesBlocks:
        """This graph with an epoch count of its own."""

    def begin_epoch(self, shared: ServesBlocks) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to the next one."""

    def check_weights(self, prob: str) -> None:
        """Raise if edge feature ``prob`` cannot be sampled by."""

    def sample_blocks(self, nodes: Any, fanouts: Any, prob: str | None, replace: bool) -> Any:
        """Sample all hops of a mini-batch into blocks."""


def serve_dataloading() -> None:
    """Teach DGL's classes to use what this package's graphs offer; once for all graphs."""
    if getattr(DataLoader.__iter__, "serves_stores", False):
        return
    iterate, sample_blocks = DataLoader.__iter__, NeighborSampler.sample_blocks

    def __iter__(self: Any) -> Iterator:
        shared = self.graph
        if isinstance(shared, ServesBlocks):
            if self.collate_fn.g is shared:
                self.collate_fn.g = shared.for_loader()
            self.collate_fn.g.begin_epoch(shared)
            prob = getattr(self.graph_sampler, "prob", None)
            if prob is not None:
                shared.check_weights(prob)
        return iterate(self)

    def _sample_blocks(self: Any, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        sampled = None
        if exclude_eids is None and self.edge_dir == "in":
            sampled = _sample_at_once(g, seed_nodes, self.fanouts, self.prob, self.replace)
        if sampled is None:
            return sample_blocks(self, g, seed_nodes, exclude_eids)
        inputs, outputs, blocks = sampled
        if self.output_device is not None:
            blocks = [block.to(self.output_device) for block in blocks]
            inputs = blocks[0].srcdata[NID]
        return inputs, outputs, blocks

    def assign_lazy_features(self: Any, result: Any) -> Any:
        _, _, blocks = result
        first, last = blocks[0], blocks[-1]
        # Each makes views of a block first, also where there is nothing to assign.
        if self.prefetch_node_feats:
            set_src_lazy_features(first, self.prefetch_node_feats)
        if self.prefetch_labels:
            set_dst_lazy_features(last, self.prefetch_labels)
        if self.prefetch_edge_feats:
            for block in blocks:
                set_edge_lazy_features(block, self.prefetch_edge_feats)
        return result

    __iter__.serves_stores = True  # type: ignore[attr-defined]
    DataLoader.__iter__ = __iter__
    NeighborSampler.sample_blocks = _sample_blocks
    BlockSampler.assign_lazy_features = assign_lazy_features


def _sample_at_once(g: Any, nodes: Any, fanouts: Any, prob: str | None, replace: bool) -> Any:
    """All hops of a mini-batch, from a graph that can; else None."""
    if isinstance(g, DGLGraph):
        if not isinstance(g._graph, OnTensors) and not g.is_pinned():
            return None  # without importing operators that graphs on the CPU do not need
        from dgl_mgpu.backend.block_sampling import sample_graph

        return sample_graph(g, nodes, fanouts, prob, replace)
    if isinstance(g, ServesBlocks):
        return g.sample_blocks(nodes, fanouts, prob, replace)
    return None
