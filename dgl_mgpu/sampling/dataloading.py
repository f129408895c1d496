"""How DGL's DataLoader and NeighborSampler work on graphs of this package.

DGL's own protocol (``sample_neighbors``, ``get_node_storage``, …) is enough for them to work, but
it does not tell a store's graph when an epoch starts, builds a graph over all nodes at every hop,
and lets the GPU wait while the host samples the next mini-batch.  For DGL's own graphs on the CPU
both classes are unchanged.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from dgl.dataloading.base import (
    BlockSampler,
    set_dst_lazy_features,
    set_edge_lazy_features,
    set_src_lazy_features,
)
from dgl.dataloading.dataloader import CollateWrapper, DataLoader
from dgl.dataloading.neighbor_sampler import NeighborSampler
from dgl.frame import Frame, LazyFeature
from dgl.heterograph import DGLGraph
from dgl.storages.tensor import BaseTensorStorage

from dgl_mgpu.errors import UnsupportedByStoreError
from dgl_mgpu.graph.dispatch import TensorBacked
from dgl_mgpu.sampling.async_blocks import (
    finish_blocks,
    is_pinned,
    require_layers,
    sample_all_hops_async,
    samples_blocks,
    weight_of,
)
from dgl_mgpu.sampling.loader_batches import Batches, BatchSlots, other_storages
from dgl_mgpu.sampling.prefetch_safety import PURE_DATASETS, declares_prefetch_safe, is_pure
from dgl_mgpu.sampling.prefetcher import Prefetcher, PrefetchTuner
from dgl_mgpu.sampling.side_stream import may_prefetch, side_stream_of
from dgl_mgpu.utils.fork_safe import freed_at_fork

#: Mini-batches to prefetch.  One is made while the model works on the one before, which fills the
#: whole step; more would only take memory.
DEPTH = 1
#: Tuners of loaders, kept from pass to pass.
_tuners: WeakKeyDictionary[Any, PrefetchTuner] = WeakKeyDictionary()
#: Held while a pass starts: its loader's collate function is replaced meanwhile, and workers are
#: forked.
_start_lock = freed_at_fork(threading.RLock())
#: What has been set for this thread.
_thread = threading.local()


def serve_dataloading() -> None:
    """Replace three methods of DGL's, unless the import hook has already done so.

    Calling it again does nothing.
    """
    if getattr(DataLoader.__iter__, "serves_stores", False):
        return
    iterate, original = DataLoader.__iter__, NeighborSampler.sample_blocks

    def __iter__(self: Any) -> Iterator:
        return _iterate(self, iterate)

    def _sample_blocks(self: Any, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
        return sample_blocks(self, g, seed_nodes, exclude_eids, original)

    __iter__.serves_stores = True  # type: ignore[attr-defined]
    __iter__.dgls = iterate  # type: ignore[attr-defined]
    _sample_blocks.serves_stores = True  # type: ignore[attr-defined]
    DataLoader.__iter__ = __iter__
    NeighborSampler.sample_blocks = _sample_blocks
    BlockSampler.assign_lazy_features = assign_lazy_features


def sample_blocks(
    sampler: Any, g: Any, seed_nodes: Any, exclude_eids: Any, original: Callable[..., Any]
) -> Any:
    """``NeighborSampler.sample_blocks``: all hops at once where a graph of this package can."""
    future = sample_all_hops_async(sampler, g, seed_nodes, exclude_eids)
    sampled = None if future is None else future.result()
    if sampled is None:
        return original(sampler, g, seed_nodes, exclude_eids)
    return finish_blocks(sampler, sampled)


def assign_lazy_features(self: Any, result: Any) -> Any:
    """``BlockSampler.assign_lazy_features``, without views where none are needed."""
    require_layers(self)
    _, _, blocks = result
    first, last = blocks[0], blocks[-1]
    names = self.prefetch_node_feats
    if names and not _set_lazy(first._node_frames, first.srctypes, names):
        set_src_lazy_features(first, names)
    names = self.prefetch_labels
    if names and not _set_lazy(last._node_frames[len(last.srctypes) :], last.dsttypes, names):
        set_dst_lazy_features(last, names)
    if self.prefetch_edge_feats:
        for block in blocks:
            set_edge_lazy_features(block, self.prefetch_edge_feats)
    return result


def _set_lazy(frames: Sequence[Frame], ntypes: Sequence[str], names: Any) -> bool:
    """Have features of the only node type fetched; False if names are given by type."""
    if len(ntypes) != 1 or not isinstance(names, list | tuple):
        return False
    frames[0]._columns.update((name, LazyFeature(name)) for name in names)
    return True


def batches_into_slots(loader: Any, slots: BatchSlots) -> Iterator:
    """A pass over a loader that puts mini-batches into slots where it can.

    It can for DGL's neighbour samplers over a graph of this package, in this process, and for a
    loader that does not override ``__iter__``.  Yields what :meth:`BatchSlots.put` returns, or what
    the loader gives where that is None.
    """
    dgls = getattr(type(loader).__iter__, "dgls", None)
    return iter(loader) if dgls is None else _iterate(loader, dgls, slots)


def _iterate(loader: Any, dgls: Callable[[Any], Any], slots: BatchSlots | None = None) -> Iterator:
    """A pass over a loader; ``dgls`` is ``DataLoader.__iter__`` as DGL has it."""
    with _start_lock:
        return _start_pass(loader, dgls, slots)


def _start_pass(loader: Any, dgls: Callable[[Any], Any], slots: BatchSlots | None) -> Iterator:
    shared = loader.graph
    if samples_blocks(type(shared)):
        if getattr(shared, "spans_machines", False) and (
            loader.num_workers or loader.use_prefetch_thread
        ):
            raise UnsupportedByStoreError(
                "sample a store of several machines in workers or in a thread",
                "all ranks ask each other for rows in one order",
                "use num_workers=0 and use_prefetch_thread=False",
            )
        _start_epoch(loader)
        prob = weight_of(loader.graph_sampler)
        if prob is not None:
            shared.check_weights(prob)
    if not _samples_here(loader):
        return dgls(loader)
    if loader.device.type == "cuda":
        _run_backward_here()
    side_stream = side_stream_of(loader.device) if _may_prefetch(loader) else None
    in_lockstep = getattr(shared, "spans_machines", False)
    if side_stream is not None and side_stream.is_full and not in_lockstep:
        side_stream = None
    return Prefetcher(
        Batches(loader, dgls, slots),
        side_stream,
        DEPTH,
        _tuners.setdefault(loader, PrefetchTuner()),
        in_lockstep=in_lockstep,
    )


def _run_backward_here() -> None:
    """Have this thread run its backward passes itself, unless it has been told so before.

    Torch has a thread for each GPU, so that the host can queue work for several at once.  With one,
    each backward pass waits twice for another thread to wake up.
    """
    if not getattr(_thread, "runs_backward", False):
        _thread.runs_backward = True
        torch.autograd.set_multithreading_enabled(False)


def _start_epoch(loader: Any) -> None:
    """Make a loader sample its graph's next epoch, but not passes that have started."""
    shared, collate = loader.graph, loader.collate_fn
    if collate.g is not shared and loader.persistent_workers:
        collate.g.start_epoch(shared)  # of the pass before, which they have, and see
        return
    loader.collate_fn = copy.copy(collate)
    loader.collate_fn.g = shared.for_pass()


