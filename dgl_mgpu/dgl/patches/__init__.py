"""Overrides of names of DGL, ogb and Hydra, in files that mirror their trees.

A file is imported when the module that it mirrors has been executed, and not before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.originals import originals

TENSORS = "graph.dispatch:TensorBacked"
TENSOR_INDEX = "graph.index:TensorIndex"
_SCRIPT = "dgl_mgpu.distributed.whole_view.script"
DISTRIBUTED = "graph.distributed:DistributedGraphIndex"


def override(target: str, kind: str, *, takes_index: bool = False) -> Callable[..., Any]:
    """Decorates what replaces `target` for graphs with one kind of index; DGL's own has the others.

    `kind` is ``"module:class"`` in dgl_mgpu.  The first argument is a graph, or with `takes_index`
    its index.  Errors of the input are also DGL's.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(graph: Any, *arguments: Any, **options: Any) -> Any:
            index = graph if takes_index else graph._graph
            chosen = function if isinstance(index, _imported(kind)) else originals[target]
            try:
                return chosen(graph, *arguments, **options)
            except InvalidInputError as error:
                from dgl_mgpu.graph.errors import as_dgl_error

                raise as_dgl_error(error) from error

        return call

    return decorate


def partitions() -> Any:
    """What partitions the graphs that a script moves; None without ``--partition``."""
    script = sys.modules.get(_SCRIPT)
    return script if script is not None and script.by is not None else None


def is_partitioned(graph: Any) -> bool:
    """Whether a graph is partitioned and looks whole: under ``--partition``."""
    view = sys.modules.get("dgl_mgpu.distributed.whole_view.graph")
    return view is not None and view.is_whole_view(graph)


def on_whole_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates what makes another graph of one: of a partitioned one under ``--partition``, too.

    The function gets the whole graph, and what it makes is partitioned.
    """

    @wraps(function)
    def call(graph: Any, *arguments: Any, **options: Any) -> Any:
        if not is_partitioned(graph):
            return function(graph, *arguments, **options)
        return _imported("distributed.whole_view.script:partition_anew")(
            function, graph, *arguments, **options
        )

    return call


def imported_at_call(name: str) -> Callable[..., Any]:
    """A function that calls ``"module:function"`` of dgl_mgpu, imported at the first call."""

    def call(*arguments: Any) -> Any:
        return _imported(name)(*arguments)

    return call


@cache
def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"dgl_mgpu.{module}"), attribute)
