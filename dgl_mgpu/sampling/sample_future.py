"""What begins with a mini-batch of a DataLoader, where all that its sampler does is known."""

from __future__ import annotations

import functools
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

#: DGL's own, which samples blocks and assigns lazy features to them.
_SAMPLE = BlockSampler.sample


@runtime_checkable
class ServesBlocks(Protocol):
    """What `dgl_mgpu.StoreGraph` offers beyond DGL's protocol."""

    def for_pass(self) -> ServesBlocks:
        """This graph for a pass over a DataLoader, which begins now."""

    def begin_epoch(self, shared: ServesBlocks) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to the next one."""

    def check_weights(self, prob: str) -> None:
        """Raise if edge feature ``prob`` cannot be sampled by."""

    def begin_blocks(
        self,
        nodes: Any,
        fanouts: Any,
        prob: str | None,
        replace: bool,
        exclude_edges: Any,
        *,
        on_host: Any,
    ) -> Callable[[], Any] | None:
        """Begin to sample all hops of a mini-batch; what is returned waits for the blocks."""

    def weight_tables(self, prob: str) -> Sequence[VersionedTable]:
        """Where edge feature ``prob`` is."""

    def begin_hops(
        self, nodes: Any, fanouts: Any, prob: str | None, replace: bool, *, on_host: Any
    ) -> Callable[[], list[EtypeBlock]]:
        """Begin to sample all hops of a mini-batch; what is returned waits for them."""

    def blocks_of(self, hops: Sequence[EtypeBlock], nodes: Any) -> Any:
        """Input nodes, output nodes and blocks of sampled hops."""


#: Whether a class :class:`ServesBlocks`; to ask takes microseconds each time.
has_blocks: Callable[[Any], bool] = functools.cache(lambda kind: issubclass(kind, ServesBlocks))


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


def begin_at_once(
    sampler: Any, g: Any, nodes: Any, exclude_eids: Any = None, *, on_host: Any = None
) -> Callable[[], Any] | None:
    """Begin with all hops of a mini-batch of a graph that can; what it returns may give None."""
    if sampler.edge_dir != "in":
        return None
    what = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if has_blocks(type(g)):
        return g.begin_blocks(*what, exclude_eids, on_host=on_host)
    if not isinstance(g, DGLGraph) or exclude_eids is not None:
        return None
    if not isinstance(g._graph, TensorBacked) and not g.is_pinned():
        return None  # without importing operators that graphs on the CPU do not need
    from dgl_mgpu.sampling.block_sampling import begin_graph

    return begin_graph(g, *what)


def beginner(sample: Any) -> Callable[..., Callable[[], Any] | None] | None:
    """What begins with the blocks of a loader's function, if all that it does is known.

    A sampler that says that its batches may be made ahead may itself have ``begin_blocks``, which
    takes the graph, the nodes and, ``on_host``, the same nodes in host memory.  What that returns
    waits for what ``sample_blocks`` returns, but for :func:`handed_out`.
    """
    sampler = getattr(sample, "__self__", None)
    if sampler is None or sample.__func__ is not _SAMPLE or "sample_blocks" in vars(sampler):
        return None
    if type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler):
        known = getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        return functools.partial(begin_at_once, sampler) if known else None
    return getattr(sampler, "begin_blocks", None) if declares_prefetch_safe(sampler) else None


def can_be_placed(loader: Any) -> bool:
    """Whether a loader's sampler does nothing but sample hops of its graph."""
    graph, sampler = loader.graph, loader.graph_sampler
    sample = loader.collate_fn.sample_func
    if type(graph) is DGLGraph:
        is_here = is_pinned(loader) or graph.device == loader.device
    else:
        is_here = getattr(graph, "features_are_stored", False) and graph.device == loader.device
    return (
        is_here
        and getattr(sample, "__func__", None) is _SAMPLE
        and getattr(NeighborSampler.sample_blocks, "serves_stores", False)
        and type(sampler) in (NeighborSampler, MultiLayerFullNeighborSampler)
        and "sample_blocks" not in vars(sampler)
        and sampler.edge_dir == "in"
        and sampler.output_device is None
        and not any(graph._gpu_caches.values())
    )


class ToPlace:
    """Hops that are being sampled, to be put somewhere; they may become blocks all the same.

    Parameters
    ----------
    hops : callable
        Waits for them; gives None if DGL is to sample.
    blocks : callable
        Makes input nodes, output nodes and blocks of them.
    """

    def __init__(
        self,
        hops: Callable[[], Sequence[EtypeBlock] | None],
        blocks: Callable[[Sequence[EtypeBlock]], Any],
    ) -> None:
        self.hops, self._blocks = functools.cache(hops), blocks

    def __call__(self) -> Any:
        hops = self.hops()
        return None if hops is None else self._blocks(hops)


def begin_to_place(sampler: Any, graph: Any, nodes: Any, on_host: Any) -> ToPlace | None:
    """Begin with hops of a graph; None if DGL is to sample."""
    what = nodes, sampler.fanouts, sampler.prob, sampler.replace
    if has_blocks(type(graph)):
        finish = graph.begin_hops(*what, on_host=on_host)
        return ToPlace(finish, lambda hops: graph.blocks_of(hops, nodes))
    from dgl_mgpu.sampling.block_sampling import begin_graph

    begun = begin_graph(graph, *what, blanks=False)
    return None if begun is None else ToPlace(begun.hops, begun.blocks_of)


def handed_out(sampler: Any, sampled: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """What was sampled, with what else a sampler is to give it."""
    inputs, outputs, blocks = sampled
    require_layers(sampler)
    if blocks[0].device.type == "cuda" and torch.is_grad_enabled():
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
