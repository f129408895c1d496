"""Graphs of unmodified scripts in the store: ``DataLoader(g, …, use_uva=True)``.

With ``use_uva=True`` DGL has every process pin the graph and its features in the host's memory,
where its GPU reads them.  Here they are put into a store instead, once for all ranks of a machine
(:class:`~dgl_mgpu.backend.store.GlobalStore`), and the DataLoader is given a `SharedGraph`, which
samples and reads there.  The script notices nothing of it:

>>> loader = dgl.dataloading.DataLoader(
...     g, train_ids, sampler, device=device, batch_size=1024, use_ddp=True, use_uva=True
... )

That is done where ``g`` is a DGLGraph on the CPU, the sampler one of DGL's that samples neighbours,
and

- there are several ranks and ``use_ddp=True``: then all of them come here, and build the store
  together when the first such DataLoader of a graph is made;
- there is one process, and ``python -m dgl_mgpu`` was given options (`dgl_mgpu.backend.runner`); or
- the graph has a store already.

Else, and with ``--store=off``, the graph is pinned as DGL does.  The data are read on the first
rank of each machine; the others' are taken to be the same.  A store belongs to its graph, all
DataLoaders of which share it, and goes with it.

A column of the graph that is replaced, or written to by torch in this process, is read from the
graph from then on.  What torch does not see is not seen: writes by NumPy, or by other processes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from dgl import backend as F
from dgl.base import EID, NID
from dgl.dataloading.base import EdgePredictionSampler
from dgl.dataloading.labor_sampler import LaborSampler
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.dataloading.shadow import ShaDowKHopSampler
from dgl.frame import Column, Frame, _LazyIndex
from dgl.heterograph import DGLGraph
from dgl.utils import gather_pinned_tensor_rows, set_new_frames

from dgl_mgpu.backend import runner
from dgl_mgpu.backend.blocks import BlankBlock
from dgl_mgpu.backend.graph import _DGL_NAMES, StoreGraph
from dgl_mgpu.backend.random import next_key
from dgl_mgpu.backend.storage import TableStorage
from dgl_mgpu.backend.store import GlobalStore
from dgl_mgpu.backend.tables import CanonicalEtype, Nodes, edge_table
from dgl_mgpu.backend.views import scalars_view
from dgl_mgpu.errors import ConfigError, InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import EtypeBlock, check_weights
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store import Ranks

#: Samplers that use a graph by its methods alone.  The code of others may do anything with it.
_SERVED = NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, ShaDowKHopSampler
#: What is read of a DGLGraph without its memory being pinned for a GPU.
_NEEDS_NO_PINNING = (
    {"ndata", "edata", "srcdata", "dstdata", "nodes", "edges", "srcnodes", "dstnodes"}
    | {"_node_frames", "_edge_frames", "node_attr_schemes", "edge_attr_schemes", "metagraph"}
    | {"get_ntype_id", "get_etype_id", "srctypes", "dsttypes", "is_block", "is_pinned"}
)
_ASKED = "share a graph among ranks (DataLoader with use_uva=True)"
_OFF = "run python -m dgl_mgpu --store=off, which has each rank pin its own"

#: A node type or a canonical edge type.
Type = str | CanonicalEtype
FrameOrColumn = TypeVar("FrameOrColumn", Frame, Column)


def is_shared(graph: Any, sampler: Any, use_ddp: bool) -> bool:
    """Whether a DataLoader with ``use_uva=True`` is to have its graph from the store.

    Warns if the runner was given options, and the sampler is one that needs the graph itself.

    Raises
    ------
    ConfigError
        If the runner's options cannot be read.
    """
    if type(graph) is not DGLGraph or graph.is_block or graph.device.type != "cpu":
        return False
    told = runner.told()
    if not told.uses_store:
        return False
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_asked_for = use_ddp or _stored_of(graph) is not None
    else:
        is_asked_for = told.store is not None or _stored_of(graph) is not None
    if not is_asked_for:
        return False
    inner = sampler.sampler if type(sampler) is EdgePredictionSampler else sampler
    if type(inner) in _SERVED:
        return True
    if told.store is not None:
        warnings.warn(
            f"the graph of a DataLoader is pinned in each process, and not kept in the store: "
            f"{type(inner).__name__} may need more of it than a store has",
            stacklevel=3,
        )
    return False


def unpinned(graph: DGLGraph) -> DGLGraph:
    """The same graph, which DGL's DataLoader can check, and does not pin."""
    twin = object.__new__(_Unpinned)
    twin.__dict__ = graph.__dict__
    return twin


