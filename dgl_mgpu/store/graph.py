"""The store as a graph that DGL's DataLoader and samplers take in place of a DGLGraph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import dgl
import torch

from dgl_mgpu.errors import StoreClosedError, UnsupportedByStoreError
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.sampling.dataloading import serve_dataloading
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.edge_sampling import EdgeSampler
from dgl_mgpu.store.edges import EdgeQueries
from dgl_mgpu.store.feature_storage import Traffic
from dgl_mgpu.store.graph_data import StoredData, StoredEdges, StoredNodes
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure
from dgl_mgpu.store.lazy_rows import LazyColumn
from dgl_mgpu.store.memory import Store
from dgl_mgpu.store.neighbor_sampling import StoreSampler
from dgl_mgpu.store.random_walks import RandomWalker, ReversedEdges
from dgl_mgpu.store.remote import OtherMachines, checked_ids_of_owners
from dgl_mgpu.utils.deprecation import renamed_method
from dgl_mgpu.utils.types import CanonicalEtype

P = ParamSpec("P")
R = TypeVar("R")

#: What DGL's samplers and users look for on a graph.
GRAPH_NAMES = frozenset(dir(dgl.DGLGraph)) | {"_graph", "_node_frames", "_edge_frames"}


@dataclass(frozen=True)
class GraphParts:
    """What all copies of a store's graph share: everything but the random numbers they draw."""

    structure: GraphStructure
    features: GraphFeatures
    edges: EdgeQueries
    reversed_edges: ReversedEdges
    traffic: Traffic
    #: DGL's caches of features, as its DataLoader looks for them.
    gpu_caches: dict[str, dict] = field(default_factory=lambda: {"node": {}, "edge": {}})

    @classmethod
    def of_store(
        cls,
        store: Store,
        num_nodes: Mapping[str, int],
        canonical_etypes: list[CanonicalEtype],
        others: OtherMachines | None,
    ) -> GraphParts:
        """The parts of a store's own graph, of which ``others`` have some of the rows."""
        structure, traffic = GraphStructure(store, num_nodes, canonical_etypes, others), Traffic()
        return cls(
            structure,
            GraphFeatures(store, structure, traffic),
            EdgeQueries(store, structure),
            ReversedEdges(structure),
            traffic,
        )


