"""Edges of seed nodes, which samplers of graphs of tensors draw and pick from.

Seeds on a GPU may have edges in that GPU's memory or, pinned, in the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.graph import random
from dgl_mgpu.graph.dispatch import TensorBacked, as_tensor, is_null
from dgl_mgpu.graph.index import SubgraphIndex, TensorIndex
from dgl_mgpu.graph.pinning.pinned_graphs import pinned_tensors
from dgl_mgpu.graph.pinning.pinning import gather_pinned_tensor_rows
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.ops import SampledNeighbors, SampleKey
from dgl_mgpu.ops import sample_neighbors as sample_edges
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.sampling.views import compressed_view, scalars_view

ACTION = "sample neighbors"
#: Of weights that operators take.
WEIGHT_DTYPES = torch.float32, torch.float64, torch.bool, torch.uint8


def new_key() -> SampleKey:
    """The key of a new call, which no other has had since DGL was seeded."""
    seed, call = random.next_key()
    return SampleKey(seed, batch=call)


def resolve_graph(
    graph: HeteroGraphIndex, arrays: Iterable[Any]
) -> tuple[TensorIndex, torch.device]:
    """A call's graph as tensors, and the device on which its arguments have it work.

    Raises InvalidInputError if nodes are on a GPU, and the graph is on the CPU and not pinned.
    """
    devices = (array.device for array in arrays if isinstance(array, torch.Tensor))
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    if isinstance(graph, TensorIndex) and (graph.device.type != "cpu" or device.type == "cpu"):
        return graph, graph.device
    pinned = pinned_tensors(graph)
    if pinned is None:
        raise InvalidInputError(
            f"sample a graph on the CPU for nodes on {device}",
            "it is not pinned",
            f"pin it with g.pin_memory_(), move it with g.to('{device}'), or the nodes to the CPU",
        )
    return pinned, device


class Sample(NamedTuple):
    """What was sampled of one edge type."""

    seeds: torch.Tensor
    edges: SampledNeighbors


def format_of(edge_dir: str) -> str:
    formats = {"in": "csc", "out": "csr"}
    if edge_dir not in formats:
        raise InvalidInputError(ACTION, f"edge_dir is {edge_dir!r}", "pass 'in' or 'out'")
    return formats[edge_dir]


def seeds_of(
    index: TensorIndex, nodes: Sequence[Any], etype: int, edge_dir: str
) -> torch.Tensor | None:
    """The seeds at whose edges of a type is looked; None for none."""
    source, target = index.schema.ends[etype]
    seeds = nodes[target if edge_dir == "in" else source]
    return None if is_null(seeds) else as_tensor(seeds)


def as_weights(prob: Any) -> torch.Tensor | None:
    """Probabilities in a dtype that operators know; None for equal ones."""
    if is_null(prob):
        return None
    weights = as_tensor(prob).reshape(-1)
    if weights.dtype in WEIGHT_DTYPES:
        return weights
    return weights.view(torch.uint8) if weights.dtype == torch.int8 else weights.float()


def values_at(values: Any, ids: torch.Tensor) -> Any:
    """Rows of a tensor on the device of ``ids``, or pinned; None of None."""
    if values is None:
        return None
    values = as_tensor(values)
    if values.device == ids.device:
        return values[ids.long()]
    return gather_pinned_tensor_rows(values, ids)


def all_edges(view: GraphView, seeds: torch.Tensor) -> SampledNeighbors:
    """All edges of seeds, in the order in which they are stored."""
    return sample_edges(view, seeds, -1, SampleKey(0))


def edge_rows(edges: SampledNeighbors) -> torch.Tensor:
    """For each edge the place of its seed among the seeds, int64."""
    places = torch.arange(len(edges.indptr) - 1, device=edges.eids.device)
    return places.repeat_interleave(edges.indptr.diff(), output_size=len(edges.eids))


def keep(edges: SampledNeighbors, places: torch.Tensor) -> SampledNeighbors:
    """The edges at some places, int64 and ascending."""
    return SampledNeighbors(
        torch.searchsorted(places, edges.indptr), edges.neighbors[places], edges.eids[places]
    )


class IdFilter(TensorBacked):
    """A set of ids, int32 or int64, shape (n,): what is behind ``dgl.utils.Filter``."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.sort().values

    def holds(self, test: torch.Tensor) -> torch.Tensor:
        """Whether each id is in the set, bool, shape (m,)."""
        if not len(self._ids):
            return torch.zeros_like(test, dtype=torch.bool)
        place = torch.searchsorted(self._ids, test.to(self._ids.dtype))
        return self._ids[place.clamp_(max=len(self._ids) - 1)] == test