class _Unpinned(DGLGraph):
    def create_formats_(self) -> _Unpinned:
        return self

    def pin_memory_(self) -> _Unpinned:
        return self


def share(loader: Any, graph: DGLGraph, indices: Any, batch_size: int) -> None:
    """Give a DataLoader its graph from the store, which is built if there is none yet.

    Collective where it is built.

    Parameters
    ----------
    loader : DataLoader
        Made of ``unpinned(graph)``.
    graph : DGLGraph
    indices : Tensor or mapping of Tensor, or any data set
        What mini-batches begin with.
    batch_size : int
        The mini-batch that the store is planned for, where the runner was not told of another.

    Raises
    ------
    InvalidInputError
        If the ranks of the machine have different graphs.
    ConfigError
        If the store is elsewhere than the loader samples.
    DGLMGPUError
        As :meth:`~dgl_mgpu.backend.store.GlobalStore.from_dgl`.
    """
    stored = _stored_of(graph)
    if stored is None:
        stored = _store(graph, _options(loader, batch_size), indices, loader.device)
        vars(graph._graph)["_stored"] = stored
    if stored.store.device != loader.device:
        raise ConfigError(
            f"sample on {loader.device}",
            f"the graph's store is on {stored.store.device}",
            f"leave out --store.device, use one device for all of a graph's loaders, or {_OFF}",
        )
    loader.graph = loader.collate_fn.g = SharedGraph(stored, graph)


# -- what is in the store --------------------------------------------------------------------------


class _Snapshot:
    """A tensor as it is now; it does not keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor, and not written to since."""
        return self._tensor() is tensor and _is_watched(tensor) and tensor._version == self._version


def _is_watched(tensor: torch.Tensor) -> bool:
    """Whether torch counts what is written to a tensor: not of one that is learned, or in
    inference mode."""
    return not (tensor.is_inference() or tensor.requires_grad)


@dataclass(frozen=True)
class _Stored:
    """The store of a graph, kept with its index: whose graph the memory is, is told by that.

    Attributes
    ----------
    store : GlobalStore
    columns : dict
        By type, each column that is stored as it was then, by its name.
    """

    store: GlobalStore
    columns: Mapping[Type, Mapping[str, _Snapshot]]

    def name_of(self, of: Type, column: Column) -> str | None:
        """The name under which the store has a column; None if it has it not, or no more so.

        A tensor may have another name by now: ``g.ndata["h"] = g.ndata["feat"]``.
        """
        if column.index is not None or column.device is not None or column.deferred_dtype:
            return None
        for name, snapshot in self.columns[of].items():
            if snapshot.is_of(column.storage):
                return name
        return None


def _stored_of(graph: DGLGraph) -> _Stored | None:
    return vars(graph._graph).get("_stored")


def _frames(graph: DGLGraph) -> Iterator[tuple[Type, Frame]]:
    yield from zip(graph.ntypes, graph._node_frames, strict=True)
    yield from zip(graph.canonical_etypes, graph._edge_frames, strict=True)


def _storable(graph: DGLGraph) -> DGLGraph:
    """The graph with those of its columns that can be stored."""
    for _, frame in _frames(graph):
        for column in frame._columns.values():
            _ = column.data  # rows of another graph's column
    kept = graph.local_var()
    for _, frame in _frames(kept):
        for name, column in list(frame._columns.items()):
            # DGL's frames take anything; a table is of tensors with rows.
            if not (isinstance(column, Column) and _is_storable(column.storage)):
                del frame._columns[name]
    return kept


def _is_storable(rows: Any) -> bool:
    is_tensor = isinstance(rows, torch.Tensor)
    return is_tensor and rows.layout == torch.strided and rows.dim() > 0 and _is_watched(rows)


def _options(loader: Any, batch_size: int) -> dict[str, Any]:
    """How to build a store for a loader: as the runner was told, and for its mini-batches."""
    sampler, of_edges = loader.graph_sampler, type(loader.graph_sampler) is EdgePredictionSampler
    options: dict[str, Any] = {"batch_size": batch_size, "edges": of_edges}
    fanouts = getattr(sampler.sampler if of_edges else sampler, "fanouts", ())
    if fanouts and all(type(fanout) is int for fanout in fanouts):
        options["fanouts"] = list(fanouts)
    if loader.device.type == "cpu":
        options["device"] = "cpu"
    return options | dict(runner.told().store or {})


