"""DGL's DataLoader: shared stores with ``use_uva``, and mini-batches in less of the host's time."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.queues import Queue
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from dgl.base import EID, NID, DGLError
from dgl.frame import Column, Frame, LazyFeature
from dgl.heterograph import DGLGraph
from torch._utils import ExceptionWrapper

from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.patches import is_partitioned
from dgl_mgpu.dgl.patches.dataloading import fork_workers
from dgl_mgpu.errors import (
    InvalidInputError,
    UnavailableError,
    UnsupportedByPartitionError,
    UnsupportedByStoreError,
    WorkerFailedError,
)
from dgl_mgpu.graph.block_frames import BlockFrame
from dgl_mgpu.graph.dispatch import is_tensor_backed
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
            g.reattach_column(rows)
    return originals[f"{_HERE}:restore_parent_storage_columns"](item, g)


def _rows_of_a_store(item: Any, g: Any) -> Iterator[Any]:
    """Columns of a part of a batch that was sampled from a store's graph."""
    if isinstance(item, DGLGraph) and is_in_a_store(g):
        from dgl_mgpu.store.lazy_rows import LazyColumn

        for frame in (*item._node_frames, *item._edge_frames):
            yield from (each for each in frame._columns.values() if isinstance(each, LazyColumn))


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
    picks: list[Any] = []
    _fetch(
        feats, frames, types, get_storage_func, id_name, device, pin_prefetcher, gpu_caches, picks
    )
    if picks:
        _pick_all(picks)


def _fetch(
    feats: _Columns,
    frames: Sequence[Any],
    types: Sequence[Any],
    get_storage_func: Callable[..., Any],
    id_name: str,
    device: Any,
    pin_prefetcher: bool,
    gpu_caches: dict[tuple[str, Any], tuple[GPUCache, Any]],
    picks: list[Any],
) -> None:
    """As :func:`_prefetch_update_feats`, but rows of tensors on the GPU are left to ``picks``."""
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
                if type(storage) is Column:
                    data = storage.data
                    pick = _pick(ids, data) if data.is_cuda and data.device == device else None
                    if pick is not None:
                        picks.append(pick)
                        feats[number, key] = pick[0]
                        continue
                feats[number, key] = storage.fetch(ids, device, pin_prefetcher)
                continue

            def fetch(rows: Any, storage: Any = storage, where: Any = ids.device) -> Any:
                return storage.fetch(rows.to(where), device, pin_prefetcher)

            feats[number, key] = cache.fetch(ids.to(device), fetch)


def _pick(ids: Any, rows: torch.Tensor) -> Any:
    """What :func:`_pick_all` is to copy of a tensor on a GPU; None if it cannot."""
    # Here: who has no graph on a GPU needs no operators of this package.
    from dgl_mgpu.ops.gather import can_be_picked, to_be_picked

    return to_be_picked(ids, rows) if can_be_picked(ids, rows) else None


def _pick_all(picks: list[Any]) -> None:
    """Copy rows of tensors to memory for them, by one launch."""
    from dgl_mgpu.ops.gather import pick_all

    pick_all(picks)


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
    picks: list[Any] = []
    batch = recursive_apply(batch, _complete, loader, fetched, futures, picks)
    if picks:
        _pick_all(picks)
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
    picks: list[Any],
) -> Any:
    """A part of a batch on the loader's device.

    What its columns are to be is added to ``fetched``, and what is to be copied to them to
    ``picks``; it is a future, or has some in it, if these are in ``futures``.
    """
    device = loader.device
    if isinstance(part, LazyFeature):
        rows = loader.other_storages[part.name].fetch(part.id_, device, loader.pin_prefetcher)
        recursive_apply(rows, _note_future, futures)
        return rows
    if not isinstance(part, DGLGraph):
        is_here = isinstance(part, torch.Tensor) and part.device == device
        return part if is_here else part.to(device, non_blocking=True)
    graph, pin = loader.graph, loader.pin_prefetcher
    of_nodes: _Columns = {}
    of_edges: _Columns = {}
    if _has_lazy_features(part._node_frames):
        nodes = part._node_frames, part.ntypes, graph.get_node_storage, NID
        _fetch(of_nodes, *nodes, device, pin, graph._gpu_caches["node"], picks)
    if _has_lazy_features(part._edge_frames):
        edges = part._edge_frames, part.canonical_etypes, graph.get_edge_storage, EID
        _fetch(of_edges, *edges, device, pin, graph._gpu_caches["edge"], picks)
    is_here = is_tensor_backed(part._graph) and part._graph.device == device
    there = part if is_here else part.to(device, non_blocking=True)
    if of_nodes:
        fetched.append((there._node_frames, of_nodes))
    if of_edges:
        fetched.append((there._edge_frames, of_edges))
    return there


