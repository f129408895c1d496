"""The mini-batches of a pass over a DataLoader, which can be made before they are due."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from dgl.base import NID
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.frame import Column, Frame, LazyFeature, _LazyIndex
from dgl.heterograph import DGLGraph
from dgl.utils import recursive_apply

from dgl_mgpu.graph.block_frames import BlockFrame, plain_column
from dgl_mgpu.graph.random import BatchDraws
from dgl_mgpu.sampling.async_blocks import (
    async_sampling_of,
    can_use_slots,
    finish_blocks,
    sample_hops_async,
    samples_blocks,
    weight_of,
)
from dgl_mgpu.sampling.prefetch_safety import PURE_DATASETS, DependencySnapshot, VersionedTable
from dgl_mgpu.utils.stages import stage
from dgl_mgpu.utils.streams import current_stream

if TYPE_CHECKING:
    from dgl_mgpu.ops import EtypeBlock
    from dgl_mgpu.ops.sample_future import SampleFuture


class FrameKey(NamedTuple):
    """The frame of a block: its side, 'src', 'dst' or 'edge', and its node or edge type."""

    side: str
    type: Any


class FeatureSource(Protocol):
    """The features of sampled hops."""

    def serves(
        self, is_first: bool, is_last: bool, of: FrameKey, name: str, buffer: torch.Tensor
    ) -> bool:
        """Whether a block that is the first or the last one has this feature, fetched by now, in
        rows as there is room for."""

    def fetch(self, of: FrameKey, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write rows of a feature to ``out``."""


class BatchSlots(Protocol):
    """Slots of static buffers that mini-batches are loaded into as they are sampled."""

    def put(self, hops: Sequence[EtypeBlock], features: FeatureSource) -> Any:
        """Load a mini-batch; returns a handle, or None if no slot takes it."""