def create_from_set(ids: torch.Tensor) -> IdFilter:
    """A filter of ids, int32 or int64, shape (n,): ``_CAPI_DGLFilterCreateFromSet``."""
    return IdFilter(ids)


def find_included(ids: IdFilter, test: torch.Tensor) -> torch.Tensor:
    """Places in ``test`` of ids in the set, ascending: ``_CAPI_DGLFilterFindIncludedIndices``."""
    return ids.holds(test).nonzero()[:, 0].to(test.dtype)


def find_excluded(ids: IdFilter, test: torch.Tensor) -> torch.Tensor:
    """Places in ``test`` of other ids, ascending: ``_CAPI_DGLFilterFindExcludedIndices``."""
    return ids.holds(test).logical_not_().nonzero()[:, 0].to(test.dtype)


def not_excluded(edges: SampledNeighbors, excluded: Any) -> torch.Tensor:
    """Places of the edges that are not excluded."""
    left_out = IdFilter(as_tensor(excluded).to(edges.eids.device)).holds(edges.eids)
    return left_out.logical_not_().nonzero()[:, 0]


def row_bounds(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where in sorted ``rows`` each row begins, and the last ends; int64."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device))


def _sums_before(counts: torch.Tensor) -> torch.Tensor:
    """Sums of all that come before each place, and of all; int64."""
    return torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))


def draw(
    view: GraphView,
    seeds: torch.Tensor,
    fanout: int,
    key: SampleKey,
    replace: bool,
    weights: torch.Tensor | None,
) -> SampledNeighbors:
    if weights is None:
        return sample_edges(view, seeds, fanout, key, replace=replace)
    rows = scalars_view(weights, seeds.device)
    try:
        return sample_edges(view, seeds, fanout, key, replace=replace, weights=rows)
    except InvalidWeightError:
        # The operator refuses a seed whose edges all have weight 0; DGL samples nothing there.
        edges = all_edges(view, seeds)
        positive = values_at(weights, edges.eids).nonzero()[:, 0]
        has_any = keep(edges, positive).indptr.diff() > 0
        if bool((has_any | (edges.indptr.diff() == 0)).all()):
            raise
    sample = sample_edges(view, seeds[has_any], fanout, key, replace=replace, weights=rows)
    counts = torch.zeros_like(seeds, dtype=torch.int64)
    counts[has_any] = sample.indptr.diff()
    return sample._replace(indptr=_sums_before(counts))


def pick(
    edges: SampledNeighbors,
    fanout: int,
    key: SampleKey,
    replace: bool,
    weights: torch.Tensor | None,
) -> SampledNeighbors:
    """Sample from given edges of seeds, with weights by their places in them."""
    if weights is not None:
        positive = weights.nonzero()[:, 0]
        edges, weights = keep(edges, positive), weights[positive]
    if fanout < 0:
        return edges
    count, device = len(edges.indptr) - 1, edges.eids.device
    # Without edge ids, they are places.
    matrix = Compressed(edges.indptr, edges.neighbors, None)
    picked = draw(
        compressed_view(matrix, count, count, device),
        torch.arange(count, device=device),
        fanout,
        key,
        replace,
        weights,
    )
    return picked._replace(eids=edges.eids[picked.eids.long()])


def as_subgraph(
    index: TensorIndex, samples: Sequence[Sample | None], edge_dir: str, device: torch.device
) -> SubgraphIndex:
    """All nodes of a graph, and the sampled edges of each type."""
    relations, induced = [], []
    for relation, sample in zip(index.relations, samples, strict=True):
        if sample is None:
            near = far = eids = torch.empty(0, dtype=index.idtype, device=device)
        else:
            (indptr, far, eids) = sample.edges
            near = sample.seeds.to(far.dtype).repeat_interleave(indptr.diff(), output_size=len(far))
        coo = Coo(far, near) if edge_dir == "in" else Coo(near, far)
        relations.append(Relation(relation.num_src, relation.num_dst, coo=coo))
        induced.append(eids)
    num_nodes = [index.num_nodes(ntype) for ntype in range(index.schema.num_ntypes)]
    return SubgraphIndex(TensorIndex(index.schema, num_nodes, relations), [], induced)
