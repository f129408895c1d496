"""Link prediction on mini-batches: which edges are learned, and how their batches are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dgl
import numpy as np
import torch
from dgl.dataloading import BlockSampler, Sampler, as_edge_prediction_sampler
from torch import nn
from torch.nn import functional

from dgl_mgpu.config.schema import Config
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.links import HeldOut, edges_to_learn, rings_of_edges
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import SampleKey
from dgl_mgpu.report import AUC
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.minibatch.task import Task, input_rows
from dgl_mgpu.train.objectives import Criterion, Objective, model_rows

#: Attempts to draw pairs that are not edges.
_ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class LinkTask(Task):
    """Link prediction: distinguish edges from pairs of nodes without one.

    Seeds are ids of edges in training; else their numbers among those held out.
    """

    # Shape (2, n): sources and destinations of the edges of a split, in the graph's id type
    held_out: dict[str, torch.Tensor]
    next_edge: torch.Tensor  # shape (num_edges,)
    longest_ring: int  # Edges between the same nodes (:class:`dgl_mgpu.data.links.Rings`)
    negatives: int  # Pairs that are compared with each edge
    seed: int  # of the pairs of held-out edges

    @classmethod
    def from_links(cls, config: Config, links: HeldOut) -> LinkTask:
        """The task on the edges of a data set that are not held out."""
        rest = links.dataset
        next_edge, longest_ring = rings_of_edges(rest)

        def ids(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(rest.id_dtype, copy=False))

        held_out = {"valid": ids(links.valid), "test": ids(links.test)}
        seeds = {name: torch.arange(edges.shape[1]) for name, edges in held_out.items()}
        return cls(
            seeds={"train": ids(edges_to_learn(rest)), **seeds},
            num_outputs=config.model.hidden,
            **input_rows(config, rest),
            held_out=held_out,
            next_edge=ids(next_edge),
            longest_ring=longest_ring,
            negatives=config.links.negatives,
            seed=config.trainer.seed,
        )

    def prefetch_options(self, inputs: tuple[str, ...]) -> dict[str, Any]:
        return {"prefetch_node_feats": super().prefetch_options(inputs)["prefetch_node_feats"]}

    def objective(self, graph: StoreGraph) -> Objective:
        return LinkPrediction()

    def sampler(self, split: str, blocks: Sampler, graph: StoreGraph) -> Sampler:
        if split == "train":
            return as_edge_prediction_sampler(
                blocks,
                exclude=WithParallels(self.next_edge.to(graph.device), self.longest_ring),
                negative_sampler=OtherDestinations(self.negatives),
            )
        edges = self.held_out[split].to(graph.device)
        return HeldOutEdges(edges, self._negatives(split, edges[0], graph), blocks)

    def _negatives(self, split: str, sources: torch.Tensor, graph: StoreGraph) -> torch.Tensor:
        """Destinations to which the sources of a split have no edge, held out or not."""
        ends = torch.cat(list(self.held_out.values()), 1).long().to(graph.device)
        known, rows = ends[0] * graph.num_nodes() + ends[1], sources.long()[:, None]

        def draw(attempt: int) -> torch.Tensor:
            # A key of no mini-batch: the same for all ranks and epochs.
            key = SampleKey(self.seed, batch=SPLITS.index(split), hop=attempt)
            return graph.negative_destinations(sources, self.negatives, key=key)

        negatives = draw(0)
        for attempt in range(1, _ATTEMPTS):
            is_edge = torch.isin(rows * graph.num_nodes() + negatives, known)
            if not is_edge.any():
                return negatives
            negatives = torch.where(is_edge, draw(attempt), negatives)
        raise InvalidInputError(
            f"compare edges of the {split} split with pairs that are none",
            f"the sources of {int(is_edge.any(1).sum())} edges seem to have edges to all nodes",
            "choose a graph that is not nearly complete, or smaller links.valid and links.test",
        )


class PairRanking(Criterion):
    """Scores of each edge and then of its other pairs, shape (edges, 1 + others).

    Edges and other pairs count alike in the loss, a binary cross entropy.  An edge counts as
    correct by the share of its other pairs that score lower, equal scores as half: the mean over
    edges estimates the mean area under the ROC curves of their sources' pairs.
    """

    metric_name = AUC

    def loss(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction=reduction)

    def num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positive, negative = outputs[:, :1], outputs[:, 1:]
        return ((positive > negative).double() + 0.5 * (positive == negative)).mean(1).sum()

    def predictions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embeddings, of which the product of two is the score of a pair."""
        return {"embeddings": rows}


