"""Whether a DataLoader is to have its graph from a store, and the building of that store."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from dgl.dataloading.base import EdgePredictionSampler
from dgl.dataloading.labor_sampler import LaborSampler
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.dataloading.shadow import ShaDowKHopSampler
from dgl.frame import Column
from dgl.heterograph import DGLGraph

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.shared_graphs.columns import Passes, Snapshot, Stored, is_watched, stored_of
from dgl_mgpu.dgl.shared_graphs.graph import SharedGraph
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.graph.random import next_key
from dgl_mgpu.store.agreement import frames, graph_facts, require_same
from dgl_mgpu.store.global_store import GlobalStore

#: Samplers that use a graph by its methods alone.  The code of others may do anything with it.
_SERVED = NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, ShaDowKHopSampler
_ASKED = "share a graph among ranks (DataLoader with use_uva=True)"
_OFF = "run python -m dgl_mgpu --store=off, which has each rank pin its own"


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
    told = runner_options.told()
    if not told.uses_store:
        return False
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_asked_for = use_ddp or stored_of(graph) is not None
    else:
        is_asked_for = told.store is not None or stored_of(graph) is not None
    if not is_asked_for:
        return False
    if can_be_served(sampler):
        return True
    if told.store is not None:
        warnings.warn(
            f"the graph of a DataLoader is pinned in each process, and not kept in the store: "
            f"{type(_of_nodes(sampler)).__name__} may need more of it than a store has",
            stacklevel=3,
        )
    return False


def can_be_served(sampler: Any) -> bool:
    """Whether all that a DataLoader's sampler needs of a graph is in a store."""
    return type(_of_nodes(sampler)) in _SERVED


def _of_nodes(sampler: Any) -> Any:
    return sampler.sampler if type(sampler) is EdgePredictionSampler else sampler


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
        As :meth:`~dgl_mgpu.store.global_store.GlobalStore.from_dgl`.
    """
    stored = stored_of(graph)
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


def _storable(graph: DGLGraph) -> DGLGraph:
    """The graph with those of its columns that can be stored."""
    for _, frame in frames(graph):
        for column in frame._columns.values():
            _ = column.data  # rows of another graph's column
    kept = graph.local_var()
    for _, frame in frames(kept):
        for name, column in list(frame._columns.items()):
            # DGL's frames take anything; a table is of tensors with rows.
            if not (isinstance(column, Column) and _is_storable(column.storage)):
                del frame._columns[name]
    return kept


def _is_storable(rows: Any) -> bool:
    return (
        isinstance(rows, torch.Tensor)
        and rows.layout == torch.strided
        and rows.dim() > 0
        and (rows.numel() > 0 or len(rows) == 0)  # rows without bytes are no table's
        and is_watched(rows)
    )


def _options(loader: Any, batch_size: int) -> dict[str, Any]:
    """How to build a store for a loader: as the runner was told, and for its mini-batches."""
    sampler, of_edges = loader.graph_sampler, type(loader.graph_sampler) is EdgePredictionSampler
    options: dict[str, Any] = {"batch_size": batch_size, "edges": of_edges}
    fanouts = list(getattr(sampler.sampler if of_edges else sampler, "fanouts", ()))
    with suppress(TypeError):  # one for each edge type, which a plan does not take
        if fanouts:
            options["fanouts"] = [operator.index(fanout) for fanout in fanouts]
    if loader.device.type == "cpu":
        options["device"] = "cpu"
    return options | dict(runner_options.told().store or {})


def _store(graph: DGLGraph, options: dict[str, Any], indices: Any, device: torch.device) -> Stored:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # A machine's ranks build a store of their own.
        ranks = Communicator.of_this_machine()
        kept = ranks.run_all(_ASKED, lambda: _storable(graph))
        fix = f"load the same graph on all ranks, or {_OFF}"
        require_same(_ASKED, ranks.all_gather(graph_facts(kept)), fix)
        # What is said to the first rank holds for all, as its data do.
        seed, options = ranks.broadcast_from_rank0(_ASKED, lambda: (next_key()[0], options))
        if options.get("hotness") == "presample" and not options["edges"]:
            options["seeds"] = _seeds(indices)
        store = GlobalStore.from_dgl(kept if ranks.rank == 0 else None, seed=seed, **options)
    columns = {
        of: {name: Snapshot(column.storage) for name, column in frame._columns.items()}
        for of, frame in frames(kept)
    }
    return Stored(store, columns, Passes(seed))


def _seeds(indices: Any) -> Any:
    """The nodes that mini-batches begin with; None, for all, where that is not seen."""
    if isinstance(indices, Mapping):
        seeds = {ntype: _seeds(ids) for ntype, ids in indices.items()}
        return None if any(ids is None for ids in seeds.values()) else seeds
    return indices.cpu() if isinstance(indices, torch.Tensor) else None
