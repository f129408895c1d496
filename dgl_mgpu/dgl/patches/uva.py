"""DGL's DataLoader with ``use_uva=True``: the graph from the store, where there is to be one."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any

from dgl.heterograph import DGLGraph

from dgl_mgpu.dgl import runner_options
from dgl_mgpu.errors import InvalidInputError, UnavailableError, UnsupportedByStoreError
from dgl_mgpu.graph.originals import originals


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
    if is_shared:
        shared_graphs.share(self, graph, indices, batch_size)


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
