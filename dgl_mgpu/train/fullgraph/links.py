"""Link prediction on a whole graph: every edge is learned in each step, against other pairs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.links import HeldOut, edges_to_learn
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.pairs import Pairs
from dgl_mgpu.distributed.partition import random_bits
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train.fullgraph.trainer import WholeGraphTrainer
from dgl_mgpu.train.minibatch.links import PairRanking

#: Attempts to draw pairs that are not edges.
_ATTEMPTS = 20


def edges_of_splits(links: HeldOut) -> dict[str, torch.Tensor]:
    """Sources and destinations of the edges of each part of the split, int64, shape (2, n)."""
    rest = links.dataset
    places = edges_to_learn(rest)
    train = torch.stack(
        [
            torch.from_numpy(rest.indices[places]).long(),
            torch.searchsorted(torch.from_numpy(rest.indptr), torch.from_numpy(places), right=True)
            - 1,
        ]
    )
    held_out = (torch.from_numpy(edges).long() for edges in (links.valid, links.test))
    return dict(zip(SPLITS, (train, *held_out), strict=True))


class FullGraphLinkTrainer(WholeGraphTrainer):
    """Learns which pairs of nodes are edges of a partitioned graph of one type.

    An epoch is one step, in which every edge is learned: the model's rows of both ends, whose dot
    product scores a pair, come from a graph that has it.  Each is compared with ``negatives`` pairs
    of the same source and other destinations, drawn anew in each epoch from the seed, the epoch and
    the edge's number alone; those of edges that are held out from the graph stay.

    ``edges`` are those of `edges_of_splits` on the first rank, which sends each rank the edges from
    its nodes; others pass None.  Other arguments are those of `WholeGraphTrainer`.

    Raises InvalidInputError if no pairs are found that are not edges.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: PartitionedGraph,
        inputs: Mapping[str, Any],
        edges: Mapping[str, torch.Tensor] | None,
        *,
        negatives: int = 1,
        seed: int = 0,
        eval_every: int = 1,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self._seed, self._negatives = seed, negatives
        (owned,) = graph.ownership.values()
        self._positions = owned.positions(torch.int64, graph.device)
        ranks = Communicator.of_all_machines()
        sizes = ranks.broadcast_from_rank0(
            "count the edges of each split",
            lambda: {name: of_split.shape[1] for name, of_split in (edges or {}).items()},
        )
        #: By split: the numbers of this rank's edges, their sources' rows, their destinations.
        self._edges = {
            name: _own_edges(graph, self._positions, None if edges is None else edges[name], size)
            for name, size in sizes.items()
        }
        edges_here = [self._keys(*of_split[1:]) for of_split in self._edges.values()]
        ids = owned.nodes(ranks.rank, graph.device)
        loops = self._keys(torch.arange(len(ids), device=ids.device), ids)
        #: Pairs that an edge is not compared with.
        self._known = torch.cat([*edges_here, loops])
        super().__init__(
            model, optimizer, graph, inputs, PairRanking(),
            {name: len(numbers) for name, (numbers, _, _) in self._edges.items()},
            eval_every=eval_every, precision=precision,
        )  # fmt: skip
        self._loss_terms = self._totals["train"] * (1 + negatives)
        self._held_out = {name: self._pairs(name, 0) for name in SPLITS[1:]}

    def _examples(self, rows: torch.Tensor, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = self._pairs(split, self.epoch) if split == "train" else self._held_out[split]
        scores = pairs.products(rows).view(-1, 1 + self._negatives)
        targets = torch.zeros_like(scores)
        targets[:, 0] = 1
        return scores, targets

    def _pairs(self, split: str, epoch: int) -> Pairs:
        """Each edge of a split, and then its other pairs."""
        _, rows, destinations = self._edges[split]
        others = self._ranks.run_all(
            f"compare edges of the {split} split with pairs that are none",
            partial(self._other_destinations, split, epoch),
        )
        together = torch.cat([destinations.unsqueeze(1), others], 1)
        return Pairs(
            self._graph,
            rows.repeat_interleave(1 + self._negatives),
            self._positions[together.flatten()],
        )

    def _other_destinations(self, split: str, epoch: int) -> torch.Tensor:
        """For each edge other nodes to which its source has none, shape (edges, negatives)."""
        numbers, rows, _ = self._edges[split]
        places = torch.arange(self._negatives, device=rows.device)
        draws = numbers.unsqueeze(1) * self._negatives + places
        rows = rows.unsqueeze(1).expand_as(draws)
        found = torch.full_like(draws, -1)
        for attempt in range(_ATTEMPTS):
            seed = ((self._seed * len(SPLITS) + SPLITS.index(split)) << 32) + epoch * _ATTEMPTS
            bits = random_bits(draws, seed + attempt)
            drawn = (bits >> 1 & (1 << 62) - 1) % len(self._positions)
            found = torch.where(found < 0, drawn, found)
            is_edge = torch.isin(self._keys(rows, found), self._known)
            found = found.masked_fill(is_edge, -1)
            if not is_edge.any():
                return found
        raise InvalidInputError(
            f"compare edges of the {split} split with pairs that are none",
            f"the sources of {int((found < 0).any(1).sum())} edges seem to have edges to all nodes",
            "choose a graph that is not nearly complete, or smaller links.valid and links.test",
        )

    def _keys(self, rows: torch.Tensor, destinations: torch.Tensor) -> torch.Tensor:
        """A number for each pair of an own node and any."""
        return rows * len(self._positions) + destinations


def _own_edges(
    graph: PartitionedGraph, positions: torch.Tensor, edges: torch.Tensor | None, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The edges from this rank's nodes, of those that the first rank has; see `_edges`."""
    ranks = Communicator.of_all_machines()
    if edges is None:
        ends = torch.empty(2, size, dtype=torch.int64, device=graph.device)
    else:
        ends = edges.to(graph.device).contiguous()
    if ranks.size > 1:
        dist.broadcast(ends, 0)
    (owned,) = graph.ownership.values()
    rows = positions[ends[0]] - owned.bounds[ranks.rank]
    numbers = ((rows >= 0) & (rows < owned.count(ranks.rank))).nonzero().squeeze(1)
    return numbers, rows[numbers], ends[1, numbers]