class LinkPrediction(Objective):
    """Scores of edges and of pairs without one: dot products of their ends' embeddings.

    A batch is what ``dgl.dataloading.as_edge_prediction_sampler`` gives: input nodes, the graph of
    the edges, that of the other pairs, as many for each edge and of its source, and blocks.
    """

    def __init__(self) -> None:
        super().__init__(PairRanking())

    def outputs(self, model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        """Scores, of each edge and then of its other pairs, float32, shape (edges, 1 + others)."""
        _, edges, negatives, blocks = batch
        # In float32, since products of 16-bit numbers are often equal.
        rows = model_rows(model, blocks).float()
        scores = [
            _products(pairs, rows).view(edges.num_edges(), -1) for pairs in (edges, negatives)
        ]
        return torch.cat(scores, 1)

    def targets(self, batch: Sequence[Any]) -> torch.Tensor:
        """1 for edges, which come first, and 0 for other pairs: float32, of the same shape."""
        _, edges, negatives, _ = batch
        count = edges.num_edges()
        width = 1 + negatives.num_edges() // count
        first = torch.arange(width, device=edges.device) == 0
        return first.float().expand(count, width)


def _products(pairs: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    """Dot products of the rows at the ends of each pair, shape (pairs,)."""
    sources, destinations = pairs.edges()
    return (rows[sources.long()] * rows[destinations.long()]).sum(1)


class WithParallels:
    """For DGL's edge samplers: the edges hidden from a mini-batch, its own and all parallel ones.

    DGL's ``exclude="reverse_id"`` hides one reverse edge each; a graph may have several edges
    between two nodes, each of which would give the others away.  ``next_edge``, in the graph's
    idtype and of shape (num_edges,), and ``longest_ring`` are those of
    :class:`dgl_mgpu.data.links.Rings`.
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`.
    prefetch_safe = True

    def __init__(self, next_edge: torch.Tensor, longest_ring: int) -> None:
        self._next_edge, self._longest_ring = next_edge, longest_ring

    def __call__(self, eids: torch.Tensor) -> torch.Tensor:
        """Ids of the edges that join the same nodes as some edges, some of them repeated."""
        rings, begin, now = [eids], eids, self._next_edge[eids]
        for turn in range(1, self._longest_ring):
            if turn > 1:  # most rings have two edges, and few have many
                goes_on = now != begin
                begin, now = begin[goes_on], now[goes_on]
                if not len(now):
                    break
            rings.append(now)
            now = self._next_edge[now]
        return torch.cat(rings)


class OtherDestinations:
    """For DGL's edge samplers: pairs of each edge's source and of nodes to which it has no edge.

    Unlike those of DGL's ``negative_sampler.Uniform`` they depend on the store's seed, the epoch
    and the batch alone: any number of ranks and workers draws the same, and a run that resumes.
    Each edge has ``k`` pairs.
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`.
    prefetch_safe = True

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, g: StoreGraph, eids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and destinations, shape (k * len(eids),), an edge's one after another."""
        sources, _ = g.find_edges(eids)
        destinations = g.negative_destinations(sources, self._k)
        return sources.repeat_interleave(self._k), destinations.flatten()


class HeldOutEdges(Sampler):
    """Mini-batches of edges that the graph does not have, by their numbers.

    ``edges``, shape (2, n), are sources and destinations, and ``others``, shape (n, k), for each
    edge the destinations that its source is compared with; both in the graph's idtype.  ``blocks``
    samples what the model sees of their ends.
    """

    #: For `dgl_mgpu.sampling.prefetch_safety`.
    prefetch_safe = True

    def __init__(self, edges: torch.Tensor, negatives: torch.Tensor, blocks: BlockSampler) -> None:
        super().__init__()
        self._edges, self._others, self._blocks = edges, negatives, blocks

    def sample(
        self, g: StoreGraph, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, dgl.DGLGraph, dgl.DGLGraph, list[dgl.DGLGraph]]:
        """Input nodes, the edges, the other pairs and blocks, as DGL's edge samplers give."""
        (sources, destinations), negatives = self._edges[:, numbers], self._others[numbers]
        pairs = (
            (sources, destinations),
            (sources.repeat_interleave(negatives.shape[1]), negatives.flatten()),
        )
        graphs = [dgl.graph(ends, num_nodes=g.num_nodes()) for ends in pairs]
        edges, other_pairs = dgl.compact_graphs(graphs)
        input_nodes, _, blocks = self._blocks.sample(g, edges.ndata[dgl.NID])
        return input_nodes, edges, other_pairs, blocks
