"""What DGL's DataLoader and NeighborSampler do differently for graphs of this package.

DGL's own protocol (``sample_neighbors``, ``get_node_storage``, …) suffices for them to work.
Three things it lacks: a store's graph is not told that an epoch begins, a mini-batch goes through
a graph over all nodes at every hop, and a GPU waits while the host has the next one sampled.  For
DGL's own graphs on the CPU both classes do what they always did.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from dgl.base import NID
from dgl.dataloading.base import (
    BlockSampler,
    EdgePredictionSampler,
    set_dst_lazy_features,
    set_edge_lazy_features,
    set_src_lazy_features,
)
from dgl.dataloading.dataloader import (
    CollateWrapper,
    DataLoader,
    DDPTensorizedDataset,
    TensorizedDataset,
)
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.dataloading.shadow import ShaDowKHopSampler
from dgl.frame import Column, LazyFeature, _LazyIndex
from dgl.heterograph import DGLGraph
from dgl.storages.tensor import BaseTensorStorage
from dgl.utils import recursive_apply

from dgl_mgpu.backend.ours import OnTensors
from dgl_mgpu.backend.random import BatchDraws
from dgl_mgpu.pipeline import Ahead, lane_of
from dgl_mgpu.pipeline.stage import stage

if TYPE_CHECKING:
    from dgl_mgpu.ops import EtypeBlock
    from dgl_mgpu.store import Table

#: Mini-batches that are made ahead.  One is made while the model works on the one before, which is
#: all the time there is in a step; each more would only take memory.
DEPTH = 1
#: Samplers whose samples depend on their attributes, the graph and random numbers alone, and that
#: have no state that sampling changes.
_PURE_SAMPLERS = NeighborSampler, MultiLayerFullNeighborSampler, ShaDowKHopSampler
_PURE_NEGATIVES = PerSourceUniform, GlobalUniform
_PURE_DATASETS = TensorizedDataset, DDPTensorizedDataset
_ATTRIBUTES_COUNT = frozenset({*_PURE_SAMPLERS, *_PURE_NEGATIVES, EdgePredictionSampler})
#: DGL's own, which samples blocks and assigns lazy features to them.
_SAMPLE = BlockSampler.sample
#: Of what is compared by its value.
_VALUES = frozenset({NoneType, bool, int, float, str, torch.device})


@runtime_checkable
class ServesBlocks(Protocol):
    """What `dgl_mgpu.StoreGraph` offers beyond DGL's protocol."""

    def for_loader(self) -> ServesBlocks:
        """This graph with an epoch count of its own."""

    def begin_epoch(self, shared: ServesBlocks) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to the next one."""

    def check_weights(self, prob: str) -> None:
        """Raise if edge feature ``prob`` cannot be sampled by."""

    def begin_blocks(
        self,
        nodes: Any,
        fanouts: Any,
        prob: str | None,
        replace: bool,
        exclude_edges: Any,
        *,
        on_host: Any,
    ) -> Callable[[], Any] | None:
        """Begin to sample all hops of a mini-batch; what is returned waits for the blocks."""

    def weight_tables(self, prob: str) -> Sequence[Table]:
        """Where edge feature ``prob`` is."""

    def begin_hops(
        self, nodes: Any, fanouts: Any, prob: str | None, replace: bool, *, on_host: Any
    ) -> Callable[[], list[EtypeBlock]]:
        """Begin to sample all hops of a mini-batch; what is returned waits for them."""

    def blocks_of(self, hops: Sequence[EtypeBlock], nodes: Any) -> Any:
        """Input nodes, output nodes and blocks of sampled hops."""


#: Writes rows of a feature: if of nodes, the number of their type, the name, the ids and where to.
Fetch = Callable[[bool, int, str, torch.Tensor, torch.Tensor], None]


class Places(Protocol):
    """Memory that mini-batches are put into as they are sampled."""

    def put(self, hops: Sequence[EtypeBlock], fetch: Fetch) -> Any:
        """What stands for a mini-batch that is there now; None if there is no place for it."""


#: Whether a class :class:`ServesBlocks`; to ask takes microseconds each time.
_has_blocks: Callable[[Any], bool] = functools.cache(lambda kind: issubclass(kind, ServesBlocks))


def serve_dataloading() -> None:
    """Teach DGL's classes to use what this package's graphs offer; once for all graphs."""
    if getattr(DataLoader.__iter__, "serves_stores", False):
        return
    iterate, sample_blocks = DataLoader.__iter__, NeighborSampler.sample_blocks

    def __iter__(self: Any) -> Iterator:
        return _iterate(self, iterate)

    def _sample_blocks(self: Any, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        finish = _begin_at_once(self, g, seed_nodes, exclude_eids)
        sampled = None if finish is None else finish()
        if sampled is None:
            return sample_blocks(self, g, seed_nodes, exclude_eids)
        return handed_out(self, sampled)

    def assign_lazy_features(self: Any, result: Any) -> Any:
        _, _, blocks = result
        first, last = blocks[0], blocks[-1]
        # Each makes views of a block first, also where there is nothing to assign.
        if self.prefetch_node_feats:
            set_src_lazy_features(first, self.prefetch_node_feats)
        if self.prefetch_labels:
            set_dst_lazy_features(last, self.prefetch_labels)
        if self.prefetch_edge_feats:
            for block in blocks:
                set_edge_lazy_features(block, self.prefetch_edge_feats)
        return result

    __iter__.serves_stores = True  # type: ignore[attr-defined]
    __iter__.dgls = iterate  # type: ignore[attr-defined]
    _sample_blocks.serves_stores = True  # type: ignore[attr-defined]
    DataLoader.__iter__ = __iter__
    NeighborSampler.sample_blocks = _sample_blocks
    BlockSampler.assign_lazy_features = assign_lazy_features


def batches_into(loader: Any, places: Places) -> Iterator:
    """A pass over a loader whose mini-batches are put into places, where that can be done.

    It can be of DGL's neighbour samplers, over a graph of this package and in this process.

    Returns
    -------
    iterator
        Of what :meth:`Places.put` returns, and where that is None of what the loader gives.
    """
    return _iterate(loader, DataLoader.__iter__.dgls, places)


def _iterate(loader: Any, dgls: Callable[[Any], Any], places: Places | None = None) -> Iterator:
    """A pass over a loader; ``dgls`` is ``DataLoader.__iter__`` as DGL has it."""
    shared = loader.graph
    if _has_blocks(type(shared)):
        if loader.collate_fn.g is shared:
            loader.collate_fn.g = shared.for_loader()
        loader.collate_fn.g.begin_epoch(shared)
        prob = getattr(loader.graph_sampler, "prob", None)
        if prob is not None:
            shared.check_weights(prob)
    if not _samples_here(loader):
        return dgls(loader)
    lane = lane_of(loader.device) if _may_look_ahead(loader) else None
    if lane is not None and lane.is_full:
        lane = None
    return Ahead(_Batches(loader, dgls, places), lane, DEPTH)


def _begin_at_once(
    sampler: Any, g: Any, nodes: Any, exclude_eids: Any = None, *, on_host: Any = None
) -> Callable[[], Any] | None:
    """Begin with all hops of a mini-batch of a graph that can; what it returns may give None."""
    if sampler.edge_dir != "in":
        return None
    what = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if _has_blocks(type(g)):
        return g.begin_blocks(*what, exclude_eids, on_host=on_host)
    if not isinstance(g, DGLGraph) or exclude_eids is not None:
        return None
    if not isinstance(g._graph, OnTensors) and not g.is_pinned():
        return None  # without importing operators that graphs on the CPU do not need
    from dgl_mgpu.backend.sampling.block_sampling import begin_graph

    return begin_graph(g, *what)


def _beginner(sample: Any) -> Callable[..., Callable[[], Any] | None] | None:
    """What begins with the blocks of a loader's function, if all that it does is known.

    A sampler that says that its batches may be made ahead may itself have ``begin_blocks``, which
    takes the graph, the nodes and, ``on_host``, the same nodes in host memory.  What that returns
    waits for what ``sample_blocks`` returns, but for :func:`handed_out`.
    """
    sampler = getattr(sample, "__self__", None)
    if sampler is None or sample.__func__ is not _SAMPLE or "sample_blocks" in vars(sampler):
        return None
    if type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler):
        known = getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        return functools.partial(_begin_at_once, sampler) if known else None
    return getattr(sampler, "begin_blocks", None) if _says_so(sampler) else None


def _can_be_placed(loader: Any) -> bool:
    """Whether a loader's sampler does nothing but sample hops of its graph."""
    graph, sampler = loader.graph, loader.graph_sampler
    sample = loader.collate_fn.sample_func
    if type(graph) is DGLGraph:
        is_here = _is_pinned(loader) or graph.device == loader.device
    else:
        is_here = getattr(graph, "features_are_stored", False) and graph.device == loader.device
    return (
        is_here
        and getattr(sample, "__func__", None) is _SAMPLE
        and getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        and type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler)
        and "sample_blocks" not in vars(sampler)
        and sampler.edge_dir == "in"
        and sampler.output_device is None
    )


