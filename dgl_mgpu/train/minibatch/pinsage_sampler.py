"""PinSAGE's sampler: neighbours are the nodes that random walks visit most."""

from __future__ import annotations

import dgl
import torch
from dgl.dataloading import BlockSampler

from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.sampling.async_blocks import finish_blocks
from dgl_mgpu.sampling.block_sampling import Sampled
from dgl_mgpu.store.graph import StoreGraph


class RandomWalkSampler(BlockSampler):
    """Blocks of important neighbours (Ying et al., 2018; XGNN, section 6.1).

    ``num_neighbors``: neighbours of a node in each layer. ``num_walks``: walks from each node.
    ``walk_length``: steps of a walk. ``**prefetch``: as in ``dgl.dataloading.BlockSampler``.
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`: samples depend on attributes and the graph alone.
    prefetch_safe = True

    def __init__(
        self,
        num_layers: int,
        num_neighbors: int,
        num_walks: int,
        walk_length: int,
        **prefetch: object,
    ) -> None:
        super().__init__(**prefetch)
        self._num_layers = num_layers
        self._num_neighbors = num_neighbors
        self._num_walks = num_walks
        self._walk_length = walk_length

    def sample_blocks_async(
        self, g: StoreGraph, nodes: torch.Tensor, *, on_host: torch.Tensor | None = None
    ) -> SampleFuture[Sampled]:
        """Start what :meth:`sample_blocks` does on a GPU."""
        walks = self._num_walks, self._walk_length, self._num_neighbors
        return g.pinsage_blocks_async(nodes, self._num_layers, *walks, on_host=on_host)

    def sample_blocks(
        self, g: StoreGraph, seed_nodes: torch.Tensor, exclude_eids: object = None
    ) -> tuple[torch.Tensor, torch.Tensor, list[dgl.DGLGraph]]:
        """Input nodes, ``seed_nodes`` and one block a layer, with visit counts as edge data."""
        return finish_blocks(self, self.sample_blocks_async(g, seed_nodes).result())
