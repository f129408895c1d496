"""Which calls of DGL's C functions come to this package.

DGL's Python binds each C function to a module attribute by `get_global_func`. Its replacement
returns a `Dispatcher`: a DGL function with the same C handle, so that whatever else DGL does with
it works as before.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any

from dgl._ffi.function import Function

from dgl_mgpu.dgl.capi import record
from dgl_mgpu.dgl.capi.ids import CHECKS
from dgl_mgpu.dgl.capi.libxsmm import make_safe
from dgl_mgpu.dgl.capi.table import TAKE_HOST_GRAPHS, Implementation, find_entry
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import CHECKED_TYPES, is_tensor_backed_argument
from dgl_mgpu.graph.errors import as_dgl_error
from dgl_mgpu.graph.originals import originals


class Dispatcher(Function):
    """A C function of DGL that gives calls with tensors to this package."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(handle, False)
        self.name = name
        self._check = CHECKS.get(name.partition("_CAPI_")[2])

    def __call__(self, *arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, CHECKED_TYPES) and is_tensor_backed_argument(argument):
                return self._call_tensor_backed(arguments)
        if self._check is not None:
            self._check(*arguments)
        return super().__call__(*arguments)

    def _call_tensor_backed(self, arguments: tuple[Any, ...]) -> Any:
        implementation, function = self._implementation
        try:
            if record.recording:
                record.wrap_methods()  # with DGL_MGPU_LOG, when the first graph is made
                with record.call(self.name, implementation):
                    return function(*arguments)
            return function(*arguments)
        except InvalidInputError as error:
            raise as_dgl_error(error) from error

    @cached_property
    def _implementation(self) -> tuple[Implementation, Callable[..., Any]]:
        from dgl_mgpu.dgl.capi.roundtrip import on_host_graphs, refuse, through_cpu

        entry = find_entry(self.name)
        if entry.by:
            module, _, name = entry.by.partition(":")
            home = importlib.import_module(f"dgl_mgpu.{module}")
            function = attrgetter(name)(home)
            if module not in TAKE_HOST_GRAPHS:
                function = on_host_graphs(self.name, function, super().__call__)
            return entry.implementation, function
        if entry.implementation is Implementation.CPU:
            return entry.implementation, through_cpu(self.name, super().__call__)
        return entry.implementation, refuse(self.name, entry)


class CopyDispatcher(Dispatcher):
    """The copy of a graph to a device: the device makes it one for this package."""

    def __call__(self, *arguments: Any) -> Any:
        _, device_type, _ = arguments
        if device_type != 1:  # DGL's number of the CPU
            return self._call_tensor_backed(arguments)
        return super().__call__(*arguments)


class SpMMDispatcher(Dispatcher):
    """A sum over neighbours: on the CPU libxsmm may do it."""

    def __call__(self, *arguments: Any) -> Any:
        make_safe()
        return super().__call__(*arguments)


_SPECIAL = {
    "DGLHeteroCopyTo": CopyDispatcher,
    "DGLKernelSpMM": SpMMDispatcher,
    "DGLKernelSpMMHetero": SpMMDispatcher,
}


def get_global_func(name: str, allow_missing: bool = False) -> Function | None:
    """DGL's function of that name, or a dispatcher for it if it may be called with tensors."""
    function = originals["dgl._ffi.function:get_global_func"](name, allow_missing)
    if function is None or "_CAPI_" not in name:
        return function
    # Both have the handle, and each would free it when the process ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    dispatcher = _SPECIAL.get(name.partition("_CAPI_")[2], Dispatcher)
    return dispatcher(name, function.handle)
