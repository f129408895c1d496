"""What DGL's DataLoader does with the parts of every mini-batch, in less of the host's time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from dgl.base import EID, NID, DGLError
from dgl.frame import Frame, LazyFeature
from dgl.heterograph import DGLGraph

from dgl_mgpu.dgl.patches.uva import is_in_a_store
from dgl_mgpu.graph.originals import originals
from dgl_mgpu.graph.pinning.gpu_cache import GPUCache

_HERE = "dgl.dataloading.dataloader"
#: What was fetched, or is to be waited for, by number of the type and name.
_Columns = dict[tuple[int, str], Any]

#: What becomes of a container, by its type: a dict, a tuple or a list; None of what is none.
_containers: dict[type, type | None] = {}


def _container(data: Any) -> type | None:
    kind = type(data)
    try:
        return _containers[kind]
    except KeyError:
        pass
    found: type | None = None
    if issubclass(kind, Mapping):
        found = dict
    elif issubclass(kind, tuple):
        found = tuple
    elif issubclass(kind, Sequence) and not issubclass(kind, str):
        found = list
    _containers[kind] = found
    return found


def recursive_apply(data: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of ``dgl.utils.recursive_apply``: asks a type once what it is, not every object."""
    container = _container(data)
    if container is None:
        return fn(data, *args, **kwargs)
    if container is dict:
        return {key: recursive_apply(each, fn, *args, **kwargs) for key, each in data.items()}
    parts = [
        fn(each, *args, **kwargs)
        if _container(each) is None
        else recursive_apply(each, fn, *args, **kwargs)
        for each in data
    ]
    return tuple(parts) if container is tuple else parts