def _store(graph: DGLGraph, options: dict[str, Any], indices: Any, device: torch.device) -> _Stored:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # A machine's ranks build a store of their own.
        ranks = Ranks.of_this_machine()
        kept = ranks.together(_ASKED, lambda: _storable(graph))
        _compare(ranks.all_gather(_signature(kept)))
        # What is said to the first rank holds for all, as its data do.
        seed, options = ranks.from_first(_ASKED, lambda: (next_key()[0], options))
        if options.get("hotness") == "presample" and not options["edges"]:
            options["seeds"] = _seeds(indices)
        store = GlobalStore.from_dgl(kept if ranks.rank == 0 else None, seed=seed, **options)
    columns = {
        of: {name: _Snapshot(column.storage) for name, column in frame._columns.items()}
        for of, frame in _frames(kept)
    }
    return _Stored(store, columns)


def _seeds(indices: Any) -> Any:
    """The nodes that mini-batches begin with; None, for all, where that is not seen."""
    if isinstance(indices, Mapping):
        seeds = {ntype: _seeds(ids) for ntype, ids in indices.items()}
        return None if any(ids is None for ids in seeds.values()) else seeds
    return indices.cpu() if isinstance(indices, torch.Tensor) else None


def _signature(graph: DGLGraph) -> dict[str, str]:
    """What has to be the same of the graphs of all ranks."""
    facts = {"the dtype of ids": str(graph.idtype)}
    for ntype in graph.ntypes:
        facts[f"nodes of type '{ntype}'"] = f"{graph.num_nodes(ntype):,}"
    for etype in graph.canonical_etypes:
        facts[f"edges of type {etype}"] = f"{graph.num_edges(etype):,}"
    for of, frame in _frames(graph):
        for name, column in frame._columns.items():
            rows = column.storage
            facts[f"feature '{name}' of {of!r}"] = f"{rows.dtype} of shape {tuple(rows.shape)}"
    return facts


def _compare(signatures: Sequence[Mapping[str, str]]) -> None:
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for what in {**first, **other}:
            mine, its = first.get(what, "missing"), other.get(what, "missing")
            if mine != its:
                raise InvalidInputError(
                    _ASKED,
                    f"{what}: {mine} on the machine's first rank, {its} on rank {rank} of it",
                    f"load the same graph on all ranks, or {_OFF}",
                )


# -- the graph that DataLoaders are given ----------------------------------------------------------


