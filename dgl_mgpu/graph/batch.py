"""Graphs put together and taken apart: batches, slices of them, and relations as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from dgl import ndarray as nd
from dgl.graph_index import GraphIndex
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.graph.dispatch import TensorBacked, as_tensor
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import Coo, Relation, ranges


def joint_union(metagraph: GraphIndex, indexes: Sequence[TensorIndex]) -> TensorIndex:
    """The edges of several graphs on the same nodes: ``_CAPI_DGLHeteroJointUnion``."""
    _check_alike("join graphs", indexes)
    first = indexes[0]
    if any(index._num_nodes != first._num_nodes for index in indexes):
        raise InvalidCallError(
            "join graphs on the same nodes",
            f"their numbers of nodes are {[index._num_nodes for index in indexes]}",
            "pass graphs with the same number of nodes of each type",
        )
    relations = [
        Relation(parts[0].num_src, parts[0].num_dst, coo=_joined(parts))
        for parts in zip(*(index.relations for index in indexes), strict=True)
    ]
    return TensorIndex(GraphSchema(metagraph), first._num_nodes, relations)


def disjoint_union(metagraph: GraphIndex, indexes: Sequence[TensorIndex]) -> TensorIndex:
    """Several graphs as one, graph after graph: ``_CAPI_DGLHeteroDisjointUnion_v2``."""
    _check_alike("put graphs into a batch", indexes)
    schema, device = GraphSchema(metagraph), indexes[0].device
    sizes = [index._num_nodes for index in indexes]
    totals = [sum(counts) for counts in zip(*sizes, strict=True)]
    before = torch.tensor(sizes, dtype=indexes[0].idtype).view(len(indexes), -1)
    before = (before.cumsum(0, dtype=before.dtype) - before).to(device)
    relations = []
    for etype, (src, dst) in enumerate(schema.ends):
        parts = [index.relations[etype] for index in indexes]
        counts = torch.tensor([part.num_edges for part in parts], device=device)
        edges = Coo(
            *(
                end + before[:, ntype].repeat_interleave(counts, output_size=end.numel())
                for end, ntype in zip(_joined(parts), (src, dst), strict=True)
            )
        )
        relations.append(Relation(totals[src], totals[dst], coo=edges))
    return TensorIndex(schema, totals, relations)


def _check_alike(action: str, indexes: Sequence[HeteroGraphIndex]) -> None:
    kinds_of_ids = {
        (index.idtype, index.device)
        if isinstance(index, TensorIndex)
        else (getattr(torch, index.dtype), torch.device("cpu"))
        for index in indexes
    }
    if len(kinds_of_ids) > 1:
        raise InvalidCallError(
            action,
            "they have ids of "
            + " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds_of_ids)),
            "convert all to the same dtype and device, with g.int() or g.long() and g.to()",
        )
    kinds = {(index.number_of_ntypes(), index.number_of_etypes()) for index in indexes}
    if len(kinds) > 1:
        raise InvalidCallError(
            action,
            f"their numbers of node types and edge types are {sorted(kinds)}",
            "pass graphs with the same node and edge types",
        )


def _joined(parts: Iterable[Relation]) -> Coo:
    edges = [part.coo() for part in parts]
    return Coo(torch.cat([row for row, _ in edges]), torch.cat([col for _, col in edges]))


def disjoint_partition(index: TensorIndex, num_nodes: Any, num_edges: Any) -> list[TensorIndex]:
    """The graphs of a batch: ``_CAPI_DGLHeteroDisjointPartitionBySizes_v2``.

    Arrays, int64, have the number in every graph for the first type, then for the next one.
    """
    nodes = as_tensor(num_nodes).view(index.schema.num_ntypes, -1).tolist()
    edges = as_tensor(num_edges).view(len(index.schema.ends), -1).tolist()
    parts = zip(
        zip(*nodes, strict=True),
        zip(*map(_starts, nodes), strict=True),
        zip(*edges, strict=True),
        zip(*map(_starts, edges), strict=True),
        strict=True,
    )
    return [_sliced(index, *part) for part in parts]


def _starts(sizes: list[int]) -> list[int]:
    return list(accumulate(sizes[:-1], initial=0))


def slice_index(
    index: TensorIndex, num_nodes: Any, start_nid: Any, num_edges: Any, start_eid: Any
) -> TensorIndex:
    """One graph of a batch: ``_CAPI_DGLHeteroSlice``.

    Arrays, int64, say of every type how many there are in the graph, and the first's id in the
    batch.
    """
    arrays = (num_nodes, start_nid, num_edges, start_eid)
    return _sliced(index, *(as_tensor(array).tolist() for array in arrays))


def _sliced(
    index: TensorIndex,
    num_nodes: Sequence[int],
    first_node: Sequence[int],
    num_edges: Sequence[int],
    first_edge: Sequence[int],
) -> TensorIndex:
    relations = []
    for etype, (src, dst) in enumerate(index.schema.ends):
        row, col = (
            end.narrow(0, first_edge[etype], num_edges[etype])
            for end in index.relations[etype].coo()
        )
        edges = Coo(row - first_node[src], col - first_node[dst])
        relations.append(Relation(num_nodes[src], num_nodes[dst], coo=edges))
    return TensorIndex(index.schema, num_nodes, relations)


@dataclass
class FlattenedIndex(TensorBacked):
    """Several relations as one, with the type and id that each node and edge had.

    Of one node type where sources and destinations have the same types, else of two.  Types and ids
    of nodes are int64, of edges of the ids' dtype; sets of types are on the CPU.
    """

    graph: TensorIndex
    induced_srctype: torch.Tensor
    induced_srctype_set: nd.NDArray
    induced_srcid: torch.Tensor
    induced_dsttype: torch.Tensor
    induced_dsttype_set: nd.NDArray
    induced_dstid: torch.Tensor
    induced_etype: torch.Tensor
    induced_etype_set: nd.NDArray
    induced_eid: torch.Tensor


def flatten_relations(index: TensorIndex, etypes: Sequence[int]) -> FlattenedIndex:
    """Relations as one: nodes type after type, edges relation after relation as given.

    ``_CAPI_DGLHeteroGetFlattenedGraph``.
    """
    etypes = [int(etype) for etype in etypes]
    ends = [index.schema.ends[etype] for etype in etypes]
    sources = _NodeTypes(index, {src for src, _ in ends})
    destinations = _NodeTypes(index, {dst for _, dst in ends})
    edges = [index.relations[etype].coo() for etype in etypes]
    row = torch.cat(
        [coo.row + sources.start[src] for coo, (src, _) in zip(edges, ends, strict=True)]
    )
    col = torch.cat(
        [coo.col + destinations.start[dst] for coo, (_, dst) in zip(edges, ends, strict=True)]
    )
    relation = Relation(sources.total, destinations.total, coo=Coo(row, col))
    types, ids = _numbered(etypes, [coo.row.numel() for coo in edges], index.device)
    return FlattenedIndex(
        TensorIndex.single(relation, 1 if sources.types == destinations.types else 2),
        *sources.induced(),
        *destinations.induced(),
        types.to(index.idtype),
        nd.array(np.asarray(etypes, dtype=np.int64)),
        ids.to(index.idtype),
    )


class _NodeTypes:
    """Nodes of several types, one type after the other."""

    def __init__(self, index: TensorIndex, types: set[int]) -> None:
        self.types = sorted(types)
        self._sizes = [index.num_nodes(ntype) for ntype in self.types]
        self._device = index.device
        self.start = dict(zip(self.types, _starts(self._sizes), strict=True))
        self.total = sum(self._sizes)

    def induced(self) -> tuple[torch.Tensor, nd.NDArray, torch.Tensor]:
        types, ids = _numbered(self.types, self._sizes, self._device)
        return types, nd.array(np.asarray(self.types, dtype=np.int64)), ids


def _numbered(
    types: list[int], sizes: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Type of each of so many items of each type, and its number among them; int64."""
    total = sum(sizes)
    counts = torch.tensor(sizes, device=device)
    of_type = torch.tensor(types, device=device).repeat_interleave(counts, output_size=total)
    return of_type, ranges(torch.zeros_like(counts), counts, total)
