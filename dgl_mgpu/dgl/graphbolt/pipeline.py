"""GraphBolt's chains of datapipes as one loop over stages, which a DataLoader runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from dgl.graphbolt.base import Bufferer, CopyTo, EndMarker, FutureWaiter, Waiter
from dgl.graphbolt.dataloader import MultiprocessingWrapper
from dgl.graphbolt.feature_fetcher import FeatureFetcher
from dgl.graphbolt.impl.basic_feature_store import BasicFeatureStore
from dgl.graphbolt.impl.fused_csc_sampling_graph import FusedCSCSamplingGraph
from dgl.graphbolt.impl.gpu_cached_feature import GPUCachedFeature
from dgl.graphbolt.impl.neighbor_sampler import (
    CompactPerLayer,
    FetcherAndSampler,
    FetchInsubgraphData,
    NeighborSampler,
    SamplePerLayer,
    SamplePerLayerFromFetchedSubgraph,
)
from dgl.graphbolt.impl.torch_based_feature_store import TorchBasedFeatureStore
from dgl.graphbolt.impl.uniform_negative_sampler import UniformNegativeSampler
from dgl.graphbolt.minibatch import MiniBatch
from dgl.graphbolt.minibatch_transformer import MiniBatchTransformer
from dgl.graphbolt.subgraph_sampler import SubgraphSampler
from dgl.utils import recursive_apply
from torch.utils.data.datapipes.iter import Mapper
from torchdata.datapipes.iter import Prefetcher as ThreadedPipe

from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph as OwnGraph
from dgl_mgpu.dgl.graphbolt.layers import Layer, LayerSampling, Stage
from dgl_mgpu.graph.stored_tensors import is_stored
from dgl_mgpu.sampling.loader_batches import copies_on
from dgl_mgpu.store.graphbolt import tensor_of

_IDENTITY = MiniBatchTransformer._identity
#: What mini-batches go through before and after they are sampled; depends on them alone.
_KNOWN = (SubgraphSampler._preprocess, SubgraphSampler._postprocess)
_FEATURE_STORES = BasicFeatureStore, TorchBasedFeatureStore


class Pipeline:
    """A datapipe as a loop: the stages that each element of a source goes through, in order.

    Parameters
    ----------
    datapipe : IterDataPipe
        A chain is followed back to the first pipe that is none of GraphBolt's, or waits for
        threads or processes.

    Attributes
    ----------
    source : IterDataPipe
        What the elements come from.
    stages : list of callable
    device, target : torch.device or None
        Where mini-batches are copied before they are sampled, and where they end up.
    graphs, fetchers : list
        What is sampled, and the pipes that read features.
    loaders : list of torch.utils.data.DataLoader
        Those without workers, which the loop goes past.
    is_known : bool
        Whether what stages do depends on these alone, and on random numbers.
    draws_from_torch : bool
        Whether stages ask torch for random numbers.
    """

    def __init__(self, datapipe: Any) -> None:
        self.stages: list[Stage] = []
        self.device: torch.device | None = None
        self.target: torch.device | None = None
        self.graphs: list[Any] = []
        self.fetchers: list[Any] = []
        self.is_known, self.draws_from_torch = True, False
        self.source, pipes, self.loaders = _chain(datapipe)
        #: Layers and stages of a neighbor sampler that is still being read, if one is.
        self._layers: list[Layer] | None = None
        self._layer_stages: list[Stage] = []
        for pipe in pipes:
            self._add(pipe)
        self._end_sampler()

    @property
    def samples(self) -> bool:
        """Whether there is a sampler among the stages."""
        return bool(self.graphs)

    def _add(self, pipe: Any) -> None:
        kind = type(pipe)
        if self._layers is not None and not self._is_next(pipe):
            self._end_sampler()  # which has stages of its own
        if kind is CopyTo:
            self._add_copy(pipe)
        elif kind is FeatureFetcher:
            # Not on the stream that GraphBolt's loader gave it.
            self.stages.append(functools.partial(pipe._read_data, stream=None))
            self.fetchers.append(pipe)
        elif kind in (SamplePerLayer, SamplePerLayerFromFetchedSubgraph):
            self._add_layer(_layer_of(pipe))
        elif kind is CompactPerLayer:
            self._add_compaction(pipe)
        elif isinstance(pipe, MiniBatchTransformer):
            self._add_transformer(pipe)
        else:
            self.is_known = False
            self.stages.append(pipe._apply_fn)

    def _is_next(self, pipe: Any) -> bool:
        """Whether a pipe is what comes next in GraphBolt's own sampler of neighbors.

        To prepare seeds, to sample and to compact by turns, and to set the input nodes.
        """
        assert self._layers is not None
        is_whole = len(self._layer_stages) == 2 * len(self._layers) + 1
        if type(pipe) is CompactPerLayer:
            return not is_whole
        if type(pipe) in (SamplePerLayer, SamplePerLayerFromFetchedSubgraph):
            return is_whole
        return (
            is_whole
            and len(self._layers) > 0
            and type(pipe) is MiniBatchTransformer
            and pipe.transformer is NeighborSampler._set_input_nodes
        )

    def _end_sampler(self) -> None:
        """Have the stages of a sampler run one by one."""
        self.stages += self._layer_stages
        self._layers, self._layer_stages = None, []

    def _add_copy(self, pipe: Any) -> None:
        device = torch.device(pipe.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.target = device
        if self.samples:
            self.stages.append(functools.partial(_copy_as_graphbolt, pipe))
            return
        self.device = device
        self.stages.append(functools.partial(_copy_seeds, pipe, device))

    def _add_transformer(self, pipe: Any) -> None:
        function = pipe.transformer
        if type(pipe) is not MiniBatchTransformer:
            self._add_sampler(pipe)
        elif isinstance(function, functools.partial) and function.func is NeighborSampler._prepare:
            self._layers, self._layer_stages = [], [function]
        elif self._layers is not None:
            self.stages.append(LayerSampling(self._layers, [*self._layer_stages, function]))
            self._layers, self._layer_stages = None, []
        else:
            self.is_known &= function in _KNOWN
            self.stages.append(pipe._transformer)

    def _add_sampler(self, pipe: Any) -> None:
        if type(pipe) is UniformNegativeSampler and type(pipe.graph) is FusedCSCSamplingGraph:
            self.draws_from_torch = True
            self.graphs.append(pipe.graph)
        elif (
            isinstance(pipe, NeighborSampler)
            and pipe.transformer is _IDENTITY
            and type(pipe)._transformer is MiniBatchTransformer._transformer
        ):
            return  # all that it does has been added by now
        else:
            self.is_known = False
        self.stages.append(pipe._transformer)

    def _add_layer(self, layer: Layer) -> None:
        stage = functools.partial(_sample, layer)
        graph: Any = getattr(layer.sample, "__self__", None)
        self.graphs.append(graph)
        if type(graph) is not FusedCSCSamplingGraph or type(graph._c_csc_graph) is not OwnGraph:
            self.is_known = False
        if self._layers is None:
            self.stages.append(stage)
        else:
            self._layers.append(layer)
            self._layer_stages.append(stage)

    def _add_compaction(self, pipe: Any) -> None:
        if self._layers is None:
            self.stages.append(pipe._transformer)
            return
        self._layer_stages.append(pipe._transformer)
        if not pipe.deduplicate:
            *_, last = self._layers
            self._layers[-1] = last._replace(deduplicate=False)

    def tables(self) -> list[Any] | None:
        """The tensors of features that stages read; None if another feature may be read."""
        tables = []
        for fetcher in self.fetchers:
            store = fetcher.feature_store
            if type(store) not in _FEATURE_STORES:
                return None
            for feature in store._features.values():
                table = tensor_of(feature)
                # A cache is written to as it is read, unless a store is read in its place.
                if table is None or (type(feature) is GPUCachedFeature and not is_stored(table)):
                    return None
                tables.append(table)
        return tables


def _chain(datapipe: Any) -> tuple[Any, list[Any], list[Any]]:
    """The source of a datapipe, the pipes after it that do something, and torch's loaders."""
    pipes: list[Any] = []
    loaders: list[Any] = []
    pipe = datapipe
    while True:
        kind = type(pipe)
        if kind is EndMarker:
            pipe = pipe.datapipe
        elif kind is MultiprocessingWrapper and not pipe.dataloader.num_workers:
            loaders.append(pipe.dataloader)
            pipe = pipe.datapipe
        elif kind is ThreadedPipe and not Pipeline(pipe.source_datapipe).samples:
            pipe = pipe.source_datapipe  # a thread would take the time that it saves
        elif kind is Waiter and _is_chain(pipe, Bufferer, FeatureFetcher):
            pipe = pipe.datapipe.datapipe  # features are fetched ahead with all else
        elif kind is FetcherAndSampler and _is_chain(
            pipe, SamplePerLayerFromFetchedSubgraph, Waiter, FutureWaiter, Bufferer,
            FetchInsubgraphData,
        ):  # fmt: skip
            # Kernels read a pinned graph where it is: nothing is to be fetched before.
            pipes.append(pipe.datapipe)
            pipe = pipe.datapipe.datapipe.datapipe.datapipe.datapipe.datapipe
        elif kind is CopyTo or (isinstance(pipe, Mapper) and kind.__iter__ is Mapper.__iter__):
            pipes.append(pipe)
            pipe = pipe.datapipe
        else:
            return pipe, pipes[::-1], loaders


