"""The graph that DataLoaders get in place of the script's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from dgl import backend as F
from dgl.base import EID
from dgl.frame import Column, Frame
from dgl.heterograph import DGLGraph
from dgl.utils import gather_pinned_tensor_rows, set_new_frames

from dgl_mgpu.dgl.shared_graphs.columns import Stored
from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.graph.stored_tensors import Snapshot, is_watched
from dgl_mgpu.ops import check_weights
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.sampling.views import scalars_view
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.edges import EdgeQueries
from dgl_mgpu.store.graph import GRAPH_NAMES, StoreGraph
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure, Nodes, edge_table
from dgl_mgpu.store.lazy_rows import LazyColumn, LazyColumns, NodeOrEdgeType
from dgl_mgpu.store.memory import Store
from dgl_mgpu.utils.types import CanonicalEtype

#: What can be read of a DGLGraph without pinning its memory for a GPU.
_NEEDS_NO_PINNING = {
    "_node_frames", "_edge_frames", "node_attr_schemes", "edge_attr_schemes", "get_ntype_id",
    "get_etype_id", "srctypes", "dsttypes", "is_block",
}  # fmt: skip


def _of_original(name: str) -> Any:
    return property(lambda self: getattr(self.original, name))


FrameOrColumn = TypeVar("FrameOrColumn", Frame, Column)


class ScriptGraph:
    """A script's graph, pinned where a GPU samples it or reads its features."""

    def __init__(self, graph: DGLGraph, device: torch.device) -> None:
        self.graph, self._device = graph, device

    def pinned(self) -> DGLGraph:
        """The graph, readable by GPUs."""
        graph = self.graph
        if self._device.type == "cuda" and not graph.is_pinned():
            graph.create_formats_()
            graph.pin_memory_()
        return graph

    def pin(self, features: FrameOrColumn) -> FrameOrColumn:
        """Features of the graph, pinned in place."""
        if self._device.type == "cuda":
            features.pin_memory_()
        return features

    def frame(self, of: NodeOrEdgeType) -> Frame:
        """The features of a node type or of a canonical edge type."""
        if isinstance(of, str):
            return self.graph._node_frames[self.graph.get_ntype_id(of)]
        return self.graph._edge_frames[self.graph.get_etype_id(of)]

    def columns(self, of: NodeOrEdgeType) -> dict[str, Any]:
        """The columns of a type by name, as they are now."""
        return self.frame(of)._columns


