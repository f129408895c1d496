"""Decides whether a loader of GraphBolt's reads a store, and builds that store.

It does where `dgl_mgpu.dgl.shared_graphs` says so of DGL's DataLoader: several ranks with a
``DistributedItemSampler``, which build the store together when they make their first such loader,
or one process whose ``python -m dgl_mgpu`` was given options; not with ``--store=off``.  The graph
is in the host's memory, where else each process would pin it, and mini-batches are sampled on
another device or, to try it out, with ``--store.device=cpu``.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dgl.graphbolt.impl.fused_csc_sampling_graph import FusedCSCSamplingGraph
from dgl.graphbolt.impl.gpu_cached_feature import GPUCachedFeature
from dgl.graphbolt.item_sampler import DistributedItemSampler, ItemSampler
from torch import Tensor
from torch.utils.data.datapipes.iter import ShardingFilter

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.dgl import runner_options
from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph as OwnGraph
from dgl_mgpu.dgl.graphbolt.layers import LayerSampling
from dgl_mgpu.dgl.graphbolt.pipeline import Pipeline
from dgl_mgpu.graph.random import next_key
from dgl_mgpu.graph.stored_tensors import is_watched
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.store.graphbolt import is_storable, tensor_of

_ACTION = "share a graph of GraphBolt among ranks"
#: At most about twice as many rows of a tensor are compared between ranks.
_ROWS_COMPARED = 1 << 14


def share(datapipe: Any) -> Pipeline:
    """Build the store that a loader's mini-batches are to be read from, if there is none yet.

    Collective where it is built.  Returns what the loader does.

    Raises
    ------
    ConfigError, DGLMGPUError
        As :meth:`~dgl_mgpu.store.global_store.GlobalStore.from_graphbolt`.
    """
    options, pipeline = runner_options.told(), Pipeline(datapipe)
    if not options.uses_store:
        return pipeline
    if pipeline.device is None and (options.store or {}).get("device") == "cpu":
        pipeline.device = torch.device("cpu")
    items = _items(pipeline.source)
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    is_distributed = type(items) is DistributedItemSampler
    if not (is_distributed if has_ranks else options.store is not None) or not pipeline.samples:
        return pipeline
    reason = _obstacle(pipeline)
    if reason is not None:
        if options.store is not None:
            warnings.warn(f"a graph of GraphBolt is not in a store: {reason}", stacklevel=4)
        return pipeline
    graph = pipeline.graphs[0]._c_csc_graph
    if graph.was_stored:
        return pipeline  # what was written to since is read where it is
    device = pipeline.device
    assert device is not None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ranks, features = Communicator.of_this_machine(), _read(pipeline)
        chosen = _options(pipeline, items, features) | dict(options.store or {})
        if not _are_same(ranks, [*graph.parts()[:2], *map(tensor_of, features.values())]):
            warnings.warn(
                "ranks have other graphs or features than each other: each reads its own",
                stacklevel=4,
            )
            graph.was_stored = True  # as far as that goes
            return pipeline
        # The first rank's options hold for all.
        seed, chosen = ranks.broadcast_from_rank0(_ACTION, lambda: (next_key()[0], chosen))
        # The graph and the features keep the store.
        GlobalStore.from_graphbolt(pipeline.graphs[0], features, seed=seed, **chosen)
    return pipeline


def _are_same(ranks: Communicator, tensors: list[Any]) -> bool:
    """Whether ranks have the same tensors, as far as samples of them tell."""
    facts = [(str(it.dtype), tuple(it.shape), _checksum(it)) for it in tensors]
    return len(set(map(str, ranks.all_gather(facts)))) == 1


def _checksum(tensor: Tensor) -> int:
    """Of some thousand rows, far apart."""
    step = max(1, len(tensor) // _ROWS_COMPARED)
    return zlib.crc32(tensor[::step].contiguous().view(torch.uint8).numpy().data)


def _read(pipeline: Pipeline) -> dict[tuple[str, None, str], Any]:
    """The features that a pipeline reads and a store can keep, by their keys."""
    features: dict[tuple[str, None, str], Any] = {}
    count = pipeline.graphs[0].total_num_nodes
    for fetcher in pipeline.fetchers:
        known = getattr(fetcher.feature_store, "_features", {})
        for name in fetcher.node_feature_keys or ():
            feature = known.get(("node", None, name))
            rows = tensor_of(feature)
            if rows is not None and len(rows) == count and is_storable(rows):
                features["node", None, name] = feature
    return features


def _items(source: Any) -> Any:
    """The pipe that mini-batches of seeds come from."""
    while isinstance(source, ShardingFilter):
        source = source.source_datapipe
    return source


def _obstacle(pipeline: Pipeline) -> str | None:
    """Why mini-batches cannot be read from a store, as a phrase; None if they can."""
    graph = pipeline.graphs[0]
    if graph is None:
        return "a function of the script samples it"
    if any(other is not graph for other in pipeline.graphs):
        return "the loader samples several graphs"
    if type(graph) is not FusedCSCSamplingGraph or type(graph._c_csc_graph) is not OwnGraph:
        return f"it is of type {type(graph).__name__}"
    if not (is_watched(graph.indices) and is_watched(graph.csc_indptr)):
        return "it was made in inference mode"
    if graph.type_per_edge is not None:
        return "it has several types of edges"
    if pipeline.device is None:
        return "mini-batches are sampled before they are copied to a GPU"
    if graph.indices.device.type != "cpu":
        return f"it is on {graph.indices.device}"
    return None


def _options(pipeline: Pipeline, items: Any, features: Mapping[Any, Any]) -> dict[str, Any]:
    """Options of a loader's store, by its mini-batches and the features that it reads."""
    options: dict[str, Any] = {}
    if isinstance(items, ItemSampler):
        options["batch_size"] = items._batch_size
    samplings = [it for it in pipeline.stages if isinstance(it, LayerSampling)]
    if samplings:
        options["fanouts"] = samplings[0].fanouts
    if pipeline.device is not None and pipeline.device.type == "cpu":
        options["device"] = "cpu"
    caches = [it for it in features.values() if type(it) is GPUCachedFeature]
    if caches:
        # As much of a GPU's memory as the script gives to caches.
        options["gpu_memory"] = f"{sum(it.cache_size * _row_bytes(it) for it in caches)}B"
    return options


def _row_bytes(feature: GPUCachedFeature) -> int:
    rows = tensor_of(feature)
    return 0 if rows is None else rows[:1].nbytes
