"""Functions of DGL's C API where there is no C: this package's, by the same names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from dgl_mgpu.dgl.capi import record
from dgl_mgpu.dgl.capi.ids import CHECKS
from dgl_mgpu.dgl.capi.table import (
    ENTRIES,
    TAKE_HOST_GRAPHS,
    WITHOUT_LIBRARY,
    Implementation,
)
from dgl_mgpu.dgl.ffi.function import Function
from dgl_mgpu.dgl.ffi.ndarray import NDArrayBase
from dgl_mgpu.errors import InvalidInputError, UnavailableError
from dgl_mgpu.graph.dispatch import CHECKED_TYPES
from dgl_mgpu.graph.errors import as_dgl_error


class OwnFunction(Function):
    """A function of the C API, found when it is first called."""

    def __init__(self, name: str) -> None:
        super().__init__(self._call_own)
        self.name = name
        self._check = CHECKS.get(name.partition("_CAPI_")[2])

    def _call_own(self, *given: Any) -> Any:
        arguments = [_plain(argument) for argument in given]
        function = self._function
        try:
            if self._check is not None and not _any_on_gpu(arguments):
                self._check(*arguments)
            if record.recording:
                record.wrap_methods()  # with DGL_MGPU_LOG, when the first graph is made
                with record.call(self.name, self._place):
                    return function(*arguments)
            return function(*arguments)
        except InvalidInputError as error:
            raise as_dgl_error(error) from error

    @property
    def _place(self) -> Implementation:
        entry = ENTRIES.get(self.name)
        return Implementation.TORCH if entry is None else entry.implementation

    @cached_property
    def _function(self) -> Callable[..., Any]:
        place = WITHOUT_LIBRARY.get(self.name)
        if place is None:
            raise UnavailableError(
                f"call {self.name}",
                "it is a function of DGL's binary, which is not used here, and has no other form",
                "do without it, or unset DGL_MGPU_LIBDGL where DGL's wheel has a libdgl that loads",
            )
        module, _, name = place.partition(":")
        function = attrgetter(name)(importlib.import_module(f"dgl_mgpu.{module}"))
        # Modules of DGL make functions, and these import modules of DGL.
        from dgl_mgpu.dgl.capi.roundtrip import through_cpu
        from dgl_mgpu.graph.host_ids import takes_ids_of_gpus

        if self._place is not Implementation.CPU:
            return function if module in TAKE_HOST_GRAPHS else takes_ids_of_gpus(function)
        on_gpu = through_cpu(self.name, function)
        return lambda *arguments: (on_gpu if _any_on_gpu(arguments) else function)(*arguments)


def _plain(argument: Any) -> Any:
    """An argument with tensors in place of DGL's arrays."""
    if isinstance(argument, NDArrayBase):
        return argument.handle
    if isinstance(argument, list | tuple):
        return [_plain(part) for part in argument]
    return argument


def _any_on_gpu(arguments: Any) -> bool:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            if _any_on_gpu(argument):
                return True
        elif isinstance(argument, CHECKED_TYPES):
            device: torch.device | None = getattr(argument, "device", None)
            if device is not None and device.type == "cuda":
                return True
    return False
