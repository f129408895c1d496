"""The graph that DataLoaders are given in place of a script's."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from dgl import backend as F
from dgl.base import EID
from dgl.frame import Column, Frame
from dgl.heterograph import DGLGraph
from dgl.utils import gather_pinned_tensor_rows, set_new_frames

from dgl_mgpu.dgl.shared_graphs.columns import Snapshot, Stored, is_watched
from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import check_weights
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.sampling.views import scalars_view
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.store.graph import GRAPH_NAMES, StoreGraph
from dgl_mgpu.store.lazy_rows import RowsLater, Type
from dgl_mgpu.store.table_names import CanonicalEtype, Nodes, edge_table

#: What is read of a DGLGraph without its memory being pinned for a GPU.
_NEEDS_NO_PINNING = {"_node_frames", "_edge_frames", "node_attr_schemes", "edge_attr_schemes"} | {
    "get_ntype_id",
    "get_etype_id",
    "srctypes",
    "dsttypes",
    "is_block",
}


def _of_original(name: str) -> Any:
    return property(lambda self: getattr(self.original, name))


FrameOrColumn = TypeVar("FrameOrColumn", Frame, Column)


class SharedGraph(StoreGraph):
    """A script's graph of which topology and features are in the store.

    What the store does not serve is asked of the script's graph, which is pinned then, if it is
    sampled on a GPU: other methods, edges by source, weights that the store refuses and DGL takes.

    Parameters
    ----------
    stored : Stored
    original : DGLGraph
        The script's.  Its columns count, as they are when they are read.

    Attributes
    ----------
    features_are_stored : bool
        They are not: blocks have rows of what features the script's graph has.
    """

    features_are_stored = False

    def __init__(self, stored: Stored, original: DGLGraph) -> None:
        self.__dict__.update(vars(stored.store.graph))
        self.original = original
        self._stored, self._index = stored, original._graph
        # DGL keeps the caches of features with a graph.
        self._gpu_caches = original._gpu_caches
        # For each name of weights, what they were when they were looked at, and what was found.
        self._weights_seen: dict[str, tuple[list[Snapshot | None], bool]] = {}

    # What a store's graph has itself, and a script's has otherwise.
    ndata, edata, nodes, edges, srcdata, dstdata, srcnodes, dstnodes = (
        _of_original(name)
        for name in (
            "ndata", "edata", "nodes", "edges", "srcdata", "dstdata", "srcnodes", "dstnodes"
        )
    )  # fmt: skip

    def in_degrees(self, *arguments: Any, **options: Any) -> Any:
        """As the script's graph says."""
        return self._pinned().in_degrees(*arguments, **options)

    def __getattr__(self, name: str) -> Any:  # type: ignore[override]
        if name not in GRAPH_NAMES:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.original if name in _NEEDS_NO_PINNING else self._pinned(), name)

    def begin_epoch(self, shared: StoreGraph) -> None:
        """Go to what has not been sampled yet, by whatever loader, since ``dgl.seed``.

        Raises
        ------
        InvalidInputError
            If nodes or edges were added to the script's graph, or removed.
        """
        if self.original._graph is not self._index:
            raise InvalidInputError(
                "sample a graph from the store",
                "its nodes or edges have changed since the DataLoader was made",
                "make the DataLoader when the graph is complete",
            )
        mine = self._batch_keys
        mine.seed, mine.epoch = self._stored.passes.next()

    # -- features -----------------------------------------------------------------------

    def get_node_storage(self, key: str, ntype: str | None = None) -> Any:
        """The storage of a node feature: the store's, or the column that is the feature now."""
        return self._storage_of(self._only_ntype(ntype), key)

    def get_edge_storage(self, key: str, etype: str | CanonicalEtype | None = None) -> Any:
        """The storage of an edge feature, likewise."""
        return self._storage_of(self.to_canonical_etype(etype), key)

    def _storage_of(self, of: Type, key: str) -> Any:
        column = self._columns_of(of)[key]
        name = self._stored.name_of(of, column)
        return self._on_host(column) if name is None else self._stored_as(of, name)

    def _stored_as(self, of: Type, name: str) -> TableStorage:
        if isinstance(of, str):
            return super().get_node_storage(name, of)
        return super().get_edge_storage(name, of)

    def _columns_of(self, of: Type) -> dict[str, Any]:
        return self._frame_of(of)._columns

    def _frame_of(self, of: Type) -> Frame:
        g = self.original
        if isinstance(of, str):
            return g._node_frames[g.get_ntype_id(of)]
        return g._edge_frames[g.get_etype_id(of)]

    def _rows(self, of: Type, column: Column, ids: torch.Tensor | None) -> torch.Tensor:
        """Rows of a column of the script's graph, on the device of ``ids``; its own if None."""
        if ids is None:
            return column.data
        name = self._stored.name_of(of, column)
        if name is not None:
            return self._stored_as(of, name).fetch(ids, ids.device)
        rows = self._on_host(column).data
        return gather_pinned_tensor_rows(rows, ids) if ids.is_cuda else F.gather_row(rows, ids)

    def _on_host(self, features: FrameOrColumn) -> FrameOrColumn:
        """Features where they are, as GPUs can read them."""
        if self.device.type == "cuda":
            features.pin_memory_()
        return features

    def _pinned(self) -> DGLGraph:
        """The script's graph, as GPUs can use it."""
        g = self.original
        if self.device.type == "cuda" and not g.is_pinned():
            g.create_formats_()
            g.pin_memory_()
        return g

    # -- sampling -----------------------------------------------------------------------

    def is_pinned(self) -> bool:
        """Whether the script's graph is."""
        return self.original.is_pinned()

    def check_weights(self, prob: str) -> None:
        """See whether the store can sample by an edge feature; if not, DGL does."""
        self._serves(prob)

    def begin_blocks(  # type: ignore[override]
        self,
        nodes: Nodes,
        fanouts: Any,
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Any = None,
        *,
        on_host: Nodes | None = None,
    ) -> Any:
        """As :meth:`StoreGraph.begin_blocks`, with features; None where DGL is to do it."""
        if not self._serves(prob):
            return None
        return super().begin_blocks(nodes, fanouts, prob, replace, exclude_edges, on_host=on_host)

    def sample_neighbors(
        self,
        nodes: Nodes,
        fanout: Any,
        edge_dir: str = "in",
        prob: str | None = None,
        replace: bool = False,
        copy_ndata: bool = True,
        copy_edata: bool = True,
        _dist_training: bool = False,
        exclude_edges: Any = None,
        output_device: Any = None,
    ) -> DGLGraph:
        """As ``dgl.sampling.sample_neighbors`` of the script's graph."""
        rest = prob, replace, copy_ndata, copy_edata, _dist_training, exclude_edges, output_device
        if edge_dir != "in" or not self._serves(prob):
            return self._pinned().sample_neighbors(nodes, fanout, edge_dir, *rest)
        frontier = super().sample_neighbors(
            nodes, fanout, edge_dir, prob, replace, False, False, exclude_edges=exclude_edges
        )
        # Blocks are made of rows of these, by what knows tensors in the host's memory alone.
        if copy_ndata:
            frames = [self._on_host(frame).clone() for frame in self.original._node_frames]
            set_new_frames(frontier, node_frames=frames)
        if copy_edata:
            eids = [frame[EID] for frame in frontier._edge_frames]
            frames = [
                self._on_host(frame).subframe(ids)
                for frame, ids in zip(self.original._edge_frames, eids, strict=True)
            ]
            set_new_frames(frontier, edge_frames=frames)
            for frame, ids in zip(frames, eids, strict=True):
                frame[EID] = ids
        return frontier if output_device is None else frontier.to(output_device)

    def find_edges(self, eid: Any, etype: str | CanonicalEtype | None = None) -> Any:
        """The ends of edges, from the store if it can tell."""
        try:
            return super().find_edges(eid, etype)
        except UnsupportedByStoreError:  # it was built by a loader that asked for none
            return self._pinned().find_edges(eid, etype=etype)

    def edge_subgraph(
        self,
        edges: Any,
        *,
        relabel_nodes: bool = True,
        store_ids: bool = True,
        output_device: Any = None,
    ) -> DGLGraph:
        """The graph of given edges, as ``dgl.edge_subgraph`` of the script's graph."""
        if relabel_nodes or not store_ids:
            return self._pinned().edge_subgraph(
                edges, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device
            )
        return super().edge_subgraph(edges, relabel_nodes=False, output_device=output_device)

    def _add_rows(self, frame: Frame, of: Type, ids_name: str | None = None) -> None:
        """Give a frame the features that the graph's has, of the rows that it names or of all."""
        whole = self._frame_of(of)
        frame._initializers = whole._initializers
        frame._default_initializer = whole._default_initializer
        mine = frame._columns
        ids = None if ids_name is None else mine[ids_name].data
        rows = {
            name: RowsLater.of(column.storage, column.scheme, ids, partial(self._rows, of, column))
            for name, column in whole._columns.items()
            if name not in mine
        }
        frame._columns = {**rows, **mine}

    def _weights(self, etype: CanonicalEtype, prob: str) -> RowView | None:
        column = self._columns_of(etype).get(prob)
        if column is None:
            return None  # as in DGL, this edge type is sampled evenly
        name = self._stored.name_of(etype, column)
        if name is None:
            values = self._on_host(column).data
            if values.dim() != 1:
                raise InvalidInputError(
                    f"sample by edge feature '{prob}'",
                    f"it has shape {tuple(values.shape)}",
                    "give it one number for each edge",
                )
            return scalars_view(values.detach(), self.device)
        view = self._store.tables[edge_table(etype, name)].view
        assert isinstance(view, RowView)
        return view

    def _serves(self, prob: str | None) -> bool:
        """Whether the store can sample by an edge feature as it is now.

        It refuses weights that are all zero at some node, where DGL takes no edge.
        """
        if prob is None:
            return True
        columns = {
            etype: columns[prob]
            for etype in self.canonical_etypes
            if prob in (columns := self._columns_of(etype))
        }
        tensors = [column.data for column in columns.values()]
        seen, serves = self._weights_seen.get(prob, ([], False))
        is_known = len(seen) == len(tensors) and all(
            old is not None and old.is_of(now) for old, now in zip(seen, tensors, strict=True)
        )
        if not (is_known and tensors):
            serves = bool(tensors) and all(map(is_watched, tensors)) and self._can_weigh(prob)
            seen = [Snapshot(each) if is_watched(each) else None for each in tensors]
            self._weights_seen[prob] = seen, serves
        return serves

    def _can_weigh(self, prob: str) -> bool:
        try:
            for etype in self.canonical_etypes:
                weights = self._weights(etype, prob)
                if weights is not None:
                    check_weights(self.view(etype), weights)
        except InvalidInputError:
            return False
        return True