class SharedGraph(StoreGraph):
    """A script's graph of which topology and features are in the store.

    What the store does not serve is asked of the script's graph, which is pinned then, if it is
    sampled on a GPU: other methods, edges by source, weights that the store refuses and DGL takes.

    Parameters
    ----------
    stored : _Stored
    original : DGLGraph
        The script's.  Its columns count, as they are when they are read.
    """

    def __init__(self, stored: _Stored, original: DGLGraph) -> None:
        self.__dict__.update(vars(stored.store.graph))
        self.original = original
        self._stored, self._index = stored, original._graph
        # DGL keeps the caches of features with a graph.
        self._gpu_caches = original._gpu_caches
        # For each name of weights, what they were when they were looked at, and what was found.
        self._weights_seen: dict[str, tuple[list[_Snapshot | None], bool]] = {}

    def __getattr__(self, name: str) -> Any:  # type: ignore[override]
        if name not in _DGL_NAMES:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.original if name in _NEEDS_NO_PINNING else self._pinned(), name)

    def for_loader(self) -> SharedGraph:
        """This graph with an epoch count of its own."""
        twin = object.__new__(SharedGraph)
        twin.__dict__.update(vars(super().for_loader()))
        return twin

    def begin_epoch(self, shared: StoreGraph) -> None:
        """Go to the next epoch, or the one set on ``shared``.

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
        super().begin_epoch(shared)

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
        g = self.original
        if isinstance(of, str):
            return g._node_frames[g.get_ntype_id(of)]._columns
        return g._edge_frames[g.get_etype_id(of)]._columns

    def _rows(self, of: Type, column: Column, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a column of the script's graph, on the device of ``ids``."""
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

    def check_weights(self, prob: str) -> None:
        """See whether the store can sample by an edge feature; if not, DGL does."""
        self._serves(prob)

    def sample_blocks(  # type: ignore[override]
        self,
        nodes: Nodes,
        fanouts: Any,
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Any = None,
    ) -> Any:
        """As :meth:`StoreGraph.sample_blocks`, with features; None where DGL is to do it."""
        if not self._serves(prob):
            return None
        return super().sample_blocks(nodes, fanouts, prob, replace, exclude_edges)

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
        frontier = super().sample_neighbors(nodes, fanout, edge_dir, *rest[:-1])
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
        made = super().edge_subgraph(edges, relabel_nodes=False)
        g = self.original
        for ntype, frame, whole in zip(self.ntypes, made._node_frames, g._node_frames, strict=True):
            self._add_rows(frame, ntype, whole)
        for etype, frame, whole in zip(
            self.canonical_etypes, made._edge_frames, g._edge_frames, strict=True
        ):
            self._add_rows(frame, etype, whole, EID)
        return made if output_device is None else made.to(output_device)

    def _dgl_blocks(
        self,
        sampled: Sequence[EtypeBlock],
        seeds: Mapping[str, torch.Tensor],
        blanks: Sequence[BlankBlock] = (),
    ) -> list[DGLGraph]:
        g = self.original
        blocks = super()._dgl_blocks(sampled, seeds, blanks)
        for block in blocks:
            for ntype, frame, whole in zip(
                2 * self.ntypes, block._node_frames, 2 * g._node_frames, strict=True
            ):
                self._add_rows(frame, ntype, whole, NID)
            for etype, frame, whole in zip(
                self.canonical_etypes, block._edge_frames, g._edge_frames, strict=True
            ):
                self._add_rows(frame, etype, whole, EID)
        return blocks

    def _add_rows(self, frame: Frame, of: Type, whole: Frame, ids_name: str | None = None) -> None:
        """Give a frame the features that the graph's has, of the rows that it names or of all."""
        frame._initializers = whole._initializers
        frame._default_initializer = whole._default_initializer
        mine = frame._columns
        ids = None if ids_name is None or ids_name not in mine else mine[ids_name].data
        rows = {
            name: _RowsLater.of(self, of, column, ids)
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
                    f"sample by edge feature '{prob}'", f"{tuple(values.shape)}", "give a vector"
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
            serves = bool(tensors) and all(map(_is_watched, tensors)) and self._can_weigh(prob)
            seen = [_Snapshot(each) if _is_watched(each) else None for each in tensors]
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


#: What a column has that holds a tensor and nothing else.
_PLAIN_COLUMN = dict(vars(Column(torch.empty(0))))


class _RowsLater(Column):
    """Rows of a column of a `SharedGraph`, read when they are first looked at.

    DGL's own reads them from the tensor in the host's memory.
    """

    index: Any
    storage: Any
    read: Callable[[torch.Tensor], torch.Tensor] | None

    @classmethod
    def of(
        cls, graph: SharedGraph, of: Type, whole: Column, ids: torch.Tensor | None
    ) -> _RowsLater:
        """Rows ``ids``; all, if None."""
        rows = cls.__new__(cls)
        # A batch has many of these, and DGL's constructor takes longer.
        rows.__dict__ = {
            **_PLAIN_COLUMN,
            "storage": whole.storage,
            "scheme": whole.scheme,
            "index": ids,
            "read": partial(graph._rows, of, whole),
        }
        return rows

    @property
    def data(self) -> torch.Tensor:
        """The rows."""
        if self.index is not None and self.read is not None:
            ids = self.index.flatten() if isinstance(self.index, _LazyIndex) else self.index
            self.storage, self.index, self.read = self.read(ids), None, None
        return Column.data.fget(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.read = None
        Column.data.fset(self, value)

    def clone(self) -> _RowsLater:
        """A shallow copy."""
        return self.subcolumn(None)

    def subcolumn(self, rowids: torch.Tensor | None) -> _RowsLater:
        """Some of the rows, not read yet either."""
        some = _RowsLater(self.storage, self.scheme, self.index, self.device, self.deferred_dtype)
        some.read = self.read
        if rowids is not None:
            index = self.index
            if index is not None:
                index = index if isinstance(index, _LazyIndex) else _LazyIndex(index)
            some.index = rowids if index is None else index.slice(rowids)
        return some

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "read": None}
