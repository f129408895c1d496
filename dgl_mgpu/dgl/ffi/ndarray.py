"""In place of ``dgl._ffi.ndarray``: DGL's arrays are torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from dgl._ffi.runtime_ctypes import DGLContext
from dgl._ffi.runtime_ctypes import DGLDataType as DGLDataType
from torch.utils import dlpack

from dgl_mgpu.graph.shared_memory import map_shared_memory

_DEVICES = {1: "cpu", 2: "cuda"}


class NDArrayBase:
    """An array of DGL's, which has a tensor."""

    def __init__(self, handle: torch.Tensor, is_view: bool = False) -> None:
        self.handle = handle
        self.is_view = is_view

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.shape)

    @property
    def dtype(self) -> str:
        return str(self.handle.dtype).removeprefix("torch.")

    @property
    def ctx(self) -> DGLContext:
        device = self.handle.device
        return DGLContext(2 if device.type == "cuda" else 1, device.index or 0)

    context = ctx

    def __hash__(self) -> int:
        return self.handle.data_ptr()

    def __eq__(self, other: object) -> bool:
        return self.same_as(other)

    def same_as(self, other: object) -> bool:
        """Whether both are the same memory."""
        return isinstance(other, NDArrayBase) and hash(self) == hash(other)

    def __setitem__(self, in_slice: slice, value: Any) -> None:
        if in_slice != slice(None):
            raise ValueError("Array only support set from numpy array")
        self.copyfrom(value)

    def copyfrom(self, source_array: Any) -> NDArrayBase:
        """Copy an array of the same shape into this one."""
        if isinstance(source_array, NDArrayBase):
            source_array = source_array.handle
        source = torch.as_tensor(np.asarray(source_array))
        if tuple(source.shape) != self.shape:
            raise ValueError(
                f"array shape do not match the shape of NDArray {tuple(source.shape)} vs"
                f" {self.shape}"
            )
        self.handle.copy_(source)
        return self

    def copyto(self, target: Any) -> Any:
        """Copy to another array, or to a new one on a device."""
        if isinstance(target, DGLContext):
            target = empty(self.shape, self.dtype, target)
        if not isinstance(target, NDArrayBase):
            raise ValueError(f"Unsupported target type {type(target)}")
        target.handle.copy_(self.handle)
        return target

    def asnumpy(self) -> np.ndarray:
        """A copy as an array of NumPy's."""
        return self.handle.cpu().numpy().copy()

    def to_dlpack(self, alignment: int = 0) -> Any:
        """The same memory as a DLPack capsule."""
        return dlpack.to_dlpack(self.handle)

    def pin_memory_(self) -> None:
        """Pin the memory, until it is unpinned or the array is given up."""
        from dgl_mgpu.dgl.patches._ffi import ndarray

        ndarray.pin_memory_(self)  # type: ignore[arg-type]

    def unpin_memory_(self) -> None:
        """Unpin the memory; an error if it is pinned, but not by the array."""
        from dgl_mgpu.dgl.patches._ffi import ndarray

        ndarray.unpin_memory_(self)  # type: ignore[arg-type]

    def record_stream(self, stream: Any) -> None:
        """Let no other stream reuse the memory before this one has come here."""
        self.handle.record_stream(stream)

    def __repr__(self) -> str:
        return f"dgl.{self.asnumpy()!r}@{self.ctx}"

    def __str__(self) -> str:
        return str(self.asnumpy())


_CLASSES: list[type[NDArrayBase]] = [NDArrayBase]


def _set_class_ndarray(cls: type[NDArrayBase]) -> None:
    _CLASSES[0] = cls


def array_of(tensor: torch.Tensor) -> Any:
    """A tensor as DGL's array."""
    return _CLASSES[0](tensor)


def context(dev_type: Any, dev_id: int = 0) -> DGLContext:
    """DGL's name of a device."""
    if isinstance(dev_type, str):
        dev_type = dev_type.split()[0]
        if dev_type not in DGLContext.STR2MASK:
            raise ValueError(f"Unknown device type {dev_type}")
        dev_type = DGLContext.STR2MASK[dev_type]
    return DGLContext(dev_type, dev_id)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return getattr(torch, str(np.dtype(dtype)))


def numpyasarray(np_data: np.ndarray) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor that shares an array's memory, and its shape."""
    return torch.as_tensor(np_data), np_data.shape


def empty(shape: Sequence[int], dtype: Any = "float32", ctx: Any = None) -> Any:
    """A new array."""
    kind, number = (ctx.device_type, ctx.device_id) if ctx is not None else (1, 0)
    device = torch.device("cpu") if kind == 1 else torch.device(_DEVICES[kind], number)
    return array_of(torch.empty(tuple(shape), dtype=_torch_dtype(dtype), device=device))


def empty_shared_mem(
    name: str, is_create: bool, shape: Sequence[int], dtype: Any = "float32"
) -> Any:
    """An array in shared memory of a name: a new one, or the one that is there."""
    return array_of(map_shared_memory(name, is_create, tuple(shape), _torch_dtype(dtype)))


def from_dlpack(dltensor: Any) -> Any:
    """An array of the memory of a DLPack capsule."""
    return array_of(dlpack.from_dlpack(dltensor))


def register_extension(cls: type, fcreate: Any = None) -> type:
    """Nothing: no C receives arguments."""
    return cls
