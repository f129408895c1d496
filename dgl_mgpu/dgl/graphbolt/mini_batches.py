"""The mini-batches of a pass over a pipeline, which can be made before they are due."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from dgl.graphbolt.base import CSCFormatBase
from dgl.graphbolt.impl.sampled_subgraph_impl import SampledSubgraphImpl
from dgl.graphbolt.minibatch import MiniBatch

from dgl_mgpu.dgl.graphbolt.keys import keys
from dgl_mgpu.dgl.graphbolt.layers import LayerSampling
from dgl_mgpu.dgl.graphbolt.pipeline import Pipeline
from dgl_mgpu.graph.random import BatchDraws
from dgl_mgpu.sampling.dataloading import DEPTH
from dgl_mgpu.sampling.prefetch_safety import DependencySnapshot
from dgl_mgpu.sampling.prefetcher import Prefetcher, PrefetchTuner
from dgl_mgpu.sampling.side_stream import may_prefetch, side_stream_of
from dgl_mgpu.utils.stages import stage
from dgl_mgpu.utils.streams import current_stream

#: Tuners of datapipes, kept from pass to pass.
_tuners: WeakKeyDictionary[Any, PrefetchTuner] = WeakKeyDictionary()


def iterate(datapipe: Any) -> Iterator[Any]:
    """A pass over a datapipe; one that samples on a GPU makes mini-batches ahead."""
    if torch.utils.data.get_worker_info() is not None:
        _leave_parents_alone()
    pipeline = Pipeline(datapipe)
    if not pipeline.samples:
        yield from datapipe
        return
    device = pipeline.device or torch.device("cpu")
    side_stream = side_stream_of(device) if _may_prefetch(pipeline) else None
    if side_stream is not None and side_stream.is_full:
        side_stream = None
    for loader in pipeline.loaders:
        iter(loader)  # to draw seeds from torch, as it does in GraphBolt's order of things
    batches = MiniBatches(pipeline, is_ahead=side_stream is not None)
    tuner = _tuners.setdefault(datapipe, PrefetchTuner())
    yield from Prefetcher(batches, side_stream, DEPTH, tuner)


@functools.cache
def _leave_parents_alone() -> None:
    """Do not collect what a worker process has of its parent.

    Torch's loaders and events of GPUs among it fail where they are not their own.
    """
    gc.freeze()


def _may_prefetch(pipeline: Pipeline) -> bool:
    """Whether prefetching is certain not to change mini-batches."""
    device = pipeline.device
    return (
        may_prefetch()
        and device is not None
        and device.type == "cuda"
        and pipeline.is_known
        and pipeline.tables() is not None
    )


class _Started(NamedTuple):
    """A mini-batch whose sampling has started."""

    minibatch: Any
    future: Any  # None if the stage samples when it comes
    at: int  # the number of the stage that samples


class MiniBatches:
    """Those of one pass over a pipeline: the source of a :class:`Prefetcher`.

    If they may be made ahead, torch's numbers for one depend on its own alone.
    """

    def __init__(self, pipeline: Pipeline, *, is_ahead: bool) -> None:
        self._pipeline = pipeline
        self._elements = iter(pipeline.source)
        self._is_ahead = is_ahead
        self._key, self._num_seedings = keys.of_pass(), keys.num_seedings
        self._draws = None
        if pipeline.draws_from_torch and is_ahead:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            self._draws = BatchDraws(pipeline.device or torch.device("cpu"), seed)
        self._seen: set[int] = set()

    def seeds(self) -> Any:
        """The next element of the source."""
        return next(self._elements)

    def start(self, number: int, seeds: Any) -> _Started:
        """Go through the stages up to the one that samples, and start that."""
        # Stages write to it, and may do so again.
        minibatch = _copied(seeds) if self._is_ahead else seeds
        stages = self._pipeline.stages
        with self._draws_of(number), stage("sample"):
            for at, each in enumerate(stages):
                if isinstance(each, LayerSampling):
                    return _Started(minibatch, each.start(minibatch), at)
                minibatch = each(minibatch)
        return _Started(minibatch, None, len(stages))

    def go_on(self, future: _Started) -> None:
        """Start what is left of a mini-batch's sampling."""
        if future.future is not None:
            future.future.go_on()

    def make(self, number: int, seeds: Any, future: _Started | None = None) -> Any:
        """Go through the stages from the one that samples on, after :meth:`start`."""
        started = future or self.start(number, seeds)
        minibatch, stages = started.minibatch, self._pipeline.stages
        with self._draws_of(number):
            if started.at < len(stages):
                sampling: Any = stages[started.at]
                with stage("sample"):
                    minibatch = sampling.finish(minibatch, started.future)
            with stage("gather"):
                for each in stages[started.at + 1 :]:
                    minibatch = each(minibatch)
        return minibatch

    def _draws_of(self, number: int) -> contextlib.ExitStack:
        with contextlib.ExitStack() as draws:
            draws.enter_context(_NotTheEnd())
            if keys.num_seedings != self._num_seedings:
                self._key, self._num_seedings = keys.of_pass(), keys.num_seedings
            draws.enter_context(keys.of_batch(self._key, number))
            if self._draws is not None:
                draws.enter_context(self._draws.of_batch(number))
            return draws.pop_all()

    def dependencies(self) -> DependencySnapshot:
        """A snapshot of the tensors that stages read, and of what else may change."""
        pipeline = self._pipeline
        parts = [graph._c_csc_graph.parts() for graph in pipeline.graphs]
        names = [[it.node_feature_keys, it.edge_feature_keys] for it in pipeline.fetchers]
        return DependencySnapshot(parts, pipeline.tables(), names, keys.num_seedings)

    def new_shared_state(self) -> list[torch.Tensor] | None:
        """What operators read of graphs, as far as it has been made since the last call."""
        tensors = [
            tensor
            for graph in self._pipeline.graphs
            for view in graph._c_csc_graph.views()
            for tensor in (view.tiers, view.pointers, view.position, *view.owner)
        ]
        added = [tensor for tensor in tensors if id(tensor) not in self._seen]
        self._seen = {id(tensor) for tensor in tensors}
        return added or None

    def hand_over(self, *made: object) -> None:
        """Let the current stream use mini-batches and tensors."""
        device = self._pipeline.device
        if device is None or device.type != "cuda":
            return
        tensors: list[torch.Tensor] = []
        _collect(made, tensors)
        # Many tensors of a batch are views of one; recording that once is enough.
        wholes = (tensor if tensor._base is None else tensor._base for tensor in tensors)
        script_stream = current_stream(device)
        for tensor in {id(whole): whole for whole in wholes}.values():
            if tensor.is_cuda:
                tensor.record_stream(script_stream)


class _NotTheEnd:
    """Within, a StopIteration is an error, as in a generator: it would end the pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError("a stage raised StopIteration") from error


def _copied(element: Any) -> Any:
    """A mini-batch with the same contents; anything else as it is."""
    if type(element) is not MiniBatch:
        return element
    copied = object.__new__(type(element))
    copied.__dict__ = {
        name: dict(value) if type(value) is dict else value for name, value in vars(element).items()
    }
    return copied


def _collect(made: Any, tensors: list[torch.Tensor]) -> None:
    """Add the tensors of a part of a mini-batch."""
    if isinstance(made, torch.Tensor):
        tensors.append(made)
    elif isinstance(made, dict):
        for part in made.values():
            _collect(part, tensors)
    elif isinstance(made, list | tuple):
        for part in made:
            _collect(part, tensors)
    elif isinstance(made, MiniBatch | SampledSubgraphImpl | CSCFormatBase):
        _collect(vars(made), tensors)
