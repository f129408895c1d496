"""The ``torch.library`` namespace of this package's operators, ``torch.ops.dgl_mgpu``.

An operator's ``op.py`` defines its schema and fake kernel here; ``cpu.py`` registers itself
for CPU tensors.  On tensors of a device that has no kernel torch's dispatcher raises
NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library = torch.library.Library("dgl_mgpu", "FRAGMENT")

_Function = Callable[..., Any]
#: What can be called itself, by operator and type of device.
_direct: dict[tuple[str, str], _Function] = {}
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def cuda_kernel(name: str) -> Callable[[_Function], _Function]:
    """Register a function as an operator's implementation on CUDA."""

    def register(function: _Function) -> _Function:
        library.impl(name, function, "CUDA")
        return direct_cuda(name)(function)

    return register


def direct_cuda(name: str) -> Callable[[_Function], _Function]:
    """Have :func:`direct` find a function for tensors on a GPU."""

    def register(function: _Function) -> _Function:
        _direct[name, "cuda"] = function
        return function

    return register


def call(name: str, tensors: tuple[torch.Tensor | None, ...], *others: Any) -> Any:
    """Call an operator on its tensors, of which the first is not None, and its other arguments.

    Torch's dispatcher is left out where nobody would notice: on a GPU it costs the host as much
    as a launch.
    """
    function = direct(name, tensors)
    if function is not None:
        return function(*tensors, *others)
    return getattr(torch.ops.dgl_mgpu, name).default(*tensors, *others)


def direct(
    name: str, tensors: tuple[torch.Tensor | None, ...], *, even_profiled: bool = False
) -> _Function | None:
    """What implements an operator for tensors, where torch's dispatcher can be left out.

    Parameters
    ----------
    even_profiled : bool
        Also where a profiler runs, whom the dispatcher would tell of the operator.
    """
    if torch.compiler.is_compiling():
        return None
    is_profiled = torch.autograd._profiler_enabled()
    if is_profiled and not even_profiled:
        return None
    function = _direct.get((name, tensors[0].device.type))  # type: ignore[union-attr]
    if function is None or _is_observed(tensors):
        return None
    return _recorded(name, function) if is_profiled else function


def _recorded(name: str, function: _Function) -> _Function:
    """A function that a profiler takes for an operator, so that it knows whose the kernels are."""

    def call(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"dgl_mgpu::{name}"):
            return function(*arguments)

    return call


def _is_observed(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether a mode, a transform, a tensor's class or autograd is to see a call."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or not _PLAIN.issuperset(map(type, tensors))
    ):
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
