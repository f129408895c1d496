"""Decides whether a DataLoader gets its graph from a store, and builds that store."""

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
from dgl_mgpu.dgl.shared_graphs.columns import Passes, Stored, stored_of
from dgl_mgpu.dgl.shared_graphs.graph import SharedGraph
from dgl_mgpu.errors import ConfigError, UnsupportedByStoreError
from dgl_mgpu.graph.random import next_key
from dgl_mgpu.graph.stored_tensors import Snapshot, is_watched
from dgl_mgpu.store.agreement import frames, graph_facts, require_same
from dgl_mgpu.store.global_store import GlobalStore

# Samplers that use only a graph's methods.  Others may do anything with it.
_SERVED = NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, ShaDowKHopSampler
_ACTION = "share a graph among ranks (DataLoader with use_uva=True)"
_OFF = "run python -m dgl_mgpu --store=off, which has each rank pin its own"


def is_shared(graph: Any, sampler: Any, use_ddp: bool) -> bool:
    """Whether a DataLoader with ``use_uva=True`` gets its graph from the store.

    Warns if the runner was given options, and the sampler is one that needs the graph itself.
    Raises ConfigError if the runner's options cannot be read.
    """
    if type(graph) is not DGLGraph or graph.is_block or graph.device.type != "cpu":
        return False
    options = runner_options.told()
    if not options.uses_store:
        return False
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    is_requested = use_ddp if has_ranks else options.store is not None
    if not is_requested and stored_of(graph) is None:
        return False
    if can_be_served(sampler):
        return True
    if options.store is not None:
        warnings.warn(
            f"the graph of a DataLoader is pinned in each process, and not kept in the store: "
            f"{type(_of_nodes(sampler)).__name__} may need more of it than a store has",
            stacklevel=3,
        )
    return False


def can_be_served(sampler: Any) -> bool:
    """Whether a store has all that a DataLoader's sampler needs of a graph."""
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

    Collective where it is built.  ``loader`` was made of ``unpinned(graph)``; ``indices`` are the
    seeds of mini-batches, ids of one type or of several, or any data set.  ``batch_size`` is what
    the store is planned for, unless the runner's options say another.

    Raises
    ------
    InvalidInputError
        If the ranks of the machine have different graphs.
    ConfigError
        If the store is on another device than the loader samples on.
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
    storable = graph.local_var()
    for _, frame in frames(storable):
        for name, column in list(frame._columns.items()):
            # DGL's frames take anything; a table is of tensors with rows.
            if not (isinstance(column, Column) and _is_storable(column.storage)):
                del frame._columns[name]
    return storable


def _is_storable(rows: Any) -> bool:
    return (
        isinstance(rows, torch.Tensor)
        and rows.layout == torch.strided
        and rows.dim() > 0
        and (rows.numel() > 0 or len(rows) == 0)  # rows without bytes are no table's
        and is_watched(rows)
    )


def _options(loader: Any, batch_size: int) -> dict[str, Any]:
    """Options of a loader's store: the runner's, and those of its mini-batches."""
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
        storable = ranks.run_all(_ACTION, lambda: _storable(graph))
        fix = f"load the same graph on all ranks, or {_OFF}"
        require_same(_ACTION, ranks.all_gather(graph_facts(storable)), fix)
        # The first rank's options hold for all, as its data do.
        seed, options = ranks.broadcast_from_rank0(_ACTION, lambda: (next_key()[0], options))
        if options.get("span", "machine") != "machine":
            raise UnsupportedByStoreError(
                "keep a script's graph over several machines",
                f"--store.span={options['span']} has all ranks read in one order, which a script "
                "for one machine need not do",
                "leave it out, or build the store in the script: GlobalStore.from_dgl(g, span=…)",
            )
        if options.get("hotness") == "presample" and not options["edges"]:
            options["seeds"] = _seeds(indices)
        store = GlobalStore.from_dgl(storable if ranks.rank == 0 else None, seed=seed, **options)
    columns = {
        of: {name: Snapshot(column.storage) for name, column in frame._columns.items()}
        for of, frame in frames(storable)
    }
    return Stored(store, columns, Passes(seed))


def _seeds(indices: Any) -> Any:
    """The nodes that mini-batches begin with; None, for all, where these are unknown."""
    if isinstance(indices, Mapping):
        seeds = {ntype: _seeds(ids) for ntype, ids in indices.items()}
        return None if any(ids is None for ids in seeds.values()) else seeds
    return indices.cpu() if isinstance(indices, torch.Tensor) else None