class SharedFeatures(GraphFeatures):
    """Features of a script's graph: from the store, unless the columns have changed since."""

    def __init__(
        self, store: Store, structure: GraphStructure, stored: Stored, script: ScriptGraph
    ) -> None:
        super().__init__(store, structure, stored.store.graph.traffic)
        self._stored, self._script = stored, script
        # By name of weights, the tensors that were checked and whether the store can use them.
        self._weights_seen: dict[str, tuple[list[Snapshot | None], bool]] = {}

    def get_node_storage(self, key: str, ntype: str | None = None) -> Any:
        """The storage of a node feature: the store's, or the column that is the feature now."""
        return self._storage_of(self._structure.only_ntype(ntype), key)

    def get_edge_storage(self, key: str, etype: str | CanonicalEtype | None = None) -> Any:
        """The storage of an edge feature, likewise."""
        return self._storage_of(self._structure.to_canonical_etype(etype), key)

    def _storage_of(self, of: NodeOrEdgeType, key: str) -> Any:
        column = self._script.columns(of)[key]
        name = self._stored.name_of(of, column)
        return self._script.pin(column) if name is None else self.storage(of, name)

    def add_columns(self, frame: Frame, of: NodeOrEdgeType, ids_name: str | None = None) -> None:
        """Give a frame the features that the graph has now, of the rows that it names or of all."""
        original = self._script.frame(of)
        frame._initializers = original._initializers
        frame._default_initializer = original._default_initializer
        super().add_columns(frame, of, ids_name)

    def columns_of(self, of: NodeOrEdgeType, ids_name: str) -> LazyColumns:
        """The columns that the graph has now."""
        original = self._script.frame(of)
        columns = dict(original._columns)

        def make(name: str, ids: torch.Tensor | None) -> LazyColumn:
            column = columns[name]
            read = partial(self._rows, of, column)
            return LazyColumn.create(column.storage, column.scheme, ids, read)

        initializers = original._initializers, original._default_initializer
        return LazyColumns(columns, ids_name, make, initializers)

    def _rows(self, of: NodeOrEdgeType, column: Column, ids: torch.Tensor | None) -> torch.Tensor:
        """Rows of a column of the script's graph, on the device of ``ids``; its own if None."""
        if ids is None:
            return column.data
        name = self._stored.name_of(of, column)
        if name is not None:
            return self.storage(of, name).fetch(ids, ids.device)
        rows = self._script.pin(column).data
        return gather_pinned_tensor_rows(rows, ids) if ids.is_cuda else F.gather_row(rows, ids)

    def weights(self, etype: CanonicalEtype, prob: str) -> RowView | None:
        """Edge feature ``prob`` of a type as weights; None, as in DGL, for a type without it."""
        column = self._script.columns(etype).get(prob)
        if column is None:
            return None
        name = self._stored.name_of(etype, column)
        if name is None:
            values = self._script.pin(column).data
            if values.dim() != 1:
                raise InvalidInputError(
                    f"sample by edge feature '{prob}'",
                    f"it has shape {tuple(values.shape)}",
                    "give it one number for each edge",
                )
            return scalars_view(values.detach(), self._structure.device)
        view = self._store.tables[edge_table(etype, name)].view
        assert isinstance(view, RowView)
        return view

    def check_weights(self, prob: str) -> None:
        """Check whether the store can sample by an edge feature; if not, DGL does."""
        self.can_weigh(prob)

    def can_weigh(self, prob: str | None) -> bool:
        """Whether the store can sample by an edge feature as it is now.

        It refuses weights that are all zero at some node, where DGL takes no edge.
        """
        if prob is None:
            return True
        columns = [self._script.columns(etype) for etype in self._structure.canonical_etypes]
        tensors = [by_name[prob].data for by_name in columns if prob in by_name]
        snapshots, can_weigh = self._weights_seen.get(prob, ([], False))
        is_known = len(snapshots) == len(tensors) and all(
            snapshot is not None and snapshot.is_of(tensor)
            for snapshot, tensor in zip(snapshots, tensors, strict=True)
        )
        if not (is_known and tensors):
            can_weigh = bool(tensors) and all(map(is_watched, tensors)) and self._are_valid(prob)
            snapshots = [Snapshot(tensor) if is_watched(tensor) else None for tensor in tensors]
            self._weights_seen[prob] = snapshots, can_weigh
        return can_weigh

    def _are_valid(self, prob: str) -> bool:
        try:
            for etype, weights in self.weights_by_etype(prob).items():
                check_weights(self._structure.view(etype), weights)
        except InvalidInputError:
            return False
        return True


class SharedEdgeQueries(EdgeQueries):
    """Edges of a script's graph: the store's, or else the graph's own."""

    def __init__(self, store: Store, structure: GraphStructure, script: ScriptGraph) -> None:
        super().__init__(store, structure)
        self._script = script

    def find_edges(self, eid: Any, etype: str | CanonicalEtype | None = None) -> Any:
        """The ends of edges, from the store if it has them."""
        try:
            return super().find_edges(eid, etype)
        except UnsupportedByStoreError:  # it was built for a loader that needs none
            return self._script.pinned().find_edges(eid, etype=etype)

    def in_degrees(self, *arguments: Any, **options: Any) -> Any:
        """The in-degrees of the script's graph."""
        return self._script.pinned().in_degrees(*arguments, **options)


