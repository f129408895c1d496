"""The store as a graph that DGL's DataLoader and samplers take in place of a DGLGraph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import dgl
import torch

from dgl_mgpu.backend.global_store.batch_keys import BatchKeys
from dgl_mgpu.backend.global_store.edges import EdgeQueries, Edges
from dgl_mgpu.backend.global_store.excluded_edges import sample_hops_without, without
from dgl_mgpu.backend.global_store.storage import TableStorage, Traffic
from dgl_mgpu.backend.global_store.tables import (
    CanonicalEtype,
    Nodes,
    edge_table,
    node_table,
)
from dgl_mgpu.backend.ours import stays_tensor
from dgl_mgpu.backend.sampling.block_sampling import (
    begin_hops,
    blank_blocks,
    tensor_blocks,
    visited_block,
)
from dgl_mgpu.backend.sampling.dataloading import serve_dataloading
from dgl_mgpu.backend.sampling.filter import IdFilter
from dgl_mgpu.backend.structure.blocks import BlankBlock
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import (
    BlockEdges,
    EtypeBlock,
    SampledNeighbors,
    SampleKey,
    VisitedNeighbors,
    begin_pinsage_blocks,
    check_weights,
    pinsage_neighbors,
    sample_neighbors,
)
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store import Store, Table

# What DGL's samplers and users look for on a graph.
_DGL_NAMES = frozenset(dir(dgl.DGLGraph)) | {"_graph", "_node_frames", "_edge_frames"}

#: Edge feature that says how often walks visited a neighbor.
_VISITS = "visits"


class StoreGraph(EdgeQueries):
    """A graph whose topology and features live in a store.

    Implements the part of DGL's graph interface that its DataLoader, neighbour samplers and
    samplers of edges use, so that it takes a DGLGraph's place there.  Node and edge ids are those
    of the graph the store was built from.

    Attributes
    ----------
    ntypes : list of str
    canonical_etypes : list of (str, str, str)
    idtype : torch.dtype
    device : torch.device
        Where it is sampled and its blocks are: the store's.
    traffic : Traffic
        Rows and bytes read through it since the last ``traffic.take()``, by tier.
    """

    def __init__(
        self,
        store: Store,
        num_nodes: Mapping[str, int],
        canonical_etypes: list[CanonicalEtype],
        seed: int,
    ) -> None:
        super().__init__(store, num_nodes, canonical_etypes)
        self.traffic = Traffic()
        self._batch_keys = BatchKeys(seed)
        self._epoch_is_set = False
        self._checked_weights: set[str] = set()
        self._places = {}
        self.device = self.view(canonical_etypes[0]).tiers.device
        # DGL's DataLoader looks here before it asks for a storage.
        self._gpu_caches: dict[str, dict] = {"node": {}, "edge": {}}
        serve_dataloading()

    def __repr__(self) -> str:
        return (
            f"StoreGraph(num_nodes={self._num_nodes}, "
            f"num_edges={ {e: self.num_edges(e) for e in self.canonical_etypes} })"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name in _DGL_NAMES:
            raise UnsupportedByStoreError(
                f"use '{name}' of a store's graph",
                "the store serves sampling and features, not all of a DGLGraph",
                "sample with NeighborSampler, as_edge_prediction_sampler or its sample_neighbors, "
                "read features with get_node_storage, and use the DGLGraph itself for the rest",
            )
        raise AttributeError(f"'StoreGraph' object has no attribute '{name}'")

    # -- features -----------------------------------------------------------------------

    def get_node_storage(self, key: str, ntype: str | None = None) -> TableStorage:
        """The storage of node feature ``key``.

        Raises
        ------
        InvalidInputError
            If there is no such feature.
        """
        ntype = self._only_ntype(ntype)
        return self._storage(key, node_table(ntype, key), ntype)

    def get_edge_storage(self, key: str, etype: str | CanonicalEtype | None = None) -> TableStorage:
        """The storage of edge feature ``key``; rows are edge ids.

        Raises
        ------
        InvalidInputError
            If there is no such feature.
        """
        full = self.to_canonical_etype(etype)
        return self._storage(key, edge_table(full, key), full[1])

    # -- sampling -----------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose samples are drawn from now on, until it is set again.

        Without it every DataLoader counts the times it was iterated over, from 0.  A run that
        resumes, or several loaders that should agree, set it before each epoch.
        """
        self._epoch_is_set = True
        self._batch_keys.epoch = epoch

    def sample_neighbors(
        self,
        nodes: Nodes,
        fanout: int | Mapping[str | CanonicalEtype, int],
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
        nodes : Tensor or dict of Tensor
            Seed nodes, (n,) int32 or int64, by node type in a heterogeneous graph.
        fanout : int or dict
            Edges for each node (of each edge type); -1 takes all.
        edge_dir : str
            'in': the store keeps in-edges.
        prob : str, optional
            Edge feature of unnormalised probabilities, or of booleans as a mask.
        replace : bool
        exclude_edges : Tensor or dict of Tensor, optional
            Edge ids to leave out of what is sampled, by edge type in a heterogeneous graph.
        copy_ndata, copy_edata : bool
            Accepted for DGL's sake; features are fetched from the store when asked for.

        Returns
        -------
        DGLGraph
            All nodes and the sampled edges; ``edata[dgl.EID]`` holds their ids.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        """
        if edge_dir != "in":
            raise InvalidInputError(
                f"sample edges of direction '{edge_dir}'",
                "the store keeps in-edges only",
                "build the store from dgl.reverse(g) and sample its in-edges",
            )
        seeds = self._by_ntype(nodes)
        sampled = self._sample(
            seeds, self._by_etype(fanout), prob, replace, self._batch_keys.next_key(seeds)
        )
        for etype, left_out in self._left_out(exclude_edges).items():
            sampled[etype] = without(sampled[etype], left_out)
        edges = {
            etype: (sample.neighbors, self._destinations(seeds[etype[2]], sample))
            for etype, sample in sampled.items()
        }
        frontier = dgl.heterograph(edges, self._num_nodes, idtype=self.idtype, device=self.device)
        for etype, sample in sampled.items():
            frontier.edges[etype].data[dgl.EID] = sample.eids
        return frontier if output_device is None else frontier.to(output_device)

    def sample_blocks(
        self,
        nodes: Nodes,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
    ) -> tuple[Nodes, Nodes, list[dgl.DGLGraph]]:
        """Sample all hops of a mini-batch into blocks.

        The same edges as :meth:`sample_neighbors` and ``dgl.to_block`` hop by hop, without the
        graph over all nodes in between.

        Parameters
        ----------
        nodes : Tensor or dict of Tensor
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
        return self.begin_blocks(nodes, fanouts, prob, replace, exclude_edges)()

    def begin_blocks(
        self,
        nodes: Nodes,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
        *,
        on_host: Nodes | None = None,
    ) -> Callable[[], tuple[Nodes, Nodes, list[dgl.DGLGraph]]]:
        """Have a GPU begin with what :meth:`sample_blocks` does, where one kernel does it all.

        Parameters and errors are those of :meth:`sample_blocks`; what is returned is to be called
        once, on the stream on which it was begun, waits for the GPU and returns what that does.
        ``on_host`` are the same nodes in host memory, if they are there: a mini-batch is known by
        their ids, and for those of a GPU the host waits.
        """
        seeds = self._by_ntype(nodes)
        key = self._batch_keys.batch_key(self._named(nodes if on_host is None else on_host))
        finish = self._begin_hops(seeds, key, fanouts, prob, replace, exclude_edges)
        blanks = self._blank_blocks(len(fanouts))

        def blocks() -> tuple[Nodes, Nodes, list[dgl.DGLGraph]]:
            for etype in self.canonical_etypes:
                self.view(etype)  # raises if the store was closed since
            filled = self._dgl_blocks(finish(), seeds, blanks)
            return filled[0].srcdata[dgl.NID] if filled else nodes, nodes, filled

        return blocks

    def input_nodes(
        self, nodes: Nodes, fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]]
    ) -> dict[str, torch.Tensor]:
        """The input nodes of a mini-batch: those of :meth:`sample_blocks`, without the blocks.

        Returns
        -------
        dict of Tensor
            By node type, on the device where the store's operators run.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        seeds = self._by_ntype(nodes)
        key = self._batch_keys.batch_key(self._named(nodes))
        sampled = self._begin_hops(seeds, key, fanouts, None, False)()
        return sampled[0].src_nodes if sampled else seeds

    def _begin_hops(
        self,
        seeds: dict[str, torch.Tensor],
        key: SampleKey,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None,
        replace: bool,
        exclude_edges: Edges | None = None,
    ) -> Callable[[], list[EtypeBlock]]:
        """Begin with all hops of a mini-batch where the store is."""
        weights = {}
        if prob is not None:
            found = {etype: self._weights(etype, prob) for etype in self.canonical_etypes}
            weights = {etype: rows for etype, rows in found.items() if rows is not None}
        left_out = self._left_out(exclude_edges)
        begin = partial(partial, sample_hops_without, left_out) if left_out else begin_hops
        return begin(
            {etype: self.view(etype) for etype in self.canonical_etypes},
            seeds,
            [self._by_etype(fanout) for fanout in fanouts],
            key,
            replace=replace,
            weights=weights,
        )

    def _blank_blocks(self, count: int) -> list[BlankBlock]:
        """Blocks to be filled, if a GPU samples meanwhile."""
        if self.device.type != "cuda":
            return []
        return blank_blocks(count, self, self.idtype, self.device)

    def _dgl_blocks(
        self,
        sampled: Sequence[EtypeBlock],
        seeds: Mapping[str, torch.Tensor],
        blanks: Sequence[BlankBlock] = (),
    ) -> list[dgl.DGLGraph]:
        """What was sampled as DGL's blocks: its C++ has those on the CPU."""
        if sampled and stays_tensor(next(iter(sampled[0].src_nodes.values()))):
            return tensor_blocks(sampled, self.ntypes, self.canonical_etypes, seeds, blanks)
        return [self._block_on_cpu(each) for each in sampled]

    def _block_on_cpu(self, sampled: EtypeBlock) -> dgl.DGLGraph:
        sources = sampled.src_nodes
        block = dgl.create_block(
            {etype: ("csc", self._csc(edges)) for etype, edges in sampled.edges.items()},
            {ntype: len(nodes) for ntype, nodes in sources.items()},
            sampled.num_dst,
            idtype=self.idtype,
        )
        for ntype, nodes in sources.items():
            block.srcnodes[ntype].data[dgl.NID] = nodes
            block.dstnodes[ntype].data[dgl.NID] = nodes[: sampled.num_dst[ntype]]
        for etype, edges in sampled.edges.items():
            block.edges[etype].data[dgl.EID] = edges.eids
        return block

    def _csc(self, edges: BlockEdges) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Edge ids are places, which DGL would take for granted; but its CPU kernels for edge
        # features refuse a graph that does not spell them out.
        eids = torch.arange(len(edges.src), dtype=self.idtype)
        return edges.indptr.to(self.idtype), edges.src, eids

    def _sample(
        self,
        seeds: dict[str, torch.Tensor],
        fanouts: Mapping[CanonicalEtype, int],
        prob: str | None,
        replace: bool,
        key: SampleKey,
    ) -> dict[CanonicalEtype, SampledNeighbors]:
        """Sample every edge type; adds empty seeds for node types that have none."""
        empty = torch.empty(0, dtype=self.idtype, device=self.device)
        sampled = {}
        for index, etype in enumerate(self.canonical_etypes):
            seeds.setdefault(etype[2], empty)
            sampled[etype] = sample_neighbors(
                self.view(etype),
                seeds[etype[2]],
                fanouts[etype],
                dataclasses.replace(key, etype=index),
                replace=replace,
                weights=None if prob is None else self._weights(etype, prob),
            )
        return sampled

    def pinsage_neighbors(
        self, nodes: torch.Tensor, num_walks: int, walk_length: int, num_neighbors: int
    ) -> dgl.DGLGraph:
        """The nodes that random walks along in-edges visit most, as edges to ``nodes``.

        Parameters
        ----------
        nodes : Tensor, int32 or int64, shape (n,)
        num_walks, walk_length : int
            Walks from each node, and their steps.
        num_neighbors : int
            Nodes selected for each node at most.

        Returns
        -------
        DGLGraph
            All nodes and an edge from each selected node, with its visits in
            ``edata['visits']``.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        view = self.view(self._walked())
        key = self._batch_keys.next_key({self.ntypes[0]: nodes})
        visited = pinsage_neighbors(
            view,
            nodes.to(self.device),
            num_traversals=walk_length,
            termination_prob=0.0,
            num_random_walks=num_walks,
            num_neighbors=num_neighbors,
            key=key,
        )
        frontier = dgl.graph(
            (visited.neighbors, self._destinations(nodes, visited)),
            num_nodes=self.num_nodes(),
            idtype=self.idtype,
            device=self.device,
        )
        frontier.edata[_VISITS] = visited.counts
        return frontier

    def begin_pinsage_blocks(
        self,
        nodes: Nodes,
        num_layers: int,
        num_walks: int,
        walk_length: int,
        num_neighbors: int,
        *,
        on_host: Nodes | None = None,
    ) -> Callable[[], tuple[Nodes, Nodes, list[dgl.DGLGraph]]]:
        """Have a GPU begin with all layers of a mini-batch for PinSAGE.

        The same edges as :meth:`pinsage_neighbors` and ``dgl.to_block`` layer by layer, without
        the graph over all nodes in between.

        Parameters
        ----------
        nodes, on_host
            As in :meth:`begin_blocks`.
        num_layers : int
        num_walks, walk_length, num_neighbors
            As in :meth:`pinsage_neighbors`, alike in all layers.

        Returns
        -------
        callable
            As :meth:`begin_blocks` returns it, of blocks with visits in ``edata['visits']``.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        etype = self._walked()
        seeds = self._by_ntype(nodes)
        finish = begin_pinsage_blocks(
            self.view(etype),
            seeds[etype[0]],
            num_layers,
            self._batch_keys.batch_key(self._named(nodes if on_host is None else on_host)),
            num_traversals=walk_length,
            termination_prob=0.0,
            num_random_walks=num_walks,
            num_neighbors=num_neighbors,
        )
        blanks = self._blank_blocks(num_layers)

        def blocks() -> tuple[Nodes, Nodes, list[dgl.DGLGraph]]:
            self.view(etype)  # raises if the store was closed since
            visited = finish()
            sampled = [visited_block(each, etype) for each in visited]
            filled = self._dgl_blocks(sampled, seeds, blanks)
            for block, each in zip(filled, visited, strict=True):
                block.edata[_VISITS] = each.counts
            return filled[0].srcdata[dgl.NID] if filled else nodes, nodes, filled

        return blocks

    def _walked(self) -> CanonicalEtype:
        """The edges that PinSAGE's walks go along."""
        if not self.is_homogeneous:
            raise InvalidInputError(
                "select PinSAGE neighbors",
                f"edge types {self.etypes}",
                "use a homogeneous graph",
            )
        return self.canonical_etypes[0]

    def check_weights(self, prob: str) -> None:
        """Check edge feature ``prob`` of the whole graph as sampling weights, once.

        Raises
        ------
        InvalidWeightError
            If a weight is NaN, infinite or negative, or all are zero at some node.
        """
        if prob in self._checked_weights:
            return
        for etype in self.canonical_etypes:
            weights = self._weights(etype, prob)
            if weights is not None:
                check_weights(self.view(etype), weights)
        self._checked_weights.add(prob)

    def weight_tables(self, prob: str) -> list[Table]:
        """Where edge feature ``prob`` is, of the edge types that have it."""
        names = (edge_table(etype, prob) for etype in self.canonical_etypes)
        return [self._store.tables[name] for name in names if name in self._store.tables]

    # -- helpers ------------------------------------------------------------------------

    def for_loader(self) -> StoreGraph:
        """This graph with an epoch count of its own."""
        twin = object.__new__(StoreGraph)
        twin.__dict__.update(self.__dict__)
        twin._batch_keys = BatchKeys(self._batch_keys.seed)
        twin._batch_keys.epoch = -1
        return twin

    def begin_epoch(self, shared: StoreGraph) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to the next one."""
        mine, its = self._batch_keys, shared._batch_keys
        mine.epoch = its.epoch if shared._epoch_is_set else mine.epoch + 1

    def _destinations(
        self, seeds: torch.Tensor, sampled: SampledNeighbors | VisitedNeighbors
    ) -> torch.Tensor:
        """The seed of each sampled edge."""
        seeds = seeds.to(self.device, self.idtype)
        return seeds.repeat_interleave(sampled.indptr.diff(), output_size=len(sampled.neighbors))

    def _weights(self, etype: CanonicalEtype, prob: str) -> RowView | None:
        """Weights of an edge type; None, as in DGL, for one that has no such feature."""
        table = self._store.tables.get(edge_table(etype, prob))
        if table is None:
            if self.is_homogeneous:
                self.get_edge_storage(prob)  # raises, and says which features there are
            return None
        assert isinstance(table.view, RowView)
        return table.view

    def _storage(self, key: str, name: str, of: str) -> TableStorage:
        table: Table | None = self._store.tables.get(name)
        if table is None:
            prefix = name.rpartition("/")[0] + "/"
            there = [n.removeprefix(prefix) for n in self._store.tables if n.startswith(prefix)]
            raise InvalidInputError(
                f"find feature '{key}' in {prefix.rstrip('/')}",
                f"the store holds {there}",
                "name one of these, or set the feature on the graph before building the store",
            )
        return TableStorage(key if self.is_homogeneous else f"{of}.{key}", table, self.traffic)

    def _by_ntype(self, nodes: Nodes) -> dict[str, torch.Tensor]:
        """Seed nodes by type, checked, where the graph is and in its id type."""
        return {
            ntype: self._checked_ids(ids, self._num_nodes[ntype])
            for ntype, ids in self._named(nodes).items()
        }

    def _named(self, nodes: Nodes) -> dict[str, torch.Tensor]:
        """Nodes by type, as they are."""
        by_type = nodes if isinstance(nodes, Mapping) else {None: nodes}
        return {self._only_ntype(ntype): torch.as_tensor(ids) for ntype, ids in by_type.items()}

    def _checked_ids(self, ids: torch.Tensor, num_nodes: int) -> torch.Tensor:
        # Before any conversion: a float or a mask would become ids that nobody asked for.
        if not len(ids):
            return ids.to(self.device, self.idtype)
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            hint = "; of a mask, mask.nonzero().flatten()" if ids.dtype == torch.bool else ""
            raise InvalidInputError(
                "sample neighbors",
                f"seed nodes of dtype {ids.dtype} and shape {tuple(ids.shape)}",
                f"pass a vector of int32 or int64 node ids{hint}",
            )
        if ids.is_cuda:
            return ids.to(self.device)  # operators check them, and need not wait for it
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= num_nodes:
            raise IdOutOfRangeError(
                "sample neighbors",
                f"seed node {low if low < 0 else high} of {num_nodes} nodes",
                f"pass node ids in [0, {num_nodes})",
            )
        return ids.to(self.device, self.idtype)

    def _left_out(self, edges: Edges | None) -> dict[CanonicalEtype, IdFilter]:
        """Edges to leave out, by their type."""
        if edges is None:
            return {}
        by_type = edges if isinstance(edges, Mapping) else {None: edges}
        return {
            self.to_canonical_etype(etype): IdFilter(torch.as_tensor(eids).to(self.device))
            for etype, eids in by_type.items()
        }