def _samples_here(loader: Any) -> bool:
    """Whether a loader samples a graph of this package, in this thread."""
    graph = loader.graph
    is_tensor_backed = type(graph) is DGLGraph and isinstance(graph._graph, TensorBacked)
    return (
        (samples_blocks(type(graph)) or is_tensor_backed or is_pinned(loader))
        and type(loader.collate_fn) is CollateWrapper
        and loader.num_workers == 0
        and not loader.use_prefetch_thread
        and not loader.pin_memory
    )


def _may_prefetch(loader: Any) -> bool:
    """Whether prefetching is certain not to change a loader's batches.

    ``DGL_MGPU_PREFETCH=0`` turns prefetching off.
    """
    caches = loader.graph._gpu_caches
    return (
        may_prefetch()
        and getattr(loader.graph, "may_prefetch", True)
        and (loader.graph.device == loader.device or is_pinned(loader))
        and not loader.use_alternate_streams  # which is how the script wants it
        # Other code may depend on anything, unless it declares that it does not.
        and (type(loader.dataset) in PURE_DATASETS or declares_prefetch_safe(loader.dataset))
        and is_pure(loader.graph_sampler)
        and all(isinstance(other, BaseTensorStorage) for other in other_storages(loader).values())
        # Another stream may write to a cache.
        and not (caches["node"] or caches["edge"])
    )