def _delegate(
    part: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """A method of the graph that calls a method of one of its parts."""
    name = method.__name__

    @functools.wraps(method)
    def delegated(self: StoreGraph, *arguments: P.args, **options: P.kwargs) -> R:
        return getattr(getattr(self, part), name)(*arguments, **options)

    delegated.__qualname__ = f"StoreGraph.{name}"
    return delegated


class StoreGraph:
    """A graph whose topology and features live in a store.

    Implements the part of DGL's graph interface that its DataLoader, neighbour samplers, samplers
    of edges and random walks use, so that it takes a DGLGraph's place there.  Node and edge ids are
    those of the graph the store was built from.

    Attributes
    ----------
    ntypes : list of str
    canonical_etypes : list of (str, str, str)
    idtype : torch.dtype
    device : torch.device
        Where it is sampled and its blocks are: the store's.
    traffic : Traffic
        Rows and bytes read through it since the last ``traffic.take()``, by tier.
    features_are_stored : bool
        Whether all features of blocks are the store's.
    spans_machines : bool
        Whether other machines have some of its rows: then all ranks of the job sample and read
        together.
    may_prefetch : bool
        Whether loaders may make mini-batches ahead: not where a rank of another machine makes none.
    """

    features_are_stored = True

    def __init__(
        self,
        store: Store,
        num_nodes: Mapping[str, int],
        canonical_etypes: list[CanonicalEtype],
        seed: int,
        others: OtherMachines | None = None,
    ) -> None:
        self._store = store
        parts = GraphParts.of_store(store, num_nodes, canonical_etypes, others)
        self._assemble(parts, BatchKeys(seed))
        serve_dataloading()

    def _assemble(self, parts: GraphParts, batch_keys: BatchKeys) -> None:
        """Set all attributes but the store."""
        self._parts, self._batch_keys = parts, batch_keys
        self._structure, self._features = parts.structure, parts.features
        self._edge_queries = parts.edges
        self._sampler = StoreSampler(parts.structure, parts.features, batch_keys)
        self._walker = RandomWalker(
            parts.structure, parts.features, parts.reversed_edges, self._sampler, batch_keys
        )
        self._edge_sampler = EdgeSampler(parts.structure, parts.features, parts.edges, batch_keys)
        self.ntypes = parts.structure.ntypes
        self.canonical_etypes = parts.structure.canonical_etypes
        self.device, self.traffic = parts.structure.device, parts.traffic
        others = parts.structure.others
        self.spans_machines = others is not None
        self.may_prefetch = others is None or others.may_prefetch
        # DGL's DataLoader looks here before it asks for a storage.
        self._gpu_caches = parts.gpu_caches
        self._epoch_is_set = False
        #: Of DataLoaders while the epoch is not set.
        self._num_passes = 0

    def _copy(self, batch_keys: BatchKeys) -> StoreGraph:
        """A graph of the same parts that draws random numbers of its own."""
        copied = object.__new__(type(self))
        copied._store = self._store
        copied._assemble(self._parts, batch_keys)
        copied._epoch_is_set, copied._num_passes = self._epoch_is_set, self._num_passes
        return copied

    def __repr__(self) -> str:
        try:
            num_edges: Any = {etype: self.num_edges(etype) for etype in self.canonical_etypes}
        except StoreClosedError:
            num_edges = "closed"
        num_nodes = self._structure.num_nodes_by_type
        return f"StoreGraph(num_nodes={num_nodes}, num_edges={num_edges})"

    if not TYPE_CHECKING:  # which knows the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name in GRAPH_NAMES:
                raise UnsupportedByStoreError(
                    f"use '{name}' of a store's graph",
                    "the store serves sampling and features, not all of a DGLGraph",
                    "sample with NeighborSampler, as_edge_prediction_sampler, PinSAGESampler, "
                    "random_walk or sample_neighbors, read features with ndata['feat'][ids], and "
                    "use the DGLGraph itself for the rest, and for ClusterGCN's, SAINT's, ShaDow's "
                    "and LABOR's samplers",
                )
            raise AttributeError(f"'StoreGraph' object has no attribute '{name}'")

    # -- epochs ---------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose samples are drawn from now on, until it is set again.

        Without it each pass over a DataLoader of the store is the next epoch, whichever loader it
        is, from 0 on.  Set it before each epoch if a run resumes, if several loaders should draw
        the same samples, or if some ranks make more passes than others.
        """
        self._batch_keys.epoch = check_integer(epoch, "epoch", 0, "choose an epoch")
        self._epoch_is_set = True

    def for_pass(self) -> StoreGraph:
        """A copy of this graph for one pass over a DataLoader, which starts now."""
        copied = self._copy(BatchKeys(self._batch_keys.seed))
        copied.start_epoch(self)
        return copied

    def start_epoch(self, shared: StoreGraph) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to its next one."""
        if shared._epoch_is_set:
            self._batch_keys.epoch = shared._batch_keys.epoch
        else:
            self._batch_keys.epoch = shared._num_passes
            shared._num_passes += 1

    # -- structure ------------------------------------------------------------------------

    @property
    def etypes(self) -> list[str]:
        """Edge type names, in the order of ``canonical_etypes``."""
        return self._structure.etypes

    @property
    def idtype(self) -> torch.dtype:
        """int32 or int64."""
        return self._structure.idtype

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return self._structure.is_homogeneous

    def is_pinned(self) -> bool:
        """True: as with a pinned DGLGraph, node ids may be on another device than the graph's."""
        return True

    to_canonical_etype = _delegate("_structure", GraphStructure.to_canonical_etype)
    metagraph = _delegate("_structure", GraphStructure.metagraph)
    num_nodes = number_of_nodes = _delegate("_structure", GraphStructure.num_nodes)
    num_edges = number_of_edges = _delegate("_structure", GraphStructure.num_edges)
    view = _delegate("_structure", GraphStructure.view)
    own_nodes = _delegate("_structure", GraphStructure.own_nodes)

    # -- edges ----------------------------------------------------------------------------

    find_edges = _delegate("_edge_queries", EdgeQueries.find_edges)
    in_degrees = _delegate("_edge_queries", EdgeQueries.in_degrees)
    count_degrees = _delegate("_edge_queries", EdgeQueries.count_degrees)
    has_edges_between = _delegate("_edge_queries", EdgeQueries.has_edges_between)
    edge_subgraph = _delegate("_edge_sampler", EdgeSampler.edge_subgraph)
    global_uniform_negative_sampling = _delegate(
        "_edge_sampler", EdgeSampler.global_uniform_negative_sampling
    )
    negative_destinations = _delegate("_edge_sampler", EdgeSampler.negative_destinations)

    # -- features -------------------------------------------------------------------------

    get_node_storage = _delegate("_features", GraphFeatures.get_node_storage)
    get_edge_storage = _delegate("_features", GraphFeatures.get_edge_storage)
    has_feature = _delegate("_features", GraphFeatures.has_feature)
    check_weights = _delegate("_features", GraphFeatures.check_weights)
    weight_tables = _delegate("_features", GraphFeatures.weight_tables)

    def rows_of_owners(
        self, name: str, ntype: str, rows: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Rows of nodes, of which each machine passes those of its :meth:`own_nodes`.

        Collective where machines have one copy together: all ranks call it.

        Parameters
        ----------
        name : str
            What the rows are, for errors.
        ntype : str
            The nodes' type.
        rows : Tensor, any dtype, shape (len(own_nodes(ntype)), ...)
            Those of this machine's own nodes.
        ids : Tensor, int32 or int64, shape (n,)
            Of nodes of the whole graph.

        Returns
        -------
        Tensor, dtype of ``rows``, shape (n, ...)
            On the store's device.

        Raises
        ------
        InvalidInputError
            If there is no such type, ``rows`` are not those of :meth:`own_nodes`, ``ids`` are no
            vector of ids, or another rank has rows of another dtype or shape, or does something
            else.
        IdOutOfRangeError
            If there is no such node.
        RankFailedError
            If another rank failed.
        """
        structure, action = self._structure, f"gather {name}"
        with structure.told(action):
            ntype = structure.only_ntype(ntype)
        if structure.others is not None:
            return structure.others.gather_owned(name, ntype, rows, ids)
        own = structure.own_nodes(ntype)
        ids = checked_ids_of_owners(action, rows, ids, own, len(own))
        return rows[ids.to(rows.device)].to(self.device)

    def add_features_to_block(self, block: dgl.DGLGraph) -> None:
        self._features.add_to_block(block)

    def reattach_column(self, column: LazyColumn) -> None:
        self._features.reattach(column)

    @property
    def ndata(self) -> StoredData:
        """Features of nodes by name."""
        return StoredData(self, self.ntypes)

    @property
    def edata(self) -> StoredData:
        """Features of edges by name."""
        return StoredData(self, self.canonical_etypes)

    @property
    def nodes(self) -> StoredNodes:
        """Ids of nodes, ``nodes()``, and features of a type, ``nodes["user"].data``."""
        return StoredNodes(self)

    @property
    def edges(self) -> StoredEdges:
        """Features of a type, ``edges["follows"].data``."""
        return StoredEdges(self)

    # Sources and destinations of edges are all nodes.
    srcdata = dstdata = ndata
    srcnodes = dstnodes = nodes

    # -- sampling -------------------------------------------------------------------------

    sample_neighbors = _delegate("_sampler", StoreSampler.sample_neighbors)
    sample_blocks = _delegate("_sampler", StoreSampler.sample_blocks)
    sample_blocks_async = _delegate("_sampler", StoreSampler.sample_blocks_async)
    sample_hops_async = _delegate("_sampler", StoreSampler.sample_hops_async)
    blocks_of = _delegate("_sampler", StoreSampler.blocks_of)
    input_nodes = _delegate("_sampler", StoreSampler.input_nodes)
    random_walk = _delegate("_walker", RandomWalker.random_walk)
    pinsage_neighbors = _delegate("_walker", RandomWalker.pinsage_neighbors)
    pinsage_blocks_async = _delegate("_walker", RandomWalker.pinsage_blocks_async)

    begin_epoch = renamed_method("begin_epoch", start_epoch, until="0.2")
    begin_blocks = renamed_method("begin_blocks", sample_blocks_async, until="0.2")
    begin_hops = renamed_method("begin_hops", sample_hops_async, until="0.2")
    begin_pinsage_blocks = renamed_method("begin_pinsage_blocks", pinsage_blocks_async, until="0.2")
