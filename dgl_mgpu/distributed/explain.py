"""Explanations of what a model makes of a partitioned graph: masks of its features and edges.

A graph's explanation is learned by all ranks, each with the masks of its own edges; the mask of
features is the same on all.  That of a node is learned from the node's surroundings, which are
small: every rank gets them, and learns the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import dgl
import torch
from dgl import DGLGraph
from dgl.nn import GNNExplainer, HeteroGNNExplainer
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.partition import random_bits
from dgl_mgpu.distributed.subgraph import khop_in_subgraph, rows_of_edges, rows_of_nodes
from dgl_mgpu.graph.originals import originals

_MODULE = "dgl.nn.pytorch.explain.gnnexplainer:"
_EPSILON = 1e-15


class _Masks:
    """Masks of a partitioned graph's features and edges, and what they add to the loss.

    The first values depend on the first rank's seed alone, and not on who has which edges.
    """

    def __init__(self, explainer: Any, graph: PartitionedGraph) -> None:
        self._explainer = explainer
        self._index = graph._graph
        self._seed = _common_seed(graph)
        self._num_ranks = graph.ownership[graph.ntypes[0]].num_ranks
        self._generator = torch.Generator().manual_seed(self._seed)

    def of_features(self, rows: torch.Tensor) -> nn.Parameter:
        """One for all nodes of a type, shape (1, width); its gradient is that of all ranks."""
        drawn = torch.randn(1, rows.shape[1], generator=self._generator, device="cpu")
        mask = nn.Parameter(drawn.to(rows.device) * 0.1)
        mask.register_hook(lambda gradient: self._index.all_gather(gradient).sum(0))
        return mask

    def of_edges(self, number: int, deviation: float) -> nn.Parameter:
        """One for each own edge of a relation."""
        bits = random_bits(self._index.edge_ids(number).long(), self._seed + number)
        normal = (bits.double() / (1 << 63)).erfinv() * sqrt(2)
        return nn.Parameter(normal.float().clamp(-10, 10) * deviation)

    def regularised(
        self,
        loss: torch.Tensor,
        of_features: Iterable[nn.Parameter],
        of_edges: Iterable[nn.Parameter],
    ) -> torch.Tensor:
        """This rank's share of the loss and of what regularises the masks."""
        explainer = self._explainer
        for mask in of_features:
            loss = loss + explainer.beta1 * mask.sigmoid().mean()
            loss = loss + explainer.beta2 * _entropy(mask).mean()
        loss = loss / self._num_ranks
        for mask in of_edges:
            count = torch.full((), len(mask), device=mask.device)
            num_edges = self._index.all_gather(count).sum()
            loss = loss + explainer.alpha1 * mask.sigmoid().sum()
            loss = loss + explainer.alpha2 * _entropy(mask).sum() / num_edges
        return loss


def _common_seed(graph: PartitionedGraph) -> int:
    """One that torch draws on the first rank."""
    drawn = torch.randint(1 << 62, (), device="cpu").to(graph.device)
    return int(graph._graph.all_gather(drawn)[0])


def _entropy(mask: torch.Tensor) -> torch.Tensor:
    chance = mask.sigmoid()
    rest = 1 - chance
    return -chance * (chance + _EPSILON).log() - rest * (rest + _EPSILON).log()


def _deviation(num_nodes: int) -> float:
    """Of edges' masks at first, by the number of nodes at both ends; as DGL has it."""
    return nn.init.calculate_gain("relu") * sqrt(2 / max(num_nodes, 1))


class _OfPart(GNNExplainer):
    """DGL's explainer of a graph's prediction, on a rank's part."""

    def _init_masks(self, graph: PartitionedGraph, feat: torch.Tensor) -> Any:
        self._masks = _Masks(self, graph)
        num_nodes = graph.ownership[graph.ntypes[0]].num_nodes
        return self._masks.of_features(feat), self._masks.of_edges(0, _deviation(2 * num_nodes))

    def _loss_regularize(self, loss: torch.Tensor, feat_mask: Any, edge_mask: Any) -> torch.Tensor:
        return self._masks.regularised(loss, [feat_mask], [edge_mask])


