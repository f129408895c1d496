"""Layers that were sampled regardless of types, by the types of their nodes and edges.

GraphBolt samples and splits layer by layer; here all layers have been sampled at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from dgl.graphbolt.base import ORIGINAL_EDGE_ID, CSCFormatBase, etype_str_to_tuple
from dgl.graphbolt.impl.sampled_subgraph_impl import SampledSubgraphImpl
from torch import Tensor

from dgl_mgpu.dgl.graphbolt.picking import index_select
from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops.blocks import SampledBlock


def can_be_split(graph: Any) -> bool:
    """Whether all types of nodes are sources, as GraphBolt drops others after a layer."""
    types = graph.edge_type_to_id, graph.node_type_to_id, graph.node_type_offset
    if any(it is None for it in types):
        return False
    sources = {etype_str_to_tuple(etype)[0] for etype in graph.edge_type_to_id}
    return sources == set(graph.node_type_to_id)


def split_by_type(
    blocks: Sequence[SampledBlock], graph: Any, seeds: Mapping[str, Tensor]
) -> list[Any]:
    """Sampled subgraphs by type, the one nearest the input first.

    The nodes of each type are in the order in which they are in the blocks: seeds first.
    """
    nodes = _Nodes(blocks[0].src_nodes, graph)
    edges = [_Edges(block, graph, nodes) for block in blocks]
    # The sources of a block are the first so many of all nodes: those of the block before it.
    sizes = [len(block.src_nodes) for block in blocks] + [blocks[-1].num_dst]
    num_nodes = torch.stack([nodes.counts[size] for size in sizes])
    num_edges = torch.stack([it.counts for it in edges])
    known = torch.cat([num_nodes.flatten(), num_edges.flatten()]).tolist()
    num_ntypes = num_nodes.shape[1]
    by_size = [known[n : n + num_ntypes] for n in range(0, num_nodes.numel(), num_ntypes)]
    by_layer = known[num_nodes.numel() :]
    _check(seeds, graph, by_size[-1])
    num_etypes = num_edges.shape[1]
    ids = nodes.by_type(by_size[0])
    ntypes = graph.node_type_to_id
    subgraphs = []
    for layer, of in enumerate(edges):
        rows, columns = (
            {ntype: ids[number][0][: by_size[at][number]] for ntype, number in ntypes.items()}
            for at in (layer, layer + 1)
        )
        targets = [
            places[:count] for (_, places), count in zip(ids, by_size[layer + 1], strict=True)
        ]
        counts = by_layer[layer * num_etypes : (layer + 1) * num_etypes]
        csc, eids = of.by_type(counts, targets)
        subgraphs.append(
            SampledSubgraphImpl(
                sampled_csc=csc,
                original_column_node_ids=columns if layer + 1 < len(edges) else dict(seeds),
                original_row_node_ids=rows,
                original_edge_ids=eids,
            )
        )
    return subgraphs


def _check(seeds: Mapping[str, Tensor], graph: Any, counts: Sequence[int]) -> None:
    """Raise IdOutOfRangeError if seeds were of other types: of each there are so many."""
    for ntype, number in graph.node_type_to_id.items():
        if len(seeds[ntype]) != counts[number]:
            raise IdOutOfRangeError(
                "sample neighbors",
                f"ids of '{ntype}' are those of another type",
                f"pass ids in [0, {graph.num_nodes[ntype]})",
            )


def _in_order(types: Tensor, count: int) -> Tensor:
    """The places of elements of each of the types 0 to ``count``, one type after the other."""
    if types.is_cuda:
        return types.sort(stable=True).indices  # without a wait for each type
    # Types are few: that takes less time than sorting.
    return torch.cat([(types == number).nonzero()[:, 0] for number in range(count)])


class _Nodes:
    """All nodes of a mini-batch, and their numbers among those of their types."""

    def __init__(self, nodes: Tensor, graph: Any) -> None:
        self._nodes = nodes
        self._offsets = graph._c_csc_graph.type_offsets(nodes.device)
        self._types = torch.searchsorted(self._offsets, nodes, right=True) - 1
        kinds = torch.arange(len(self._offsets) - 1, device=nodes.device)
        is_of_type = (self._types[:, None] == kinds).long()
        #: How many of the first nodes are of each type, shape (n + 1, types).
        self.counts = torch.nn.functional.pad(is_of_type.cumsum(0), (0, 0, 1, 0))
        numbers = self.counts[:-1].gather(1, self._types[:, None])[:, 0]
        self.numbers = numbers.to(nodes.dtype)

    def by_type(self, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Ids within each type, of which there are so many, and their places among all nodes."""
        places = _in_order(self._types, len(counts))
        ids = self._nodes[places] - self._offsets[self._types[places]].to(self._nodes.dtype)
        bounds = [*pairwise(accumulate(counts, initial=0))]
        return [(ids[first:last], places[first:last]) for first, last in bounds]


class _Edges:
    """The edges of a layer in the order of their types, and within these of their destinations."""

    def __init__(self, block: SampledBlock, graph: Any, nodes: _Nodes) -> None:
        self._graph, count = graph, len(block.src)
        self._num_etypes = 2 + max(graph.edge_type_to_id.values())
        types = index_select(graph.type_per_edge, block.eids).long()
        # Those of no type that there is come last, and are left out.
        is_known = (types >= 0) & (types < self._num_etypes - 1)
        types = torch.where(is_known, types, self._num_etypes - 1)
        lengths = block.indptr.diff()
        rows = torch.arange(block.num_dst, device=lengths.device)
        rows = rows.repeat_interleave(lengths, output_size=count)
        #: By type and destination.
        degrees = torch.zeros(
            self._num_etypes * block.num_dst, dtype=torch.int64, device=lengths.device
        )
        degrees.index_add_(0, types * block.num_dst + rows, torch.ones_like(rows))
        self._degrees = degrees.view(self._num_etypes, block.num_dst)
        order = _in_order(types, self._num_etypes)
        self._sources = nodes.numbers[block.src.long()][order]
        self._eids = None
        original = (graph.edge_attributes or {}).get(ORIGINAL_EDGE_ID)
        if original is not None:
            self._eids = index_select(original, block.eids[order])
        self.counts = self._degrees.sum(1)

    def by_type(
        self, counts: Sequence[int], targets: Sequence[Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Each type's edges, of which there are so many, and their ids if edges have some.

        ``targets`` are the places of the destinations, by node type.
        """
        ends = [0, *accumulate(counts)]
        cscs, eids = {}, {}
        for etype, number in self._graph.edge_type_to_id.items():
            target = self._graph.node_type_to_id[etype_str_to_tuple(etype)[2]]
            lengths = self._degrees[number][targets[target]]
            part = slice(ends[number], ends[number + 1])
            cscs[etype] = CSCFormatBase(
                torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), self._sources[part]
            )
            if self._eids is not None:
                eids[etype] = self._eids[part]
        return cscs, eids if self._eids is not None else None