def recursive_apply_pair(
    data1: Any, data2: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """In place of ``dgl.utils.recursive_apply_pair``."""
    first, second = _container(data1), _container(data2)
    if first is dict and second is dict:
        return {
            key: recursive_apply_pair(each, data2[key], fn, *args, **kwargs)
            for key, each in data1.items()
        }
    if first in (None, dict) or second in (None, dict):
        return fn(data1, data2, *args, **kwargs)
    parts = [
        recursive_apply_pair(one, other, fn, *args, **kwargs)
        for one, other in zip(data1, data2, strict=False)
    ]
    return tuple(parts) if first is tuple and second is tuple else parts


def remove_parent_storage_columns(item: Any, g: Any) -> Any:
    """In place of DGL's: what stays in the process need not be taken out and put back."""
    if torch.utils.data.get_worker_info() is None:
        return item
    for rows in _rows_of_a_store(item, g):
        rows.leave_in_store()
    return originals[f"{_HERE}:remove_parent_storage_columns"](item, g)


def restore_parent_storage_columns(item: Any, g: Any) -> Any:
    """In place of DGL's: rows of a store, which a worker has not read, are read here."""
    for rows in _rows_of_a_store(item, g):
        if rows.storage is None:
            g._restore_rows(rows)
    return originals[f"{_HERE}:restore_parent_storage_columns"](item, g)


def _rows_of_a_store(item: Any, g: Any) -> Iterator[Any]:
    """Columns of a part of a batch that was sampled from a store's graph."""
    if isinstance(item, DGLGraph) and is_in_a_store(g):
        from dgl_mgpu.store.lazy_rows import RowsLater

        for frame in (*item._node_frames, *item._edge_frames):
            yield from (each for each in frame._columns.values() if isinstance(each, RowsLater))


def _prefetch_update_feats(
    feats: _Columns,
    frames: Sequence[Any],
    types: Sequence[Any],
    get_storage_func: Callable[..., Any],
    id_name: str,
    device: Any,
    pin_prefetcher: bool,
    gpu_caches: dict[tuple[str, Any], tuple[GPUCache, Any]],
) -> None:
    """Fetch the features that a sampler left to the dataloader, through a cache where there is one.

    Parameters
    ----------
    feats : dict
        By number of the type and name; is filled.
    frames, types : sequence
        Of nodes or edges.
    get_storage_func : callable
        What gives the storage of a name and a type.
    id_name : str
        Column of a frame that has the ids of its rows.
    device : torch.device
    pin_prefetcher : bool
        Passed on to storages.
    gpu_caches : dict
        By name and type.
    """
    for number, (frame, type_) in enumerate(zip(frames, types, strict=True)):
        for key, column in frame._columns.items():
            if not isinstance(column, LazyFeature):
                continue
            name = column.name or key
            ids = frame.get(id_name) if column.id_ is None else column.id_
            if ids is None:
                raise DGLError(f"feature {name!r} is to be fetched, and nothing says of which rows")
            storage = get_storage_func(name, type_)
            cache, _ = gpu_caches.get((name, type_), (None, None))
            if cache is None:
                feats[number, key] = storage.fetch(ids, device, pin_prefetcher)
                continue

            def fetch(rows: Any, storage: Any = storage, where: Any = ids.device) -> Any:
                return storage.fetch(rows.to(where), device, pin_prefetcher)

            feats[number, key] = cache.fetch(ids.to(device), fetch)


def next_batch(self: Any) -> Any:
    """In place of ``_PrefetchingIter.__next__``: one pass over a batch, where DGL makes five.

    That is for batches that this thread makes, on its own stream.
    """
    # Of torch's iterator, which several threads must not use at once.
    with vars(self).setdefault("_turn", threading.Lock()):
        return _next_batch(self)


def _next_batch(self: Any) -> Any:
    if self.use_thread or self.stream is not None:
        return originals[f"{_HERE}:_PrefetchingIter.__next__"](self)
    loader = self.dataloader
    batch = next(self.dataloader_it)
    if loader.num_workers:
        batch = recursive_apply(batch, restore_parent_storage_columns, loader.graph)
    fetched: list[tuple[Sequence[Frame], _Columns]] = []
    futures: list[Any] = []
    batch = recursive_apply(batch, _complete, loader, fetched, futures)
    # What is fetched asynchronously is all under way by now.
    for frames, columns in fetched:
        for (number, key), rows in columns.items():
            frames[number][key] = rows.wait() if hasattr(rows, "wait") else rows
    return recursive_apply(batch, _awaited, futures) if futures else batch


def _complete(
    part: Any,
    loader: Any,
    fetched: list[tuple[Sequence[Frame], _Columns]],
    futures: list[Any],
) -> Any:
    """A part of a batch on the loader's device.

    What its columns are to be is added to ``fetched``; it is a future, or has some in it, if these
    are in ``futures``.
    """
    device = loader.device
    if isinstance(part, LazyFeature):
        rows = loader.other_storages[part.name].fetch(part.id_, device, loader.pin_prefetcher)
        recursive_apply(rows, _note_future, futures)
        return rows
    if not isinstance(part, DGLGraph):
        return part.to(device, non_blocking=True)
    graph, pin = loader.graph, loader.pin_prefetcher
    of_nodes: _Columns = {}
    of_edges: _Columns = {}
    if _has_lazy_features(part._node_frames):
        nodes = part._node_frames, part.ntypes, graph.get_node_storage, NID
        _prefetch_update_feats(of_nodes, *nodes, device, pin, graph._gpu_caches["node"])
    if _has_lazy_features(part._edge_frames):
        edges = part._edge_frames, part.canonical_etypes, graph.get_edge_storage, EID
        _prefetch_update_feats(of_edges, *edges, device, pin, graph._gpu_caches["edge"])
    there = part.to(device, non_blocking=True)
    if of_nodes:
        fetched.append((there._node_frames, of_nodes))
    if of_edges:
        fetched.append((there._edge_frames, of_edges))
    return there


def _has_lazy_features(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        for column in frame._columns.values():
            if isinstance(column, LazyFeature):
                return True
    return False


def _note_future(rows: Any, futures: list[Any]) -> None:
    if hasattr(rows, "wait"):
        futures.append(rows)


def _awaited(part: Any, futures: Sequence[Any]) -> Any:
    return part.wait() if any(part is each for each in futures) else part