class _OfHeteroPart(HeteroGNNExplainer):
    """The same of several types of nodes or edges."""

    def _init_masks(self, graph: PartitionedGraph, feat: Mapping[str, torch.Tensor]) -> Any:
        self._masks = _Masks(self, graph)
        owned = graph.ownership
        return (
            {ntype: self._masks.of_features(rows) for ntype, rows in feat.items()},
            {
                etype: self._masks.of_edges(
                    number, _deviation(owned[etype[0]].num_nodes + owned[etype[2]].num_nodes)
                )
                for number, etype in enumerate(graph.canonical_etypes)
            },
        )

    def _loss_regularize(
        self, loss: torch.Tensor, feat_masks: Any, edge_masks: Any
    ) -> torch.Tensor:
        return self._masks.regularised(loss, feat_masks.values(), edge_masks.values())


def explain_graph(explainer: Any, graph: PartitionedGraph, feat: Any, **others: Any) -> Any:
    """As the explainer's own method; masks of edges are those of this rank's.  Collective."""
    of_part = _logging_once(explainer)
    is_hetero = isinstance(explainer, HeteroGNNExplainer)
    of_part.__class__ = _OfHeteroPart if is_hetero else _OfPart
    return _original(explainer, "explain_graph")(of_part, graph, feat, **others)


def explain_node(
    explainer: GNNExplainer,
    node_id: Any,
    graph: PartitionedGraph,
    feat: torch.Tensor,
    **others: Any,
) -> Any:
    """As the explainer's own method, by ids in the whole graph; the same on all ranks.

    Collective.
    """
    around, numbers = khop_in_subgraph(graph, node_id, explainer.num_hops)
    nodes, edges = around.ndata[dgl.NID].long(), around.edata[dgl.EID].long()
    tensors = {k: rows for k, rows in others.items() if isinstance(rows, torch.Tensor)}
    # Alike on all ranks: where there are neither nodes nor edges, there are as many of both.
    sizes = graph.num_nodes(), graph.num_edges(), {k: len(rows) for k, rows in tensors.items()}
    of_ranks = Communicator.of_all_machines().all_gather(sizes)
    for key, rows in tensors.items():
        if all(lengths[key] == num_nodes for num_nodes, _, lengths in of_ranks):
            others[key] = rows_of_nodes(graph, rows, nodes)
        elif all(lengths[key] == num_edges for _, num_edges, lengths in of_ranks):
            others[key] = rows_of_edges(graph, rows, edges)
    rows = rows_of_nodes(graph, feat, nodes)
    return _explain_around(explainer, graph, around, (numbers[graph.ntypes[0]],), rows, others)


def explain_node_of_type(
    explainer: HeteroGNNExplainer, ntype: str, node_id: Any, graph: PartitionedGraph,
    feat: Mapping[str, torch.Tensor], **others: Any,
) -> Any:  # fmt: skip
    """The same of several types of nodes or edges."""
    around, numbers = khop_in_subgraph(graph, {ntype: node_id}, explainer.num_hops)
    rows = {
        key: rows_of_nodes(graph, of_type, around.nodes[key].data[dgl.NID].long(), key)
        for key, of_type in feat.items()
    }
    return _explain_around(explainer, graph, around, (ntype, numbers[ntype]), rows, others)


def _explain_around(
    explainer: Any, graph: PartitionedGraph, around: DGLGraph, node: tuple[Any, ...], feat: Any,
    others: Mapping[str, Any],
) -> Any:  # fmt: skip
    """What DGL's explainer learns from a node's surroundings, with the same draws everywhere."""
    seed = _common_seed(graph)
    explain = _original(explainer, "explain_node")
    with torch.random.fork_rng([graph.device] if graph.device.type == "cuda" else []):
        torch.manual_seed(seed)
        center, subgraph, *masks = explain(_logging_once(explainer), *node, around, feat, **others)
    for ntype in around.ntypes:
        data = subgraph.nodes[ntype].data
        data[dgl.NID] = around.nodes[ntype].data[dgl.NID][data[dgl.NID].long()]
    for etype in around.canonical_etypes:
        data = subgraph.edges[etype].data
        data[dgl.EID] = around.edges[etype].data[dgl.EID][data[dgl.EID].long()]
    return center, subgraph, *masks


def _original(explainer: Any, method: str) -> Any:
    is_hetero = isinstance(explainer, HeteroGNNExplainer)
    return originals[f"{_MODULE}{'HeteroGNNExplainer' if is_hetero else 'GNNExplainer'}.{method}"]


def _logging_once(explainer: Any) -> Any:
    """A copy that logs on the first rank alone."""
    explainer = copy.copy(explainer)
    explainer.log = explainer.log and not Communicator.of_all_machines().rank
    return explainer
