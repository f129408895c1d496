"""Records what reaches this package without a C function: methods of `TensorIndex` and operators.

Their calls go straight to Python, where nothing counts them; while somebody looks, they are
covered by functions that do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from dgl_mgpu.dgl.capi import record
from dgl_mgpu.dgl.capi.table import ENTRIES, Implementation
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.message_passing import sparse_ops as message_passing

_OPERATORS = {
    "gspmm": "sparse._CAPI_DGLKernelSpMM",
    "gsddmm": "sparse._CAPI_DGLKernelSDDMM",
    "edge_softmax": "sparse._CAPI_DGLKernelEdge_softmax_forward",
    "edge_softmax_backward": "sparse._CAPI_DGLKernelEdge_softmax_backward",
}
_covered: list[tuple[Any, str, Any]] = []


def start() -> None:
    """Cover the methods and operators; again does nothing."""
    if _covered:
        return
    for home, attribute, name, implementation in _targets():
        function = vars(home)[attribute]
        _covered.append((home, attribute, function))
        setattr(home, attribute, _recorded(function, name, implementation))


def stop() -> None:
    """Uncover them."""
    while _covered:
        setattr(*_covered.pop())


@contextmanager
def profile_calls() -> Iterator[record.Profile]:
    """Count the calls of DGL's C functions with graphs or arrays on a GPU, and time them.

    Yields
    ------
    Profile
        Filled while the block runs; ``print(profile)`` shows a table.
    """
    profile = record.Profile()
    record.begin(profile)
    start()
    try:
        yield profile
    finally:
        record.end(profile)
        if not record.recording:
            stop()


def _targets() -> Iterator[tuple[Any, str, str, Implementation]]:
    seen = set()
    for name, entry in ENTRIES.items():
        method = entry.by.removeprefix("graph.index:TensorIndex.")
        is_method = isinstance(vars(TensorIndex).get(method), FunctionType)
        if method != entry.by and is_method and method not in seen:
            seen.add(method)
            yield TensorIndex, method, name, entry.implementation
    for operator, name in _OPERATORS.items():
        yield message_passing, operator, name, ENTRIES[name].implementation


def _recorded(
    function: Callable[..., Any], name: str, implementation: Implementation
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with record.call(name, implementation):
            return function(*arguments, **options)

    return call
