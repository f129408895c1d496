"""Starting to sample the blocks of a mini-batch, where the sampler's work is fully known."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from dgl.base import NID
from dgl.dataloading.base import BlockSampler, EdgePredictionSampler
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.heterograph import DGLGraph

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import TensorBacked
from dgl_mgpu.sampling.prefetch_safety import VersionedTable, declares_prefetch_safe

if TYPE_CHECKING:
    from dgl_mgpu.ops import EtypeBlock
    from dgl_mgpu.ops.sample_future import HopsFuture, SampleFuture

#: DGL's own, which samples blocks and assigns lazy features to them.
_DGL_SAMPLE = BlockSampler.sample


@runtime_checkable
class BlockSamplingGraph(Protocol):
    """What `dgl_mgpu.StoreGraph` offers beyond the graph protocol of DGL's samplers."""

    def for_pass(self) -> BlockSamplingGraph:
        """This graph for a pass over a DataLoader that starts now."""

    def start_epoch(self, shared: BlockSamplingGraph) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to the next one."""

    def check_weights(self, prob: str) -> None:
        """Raise if edge feature ``prob`` cannot serve as sampling weights."""

    def sample_blocks_async(
        self,
        nodes: Any,
        fanouts: Any,
        prob: str | None,
        replace: bool,
        exclude_edges: Any,
        *,
        on_host: Any,
    ) -> SampleFuture[Any] | None:
        """Start sampling the blocks of a mini-batch; None if DGL has to sample them."""

    def sample_hops_async(
        self, nodes: Any, fanouts: Any, prob: str | None, replace: bool, *, on_host: Any
    ) -> SampleFuture[list[EtypeBlock]]:
        """Start sampling all hops of a mini-batch."""

    def weight_tables(self, prob: str) -> Sequence[VersionedTable]:
        """The tables that hold edge feature ``prob``."""

    def blocks_of(self, hops: Sequence[EtypeBlock], nodes: Any) -> Any:
        """Input nodes, output nodes and blocks of sampled hops."""


#: Whether a class is a :class:`BlockSamplingGraph`; cached because the check takes microseconds.
samples_blocks: Callable[[Any], bool] = functools.cache(
    lambda graph_class: issubclass(graph_class, BlockSamplingGraph)
)


def weight_of(sampler: Any) -> str | None:
    """The edge feature that a neighbour sampler of DGL's samples by.

    Others may mean anything by their attributes' names.
    """
    return sampler.prob if isinstance(sampler, NeighborSampler) else None


def require_layers(sampler: Any) -> None:
    """Raise InvalidInputError for a neighbour sampler of DGL's that samples no hop.

    DGL would look for its first block.
    """
    inner = sampler.sampler if type(sampler) is EdgePredictionSampler else sampler
    if type(inner) in (NeighborSampler, MultiLayerFullNeighborSampler) and not len(inner.fanouts):
        raise InvalidInputError(
            f"sample with {type(inner).__name__}",
            "it has no fanouts, so there are no blocks",
            "pass a fanout for each layer of the model, such as NeighborSampler([10, 10]); "
            "features of nodes alone are g.ndata['feat'][ids], or store.gather('feat', ids)",
        )


def sample_all_hops_async(
    sampler: Any, g: Any, nodes: Any, exclude_eids: Any = None, *, on_host: Any = None
) -> SampleFuture[Any] | None:
    """Start sampling all hops of a mini-batch.

    None, at once or as the result, if DGL has to sample them.
    """
    if sampler.edge_dir != "in":
        return None
    arguments = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if samples_blocks(type(g)):
        return g.sample_blocks_async(*arguments, exclude_eids, on_host=on_host)
    if not isinstance(g, DGLGraph) or exclude_eids is not None:
        return None
    if not isinstance(g._graph, TensorBacked) and not g.is_pinned():
        return None  # without importing operators that graphs on the CPU do not need
    from dgl_mgpu.sampling.block_sampling import sample_graph_async

    return sample_graph_async(g, *arguments)


def sample_hops_async(sampler: Any, graph: Any, nodes: Any, on_host: Any) -> HopsFuture | None:
    """Start sampling hops that need not become blocks; None if DGL has to sample them."""
    arguments = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if samples_blocks(type(graph)):
        from dgl_mgpu.ops.sample_future import HopsFuture

        hops = graph.sample_hops_async(*arguments, on_host=on_host)
        return HopsFuture(hops, lambda sampled: graph.blocks_of(sampled, nodes))
    from dgl_mgpu.sampling.block_sampling import sample_graph_hops_async

    return sample_graph_hops_async(graph, *arguments)


def async_sampling_of(sample: Any) -> Callable[..., SampleFuture[Any] | None] | None:
    """The function that starts sampling for a loader's sample function; None if its work is not
    fully known.

    A sampler that declares itself prefetch-safe may define ``sample_blocks_async``.  It takes the
    graph, the nodes and, as ``on_host``, the same nodes in host memory, and returns a
    :class:`SampleFuture` of what ``sample_blocks`` returns before :func:`finish_blocks`.
    """
    sampler = getattr(sample, "__self__", None)
    if sampler is None or sample.__func__ is not _DGL_SAMPLE or "sample_blocks" in vars(sampler):
        return None
    if type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler):
        is_served = getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        return functools.partial(sample_all_hops_async, sampler) if is_served else None
    if not declares_prefetch_safe(sampler):
        return None
    start = getattr(sampler, "sample_blocks_async", None)
    if start is None and hasattr(sampler, "begin_blocks"):
        return functools.partial(_call_begin_blocks, sampler)
    return start


def _call_begin_blocks(sampler: Any, *args: Any, **kwargs: Any) -> SampleFuture[Any] | None:
    """``sample_blocks_async`` of a sampler that defines it under its old name."""
    warnings.warn(
        f"{type(sampler).__name__}.begin_blocks is deprecated and will not be called from 0.2 on; "
        "name it sample_blocks_async and return a dgl_mgpu.ops.SampleFuture",
        DeprecationWarning,
        stacklevel=2,
    )
    from dgl_mgpu.ops.sample_future import SampleFuture

    wait = sampler.begin_blocks(*args, **kwargs)
    return SampleFuture(wait) if callable(wait) else wait


def can_use_slots(loader: Any) -> bool:
    """Whether a loader's sampler does nothing but sample hops of its graph.

    Where machines ask each other for features, all ranks have to ask for the same; a batch of one
    may fit a slot when those of others do not.
    """
    graph, sampler = loader.graph, loader.graph_sampler
    sample = loader.collate_fn.sample_func
    if getattr(graph, "spans_machines", False):
        return False
    if type(graph) is DGLGraph:
        is_here = is_pinned(loader) or graph.device == loader.device
    else:
        is_here = getattr(graph, "features_are_stored", False) and graph.device == loader.device
    return (
        is_here
        and getattr(sample, "__func__", None) is _DGL_SAMPLE
        and getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        and type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler)
        and "sample_blocks" not in vars(sampler)
        and sampler.edge_dir == "in"
        and sampler.output_device is None
        and not any(graph._gpu_caches.values())
    )


_prepares_gradients = True


def prepare_gradients(on: bool) -> None:
    """Whether to make ahead what backward passes read of blocks; captured ones read copies."""
    global _prepares_gradients
    _prepares_gradients = on


def finish_blocks(sampler: Any, sampled: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """What was sampled, with what else a sampler is to give it."""
    inputs, outputs, blocks = sampled
    require_layers(sampler)
    if _prepares_gradients and torch.is_grad_enabled() and blocks[0].device.type == "cuda":
        # Here, where batches are made ahead, and not in the middle of the backward pass.
        _transpose(blocks[1:])
    if sampler.output_device is not None:
        blocks = [block.to(sampler.output_device) for block in blocks]
        inputs = blocks[0].srcdata[NID]
    return inputs, outputs, blocks


def _transpose(blocks: Sequence[DGLGraph]) -> None:
    """Make what gradients of sums go along; the first block's input is seldom learned."""
    for block in blocks:
        for relation in block._graph.relations:
            relation.csr()


def is_pinned(loader: Any) -> bool:
    """Whether a GPU is to sample a graph in the host's memory."""
    return loader.use_uva and type(loader.graph) is DGLGraph and loader.graph.is_pinned()