def _is_chain(pipe: Any, *kinds: type) -> bool:
    """Whether a pipe reads from one of the first kind, which reads from one of the second, …"""
    for kind in kinds:
        pipe = pipe.datapipe
        if type(pipe) is not kind:
            return False
    return True


def _layer_of(pipe: Any) -> Layer:
    sample: Callable[..., Any]
    if type(pipe) is SamplePerLayer:
        sample = pipe.sampler
    else:
        fetched = pipe.datapipe.datapipe.datapipe.datapipe
        sample = getattr(fetched.graph, pipe.sampler_name)
    return Layer(sample, pipe.fanout, pipe.replace, pipe.prob_name)


def _sample(layer: Layer, minibatch: Any) -> Any:
    """As ``SamplePerLayer`` does."""
    seeds = minibatch._seed_nodes
    subgraph = layer.sample(seeds, layer.fanout, layer.replace, layer.prob_name)
    minibatch.sampled_subgraphs.insert(0, subgraph)
    return minibatch


def _copy_as_graphbolt(pipe: Any, minibatch: Any) -> Any:
    (copied,) = CopyTo([minibatch], pipe.device, pipe.extra_attrs)
    return copied


def _copy_seeds(pipe: Any, device: torch.device, minibatch: Any) -> Any:
    """As ``CopyTo`` does before sampling; the host does not wait for a GPU."""
    if type(minibatch) is not MiniBatch or device.type == "cpu":
        return _copy_as_graphbolt(pipe, minibatch)
    names = ["labels", "sampled_subgraphs", "node_features", "edge_features"]
    has_nodes, has_pairs = (
        getattr(minibatch, name) is not None for name in ("seed_nodes", "compacted_node_pairs")
    )
    if has_nodes == has_pairs:
        names = [*vars(minibatch)]
    elif has_nodes and minibatch.labels is None:
        names.append("seed_nodes")
    elif has_pairs:
        names += ["compacted_node_pairs", "compacted_negative_srcs", "compacted_negative_dsts"]
    values = {name: getattr(minibatch, name) for name in {*names, *(pipe.extra_attrs or ())}}
    found: list[torch.Tensor] = []
    recursive_apply(values, _add_if_on_cpu, found)
    copies = dict(zip(map(id, found), copies_on(device, found), strict=True))
    for name, value in values.items():
        setattr(minibatch, name, recursive_apply(value, _copy_of, copies, device))
    return minibatch


def _add_if_on_cpu(value: Any, found: list[torch.Tensor]) -> None:
    if type(value) is torch.Tensor and value.device.type == "cpu":
        found.append(value)


def _copy_of(value: Any, copies: dict[int, torch.Tensor], device: torch.device) -> Any:
    copied = copies.get(id(value))
    if copied is not None:
        return copied
    return value.to(device) if hasattr(value, "to") else value
