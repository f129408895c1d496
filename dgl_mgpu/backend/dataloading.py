"""What DGL's DataLoader and NeighborSampler do differently for a store's graph.

DGL's own protocol (``sample_neighbors``, ``get_node_storage``, …) suffices for them to work.
Two things it lacks: a graph is not told that an epoch begins, and a mini-batch goes through a
graph over all nodes at every hop.  For any other graph both classes do what they always did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import dgl


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
    """Teach DGL's classes to use what a store's graph offers; once for all graphs."""
    loader = dgl.dataloading.DataLoader
    sampler = dgl.dataloading.NeighborSampler
    if getattr(loader.__iter__, "serves_stores", False):
        return
    iterate, sample_blocks = loader.__iter__, sampler.sample_blocks

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
        if not isinstance(g, ServesBlocks) or exclude_eids is not None or self.edge_dir != "in":
            return sample_blocks(self, g, seed_nodes, exclude_eids)
        inputs, outputs, blocks = g.sample_blocks(seed_nodes, self.fanouts, self.prob, self.replace)
        if self.output_device is not None:
            blocks = [block.to(self.output_device) for block in blocks]
        return inputs, outputs, blocks

    __iter__.serves_stores = True  # type: ignore[attr-defined]
    loader.__iter__ = __iter__
    sampler.sample_blocks = _sample_blocks
