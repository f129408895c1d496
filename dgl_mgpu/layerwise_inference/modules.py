"""A model's modules: their modes, and what stands in for those that get a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dgl import DGLGraph
from torch import nn

from dgl_mgpu.layerwise_inference.rows import Tree


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have all modules in eval mode, and then in the mode that each had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class CallEnded(BaseException):
    """Ends a call of the model from within; not for a model's own handlers."""


#: What stands in for a module's call: gets the block, all arguments, and the call itself.
Meet = Callable[[DGLGraph, Tree, Callable[[], Any]], Any]


@contextmanager
def meeting(meet: Meet) -> Iterator[None]:
    """Have ``meet`` stand in for modules that this thread calls with a graph, the outermost ones.

    All modules, since a model may have some that it does not name as its own.
    """
    call, thread, inside = nn.Module.__call__, threading.get_ident(), False

    def stand_in(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, DGLGraph)]
        if not given:
            return call(module, *args, **kwargs)
        inside = True
        try:
            return meet(given[0], (args, kwargs), partial(call, module, *args, **kwargs))
        finally:
            inside = False

    nn.Module.__call__ = stand_in  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
