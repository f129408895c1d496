"""All layers of a GraphBolt neighbor sampler at once, in place of a chain of stages for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dgl.graphbolt.base import ORIGINAL_EDGE_ID, CSCFormatBase
from dgl.graphbolt.impl.fused_csc_sampling_graph import FusedCSCSamplingGraph
from dgl.graphbolt.impl.sampled_subgraph_impl import SampledSubgraphImpl
from torch import Tensor

from dgl_mgpu.dgl.graphbolt.blocks import mark_compacted
from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph as OwnGraph
from dgl_mgpu.dgl.graphbolt.picking import index_select
from dgl_mgpu.dgl.graphbolt.typed_layers import can_be_split, split_by_type
from dgl_mgpu.errors import InvalidWeightError
from dgl_mgpu.ops.blocks import SampledBlock
from dgl_mgpu.ops.sample_future import SampleFuture

#: What a datapipe does to each mini-batch.
Stage = Callable[[Any], Any]


class Layer(NamedTuple):
    """What is sampled for one layer: arguments of a method of a graph."""

    sample: Callable[..., Any]
    fanout: Tensor
    replace: bool
    prob_name: str | None
    deduplicate: bool = True

    @property
    def graph(self) -> Any:
        """The graph, if its own method samples and nobody has put another in its place."""
        graph: Any = getattr(self.sample, "__self__", None)
        is_its_own = (
            type(graph) is FusedCSCSamplingGraph
            and getattr(self.sample, "__func__", None) is FusedCSCSamplingGraph.sample_neighbors
            and type(graph._c_csc_graph) is OwnGraph
        )
        return graph if is_its_own else None


class LayerSampling:
    """The stages of a neighbor sampler, from the seeds of a mini-batch to its input nodes.

    Parameters
    ----------
    layers : sequence of Layer
        The one nearest the seeds first.
    stages : sequence of callable
        What completes the seeds, and samples layer by layer, where the operator for all of them
        does not serve.
    """

    def __init__(self, layers: Sequence[Layer], stages: Sequence[Stage]) -> None:
        self.layers, self.stages = layers, stages
        first = layers[0]
        graph = first.graph
        #: Whether nothing but the graph decides if one operator samples all layers.
        self._is_uniform = graph is not None and all(
            layer.graph is graph
            and (layer.replace, layer.prob_name) == (first.replace, first.prob_name)
            and layer.deduplicate
            for layer in layers
        )
        #: The layer nearest the input first; without those of several edge types.
        self.fanouts = [int(it.fanout) for it in reversed(layers) if len(it.fanout) == 1]
        self._is_checked = False

    def __call__(self, minibatch: Any) -> Any:
        """Sample all layers of a mini-batch."""
        return self.finish(minibatch, self.start(minibatch))

    def start(self, minibatch: Any) -> SampleFuture[list[SampledBlock]] | None:
        """Start sampling all layers; None if the stages are to do it, one by one.

        Raises as the graph's own ``sample_neighbors``.
        """
        first, fanouts, seeds = self.layers[0], self.fanouts, minibatch._seed_nodes
        if not self._is_uniform or len(fanouts) != len(self.layers):
            return None
        graph = first.graph
        if isinstance(seeds, dict) and can_be_split(graph):
            seeds = self.stages[0](minibatch)._seed_nodes  # with those types that it lacked
            seeds = graph._convert_to_homogeneous_nodes(seeds)
        elif not isinstance(seeds, Tensor) or graph.type_per_edge is not None:
            return None
        if first.replace and first.prob_name is None and seeds.device.type == "cpu":
            return None  # it draws from torch, layer by layer
        if not self._is_checked or seeds.dim() != 1 or seeds.dtype != graph.indices.dtype:
            for layer in self.layers:
                graph._check_sampler_arguments(seeds, layer.fanout, first.prob_name)
            self._is_checked = True
        sampled: SampleFuture[list[SampledBlock]] = graph._c_csc_graph.sample_layers_async(
            seeds, fanouts, first.replace, first.prob_name
        )
        return sampled

    def finish(self, minibatch: Any, sampled: SampleFuture[list[SampledBlock]] | None) -> Any:
        """Put into a mini-batch what was sampled for it."""
        blocks = None if sampled is None else _result(sampled)
        if blocks is None:
            return self._by_layer(minibatch)
        graph, seeds = self.layers[0].graph, minibatch._seed_nodes
        if isinstance(seeds, dict):
            subgraphs = split_by_type(blocks, graph, seeds)
        else:
            subgraphs = self._subgraphs(blocks, graph, seeds)
        for subgraph in subgraphs:
            mark_compacted(subgraph)
        minibatch.sampled_subgraphs = subgraphs
        minibatch.input_nodes = minibatch._seed_nodes = subgraphs[0].original_row_node_ids
        return minibatch

    def _subgraphs(self, blocks: list[SampledBlock], graph: Any, seeds: Tensor) -> list[Any]:
        attributes = graph.edge_attributes
        original = None if attributes is None else attributes.get(ORIGINAL_EDGE_ID)
        dtype = graph.csc_indptr.dtype
        subgraphs: list[Any] = []
        targets = [block.src_nodes for block in blocks[1:]] + [seeds]
        for block, columns in zip(blocks, targets, strict=True):
            indptr = block.indptr if block.indptr.dtype == dtype else block.indptr.to(dtype)
            subgraph = SampledSubgraphImpl(
                sampled_csc=CSCFormatBase(indptr=indptr, indices=block.src),
                original_column_node_ids=columns,
                original_row_node_ids=block.src_nodes,
                original_edge_ids=None if original is None else index_select(original, block.eids),
            )
            subgraphs.append(subgraph)
        return subgraphs

    def _by_layer(self, minibatch: Any) -> Any:
        for stage in self.stages:
            minibatch = stage(minibatch)
        if all(layer.graph is not None for layer in self.layers):
            for subgraph in minibatch.sampled_subgraphs:
                mark_compacted(subgraph)
        return minibatch


def _result(sampled: SampleFuture[list[SampledBlock]]) -> list[SampledBlock] | None:
    try:
        return sampled.result()
    except InvalidWeightError:
        return None  # layer by layer, nodes without a weight above 0 have no neighbors
