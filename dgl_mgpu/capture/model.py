"""A model whose calls are captured as CUDA graphs, where a replay gives what the model gives."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dgl_mgpu.capture.call import (
    Call,
    NotCapturable,
    ObservedSizes,
    cause_of,
    inside,
    numerical_modes,
)
from dgl_mgpu.capture.check import checked_result
from dgl_mgpu.capture.graphs import ModelGraphs
from dgl_mgpu.capture.guards import SideEffects, obstacle
from dgl_mgpu.sampling.async_blocks import prepare_gradients

#: Calls of one kind before one is captured: their sizes determine the capacity.
WARM_UP = 3
#: Replays after which a call is compared with the eager passes again, and those before the first.
CHECK_INTERVAL, FIRST_CHECK = 1000, 50
#: Kinds of calls of one model that are told apart, and captures of one kind.
_MAX_KEYS, _MAX_CAPTURES = 16, 16


@dataclass(eq=False)
class _Kind:
    """The calls of a model that have one key.

    ``observed`` has their sizes so far, and ``count`` how many these are of.
    """

    observed: ObservedSizes
    count: int = 0
    num_captures: int = 0
    graphs: ModelGraphs | None = None
    refusal: str | None = None


class CapturedModel:
    """Calls one model: eagerly, or by replaying CUDA graphs that were found to give the same.

    Parameters
    ----------
    name : str
        Of the model, for warnings.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[Hashable, _Kind] = {}
        self._modules: list[nn.Module] = []
        self._told: set[str] = set()
        self._refusal: str | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._refusal is not None:
            return model._wrapped_call_impl(*args, **kwargs)
        kind = None
        try:
            call = Call(args, kwargs)
            kind = self._kind(model, call)
            if kind.refusal is None:
                return self._result(model, call, kind)
        except NotCapturable as error:
            self._refuse(kind, str(error))
        return model._wrapped_call_impl(*args, **kwargs)

    def _kind(self, model: nn.Module, call: Call) -> _Kind:
        if len(self._modules) == 0:
            self._modules = [*model.modules()][1:]
        modes = (model.training, *(module.training for module in self._modules))
        key = call.key, modes, numerical_modes(call.device)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == _MAX_KEYS:
                self._refusal = "its arguments are of another kind in every call"
                raise NotCapturable(self._refusal)
            kind = self._kinds[key] = _Kind(ObservedSizes(call))
        return kind

    def _refuse(self, kind: _Kind | None, reason: str) -> None:
        if kind is not None:
            kind.refusal, kind.graphs = reason, None
        # Once for all mini-batches, whose numbers of nodes some reasons name.
        kind_of_reason = re.sub(r"\d+", "", reason)
        if kind_of_reason not in self._told:
            self._told.add(kind_of_reason)
            warnings.warn(
                f"{self._name} runs kernel by kernel, not as a CUDA graph: {reason}",
                stacklevel=4,
            )

    def _result(self, model: nn.Module, call: Call, kind: _Kind) -> Any:
        graphs = kind.graphs
        if graphs is not None:
            change = graphs.state.change()
            if change is not None:
                self._modules = []
                kind.graphs = graphs = None
                kind.count = 0
        if graphs is not None and graphs.takes(call):
            if not graphs.is_free() or graphs.has_rare_sizes(call):
                return self._eager(model, call)
            if graphs.num_replays % CHECK_INTERVAL == FIRST_CHECK:
                graphs.num_replays += 1
                return self._checked(model, call, kind, graphs)
            return graphs.replay(call)
        kind.count += 1
        kind.observed.add(call)
        if kind.count == 1 or kind.count == WARM_UP:
            return self._watched(model, call, is_first=kind.count == 1)
        if kind.count < WARM_UP or kind.num_captures == _MAX_CAPTURES:
            return self._eager(model, call)
        kind.graphs = graphs = None
        kind.num_captures += 1
        return self._capture(model, call, kind)

    def _eager(self, model: nn.Module, call: Call) -> Any:
        with inside():
            try:
                return model._wrapped_call_impl(*call.args, **call.kwargs)
            except torch.OutOfMemoryError:
                if not any(kind.graphs for kind in self._kinds.values()):
                    raise
        for kind in self._kinds.values():
            kind.graphs = None
        self._refusal = "graphs left too little memory"
        self._refuse(None, self._refusal)
        return model._wrapped_call_impl(*call.args, **call.kwargs)

    def _watched(self, model: nn.Module, call: Call, *, is_first: bool) -> Any:
        """An eager call, of which side effects are noticed.

        The first one may set attributes: to what the others leave them at, if it is no side effect.
        """
        _check(model)
        effects = SideEffects(model, (*call.blocks, *call.pair_graphs), call.tensors)
        result = self._eager(model, call)
        reason = effects.found(but_attributes=is_first)
        if reason is not None:
            for kind in self._kinds.values():
                self._refuse(kind, reason)
        return result

    def _capture(self, model: nn.Module, call: Call, kind: _Kind) -> Any:
        """Capture a call; its eager result, which a replay was compared with."""
        _check(model)
        try:
            graphs = ModelGraphs(model, call, kind.observed)
        except NotCapturable:
            raise
        except Exception as error:
            # Models may raise anything; what is not due to the capture comes again without it.
            raise NotCapturable(cause_of(error)) from error
        kind.graphs = graphs
        prepare_gradients(False)
        return self._checked(model, call, kind, graphs)

    def _checked(self, model: nn.Module, call: Call, kind: _Kind, graphs: ModelGraphs) -> Any:
        """The eager result of a call; the graphs are given up if a replay gives another one."""
        result, difference = checked_result(model, call, graphs)
        if difference is not None:
            self._refuse(kind, difference)
        return result


def _check(model: nn.Module) -> None:
    reason = obstacle(model)
    if reason is not None:
        raise NotCapturable(reason)