def _has_lazy_features(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        if type(frame) is BlockFrame and frame.unmade_ids is not None:
            continue
        for column in frame._columns.values():
            if isinstance(column, LazyFeature):
                return True
    return False


def _note_future(rows: Any, futures: list[Any]) -> None:
    if hasattr(rows, "wait"):
        futures.append(rows)


def _awaited(part: Any, futures: Sequence[Any]) -> Any:
    return part.wait() if any(part is each for each in futures) else part


#: Files that a worker keeps open, to have as many to spare when there are no more to be had: those
#: that it takes to hand over what it has made before.
_SPARE_FILES = 2


def begin_worker(self: Any, worker_id: int) -> None:
    """In place of ``WorkerInitWrapper.__call__``: leaves alone what the process has of its parent.

    An event of a GPU among the parent's garbage would end a worker that collects it, since CUDA
    does not work there.

    It tells the process that waits for it of a mini-batch that it cannot hand over: Python drops
    what a queue cannot take, and that process would wait for ever.  When that process is gone, it
    says nothing: whoever watches that tells of its end.
    """
    gc.freeze()
    sys.excepthook = _without_lost_readers
    spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_SPARE_FILES)]
    dropped = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def not_handed_over(queue: Queue, error: Exception, item: Any) -> None:
        while spare:
            os.close(spare.pop())
        match item:
            case (int(number), _):  # torch's: a mini-batch and which it is
                _put_first(queue, (number, _NotHandedOver(error)))
            case _:
                dropped(error, item)

    Queue._on_queue_feeder_error = not_handed_over  # type: ignore[attr-defined]
    originals["dgl.dataloading.dataloader:WorkerInitWrapper.__call__"](self, worker_id)


def _without_lost_readers(kind: type[BaseException], *error: Any) -> None:
    """In place of ``sys.excepthook``: the thread from which tensors are fetched shows errors so."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *error)


def _put_first(queue: Any, item: Any) -> None:
    """Put what comes in an item's place, on the thread that has taken that out of the queue.

    What a worker has put there since must not overtake it: torch waits for no mini-batch any more,
    and says nothing, of a worker that has said that it has made its last.
    """
    queue._sem.acquire()
    with queue._notempty:
        queue._buffer.appendleft(item)


class _NotHandedOver(ExceptionWrapper):
    """What torch raises, where a mini-batch is waited for, of one that did not come."""

    def __init__(self, error: Exception) -> None:
        super().__init__((type(error), error, error.__traceback__), "in a DataLoader worker")
        # Torch raises a RuntimeError where there is no room for shared memory.
        is_of_system = isinstance(error, OSError) or "shared memory" in str(error)
        self._error = WorkerFailedError(
            "hand a mini-batch over from a DataLoader worker",
            f"{type(error).__name__}: {error}",
            "free shared memory (/dev/shm), raise the limit on open files (ulimit -n), or use "
            "fewer workers or smaller batches"
            if is_of_system
            else "have the sampler return what can be pickled",
        )

    def reraise(self) -> NoReturn:
        raise self._error


def is_tensor_adaptor_enabled() -> bool:
    """Whether what a graph on a GPU is made of is torch's memory, which knows streams: it is."""
    return True


def init_shares(
    self: Any, indices: Any, batch_size: int, drop_last: bool, ddp_seed: int, shuffle: bool
) -> None:
    """In place of ``DDPTensorizedDataset.__init__``: as many seeds for every rank, and real ones.

    DGL fills up a rank's share from the share itself, which a share with no seed, or with fewer
    than it lacks, cannot give.  Where there is such a one, seeds are repeated from the first on,
    as `torch.utils.data.DistributedSampler` does.
    """
    if not drop_last:
        indices = _filled_up(indices, dist.get_world_size())
    original = originals["dgl.dataloading.dataloader:DDPTensorizedDataset.__init__"]
    original(self, indices, batch_size, drop_last, ddp_seed, shuffle)
    # Workers that live on see each epoch's order, as they do without use_ddp.
    self._indices.share_memory_()


