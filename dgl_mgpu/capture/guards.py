"""What a model's forward pass depends on beside its arguments, and whether it has changed."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import pickle
import random
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from dgl.heterograph import DGLGraph
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
#: How deep containers in containers are looked into.
_DEPTH = 3
#: What `nn.Module` keeps in its instances.
_TORCHS = frozenset(vars(nn.Module()))


def obstacle(model: nn.Module) -> str | None:
    """Why a model cannot be captured, as far as its modules tell; None if they do not."""
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return "hooks are registered for all modules"
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "it"
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            return f"{where} is batch normalisation, whose statistics would count padding rows"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{where} has hooks, which a replay does not call"
        if any(it._backward_hooks for it in module._parameters.values() if it is not None):
            return f"a parameter of {where} has hooks"
        if (
            isinstance(module, torch.jit.ScriptModule)
            or module._compiled_call_impl is not None
            or "_orig_mod" in module._modules
        ):
            return f"{where} is compiled"
    return None


class ModelState:
    """Parameters, buffers, attributes and submodules of a model, as they are now.

    Attributes that a script assigns are noticed, and so are changes of lists, dicts, sets,
    namespaces and dataclasses without slots that are attributes or in one of those.  What is inside
    other objects is not.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        # The dicts of a module do not keep it alive.
        self._tables = [
            table
            for module in modules
            for table in (vars(module), module._parameters, module._buffers, module._modules)
        ]
        self._owners = [type(module).__name__ for module in modules for _ in range(4)]
        attributes = (
            (f"{type(module).__name__}.{name}", value)
            for module in modules
            for name, value in vars(module).items()
            if name not in _TORCHS or name in _HOOKS
        )
        hooks = ((f"torch's {name}", getattr(torch_module, name)) for name in _GLOBAL_HOOKS)
        self._containers = _Containers(itertools.chain(attributes, hooks))
        self._tensors = [*_tensors(modules)]
        self._memory = [tensor.data_ptr() for tensor in self._tensors]
        self._requires_grad = [tensor.requires_grad for tensor in self._tensors]
        self._keep()

    def _keep(self) -> None:
        self._values = [*map(dict, self._tables)]
        self._sizes = [*map(len, self._tables)]
        self._kept = [*_values_of(self._tables)]

    def change(self) -> str | None:
        """What has changed since, as a phrase; None if nothing has."""
        # At every call of the model, so nothing is made to be compared.
        if [*map(len, self._tables)] != self._sizes or not all(
            map(operator.is_, _values_of(self._tables), self._kept)
        ):
            for owner, now, then in zip(self._owners, self._tables, self._values, strict=True):
                for name in now.keys() | then.keys():
                    if not _is_same(now.get(name, now), then.get(name, then)):
                        return f"{owner}.{name} has changed"
            self._keep()
        changed = self._containers.changed()
        if changed is not None:
            return f"{changed} has changed"
        if [tensor.data_ptr() for tensor in self._tensors] != self._memory:
            return "a parameter or buffer has other memory"
        if [tensor.requires_grad for tensor in self._tensors] != self._requires_grad:
            return "other parameters require gradients"
        return None


def _values_of(tables: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, tables))


def _is_same(one: Any, two: Any) -> bool:
    return one is two or (
        type(one) is type(two) and isinstance(one, int | float | str) and one == two
    )


class _Containers:
    """What is in lists, tuples, dicts, sets, namespaces and dataclasses, and in those in them.

    Parameters
    ----------
    named : iterable of (str, object)
        Objects and their names; those that are no containers are left out.
    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        #: By container: the name of the object that it is in.
        self._names: list[str] = []
        self._parts: list[Any] = []
        for name, value in named:
            self._add(name, value, _DEPTH)
        self._dicts = [it for it in self._parts if isinstance(it, dict)]
        self._keep()

    def _add(self, name: str, value: Any, depth: int) -> None:
        contents = _contents(value)
        if contents is None:
            return
        self._names.append(name)
        self._parts.append(contents)
        if depth:
            for part in [*contents, *(contents.values() if isinstance(contents, dict) else ())]:
                self._add(name, part, depth - 1)

    def _keep(self) -> None:
        self._kept = [*map(_copied, self._parts)]
        self._sizes = [*map(len, self._parts)]
        self._contents = [*self._contents_now()]

    def _contents_now(self) -> Iterator[Any]:
        """What is in the containers: quickly compared, and seldom changed."""
        return itertools.chain(itertools.chain.from_iterable(self._parts), _values_of(self._dicts))

    def changed(self) -> str | None:
        """The name of an object that has changed since; None if there is none."""
        if [*map(len, self._parts)] == self._sizes and all(
            map(operator.is_, self._contents_now(), self._contents)
        ):
            return None
        for name, now, before in zip(
            self._names, map(_copied, self._parts), self._kept, strict=True
        ):
            if len(now) != len(before) or not all(map(_is_same, now, before)):
                return name
        self._keep()
        return None


def _copied(contents: Any) -> list[Any]:
    return [*contents, *(contents.values() if isinstance(contents, dict) else ())]


def _contents(value: Any) -> Any:
    """The list, tuple, set or dict of what a container holds; None of something else."""
    if isinstance(value, dict | list | tuple | set):
        return value
    if isinstance(value, Namespace | SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)
    ):
        return getattr(value, "__dict__", None)
    return None


def _tensors(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (
                it for it in table.values() if it is not None and it.layout == torch.strided
            )


class SideEffects:
    """Finds what a model's forward pass changes beside its result, which a replay would not."""

    def __init__(
        self, model: nn.Module, graphs: Sequence[DGLGraph], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._graphs = graphs
        self._state = ModelState(model)
        self._buffers = [(it, it._version) for it in model.buffers() if not it.is_inference()]
        self._arguments = [(it, it._version) for it in tensors if not it.is_inference()]
        self._columns = [*map(_columns, graphs)]
        # On a CPU dropout draws from the same generator.
        self._with_torch = graphs[0].device.type != "cpu"
        self._random = _random_states(self._with_torch)

    def found(self, *, but_attributes: bool) -> str | None:
        """What has changed, perhaps apart from attributes, as a phrase; None if nothing has."""
        change = None if but_attributes else self._state.change()
        if change is not None:
            return f"its forward pass has side effects: {change}"
        if any(buffer._version != version for buffer, version in self._buffers):
            return "its forward pass changes a buffer"
        if any(it._version != version for it, version in self._arguments):
            return "its forward pass changes an argument in place"
        if [*map(_columns, self._graphs)] != self._columns:
            return "its forward pass leaves features in its graphs (use local_scope)"
        if _random_states(self._with_torch) != self._random:
            return "its forward pass draws random numbers on the CPU"
        return None


def _columns(graph: DGLGraph) -> list[tuple[str, int]]:
    frames = (*graph._node_frames, *graph._edge_frames)
    return [(name, id(column)) for frame in frames for name, column in frame._columns.items()]


def _random_states(with_torch: bool) -> tuple[Any, ...]:
    states = [torch.get_rng_state().numpy().tobytes()] if with_torch else []
    return random.getstate(), pickle.dumps(np.random.get_state()), *states