class Batches:
    """The mini-batches of one pass over a DataLoader: the source of a :class:`Prefetcher`.

    ``iterate`` is DGL's ``DataLoader.__iter__``; batches go into ``slots`` where these take them.
    """

    def __init__(
        self, loader: Any, iterate: Callable[[Any], Any], slots: BatchSlots | None = None
    ) -> None:
        self._loader, self._collate = loader, loader.collate_fn
        self._slots = slots
        self._are_seeds_pinned = False
        # DGL's iterator over torch's, which yields the seeds and does not sample.
        loader.collate_fn = _unchanged
        try:
            self._rest = iterate(loader)
        finally:
            loader.collate_fn = self._collate
        if type(loader.dataset) in PURE_DATASETS:
            # Torch's iterator would take as long as all other work for seeds.  They are read on the
            # host, which would wait for a GPU at every batch.
            self._seeds = iter(loader.dataset)
            seeds = self._seeds.dataset.cpu()
            is_vector = self._seeds.mapping_keys is None and seeds.dim() == 1
            self._are_seeds_pinned = is_vector and loader.device.type == "cuda"
            if self._are_seeds_pinned:
                self._rows = _SeedRows(seeds, loader.device)
                self._seeds = _pinned_batches(self._rows, self._seeds)
            else:
                self._seeds.dataset = seeds
        else:
            self._seeds = self._rest.dataloader_it
        # Torch's iterator has drawn it, as it does for all loaders.
        self._draws = BatchDraws(loader.device, self._rest.dataloader_it._base_seed)
        self._seen: set[int] = set()
        #: A store's tables that batches were made of, with their versions then.
        self._tables: dict[VersionedTable, int] = {}
        prob = weight_of(loader.graph_sampler)
        if prob is not None and samples_blocks(type(loader.graph)):
            for table in loader.graph.weight_tables(prob):
                self._note(table)
        # A pass that starts before this one ends moves the graph to another epoch.
        loader._passes = getattr(loader, "_passes", 0) + 1

    def seeds(self) -> Any:
        """The seeds of the next batch."""
        return next(self._seeds)

    def start(self, number: int, seeds: Any) -> SampleFuture[Any] | None:
        """Start sampling a batch; None if it can only be sampled when it is made."""
        start = async_sampling_of(self._collate.sample_func)
        if start is None:
            return None
        # Nothing here asks torch for numbers.
        with self._draws.of_batch(number, with_torchs=False), stage("sample"):
            device = self._loader.device
            if self._are_seeds_pinned:
                nodes = self._rows.on_device(seeds)
            else:
                nodes = recursive_apply(seeds, to_device, device)
            if self._slots is not None and can_use_slots(self._loader):
                return sample_hops_async(self._loader.graph_sampler, self._collate.g, nodes, seeds)
            return start(self._collate.g, nodes, on_host=seeds)

    def go_on(self, future: SampleFuture[Any]) -> None:
        """Start what is left of the samples of a future."""
        with stage("sample"):
            future.go_on()

    def make(self, number: int, seeds: Any, future: SampleFuture[Any] | None = None) -> Any:
        """Sample a batch and fetch its features, as DGL does or into a slot."""
        if future is None:
            future = self.start(number, seeds)
        traffic = getattr(self._loader.graph, "traffic", None)
        if traffic is None:
            return self._made(number, seeds, future)
        traffic.watchers.append(self._note)
        try:
            return self._made(number, seeds, future)
        finally:
            traffic.watchers.remove(self._note)

    def _made(self, number: int, seeds: Any, future: SampleFuture[Any] | None) -> Any:
        if self._slots is not None and future is not None:
            slot_batch = self._put(self._slots, future)
            if slot_batch is not None:
                return slot_batch
        with stage("sample"):
            sampled = None if future is None else future.result()
            if sampled is None:
                with self._draws.of_batch(number):
                    batch = self._collate(seeds)
            else:
                sampler = self._collate.sample_func.__self__
                batch = finish_blocks(sampler, sampled)
        with stage("gather"):
            if sampled is not None:
                if self._gathered(batch):
                    return batch
                batch = sampler.assign_lazy_features(batch)
            self._rest.dataloader_it = iter([batch])
            return next(self._rest)

    def _rows_to_gather(self, blocks: Sequence[Any]) -> list[tuple[Frame, str | None, str]] | None:
        """What :meth:`_gathered` gathers: features of input nodes, and labels of the seeds.

        By frame, its node type, which may be left out if it is the only one, and name.  None if
        DGL's iterator has more to do, or may have.
        """
        loader, sampler = self._loader, self._loader.graph_sampler
        graph = loader.graph
        is_served = type(graph) is DGLGraph or samples_blocks(type(graph))
        if (
            not is_served
            or any(graph._gpu_caches.values())
            or self._rest.use_thread
            or self._rest.stream is not None
            or type(sampler) not in (NeighborSampler, MultiLayerFullNeighborSampler)
            or "assign_lazy_features" in vars(sampler)
            or sampler.prefetch_edge_feats
        ):
            return None
        first, last = blocks[0], blocks[-1]
        sides = (
            (sampler.prefetch_node_feats, first.srctypes, first._node_frames),
            (sampler.prefetch_labels, last.dsttypes, last._node_frames[len(last.srctypes) :]),
        )
        wanted: list[tuple[Frame, str | None, str]] = []
        for names, ntypes, frames in sides:
            if isinstance(names, Mapping):
                if not all(ntype in ntypes for ntype in names):
                    return None
                for ntype, of_type in names.items():
                    frame = frames[ntypes.index(ntype)]
                    wanted += [(frame, ntype, name) for name in of_type]
            elif names and (len(ntypes) > 1 or not isinstance(names, list | tuple)):
                return None
            else:
                wanted += [(frames[0], None, name) for name in names or ()]
        return wanted

    def _gathered(self, sampled: Any) -> bool:
        """Gather the features of a batch in place of DGL's iterator; False if that has to.

        It takes everything, and looks at each part of a batch several times.
        """
        inputs, outputs, blocks = sampled
        wanted = self._rows_to_gather(blocks)
        loader, device = self._loader, self._loader.device
        if wanted is None or not (_are_on(device, inputs) and _are_on(device, outputs)):
            return False
        # Here: who has no graph of this package needs none of its operators.
        from dgl_mgpu.ops.gather import pick_all

        columns: list[Any] = []
        picks = []
        reads = [
            (loader.graph.get_node_storage(name, ntype), frame._columns[NID].storage)
            for frame, ntype, name in wanted
        ]
        if reads and all(getattr(storage, "spans_machines", False) for storage, _ in reads):
            columns = reads[0][0].fetch_all(reads, device, loader.pin_prefetcher)
            reads = []
        for storage, ids in reads:
            pick = self._to_be_picked(storage, ids)
            if pick is None:
                columns.append(storage.fetch(ids, device, loader.pin_prefetcher))
            else:
                picks.append(pick)
                columns.append(pick[0])
        if picks:
            pick_all(picks)
        # What is fetched asynchronously is all under way by now.
        for (frame, _, name), rows in zip(wanted, columns, strict=True):
            frame._columns[name] = plain_column(rows.wait() if hasattr(rows, "wait") else rows)
        return True

    def _to_be_picked(self, storage: Any, ids: torch.Tensor) -> Any:
        """What ``pick_all`` is to copy of a storage to the loader's device; None if it cannot."""
        from dgl_mgpu.graph.pinning.pinning import host_view
        from dgl_mgpu.ops.gather import can_be_picked, to_be_picked
        from dgl_mgpu.ops.view import LISTED_ROWS

        if type(storage) is not Column:
            pick = getattr(storage, "to_be_picked", None)
            return None if pick is None else pick(ids)
        rows: Any = storage.data
        if rows.device != ids.device:
            is_fast = ids.is_cuda and len(ids) < LISTED_ROWS and not rows.requires_grad
            if not (is_fast and rows.is_contiguous() and rows.is_pinned()):
                return None
            rows = host_view(rows, ids.device)
        return to_be_picked(ids, rows) if can_be_picked(ids, rows) else None

    def _put(self, slots: BatchSlots, future: SampleFuture[Any]) -> Any:
        """The batch in a slot; None if it is not to go into one, or if none is free."""
        from dgl_mgpu.ops.sample_future import HopsFuture

        if not isinstance(future, HopsFuture):
            return None
        with stage("sample"):
            hops = future.hops.result()
        if hops is None:
            return None
        with stage("gather"):
            return slots.put(hops, self)

    def serves(
        self, is_first: bool, is_last: bool, of: FrameKey, name: str, buffer: torch.Tensor
    ) -> bool:
        """As :class:`FeatureSource` says."""
        sampler = self._loader.graph_sampler
        names: Any = {
            "src": sampler.prefetch_node_feats if is_first else None,
            "dst": sampler.prefetch_labels if is_last else None,
            "edge": sampler.prefetch_edge_feats,
        }[of.side]
        if isinstance(names, Mapping):
            names = names.get(of.type, names.get(of.type[1]) if of.side == "edge" else None)
        if name not in (names or ()):
            return False
        stored = self._storage(of, name)
        if isinstance(stored, Column):
            stored = stored.data
            if stored.requires_grad:
                return False
        return stored.shape[1:] == buffer.shape[1:] and stored.dtype == buffer.dtype

    def fetch(self, of: FrameKey, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        """As :class:`FeatureSource` says."""
        storage, device = self._storage(of, name), self._loader.device
        if not isinstance(storage, Column):
            storage.fetch(ids, device, out=out)
        elif storage.data.device == device:
            torch.index_select(storage.data, 0, ids, out=out)
        else:
            out.copy_(storage.fetch(ids, device))

    def _storage(self, of: FrameKey, name: str) -> Any:
        graph = self._loader.graph
        get = graph.get_edge_storage if of.side == "edge" else graph.get_node_storage
        return get(name, of.type)

    def _note(self, table: VersionedTable, ids: torch.Tensor | None = None) -> None:
        self._tables.setdefault(table, table.version)

    def dependencies(self) -> DependencySnapshot:
        """A snapshot of what batches depend on apart from seeds and random numbers."""
        loader = self._loader
        # The first is sampled, and the second has the features.
        graphs = [self._collate.g, loader.graph]
        parts = [
            (g._graph, *(frame._columns for frame in (*g._node_frames, *g._edge_frames)))
            for g in map(_scripts, graphs[graphs[0] is graphs[1] :])
            if isinstance(g, DGLGraph)
        ]
        writes = sum(table.version - version for table, version in self._tables.items())
        return DependencySnapshot(
            graphs, parts, loader.graph_sampler, other_storages(loader), loader._passes, writes
        )

    def new_shared_state(self) -> list[torch.Tensor] | None:
        """Formats of the graph that sampling or the script has added."""
        tensors = list(_structure_tensors(self._collate.g))
        added = [tensor for tensor in tensors if id(tensor) not in self._seen]
        self._seen = {id(tensor) for tensor in tensors}
        return added or None

    def hand_over(self, *made: object) -> None:
        """Let the current stream use batches, seeds and tensors."""
        if self._loader.device.type != "cuda":
            return
        tensors: list[torch.Tensor] = []
        recursive_apply(made, _collect, tensors)
        # Many tensors of a batch are views of one; recording that once is enough.
        wholes = (tensor if tensor._base is None else tensor._base for tensor in tensors)
        stream = current_stream(self._loader.device)
        for tensor in {id(whole): whole for whole in wholes}.values():
            if tensor.is_cuda:
                tensor.record_stream(stream)


class _SeedRows:
    """A vector in host memory, of which a part at a time is pinned, and copied to a GPU.

    A copy of each batch's rows would take the host as long as a kernel's launch.
    """

    #: Elements of a part, at least.
    _PART = 1 << 18

    def __init__(self, data: torch.Tensor, device: torch.device) -> None:
        self._data, self.shape, self._device = data, data.shape, device
        self._begin, self._part, self._copy = 0, data[:0], data[:0]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        begin, end = rows.start - self._begin, rows.stop - self._begin
        if not 0 <= begin <= end <= self._part.shape[0]:
            most = max(self._PART, rows.stop - rows.start)
            self._begin, self._part = rows.start, self._data[rows.start :][:most].pin_memory()
            self._copy = self._copied(self._part)
            begin, end = 0, rows.stop - rows.start
        return self._part[begin:end]

    def _copied(self, part: torch.Tensor) -> torch.Tensor:
        """A part on the GPU, for all streams: not behind what is queued on one of them."""
        stream = _copying_stream(self._device)
        with torch.cuda.stream(stream):
            copied = part.to(self._device, non_blocking=True)
        stream.synchronize()
        return copied

    def on_device(self, seeds: torch.Tensor) -> torch.Tensor:
        """Rows on the GPU that were taken of this, for the current stream."""
        if seeds.untyped_storage().data_ptr() != self._part.untyped_storage().data_ptr():
            return seeds.to(self._device, non_blocking=True)  # of a part before
        # The part's memory may be used anew when it is given up.
        self._copy.record_stream(current_stream(self._device))
        begin = seeds.storage_offset() - self._part.storage_offset()
        return self._copy[begin : begin + seeds.shape[0]]


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned_batches(seeds: _SeedRows, batches: Any) -> Iterator[torch.Tensor]:
    """The seeds of batches in pinned memory; ``batches`` is DGL's iterator of a dataset."""
    batches.dataset = seeds
    while True:
        try:
            batch = batches._next_indices()
        except StopIteration:
            return
        yield batch


def _are_on(device: torch.device, nodes: Any) -> bool:
    """Whether nodes, by type if they are several, are tensors on a device."""
    parts = nodes.values() if isinstance(nodes, Mapping) else (nodes,)
    return all(type(ids) is torch.Tensor and ids.device == device for ids in parts)


def other_storages(loader: Any) -> Mapping[str, Any]:
    """The storages that a loader fetches from beside its graph."""
    return getattr(loader, "other_storages", {})  # not of a loader that Lightning made anew


def _scripts(g: Any) -> Any:
    """The script's own graph, if it is shared between processes in its place."""
    return getattr(g, "original", g)


def _unchanged(seeds: Any) -> Any:
    return seeds


def to_device(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Ids on a device.  A copy from pageable memory would wait for all work queued before it, such
    as the model's of the last batch."""
    if device.type == "cuda" and ids.device.type == "cpu":
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


#: Bytes at which tensors begin in a joint copy: a GPU's widest reads.
_ALIGNMENT = 16


def copies_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in pageable memory, copied to a GPU by one copy, as :func:`to_device` does."""
    if len(tensors) < 2 or device.type == "cpu":
        return [to_device(tensor, device) for tensor in tensors]
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    parts = list(zip(tensors, starts, strict=True))
    for tensor, start in parts:
        _part(pinned, start, tensor).copy_(tensor)
    copied = pinned.to(device, non_blocking=True)
    return [_part(copied, start, tensor) for tensor, start in parts]


def _part(joint: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor is in a joint copy."""
    return joint[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _collect(made: Any, tensors: list[torch.Tensor]) -> None:
    """Add the tensors of a part of a batch."""
    if isinstance(made, torch.Tensor):
        tensors.append(made)
    elif isinstance(made, DGLGraph) and made.device.type == "cuda":
        for relation in made._graph.relations:
            tensors += relation.tensors()
        for frame in (*made._node_frames, *made._edge_frames):
            ids = frame.unmade_ids if type(frame) is BlockFrame else None
            if ids is not None:
                tensors.append(ids)
                continue
            for column in frame._columns.values():
                if isinstance(column, LazyFeature):
                    continue
                # Do not gather rows that are gathered lazily.
                index = column.index
                if index is not None:
                    tensors += index._indices if isinstance(index, _LazyIndex) else [index]
                tensors.append(column.storage)


def _structure_tensors(g: Any) -> Iterable[torch.Tensor]:
    """The tensors and views of a graph's structure."""
    g = _scripts(g)
    if not isinstance(g, DGLGraph):
        return  # a store's is made with the store
    from dgl_mgpu.graph.index import TensorIndex
    from dgl_mgpu.graph.pinning.pinned_graphs import pinned_tensors

    index = g._graph if isinstance(g._graph, TensorIndex) else pinned_tensors(g._graph)
    for relation in () if index is None else index.relations:
        parts = relation.tensors()
        for name in relation.created:
            for view in relation.kept_with(name).values():
                parts += [view.tiers, view.pointers, view.position, *view.owner]
        yield from (part for part in parts if isinstance(part, torch.Tensor))