def _filled_up(indices: Any, num_ranks: int) -> Any:
    by_type = indices if isinstance(indices, Mapping) else {"": indices}
    length = sum(len(ids) for ids in by_type.values())
    share = -(-length // num_ranks)
    lacking = share * num_ranks - length
    if 2 * lacking <= share:
        return indices
    repeated = torch.arange(lacking) % length
    filled, begin = {}, 0
    for key, ids in by_type.items():
        own = repeated[(repeated >= begin) & (repeated < begin + len(ids))] - begin
        filled[key] = torch.cat([ids, ids[own.to(ids.device)]])
        begin += len(ids)
    return filled if isinstance(indices, Mapping) else filled[""]


def init_loader(
    self: Any,
    graph: Any,
    indices: Any,
    graph_sampler: Any,
    device: Any = None,
    use_ddp: bool = False,
    ddp_seed: int = 0,
    batch_size: int = 1,
    drop_last: bool = False,
    shuffle: bool = False,
    use_prefetch_thread: bool | None = None,
    use_alternate_streams: bool | None = None,
    pin_prefetcher: bool | None = None,
    use_uva: bool = False,
    gpu_cache: Any = None,
    **kwargs: Any,
) -> None:
    """In place of ``DataLoader.__init__``: see `dgl_mgpu.dgl.shared_graphs`."""
    if is_partitioned(graph):
        raise UnsupportedByPartitionError(
            "make mini-batches of a graph under --partition",
            "ranks share each step on the whole graph",
            "run the script without --partition, with use_ddp=True if it can",
        )
    if kwargs.get("collate_fn") is None:
        _check_batches(graph_sampler, batch_size)
    if (use_uva or gpu_cache is not None) and is_in_a_store(graph):
        _refuse_cache(gpu_cache)
        use_uva = False  # GPUs read a store's host memory where it is, without pinning a graph
    elif not use_uva and type(graph) is DGLGraph and runner_options.was_told():
        _warn_of_options_without_use(graph)
    given = graph
    if is_in_a_store(graph):
        # DGL decides them for its own graphs alone, and passes them on as they are.
        use_prefetch_thread = bool(use_prefetch_thread)
        use_alternate_streams = bool(use_alternate_streams)
        pin_prefetcher = bool(pin_prefetcher)
    is_shared = False
    # Lightning makes a loader anew of what another one consists of.
    if use_uva and kwargs.get("collate_fn") is None:
        from dgl_mgpu.dgl import shared_graphs

        is_shared = shared_graphs.is_shared(graph, graph_sampler, use_ddp)
        given = shared_graphs.unpinned(graph) if is_shared else graph
        if is_shared and device is None and not _has_gpu():
            device = graph.device  # else DGL asks CUDA for one
    if use_uva and type(given) is DGLGraph:
        _require_gpu(graph_sampler)
    originals["dgl.dataloading.dataloader:DataLoader.__init__"](
        self,
        given,
        indices,
        graph_sampler,
        device,
        use_ddp,
        ddp_seed,
        batch_size,
        drop_last,
        shuffle,
        use_prefetch_thread,
        use_alternate_streams,
        pin_prefetcher,
        use_uva,
        gpu_cache,
        **kwargs,
    )
    if not self.num_workers:
        # DGL's advice to enable CPU affinity is for workers: it raises for a loader without any.
        self.cpu_affinity_enabled = True
    fork_workers(self)
    if is_shared:
        shared_graphs.share(self, graph, indices, batch_size)
    if self.device.type == "cuda" and runner_options.told().captures:
        from dgl_mgpu.capture.calls import capture_models

        capture_models()


def init_graph_loader(
    self: Any,
    dataset: Any,
    collate_fn: Any = None,
    use_ddp: bool = False,
    ddp_seed: int = 0,
    **kwargs: Any,
) -> None:
    """In place of ``GraphDataLoader.__init__``."""
    original = originals[f"{_HERE}:GraphDataLoader.__init__"]
    original(self, dataset, collate_fn, use_ddp, ddp_seed, **kwargs)
    fork_workers(self)


def _check_batches(sampler: Any, batch_size: Any) -> None:
    from dgl_mgpu.sampling.async_blocks import require_layers

    is_count = isinstance(batch_size, Integral) and int(batch_size) > 0
    if isinstance(batch_size, Real | str) and not is_count:
        raise InvalidInputError(
            "make a DataLoader", f"batch_size is {batch_size!r}", "pass a positive number of seeds"
        )
    require_layers(sampler)


def _warn_of_options_without_use(graph: DGLGraph) -> None:
    from dgl_mgpu.dgl.shared_graphs.columns import stored_of

    told = runner_options.told()
    if told.store is not None and told.uses_store and stored_of(graph) is None:
        warnings.warn(
            "the options of python -m dgl_mgpu (--store…) do nothing for the graph of this"
            " DataLoader: it is made without use_uva=True",
            stacklevel=3,
        )


def _has_gpu() -> bool:
    from dgl_mgpu.graph.pinning.pinning import can_pin

    return can_pin()


def _require_gpu(sampler: Any) -> None:
    if not _has_gpu():
        from dgl_mgpu.dgl.shared_graphs import can_be_served

        fix = "leave use_uva out, and use device='cpu'"
        if can_be_served(sampler):
            fix += (
                "; or run python -m dgl_mgpu --store=on SCRIPT, which keeps the graph in a store "
                "in the host's memory"
            )
        raise UnavailableError(
            "make a DataLoader with use_uva=True",
            "torch sees no GPU that could read a pinned graph",
            fix,
        )


def is_in_a_store(graph: Any) -> bool:
    """Whether a graph is a store's, and not a script's that ranks share through one."""
    if isinstance(graph, DGLGraph):
        return False
    from dgl_mgpu.store.graph import StoreGraph

    return type(graph) is StoreGraph


def _refuse_cache(gpu_cache: Any) -> None:
    if gpu_cache is not None:
        raise UnsupportedByStoreError(
            "cache features of a store's graph with DataLoader(gpu_cache=…)",
            "the store keeps the rows that are read most in GPU memory itself",
            "leave gpu_cache out; gpu_memory= of the store says how much it takes",
        )
