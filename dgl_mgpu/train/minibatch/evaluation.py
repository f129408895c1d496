"""Layer-wise validation and test, where blocks of all neighbours would overlap a lot."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dgl_mgpu.layerwise_inference import RepeatedInference
from dgl_mgpu.models.homogeneous import NodeModel
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.minibatch.samplers import SeedBatches


class AllNodes:
    """Logits of all nodes, layer by layer, in place of those of a split's seeds by blocks."""

    def __init__(self, model: NodeModel, graph: StoreGraph, num_layers: int) -> None:
        self._labels = graph.get_node_storage("label")
        self._infer = RepeatedInference(model, graph, model.inputs, num_layers, graph.device)

    def predictions(
        self, batches: SeedBatches
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
        """Logits and labels of the seeds, of each of this rank's batches.

        Every rank calls it.  None if memory is too small for rows of all nodes.
        """
        logits = self._infer()
        return None if logits is None else self._seed_logits(logits, batches)

    def _seed_logits(
        self, logits: torch.Tensor, batches: SeedBatches
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for seeds in batches:
            assert isinstance(seeds, torch.Tensor)  # of one type
            yield logits[seeds.long()], self._labels.fetch(seeds, logits.device)


def is_cheaper_for_all_nodes(
    num_seeds: int, batch_size: int, num_layers: int, num_nodes: int, num_edges: int
) -> bool:
    """Whether all nodes layer by layer take fewer edges than blocks of the seeds' neighbours.

    Layer by layer, each layer goes over all edges once.
    """
    degree, batches = num_edges / num_nodes, math.ceil(num_seeds / batch_size)
    in_blocks = batches * edges_of_blocks(num_seeds / batches, num_layers, num_nodes, degree)
    return in_blocks > num_layers * num_edges


def edges_of_blocks(num_seeds: float, num_layers: int, num_nodes: int, degree: float) -> float:
    """About how many edges the blocks of a batch have.

    The last block has the in-edges of the seeds, and each block before it those of all nodes so
    far.  They are counted as if nodes had the mean degree and edges began anywhere: where many
    begin at the same nodes, blocks have fewer nodes, and these have more in-edges.
    """
    nodes, newest, edges = num_seeds, num_seeds, 0.0
    for _ in range(num_layers):
        edges += nodes * degree
        # The newest nodes' edges begin at some that are not yet there.
        newest = (num_nodes - nodes) * -math.expm1(-newest * degree / num_nodes)
        nodes += newest
    return edges
