"""Which calls of DGL's functions this package takes over, and what it takes over from DGL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dgl_mgpu.utils.fork_safe import freed_at_fork


class TensorBacked:
    """Base of objects that stand for DGL's C++ objects and hold torch tensors."""


def is_tensor_backed(index: Any) -> bool:
    """Whether a graph's index is made of tensors."""
    return isinstance(index, TensorBacked)


# Whether DGL's binary is used: without it, all graphs are made of tensors.
_has_library = True
# How many uses of `tensor_backed_graphs` there are at the moment, which may end in any order.
_num_on = 0
_lock = freed_at_fork(threading.Lock())
# A thread's own word counts for that thread alone: threads that sample ahead end when they like,
# and what they put back must not undo what another one has said meanwhile.
_of_thread = threading.local()


def do_without_library() -> None:
    """Implement graphs on the CPU as well from now on: DGL's binary is not there."""
    global _has_library
    _has_library = False


def has_library() -> bool:
    """Whether DGL's binary is used."""
    return _has_library


@contextmanager
def tensor_backed_graphs(on: bool = True) -> Iterator[None]:
    """Have this package implement graphs on the CPU as well, as it does those on GPUs.

    For tests on machines without a GPU: graphs that any thread makes inside are made of tensors.
    With ``on=False``, graphs on the CPU that this thread makes are DGL's own, as they are without
    this; where there is no binary of DGL, they are made of tensors nevertheless.
    """
    off_before = getattr(_of_thread, "off", False)
    _of_thread.off = not on
    _count(on)
    try:
        yield
    finally:
        _of_thread.off = off_before
        _count(-on)


def _count(change: int) -> None:
    global _num_on
    with _lock:
        _num_on += change


def is_passed_as_tensor(data: torch.Tensor) -> bool:
    """Whether a tensor is handed to C functions as it is, and not as DGL's NDArray."""
    if data.is_cuda or not _has_library:
        return True
    return _num_on > 0 and not getattr(_of_thread, "off", False)


#: Types of arguments that :func:`is_tensor_backed_argument` has to look at.
CHECKED_TYPES = (TensorBacked, torch.Tensor, list, tuple)


def is_tensor_backed_argument(argument: Any) -> bool:
    """Whether an argument makes a call one for this package."""
    if isinstance(argument, torch.Tensor):
        return is_passed_as_tensor(argument)
    if isinstance(argument, list | tuple):
        return any(map(is_tensor_backed_argument, argument))
    return isinstance(argument, TensorBacked)


# -- DGL's arrays as tensors -------------------------------------------------------------------

_SIGNED = {
    torch.uint8: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def is_null(array: Any) -> bool:
    """Whether an argument is what DGL passes for none: a vector of no elements."""
    return len(array.shape) == 1 and array.shape[0] == 0


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor, or an NDArray of the CPU as one; without a copy."""
    if isinstance(array, torch.Tensor):
        return array
    from dgl import backend as F  # modules of DGL import this one

    return F.zerocopy_from_dgl_ndarray(array)


def cast_to_signed(array: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers: ``_CAPI_DGLArrayCastToSigned``."""
    return array.view(_SIGNED.get(array.dtype, array.dtype))
