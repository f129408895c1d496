"""Sampling all hops of a mini-batch by one operator, and making DGL's blocks of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from dgl.base import EID, NID
from dgl.graph_index import from_coo
from dgl.heterograph import DGLBlock, DGLGraph
from dgl.heterograph_index import create_heterograph_from_relations, create_unitgraph_from_csr
from dgl.utils import toindex

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.graph import random
from dgl_mgpu.graph.block_frames import BlockFrame, ColumnSource, Features
from dgl_mgpu.graph.blocks import BlockTypes, block_types
from dgl_mgpu.graph.dispatch import is_passed_as_tensor
from dgl_mgpu.graph.errors import as_dgl_error
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.pinning.pinned_graphs import pinned_tensors
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.ops import (
    BlockEdges,
    EtypeBlock,
    GraphView,
    RowView,
    SampleKey,
    VisitedBlock,
    sample_blocks_async,
    sample_etype_blocks_async,
)
from dgl_mgpu.ops.blocks import Hops
from dgl_mgpu.ops.check import narrow_indptr
from dgl_mgpu.ops.philox import fold_keys
from dgl_mgpu.ops.sample_future import HopsFuture, SampleFuture, start
from dgl_mgpu.sampling.seed_edges import WEIGHT_DTYPES, new_key
from dgl_mgpu.sampling.views import edges_view, scalars_view
from dgl_mgpu.utils.types import CanonicalEtype

Nodes = torch.Tensor | Mapping[str, torch.Tensor]
Fanout = int | Mapping[str | CanonicalEtype, int]
#: Input nodes, output nodes and blocks.
Sampled = tuple[Nodes, Nodes, list[DGLBlock]]

_FORMATS = ["coo", "csr", "csc"]
#: Plans of sampling that a graph keeps; scripts may draw fanouts.
MAX_PLANS = 16


def sample_hops_async(
    views: Mapping[CanonicalEtype, GraphView],
    seeds: Mapping[str, torch.Tensor],
    fanouts: Sequence[Mapping[CanonicalEtype, int]],
    key: SampleKey,
    *,
    replace: bool,
    weights: Mapping[CanonicalEtype, RowView],
) -> SampleFuture[list[EtypeBlock]]:
    """Start sampling the message-flow graphs of a mini-batch, of one edge type or of several.

    Parameters and errors are those of :func:`dgl_mgpu.ops.sample_etype_blocks_async`, except that
    seeds may be of types without edges, which the hops then leave out.
    """
    joined = {ntype for source, _, destination in views for ntype in (source, destination)}
    seeds = {ntype: nodes for ntype, nodes in seeds.items() if ntype in joined}
    (etype, view), *others = views.items()
    ntype = etype[0]
    if others or etype[2] != ntype or ntype not in seeds:
        return sample_etype_blocks_async(
            views, seeds, fanouts, key, replace=replace, weights=weights
        )
    future = sample_blocks_async(
        view,
        seeds[ntype],
        [fanout[etype] for fanout in fanouts],
        key,
        replace=replace,
        weights=weights.get(etype),
    )
    return future.then(
        lambda blocks: [
            EtypeBlock({etype: BlockEdges(*block[:3])}, {ntype: block[3]}, {ntype: block[4]})
            for block in blocks
        ]
    )


def visited_block(block: VisitedBlock, etype: CanonicalEtype) -> EtypeBlock:
    """A block of walks as one of sampled edges, whose ids are their positions in the block."""
    positions = torch.arange(len(block.src), dtype=block.src.dtype, device=block.src.device)
    edges = BlockEdges(block.indptr, block.src, positions)
    return EtypeBlock({etype: edges}, {etype[0]: block.src_nodes}, {etype[0]: block.num_dst})


def dgl_blocks(
    sampled: Sequence[EtypeBlock],
    ntypes: Sequence[str],
    canonical_etypes: Sequence[CanonicalEtype],
    seeds: Mapping[str, torch.Tensor],
    features: Features | None = None,
) -> list[DGLBlock]:
    """Sampled hops as DGL's blocks; on the CPU DGL's C++ holds them.

    Parameters are those of :func:`tensor_blocks`.
    """
    if sampled and is_passed_as_tensor(next(iter(sampled[0].src_nodes.values()))):
        return tensor_blocks(sampled, ntypes, canonical_etypes, seeds, features)
    of_nodes: dict[str, ColumnSource] = {}
    of_edges: dict[CanonicalEtype, ColumnSource] = {}
    if features is not None:
        of_nodes = dict(zip(ntypes, features.of_nodes, strict=True))
        of_edges = dict(zip(canonical_etypes, features.of_edges, strict=True))
    return [_block_on_cpu(hop, sorted(ntypes), seeds, of_nodes, of_edges) for hop in sampled]


def _block_on_cpu(
    sampled: EtypeBlock,
    ntypes: Sequence[str],
    seeds: Mapping[str, torch.Tensor],
    of_nodes: Mapping[str, ColumnSource],
    of_edges: Mapping[CanonicalEtype, ColumnSource],
) -> DGLBlock:
    none = next(iter(sampled.src_nodes.values()))[:0]
    etypes = sorted(sampled.edges)
    # Nodes of types without edges are their own sources.
    sources = [sampled.src_nodes.get(ntype, seeds.get(ntype, none)) for ntype in ntypes]
    num_src = [len(nodes) for nodes in sources]
    num_dst = [
        sampled.num_dst.get(ntype, count) for ntype, count in zip(ntypes, num_src, strict=True)
    ]
    numbers = {ntype: number for number, ntype in enumerate(ntypes)}
    index = block_index_on_cpu(
        num_src,
        num_dst,
        [(numbers[source], numbers[target]) for source, _, target in etypes],
        [_csc(sampled.edges[etype]) for etype in etypes],
    )
    eids = [sampled.edges[etype].eids for etype in etypes]
    return DGLBlock(
        index,
        (ntypes, ntypes),
        [etype for _, etype, _ in etypes],
        node_frames=[
            BlockFrame(NID, nodes, count, of_nodes.get(ntype))
            for counts in (num_src, num_dst)
            for ntype, nodes, count in zip(ntypes, sources, counts, strict=True)
        ],
        edge_frames=[
            BlockFrame(EID, ids, len(ids), of_edges.get(etype))
            for etype, ids in zip(etypes, eids, strict=True)
        ],
    )


def block_index_on_cpu(
    num_src: Sequence[int],
    num_dst: Sequence[int],
    ends: Sequence[tuple[int, int]],
    cscs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> Any:
    """A block as DGL's C++ has it, of indptr, indices and edge ids of each edge type.

    ``ends`` are the numbers of an edge type's node types, on their sides.  It does as
    ``dgl.create_block``, which makes a graph of each relation first and looks at all sources.
    """
    relations = [
        create_unitgraph_from_csr(2, num_src[source], num_dst[target], *csc, _FORMATS, True)
        for (source, target), csc in zip(ends, cscs, strict=True)
    ]
    metagraph = _metagraph(len(num_src), len(num_dst), tuple(ends))
    counts = toindex([*num_src, *num_dst], "int64")
    return create_heterograph_from_relations(metagraph, relations, counts)


@functools.cache
def _metagraph(num_srctypes: int, num_dsttypes: int, ends: tuple[tuple[int, int], ...]) -> Any:
    """Which types the edges of a block's types go from and to, by number, for DGL's C++."""
    sources = [source for source, _ in ends]
    targets = [num_srctypes + target for _, target in ends]
    return from_coo(num_srctypes + num_dsttypes, sources, targets, True)


def _csc(edges: BlockEdges) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Edge ids are positions, which DGL would assume; but its CPU kernels for edge features refuse a
    # graph without explicit ids.
    count, idtype = len(edges.src), edges.src.dtype
    indptr = narrow_indptr(edges.indptr, count, idtype, "make a block")
    return indptr, edges.src, torch.arange(count, dtype=idtype)


def tensor_blocks(
    sampled: Sequence[EtypeBlock],
    ntypes: Sequence[str],
    canonical_etypes: Sequence[CanonicalEtype],
    seeds: Mapping[str, torch.Tensor],
    features: Features | None = None,
) -> list[DGLBlock]:
    """Sampled hops as DGL's blocks on the same device, in graph indexes made of tensors.

    Types are the graph's, in its order.  Seeds of types without edges are their own sources, and
    blocks have ``features``.
    """
    types = block_types(ntypes, canonical_etypes)
    return [_block(types, hop, ntypes, canonical_etypes, seeds, features) for hop in sampled]


def _block(
    types: BlockTypes,
    sampled: EtypeBlock,
    ntypes: Sequence[str],
    canonical_etypes: Sequence[CanonicalEtype],
    seeds: Mapping[str, torch.Tensor],
    features: Features | None,
) -> DGLBlock:
    edges = [sampled.edges[etype] for etype in canonical_etypes]
    sources: list[torch.Tensor] = []
    num_dst: list[int] = []
    for ntype in ntypes:
        nodes = sampled.src_nodes.get(ntype)
        if nodes is None:
            nodes = seeds.get(ntype, edges[0].src[:0])
        sources.append(nodes)
        count = sampled.num_dst.get(ntype)
        num_dst.append(nodes.shape[0] if count is None else count)
    relations = []
    for of, (src, dst) in zip(edges, types.ends, strict=True):
        indptr = of.indptr if of.indptr.dtype == of.src.dtype else of.indptr.to(of.src.dtype)
        csc = Compressed(indptr, of.src, None)
        relations.append(Relation(sources[src].shape[0], num_dst[dst], csc=csc))
    eids = [of.eids for of in edges]
    return types.block(relations, sources, sources, num_dst, eids, features)


def sample_graph_async(
    g: DGLGraph, nodes: Nodes, fanouts: Sequence[Fanout], prob: str | None, replace: bool
) -> SampleFuture[Sampled | None] | None:
    """Start sampling a mini-batch of a graph made of tensors, or pinned for a GPU.

    The same distribution as ``dgl.sampling.sample_neighbors`` and ``dgl.to_block`` hop by hop,
    reproducible by ``dgl.seed``.

    Seed nodes are distinct, and fanouts are by layer, the layer nearest the input first.  ``prob``
    names an edge feature of unnormalised probabilities, or of booleans as a mask.

    The future is of input nodes, output nodes and blocks, as ``NeighborSampler.sample_blocks``
    returns them, or of None for weights that DGL has to sample by.  Returns None if the graph or
    another argument is not supported here.  Raises UnknownIdError here, or where the result is
    waited for.
    """
    if prob is None and type(nodes) is torch.Tensor:
        plan = _uniform_plan(g, nodes.device, fanouts, replace)
        if plan is not None and plan.takes(nodes):
            return _started(plan, g, nodes)
    started = _start(g, nodes, fanouts, prob, replace)
    if started is None:
        return None
    batch, hops = started
    return hops.then(lambda sampled: None if sampled is None else batch.blocks_of(sampled))


class UniformPlan:
    """Uniform sampling of a graph of one node type and one edge type, checked but for the seeds.

    A small batch takes the host longer than the GPU, so what is the same for all is done once.

    Parameters
    ----------
    view : GraphView
    types : BlockTypes
        Of the blocks.
    fanouts : sequence of int
        As :func:`has_uniform_fanouts` has them.
    replace : bool
    """

    def __init__(
        self, view: GraphView, types: BlockTypes, fanouts: Sequence[int], replace: bool
    ) -> None:
        self.view = view  # which keeps what the pointers point to
        self._device = view.tiers.device
        self._sizes = view.num_rows, view.num_cols, view.idtype
        self._hops = [*reversed(fanouts)]
        self._numbers = range(len(fanouts))
        self._replace = replace
        self._types = types

    def takes(self, nodes: torch.Tensor) -> bool:
        """Whether nodes are seeds as the operator wants them."""
        is_here = nodes.dtype == self._sizes[2] and nodes.device == self._device
        return is_here and nodes.dim() == 1 and nodes.is_contiguous()

    def start(self, nodes: torch.Tensor, seed: int, epoch: int, batch: int) -> SampleFuture[Hops]:
        """Start sampling a batch; numbers are those of its `SampleKey`."""
        view = self.view
        tensors = nodes, view.tiers, view.pointers, view.position
        keys = fold_keys(seed, epoch, batch, self._numbers, 0)
        limits = view.sms, view.ordered_from
        options = *self._sizes, self._hops, self._replace, keys, *limits
        return start("sample_hops", tensors, (*tensors, *options))

    def blocks(
        self, sampled: Hops, features: Features | None
    ) -> tuple[torch.Tensor, list[DGLBlock]]:
        """Input nodes and blocks of a batch."""
        nodes, *of_hops = sampled
        blocks: list[DGLBlock] = []
        sources = nodes
        for indptr, src, eids in reversed([*zip(*of_hops, strict=True)]):
            num_dst = indptr.shape[0] - 1
            if indptr.dtype != src.dtype:
                indptr = indptr.to(src.dtype)
            relation = Relation(sources.shape[0], num_dst, csc=Compressed(indptr, src, None))
            blocks.append(
                self._types.block([relation], [sources], [sources], [num_dst], [eids], features)
            )
            sources = nodes[:num_dst]
        return nodes, blocks


def has_uniform_fanouts(fanouts: Sequence[Any]) -> bool:
    """Whether there is one for each layer, and each is an integer for all edge types."""
    return bool(fanouts) and all(type(it) is int and -1 <= it < 1 << 63 for it in fanouts)


def _started(plan: UniformPlan, g: DGLGraph, nodes: torch.Tensor) -> SampleFuture[Sampled | None]:
    """A batch of a graph whose sampling a plan has started."""
    device = nodes.device
    index = _index_for(g, device)
    seed, call = random.next_key()  # those of `new_key`
    try:
        future = plan.start(nodes, seed, 0, call)
    except InvalidInputError as error:
        raise as_dgl_error(error) from error

    def sampled() -> Sampled | None:
        if _index_for(g, device) is not index:
            return None  # unpinned since
        try:
            hops = future.result()
        except InvalidInputError as error:
            raise as_dgl_error(error) from error
        inputs, blocks = plan.blocks(hops, Features.of_graph(g, device))
        return inputs, nodes, blocks

    # The index keeps the plan, and not the other way round.
    return SampleFuture(sampled)


def _uniform_plan(
    g: DGLGraph, device: torch.device, fanouts: Sequence[Any], replace: bool
) -> UniformPlan | None:
    """The plan for a graph, which keeps it; None if there has to be more to it."""
    if len(g.ntypes) != 1:
        return None
    index = _index_for(g, device)
    if index is None or not index.schema.is_single:
        return None
    plans: dict[Any, UniformPlan] = index._cache.setdefault("uniform plans", {})
    key = g.canonical_etypes[0], device, tuple(fanouts), replace
    try:
        plan = plans.get(key)
    except TypeError:  # fanouts by edge type
        return None
    if plan is None:
        if not has_uniform_fanouts(key[2]):
            return None
        if len(plans) >= MAX_PLANS:
            plans.clear()
        view = edges_view(index.relations[0], "csc", device)
        types = block_types(g.ntypes, g.canonical_etypes)
        plan = plans[key] = UniformPlan(view, types, key[2], replace)
    return plan


def sample_graph_hops_async(
    g: DGLGraph, nodes: Nodes, fanouts: Sequence[Fanout], prob: str | None, replace: bool
) -> HopsFuture | None:
    """As :func:`sample_graph_async`, whose hops may be used without making blocks."""
    started = _start(g, nodes, fanouts, prob, replace)
    if started is None:
        return None
    batch, hops = started
    return HopsFuture(hops, batch.blocks_of)


def _start(
    g: DGLGraph, nodes: Nodes, fanouts: Sequence[Fanout], prob: str | None, replace: bool
) -> tuple[_Batch, SampleFuture[list[EtypeBlock] | None]] | None:
    """A mini-batch and its hops in flight."""
    batch = _Batch.for_graph(g, nodes)
    if batch is None or len(fanouts) == 0:
        return None
    etypes = g.canonical_etypes
    hops = []
    for fanout in fanouts:
        if type(fanout) is int and fanout >= -1:
            hop: dict[CanonicalEtype, int] | None = dict.fromkeys(etypes, fanout)
        else:
            hop = _by_etype(g, fanout)
        if hop is None:
            return None
        hops.append(hop)
    weights = batch.weights(prob)
    if weights is None:
        return None
    views = {
        etype: edges_view(relation, "csc", batch.device)
        for etype, relation in zip(etypes, batch.index.relations, strict=True)
    }
    try:
        future = sample_hops_async(
            views, batch.seeds, hops, new_key(), replace=replace, weights=weights
        )
    except InvalidInputError as error:
        raise as_dgl_error(error) from error
    return batch, SampleFuture(partial(batch.wait, future))


@dataclass(frozen=True)
class _Batch:
    """The seeds of a mini-batch by node type, and the graph to sample in memory of ``device``,
    or in host memory that it reads."""

    g: DGLGraph
    index: TensorIndex
    device: torch.device
    seeds: dict[str, torch.Tensor]
    nodes: Nodes

    @classmethod
    def for_graph(cls, g: DGLGraph, nodes: Any) -> _Batch | None:
        """None if the graph or the seeds are not supported here."""
        if isinstance(nodes, Mapping):
            seeds = dict(nodes)
        elif len(g.ntypes) == 1:
            seeds = {g.ntypes[0]: nodes}
        else:
            return None
        if not seeds or not all(isinstance(ids, torch.Tensor) for ids in seeds.values()):
            return None
        device = next(iter(seeds.values())).device
        index = _index_for(g, device)
        if index is None or not index.relations:
            return None
        served = all(
            ntype in g.ntypes
            and ids.device == device
            and ids.dtype == index.idtype
            and ids.dim() == 1
            for ntype, ids in seeds.items()
        )
        return cls(g, index, device, seeds, nodes) if served else None

    def wait(self, future: SampleFuture[list[EtypeBlock]]) -> list[EtypeBlock] | None:
        """The sampled hops; None if DGL has to sample them."""
        if _index_for(self.g, self.device) is not self.index:
            return None  # unpinned since
        try:
            return future.result()
        except InvalidWeightError:
            return None  # DGL has no edges where all weights are zero
        except InvalidInputError as error:
            raise as_dgl_error(error) from error

    def blocks_of(self, hops: Sequence[EtypeBlock]) -> Sampled:
        """Input nodes, output nodes and blocks of sampled hops."""
        g = self.g
        features = Features.of_graph(g, self.device)
        blocks = tensor_blocks(hops, g.ntypes, g.canonical_etypes, self.seeds, features)
        sources = hops[0].src_nodes
        if len(g.ntypes) == 1:
            (inputs,) = sources.values()
            return inputs, self.nodes, blocks
        none = next(iter(sources.values()))[:0]
        # Not from the block, whose features would be looked at.
        of_types = {ntype: sources.get(ntype, self.seeds.get(ntype, none)) for ntype in g.ntypes}
        return of_types, self.nodes, blocks

    def weights(self, prob: str | None) -> dict[CanonicalEtype, RowView] | None:
        """Weights by edge type, without types that have none; None if they are not supported."""
        if prob is None:
            return {}
        weights = {}
        for etype, frame in zip(self.g.canonical_etypes, self.g._edge_frames, strict=True):
            if prob in frame:
                column = frame[prob]
                here = column.device == self.device or column.is_pinned()
                if not here or column.dtype not in WEIGHT_DTYPES or column.dim() != 1:
                    return None
                weights[etype] = scalars_view(column.detach(), self.device)
        return weights


def _index_for(g: DGLGraph, device: torch.device) -> TensorIndex | None:
    """The graph in memory that a device reads, if it is made of tensors there."""
    index = g._graph
    if not isinstance(index, TensorIndex):
        if device.type == "cpu":
            return None
        index = pinned_tensors(index)
    elif index.device != device:
        index = pinned_tensors(index)
    if index is None or any("csc" not in relation.formats for relation in index.relations):
        return None
    return index


def _by_etype(g: DGLGraph, fanout: Fanout) -> dict[CanonicalEtype, int] | None:
    """The fanout of each edge type; None if it is not one that is served here."""
    if not isinstance(fanout, Mapping):
        by_etype = dict.fromkeys(g.canonical_etypes, int(fanout))
    else:
        by_etype = {g.to_canonical_etype(etype): int(count) for etype, count in fanout.items()}
    served = len(by_etype) == len(g.etypes) and min(by_etype.values()) >= -1
    return by_etype if served else None