def handed_out(sampler: Any, sampled: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """What was sampled, with what else a sampler is to give it."""
    inputs, outputs, blocks = sampled
    if blocks[0].device.type == "cuda" and torch.is_grad_enabled():
        # Here, where batches are made ahead, and not in the middle of the backward pass.
        _transpose(blocks[1:])
    if sampler.output_device is not None:
        blocks = [block.to(sampler.output_device) for block in blocks]
        inputs = blocks[0].srcdata[NID]
    return inputs, outputs, blocks


def _transpose(blocks: Sequence[DGLGraph]) -> None:
    """Make what gradients of sums go along; the first block's input is seldom learned."""
    for block in blocks:
        for relation in block._graph.relations:
            relation.csr()


# -- mini-batches ahead of their time --------------------------------------------------------------


def _samples_here(loader: Any) -> bool:
    """Whether a loader samples a graph of this package, in this thread."""
    graph = loader.graph
    is_on_tensors = type(graph) is DGLGraph and isinstance(graph._graph, OnTensors)
    return (
        (_has_blocks(type(graph)) or is_on_tensors or _is_pinned(loader))
        and type(loader.collate_fn) is CollateWrapper
        and loader.num_workers == 0
        and not loader.use_prefetch_thread
        and not loader.pin_memory
    )


def _is_pinned(loader: Any) -> bool:
    """Whether a GPU is to sample a graph in the host's memory."""
    return loader.use_uva and type(loader.graph) is DGLGraph and loader.graph.is_pinned()


def _may_look_ahead(loader: Any) -> bool:
    """Whether batches of a loader are sure to be the same if they are made ahead.

    ``DGL_MGPU_PREFETCH=0`` has them made one by one all the same.
    """
    caches = loader.graph._gpu_caches
    return (
        os.environ.get("DGL_MGPU_PREFETCH") != "0"
        and (loader.graph.device == loader.device or _is_pinned(loader))
        and not loader.use_alternate_streams  # which is how the script wants it
        # The code of others may look at anything, if it does not say that it does not.
        and (type(loader.dataset) in _PURE_DATASETS or _says_so(loader.dataset))
        and _is_pure(loader.graph_sampler)
        and all(isinstance(each, BaseTensorStorage) for each in _other_storages(loader).values())
        # Its rows may be another stream's to write.
        and not (caches["node"] or caches["edge"])
    )


def _is_pure(sampler: Any) -> bool:
    if type(sampler) is EdgePredictionSampler:
        negative, exclude = sampler.negative_sampler, sampler.exclude
        return (
            type(sampler.sampler) in _PURE_SAMPLERS
            and (negative is None or type(negative) in _PURE_NEGATIVES)
            and (exclude is None or isinstance(exclude, str))
        )
    return type(sampler) in _PURE_SAMPLERS or _says_so(sampler)


def _says_so(thing: Any) -> bool:
    """Whether a class of this package, or one that knows it, is sure of itself.

    It does not speak for those that are derived from it.
    """
    return vars(type(thing)).get("may_be_made_ahead", False)


def _other_storages(loader: Any) -> Mapping[str, Any]:
    return getattr(loader, "other_storages", {})  # not of a loader that Lightning made anew


def _begin_to_place(sampler: Any, graph: Any, nodes: Any, on_host: Any) -> Any:
    """Begin with hops of a graph, to be put somewhere; None if DGL is to sample."""
    what = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if _has_blocks(type(graph)):
        return _BegunStore(graph, nodes, graph.begin_hops(*what, on_host=on_host))
    from dgl_mgpu.backend.sampling.block_sampling import begin_graph

    return begin_graph(graph, *what, blanks=False)


class _BegunStore:
    """Hops of a store's graph that are being sampled, and blocks of them."""

    def __init__(
        self, graph: ServesBlocks, nodes: Any, finish: Callable[[], Sequence[EtypeBlock]]
    ) -> None:
        self._graph, self._nodes, self._finish = graph, nodes, finish
        self._hops: Sequence[EtypeBlock] | None = None

    def hops(self) -> Sequence[EtypeBlock]:
        """Wait for them."""
        if self._hops is None:
            self._hops = self._finish()
        return self._hops

    def __call__(self) -> Any:
        return self._graph.blocks_of(self.hops(), self._nodes)


class _Batches:
    """The mini-batches of one pass over a DataLoader: the source of an :class:`Ahead`.

    Parameters
    ----------
    loader : DataLoader
    iterate : callable
        DGL's ``DataLoader.__iter__``.
    places : Places, optional
        Where to put them.
    """

    def __init__(
        self, loader: Any, iterate: Callable[[Any], Any], places: Places | None = None
    ) -> None:
        self._loader, self._collate = loader, loader.collate_fn
        self._places = places if _can_be_placed(loader) else None
        # DGL's iterator over torch's, which gives seeds instead of what is sampled from them.
        loader.collate_fn = _unchanged
        try:
            self._rest = iterate(loader)
        finally:
            loader.collate_fn = self._collate
        if type(loader.dataset) in _PURE_DATASETS:
            # Torch's iterator would take as long as all else that is done for seeds.  They are read
            # on the host, which would wait for a GPU to give them, batch by batch.
            self._seeds = iter(loader.dataset)
            self._seeds.dataset = self._seeds.dataset.cpu()
        else:
            self._seeds = self._rest.dataloader_it
        self._draws = BatchDraws(loader.device)
        self._left: set[int] = set()
        #: Of a store, what batches have been made of so far, at its version then.
        self._tables: dict[Table, int] = {}
        prob = getattr(loader.graph_sampler, "prob", None)
        if prob is not None and _has_blocks(type(loader.graph)):
            for table in loader.graph.weight_tables(prob):
                self._note(table)
        # A pass that begins before this one ends gives the graph another epoch.
        loader._passes = getattr(loader, "_passes", 0) + 1

    def seeds(self) -> Any:
        """The seeds of the next batch."""
        return next(self._seeds)

    def begin(self, number: int, seeds: Any) -> Callable[[], Any] | None:
        """Begin to sample a batch; None where that is not of use."""
        begin = _beginner(self._collate.sample_func)
        if begin is None:
            return None
        # Nothing here asks torch for numbers.
        with self._draws.of_batch(number, with_torchs=False), stage("sample"):
            nodes = recursive_apply(seeds, lambda ids: ids.to(self._loader.device))
            if self._places is not None:
                return _begin_to_place(self._loader.graph_sampler, self._collate.g, nodes, seeds)
            return begin(self._collate.g, nodes, on_host=seeds)

    def make(self, number: int, seeds: Any, finish: Callable[[], Any] | None = None) -> Any:
        """Sample a batch and fetch its features, as DGL does, or put it in its place."""
        if finish is None and self._places is not None:
            finish = self.begin(number, seeds)
        with self._reads_noted():
            if self._places is not None and finish is not None:
                placed = self._placed(self._places, finish)
                if placed is not None:
                    return placed
            with stage("sample"):
                self._rest.dataloader_it = iter([self._sampled(number, seeds, finish)])
            with stage("gather"):
                return next(self._rest)

    def _placed(self, places: Places, begun: Any) -> Any:
        """What stands for a batch that was begun, if there is a place for it."""
        with stage("sample"):
            hops = begun.hops()
        if hops is None:
            return None
        with stage("gather"):
            return places.put(hops, self._fetch)

    def _fetch(
        self, is_node: bool, number: int, name: str, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        graph, device = self._loader.graph, self._loader.device
        if is_node:
            storage = graph.get_node_storage(name, graph.ntypes[number])
        else:
            storage = graph.get_edge_storage(name, graph.canonical_etypes[number])
        if not isinstance(storage, Column):
            storage.fetch(ids, device, out=out)
        elif storage.data.device == device:
            torch.index_select(storage.data, 0, ids, out=out)
        else:
            out.copy_(storage.fetch(ids, device))

    def _sampled(self, number: int, seeds: Any, finish: Callable[[], Any] | None) -> Any:
        sampled = None if finish is None else finish()
        if sampled is None:
            with self._draws.of_batch(number):
                return self._collate(seeds)
        sampler = self._collate.sample_func.__self__
        return sampler.assign_lazy_features(handed_out(sampler, sampled))

    @contextlib.contextmanager
    def _reads_noted(self) -> Iterator[None]:
        traffic = getattr(self._loader.graph, "traffic", None)
        if traffic is None:
            yield
            return
        traffic.watchers.append(self._note)
        try:
            yield
        finally:
            traffic.watchers.remove(self._note)

    def _note(self, table: Table, ids: torch.Tensor | None = None) -> None:
        self._tables.setdefault(table, table.version)

    def state(self) -> _State:
        """What batches depend on but for seeds and draws."""
        loader = self._loader
        # They are sampled from the one, and their features fetched from the other.
        graphs = [self._collate.g, loader.graph]
        parts = [
            (g._graph, *(each._columns for each in (*g._node_frames, *g._edge_frames)))
            for g in map(_scripts, graphs[graphs[0] is graphs[1] :])
            if isinstance(g, DGLGraph)
        ]
        writes = sum(table.version - version for table, version in self._tables.items())
        return _State(
            graphs, parts, loader.graph_sampler, _other_storages(loader), loader._passes, writes
        )

    def left_behind(self) -> list[torch.Tensor] | None:
        """Formats of the graph that sampling, or the script, has made."""
        tensors = list(_kept_tensors(self._collate.g))
        left = [each for each in tensors if id(each) not in self._left]
        self._left = {id(each) for each in tensors}
        return left or None

    def hand_over(self, *made: object) -> None:
        """Let the current stream use batches, seeds and tensors."""
        if self._loader.device.type != "cuda":
            return
        tensors: list[torch.Tensor] = []
        recursive_apply(made, _collect, tensors)
        # Many tensors of a batch are parts of one piece of memory, which has to be told once.
        memory = {each.untyped_storage()._cdata: each for each in tensors if each.is_cuda}
        stream = torch.cuda.current_stream(self._loader.device)
        for each in memory.values():
            each.record_stream(stream)


def _scripts(g: Any) -> Any:
    """The graph that the script holds, of one that is shared in its place."""
    return getattr(g, "original", g)


def _unchanged(seeds: Any) -> Any:
    return seeds


def _collect(made: Any, tensors: list[torch.Tensor]) -> None:
    """Add the tensors of a part of a batch."""
    if isinstance(made, torch.Tensor):
        tensors.append(made)
    elif isinstance(made, DGLGraph) and made.device.type == "cuda":
        for relation in made._graph.relations:
            tensors += relation.tensors()
        for frame in (*made._node_frames, *made._edge_frames):
            for column in frame._columns.values():
                if isinstance(column, LazyFeature):
                    continue
                # Rows that are yet to be picked are not picked here.
                picks = column.index
                if picks is not None:
                    tensors += picks._indices if isinstance(picks, _LazyIndex) else [picks]
                tensors.append(column.storage)


def _kept_tensors(g: Any) -> Iterable[torch.Tensor]:
    """What a graph has of its structure, and views of it, on GPUs."""
    g = _scripts(g)
    if not isinstance(g, DGLGraph):
        return  # a store's is made with the store
    from dgl_mgpu.backend.memory.pinned_graphs import pinned_tensors
    from dgl_mgpu.backend.structure.index import TensorIndex

    index = g._graph if isinstance(g._graph, TensorIndex) else pinned_tensors(g._graph)
    for relation in () if index is None else index.relations:
        kept = relation.tensors()
        for name in relation.created:
            for view in relation.kept_with(name).values():
                kept += [view.tiers, view.pointers, view.position, *view.owner]
        yield from (each for each in kept if isinstance(each, torch.Tensor))


class _State:
    """Things as they are now: equal to another if none was replaced, or written to, in between.

    It holds on to them, so that what the script replaces stays as long as a batch may read it.
    """

    def __init__(self, *things: object) -> None:
        self._held: list[object] = []
        self._key = self._key_of(things)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def _key_of(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _VALUES:
            return thing
        if kind is list or kind is tuple:
            return [self._key_of(each) for each in thing]
        if kind is dict:
            return [(name, self._key_of(each)) for name, each in thing.items()]
        if isinstance(thing, BaseTensorStorage):
            return self._key_of([thing.storage, getattr(thing, "index", None)])
        self._held.append(thing)
        if isinstance(thing, torch.Tensor):
            # Torch does not count what is written in inference mode, or by a fused optimizer.
            is_unknown = thing.is_inference() or thing.requires_grad
            return id(thing), object() if is_unknown else thing._version
        if kind in _ATTRIBUTES_COUNT or _says_so(thing):
            return id(thing), self._key_of(vars(thing))
        return id(thing)
