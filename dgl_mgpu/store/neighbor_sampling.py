"""Neighbours and mini-batches sampled from a store's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from functools import partial
from typing import Any, NamedTuple

import dgl
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.blocks import block_types
from dgl_mgpu.graph.dispatch import is_passed_as_tensor
from dgl_mgpu.ops import (
    BlockEdges,
    EtypeBlock,
    GraphView,
    RowView,
    SampledNeighbors,
    SampleKey,
    VisitedNeighbors,
    append_unique,
    sample_etype_neighbors,
)
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.sampling.block_sampling import (
    MAX_PLANS,
    UniformPlan,
    dgl_blocks,
    has_uniform_fanouts,
    sample_hops_async,
)
from dgl_mgpu.sampling.seed_edges import IdFilter, keep
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.edges import Edges
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure, Nodes
from dgl_mgpu.utils.types import CanonicalEtype

_ACTION = "sample neighbors"

Fanout = int | Mapping[str | CanonicalEtype, int]
#: Input nodes, output nodes and blocks.
SampledBlocks = tuple[Nodes, Nodes, list[dgl.DGLGraph]]


class _Checked(NamedTuple):
    """What a mini-batch is sampled by."""

    seeds: dict[str, torch.Tensor]
    fanouts: list[dict[CanonicalEtype, int]]
    weights: dict[CanonicalEtype, RowView]
    excluded: dict[CanonicalEtype, IdFilter]


@dataclass(frozen=True, eq=False)
class StoreSampler:
    """Samples neighbours and mini-batches of a store's graph."""

    structure: GraphStructure
    features: GraphFeatures
    batch_keys: BatchKeys
    _plans: dict[Any, UniformPlan] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Plans have addresses of this process.
        return type(self), (self.structure, self.features, self.batch_keys)

    def sample_neighbors(
        self,
        nodes: Nodes,
        fanout: Fanout,
        edge_dir: str = "in",
        prob: str | None = None,
        replace: bool = False,
        copy_ndata: bool = True,
        copy_edata: bool = True,
        _dist_training: bool = False,
        exclude_edges: Edges | None = None,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """Sample in-edges of ``nodes``, as ``dgl.sampling.sample_neighbors`` does.

        Parameters
        ----------
        nodes : Tensor or dict of Tensor, int32 or int64, shape (n,)
            Seed nodes, by node type in a heterogeneous graph.
        fanout : int or dict
            Edges for each node (of each edge type); -1 takes all.
        edge_dir : str
            'in': the store keeps in-edges.
        prob : str, optional
            Edge feature of unnormalised probabilities, or of booleans as a mask.
        replace : bool
        exclude_edges : Tensor or dict of Tensor, int32 or int64, shape (m,), optional
            Edge ids to leave out of what is sampled, by edge type in a heterogeneous graph.
        copy_ndata, copy_edata : bool
            Whether it has the features of nodes and edges, read from the store when they are
            looked at.

        Returns
        -------
        DGLGraph
            All nodes and the sampled edges; ``edata[dgl.EID]`` holds their ids.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        """
        structure = self.structure
        with structure.told(_ACTION):
            if edge_dir != "in":
                raise InvalidInputError(
                    f"sample edges of direction '{edge_dir}'",
                    "the store keeps in-edges only",
                    "build the store from dgl.reverse(g) and sample its in-edges",
                )
        seeds, (of_hop,), weights, excluded = self._checked(nodes, [fanout], prob, exclude_edges)
        key = self.batch_keys.next_key(seeds)
        seeds = {ntype: seeds.get(ntype, structure.no_ids()) for ntype in structure.ntypes}
        sample_etypes = self._sample_etypes(prob, is_numbered=False)
        sampled = _sample_hop(
            structure.views(), seeds, of_hop, key, replace, weights, excluded, sample_etypes
        )
        edges = {
            etype: (sample.neighbors, destinations(seeds[etype[2]], sample, structure))
            for etype, sample in sampled.items()
        }
        frontier = dgl.heterograph(
            edges, structure.num_nodes_by_type, idtype=structure.idtype, device=structure.device
        )
        for etype, sample in sampled.items():
            frontier.edges[etype].data[dgl.EID] = sample.eids
        self.features.add_to_graph(frontier, copy_ndata, copy_edata)
        return frontier if output_device is None else frontier.to(output_device)

    def sample_blocks(
        self,
        nodes: Nodes,
        fanouts: Sequence[Fanout],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
    ) -> SampledBlocks:
        """Sample all hops of a mini-batch into blocks.

        The same edges as :meth:`sample_neighbors` and ``dgl.to_block`` hop by hop, without the
        graph over all nodes in between.

        Parameters
        ----------
        nodes : Tensor or dict of Tensor, int32 or int64, shape (n,)
            Seed nodes, distinct.
        fanouts : sequence of int or dict
            For each layer, the layer nearest the input first.
        prob, replace, exclude_edges
            As in :meth:`sample_neighbors`.

        Returns
        -------
        input nodes, output nodes, blocks
            As ``dgl.dataloading.NeighborSampler.sample_blocks`` gives them.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        """
        return self.sample_blocks_async(nodes, fanouts, prob, replace, exclude_edges).result()

    def sample_blocks_async(
        self,
        nodes: Nodes,
        fanouts: Sequence[Fanout],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
        *,
        on_host: Nodes | None = None,
    ) -> SampleFuture[SampledBlocks]:
        """Start :meth:`sample_blocks` on a GPU without a wait for its result.

        Parameters and errors are those of :meth:`sample_blocks`.

        Parameters
        ----------
        on_host : Tensor or dict of Tensor, shape (n,), optional
            The same nodes in host memory.  The key of a mini-batch depends on their ids, for which
            the host otherwise waits if ``nodes`` are on a GPU.

        Returns
        -------
        SampleFuture
            Of what :meth:`sample_blocks` returns.  Await it on the stream that was current here.
        """
        if prob is None and exclude_edges is None and type(nodes) is torch.Tensor:
            plan = self._uniform_plan(fanouts, replace)
            if plan is not None and plan.takes(nodes) and is_passed_as_tensor(nodes):
                return self._started(plan, nodes, nodes if on_host is None else on_host)
        hops = self.sample_hops_async(nodes, fanouts, prob, replace, exclude_edges, on_host=on_host)
        return hops.then(lambda hops: self.blocks_of(hops, nodes))

    def _uniform_plan(self, fanouts: Sequence[Any], replace: bool) -> UniformPlan | None:
        """What samples uniformly with as little of the host's time as may be; None if it cannot."""
        structure = self.structure
        if structure.others_with_edges is not None or not structure.is_homogeneous:
            return None
        key = *fanouts, replace
        try:
            plan = self._plans.get(key)
        except TypeError:  # fanouts by edge type
            return None
        (view,) = structure.views().values()
        if plan is None or plan.view is not view:
            if not has_uniform_fanouts(key[:-1]):
                return None
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            types = block_types(structure.ntypes, structure.canonical_etypes)
            plan = self._plans[key] = UniformPlan(view, types, key[:-1], replace)
        return plan

    def _started(
        self, plan: UniformPlan, nodes: torch.Tensor, on_host: Nodes
    ) -> SampleFuture[SampledBlocks]:
        key = self.batch_keys.batch_key(self.structure.nodes_by_ntype(on_host))
        hops = plan.start(nodes, key.seed, key.epoch, key.batch)

        def sampled() -> SampledBlocks:
            self.structure.views()  # raises if the store was closed since
            inputs, blocks = plan.blocks(hops.result(), self.features.of_blocks())
            return inputs, nodes, blocks

        return SampleFuture(sampled)

    def sample_hops_async(
        self,
        nodes: Nodes,
        fanouts: Sequence[Fanout],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
        *,
        on_host: Nodes | None = None,
    ) -> SampleFuture[list[EtypeBlock]]:
        """Start to sample the hops of a mini-batch, of which no blocks are made yet.

        Parameters and errors are those of :meth:`sample_blocks_async`.

        Returns
        -------
        SampleFuture
            Of the hops as :func:`dgl_mgpu.ops.sample_etype_blocks` returns them.  Await it on the
            stream that was current here.
        """
        checked = self._checked(nodes, fanouts, prob, exclude_edges)
        key = self.batch_keys.batch_key(
            self.structure.nodes_by_ntype(nodes if on_host is None else on_host)
        )
        hops = self._start_hops(checked, key, prob, replace)

        def result() -> list[EtypeBlock]:
            with self.structure.told(_ACTION):
                self.structure.views()  # raises if the store was closed since
            return hops.result()

        return SampleFuture(result, hops.go_on)

    def blocks_of(self, hops: Sequence[EtypeBlock], nodes: Nodes) -> SampledBlocks:
        """Make blocks of sampled hops.

        Parameters
        ----------
        hops : sequence of EtypeBlock
            From :meth:`sample_hops_async`.
        nodes : Tensor or dict of Tensor, shape (n,)
            The seed nodes that it was called with.

        Returns
        -------
        input nodes, output nodes, blocks
            As :meth:`sample_blocks` returns them.
        """
        structure = self.structure
        # Those of types without edges, which hops leave out.
        seeds = {} if structure.is_homogeneous else structure.seeds_by_ntype(nodes)
        blocks = dgl_blocks(
            hops, structure.ntypes, structure.canonical_etypes, seeds, self.features.of_blocks()
        )
        inputs = nodes
        if blocks and structure.is_homogeneous:
            (inputs,) = hops[0].src_nodes.values()  # without looking at the block's features
        elif blocks:
            inputs = blocks[0].srcdata[dgl.NID]
        return inputs, nodes, blocks

    def input_nodes(self, nodes: Nodes, fanouts: Sequence[Fanout]) -> dict[str, torch.Tensor]:
        """The input nodes of a mini-batch: those of :meth:`sample_blocks`, without the blocks.

        Parameters
        ----------
        nodes, fanouts
            As of :meth:`sample_blocks`.

        Returns
        -------
        dict of Tensor, the graph's idtype, shape (m,)
            By node type, on the device where the store's operators run.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        checked = self._checked(nodes, fanouts)
        key = self.batch_keys.batch_key(self.structure.nodes_by_ntype(nodes))
        hops = self._start_hops(checked, key, None, False).result()
        # Seeds of types without edges are their own sources.
        return {**checked.seeds, **hops[0].src_nodes} if hops else checked.seeds

    def _checked(
        self,
        nodes: Nodes,
        fanouts: Sequence[Fanout],
        prob: str | None = None,
        exclude_edges: Edges | None = None,
    ) -> _Checked:
        """What a mini-batch is sampled by; other machines are told what is wrong with it."""
        structure = self.structure
        with structure.told(_ACTION):
            structure.views()  # raises if the store was closed
            return _Checked(
                structure.seeds_by_ntype(nodes),
                [structure.fanouts_by_etype(fanout) for fanout in fanouts],
                self.features.weights_by_etype(prob),
                self._excluded(exclude_edges),
            )

    def _start_hops(
        self,
        checked: _Checked,
        key: SampleKey,
        prob: str | None,
        replace: bool,
    ) -> SampleFuture[list[EtypeBlock]]:
        seeds, of_hops, weights, excluded = checked
        views, others = self.structure.views(), self.structure.others_with_edges
        arguments = views, seeds, of_hops, key
        if not excluded and others is None:
            return sample_hops_async(*arguments, replace=replace, weights=weights)
        # No operator excludes edges, or asks other machines by weight or for several types: then
        # the hops are sampled one by one when they are awaited.
        one_by_one = partial(
            _sample_hop_by_hop,
            excluded,
            self._sample_etypes(prob, is_numbered=True),
            *arguments,
            replace=replace,
            weights=weights,
        )
        if others and not excluded and prob is None and others.can_start_hops(views, of_hops):
            ((_, _, ntype),) = views
            nodes = seeds.get(ntype, self.structure.no_ids())
            return others.sample_hops_async(
                views, nodes, of_hops, key, replace=replace, one_by_one=one_by_one
            )
        return SampleFuture(one_by_one)

    def _sample_etypes(
        self, prob: str | None, is_numbered: bool
    ) -> Callable[..., dict[CanonicalEtype, SampledNeighbors]]:
        """Samples the edges of each type, with the parameters of `sample_etype_neighbors`, of
        weights by feature ``prob``.  Hops of blocks are numbered alike on all ranks."""
        others = self.structure.others_with_edges
        if others is None:
            return sample_etype_neighbors
        return partial(others.sample_etype_neighbors, prob, is_numbered)

    def _excluded(self, edges: Edges | None) -> dict[CanonicalEtype, IdFilter]:
        """Filters of the edges to leave out, by edge type."""
        if edges is None:
            return {}
        by_type = edges if isinstance(edges, Mapping) else {None: edges}
        return {
            self.structure.to_canonical_etype(etype): IdFilter(
                _excluded_ids(eids, self.structure.device)
            )
            for etype, eids in by_type.items()
        }


def destinations(
    seeds: torch.Tensor, sampled: SampledNeighbors | VisitedNeighbors, structure: GraphStructure
) -> torch.Tensor:
    """The seed of each sampled edge."""
    seeds = seeds.to(structure.device, structure.idtype)
    return seeds.repeat_interleave(sampled.indptr.diff(), output_size=len(sampled.neighbors))


def _excluded_ids(edges: Any, device: torch.device) -> torch.Tensor:
    eids = torch.atleast_1d(torch.as_tensor(edges))
    if len(eids) and (eids.dtype not in (torch.int32, torch.int64) or eids.dim() != 1):
        raise InvalidInputError(
            "leave edges out of what is sampled",
            f"exclude_edges has dtype {eids.dtype} and shape {tuple(eids.shape)}",
            "pass a vector of int32 or int64 edge ids",
        )
    return eids.to(device)


def _sample_hop(
    views: Mapping[CanonicalEtype, GraphView],
    seeds: Mapping[str, torch.Tensor],
    fanouts: Mapping[CanonicalEtype, int],
    key: SampleKey,
    replace: bool,
    weights: Mapping[CanonicalEtype, RowView],
    excluded: Mapping[CanonicalEtype, IdFilter],
    sample: Callable[..., dict[CanonicalEtype, SampledNeighbors]],
) -> dict[CanonicalEtype, SampledNeighbors]:
    """Sample edges of seeds, which all node types have, by edge type.

    As in DGL, edges are sampled first and excluded then: a node may have fewer than its fanout.
    """
    by_etype = {etype: seeds[etype[2]] for etype in views}
    sampled = sample(views, by_etype, fanouts, key, replace=replace, weights=weights)
    for etype, ids in excluded.items():
        edges = sampled[etype]
        sampled[etype] = keep(edges, ids.holds(edges.eids).logical_not_().nonzero()[:, 0])
    return sampled


def _sample_hop_by_hop(
    excluded: Mapping[CanonicalEtype, IdFilter],
    sample: Callable[..., dict[CanonicalEtype, SampledNeighbors]],
    views: Mapping[CanonicalEtype, GraphView],
    seeds: Mapping[str, torch.Tensor],
    fanouts: Sequence[Mapping[CanonicalEtype, int]],
    key: SampleKey,
    *,
    replace: bool,
    weights: Mapping[CanonicalEtype, RowView],
) -> list[EtypeBlock]:
    """Sample the hops of a mini-batch one by one by ``sample``, without some edges.

    Other parameters are those of :func:`dgl_mgpu.ops.sample_etype_blocks`, whose result this is
    where no edge is excluded.
    """
    first = next(iter(views.values()))
    none = torch.empty(0, dtype=first.idtype, device=first.tiers.device)
    ends = dict.fromkeys(ntype for source, _, target in views for ntype in (source, target))
    nodes = {ntype: seeds.get(ntype, none) for ntype in ends}
    blocks = []
    for hop, fanout in enumerate(reversed(fanouts), start=key.hop):
        hop_key = with_fields(key, hop=hop)
        sampled = _sample_hop(views, nodes, fanout, hop_key, replace, weights, excluded, sample)
        sources: dict[str, torch.Tensor] = {}
        positions: dict[CanonicalEtype, torch.Tensor] = {}
        for ntype, ids in nodes.items():
            etypes = [etype for etype in views if etype[0] == ntype]
            neighbors = [sampled[etype].neighbors for etype in etypes]
            sources[ntype], local = append_unique(ids, torch.cat([none, *neighbors]))
            lengths = [len(ids) for ids in neighbors]
            positions.update(zip(etypes, local.split(lengths), strict=True))
        edges_of = {
            etype: BlockEdges(edges.indptr, positions[etype], edges.eids)
            for etype, edges in sampled.items()
        }
        num_dst = {ntype: len(ids) for ntype, ids in nodes.items()}
        blocks.append(EtypeBlock(edges_of, sources, num_dst))
        nodes = sources
    return blocks[::-1]