class SharedGraph(StoreGraph):
    """A script's graph whose topology and features are in the store.

    The script's graph serves what the store does not: other methods, edges by source, weights that
    the store refuses and DGL takes.  It is pinned then, if it is sampled on a GPU.  Features are
    those that ``original``, the script's graph, has when they are read.
    """

    features_are_stored = False

    def __init__(self, stored: Stored, original: DGLGraph) -> None:
        graph = stored.store.graph
        graph.traffic.is_counting = False  # nobody asks for the counts
        store, structure = graph._store, graph._structure
        script = ScriptGraph(original, graph.device)
        parts = replace(
            graph._parts,
            features=SharedFeatures(store, structure, stored, script),
            edges=SharedEdgeQueries(store, structure, script),
            # DGL keeps the caches of features with a graph.
            gpu_caches=original._gpu_caches,
        )
        self._store = store
        self._assemble(parts, graph._batch_keys)
        self._share(stored, script, original._graph)

    def _share(self, stored: Stored, script: ScriptGraph, index: Any) -> None:
        """Set the attributes that a store's own graph does not have."""
        self._stored, self._script, self._index = stored, script, index
        self.original = script.graph

    def _copy(self, batch_keys: BatchKeys) -> SharedGraph:
        copied: Any = super()._copy(batch_keys)
        copied._share(self._stored, self._script, self._index)
        return copied

    # A store's graph has these from the store.
    ndata, edata, nodes, edges, srcdata, dstdata, srcnodes, dstnodes = (
        _of_original(name)
        for name in (
            "ndata", "edata", "nodes", "edges", "srcdata", "dstdata", "srcnodes", "dstnodes"
        )
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:  # type: ignore[override]
        if name not in GRAPH_NAMES:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.original if name in _NEEDS_NO_PINNING else self._script.pinned(), name)

    def start_epoch(self, shared: StoreGraph) -> None:
        """Go to the next epoch since ``dgl.seed``, of all loaders of the script's graph.

        Raises InvalidInputError if nodes or edges were added to the script's graph, or removed.
        """
        if self.original._graph is not self._index:
            raise InvalidInputError(
                "sample a graph from the store",
                "its nodes or edges have changed since the DataLoader was made",
                "make the DataLoader when the graph is complete",
            )
        keys = self._batch_keys
        keys.seed, keys.epoch = self._stored.passes.next()

    def is_pinned(self) -> bool:
        """Whether the script's graph is."""
        return self.original.is_pinned()

    def _can_weigh(self, prob: str | None) -> bool:
        features = self._features
        assert isinstance(features, SharedFeatures)
        return features.can_weigh(prob)

    def sample_blocks_async(  # type: ignore[override]
        self, nodes: Nodes, fanouts: Any, prob: str | None = None, replace: bool = False,
        exclude_edges: Any = None, *, on_host: Nodes | None = None,
    ) -> Any:  # fmt: skip
        """As :meth:`StoreGraph.sample_blocks_async`; None where DGL is to sample."""
        if not self._can_weigh(prob):
            return None
        return super().sample_blocks_async(
            nodes, fanouts, prob, replace, exclude_edges, on_host=on_host
        )

    def sample_neighbors(
        self, nodes: Nodes, fanout: Any, edge_dir: str = "in", prob: str | None = None,
        replace: bool = False, copy_ndata: bool = True, copy_edata: bool = True,
        _dist_training: bool = False, exclude_edges: Any = None, output_device: Any = None,
    ) -> DGLGraph:  # fmt: skip
        """As ``dgl.sampling.sample_neighbors`` of the script's graph."""
        rest = prob, replace, copy_ndata, copy_edata, _dist_training, exclude_edges, output_device
        if edge_dir != "in" or not self._can_weigh(prob):
            return self._script.pinned().sample_neighbors(nodes, fanout, edge_dir, *rest)
        frontier = super().sample_neighbors(
            nodes, fanout, edge_dir, prob, replace, False, False, exclude_edges=exclude_edges
        )
        # DGL makes blocks of rows of these, and reads tensors in host memory only.
        if copy_ndata:
            frames = [self._script.pin(frame).clone() for frame in self.original._node_frames]
            set_new_frames(frontier, node_frames=frames)
        if copy_edata:
            eids = [frame[EID] for frame in frontier._edge_frames]
            frames = [
                self._script.pin(frame).subframe(ids)
                for frame, ids in zip(self.original._edge_frames, eids, strict=True)
            ]
            set_new_frames(frontier, edge_frames=frames)
            for frame, ids in zip(frames, eids, strict=True):
                frame[EID] = ids
        return frontier if output_device is None else frontier.to(output_device)

    def edge_subgraph(
        self, edges: Any, *, relabel_nodes: bool = True, store_ids: bool = True,
        output_device: Any = None,
    ) -> DGLGraph:  # fmt: skip
        """The subgraph of edges, as ``dgl.edge_subgraph`` makes it of the script's graph."""
        if relabel_nodes or not store_ids:
            return self._script.pinned().edge_subgraph(
                edges, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device
            )
        return super().edge_subgraph(edges, relabel_nodes=False, output_device=output_device)
