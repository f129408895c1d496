"""A stream whose kernels run on some of a GPU's multiprocessors, and leave the others alone.

A kernel that waits for memory keeps room on every multiprocessor that it has a block on, so that a
matrix product beside it finds none; on few multiprocessors it is nearly as fast and in nobody's
way.  CUDA's green contexts, of drivers from 12.4 on, are what there is for that; torch has a stream
of one from 2.12 on, so the driver is called here.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from dgl_mgpu.errors import UnavailableError

_SM_RESOURCE = 1
_DEFAULT_STREAM = _NON_BLOCKING = 1


class _Resource(ctypes.Structure):
    """The driver's ``CUdevResource``."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sms", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


def partition_stream(device: torch.device, sms: int, priority: int) -> torch.cuda.Stream:
    """A stream on ``sms`` of a GPU's multiprocessors, or a few more; it is never given back.

    Operators of this package take no more blocks there than run at once
    (:func:`dgl_mgpu.ops.device.blocks_within`).

    ``device``: of a GPU.  ``priority``: as of ``torch.cuda.Stream``.  Raises UnavailableError if
    the driver or the GPU has no such thing.
    """
    # Here: who samples on the CPU needs no operators of this package.
    from dgl_mgpu.ops.device import note_partition

    call = functools.partial(_call, f"keep a stream to {sms} multiprocessors of {device}")
    # The context that kernels and memory are torch's of has to be there first.
    torch.cuda.current_stream(device).query()
    number = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(number), device.index)
    whole, part, rest = _Resource(), _Resource(), _Resource()
    call("cuDeviceGetDevResource", number, ctypes.byref(whole), _SM_RESOURCE)
    groups = ctypes.c_uint(1)
    call(
        "cuDevSmResourceSplitByCount",
        *map(ctypes.byref, (part, groups, whole, rest)), 0, sms,
    )  # fmt: skip
    descriptor, context, stream = (ctypes.c_void_p() for _ in range(3))
    call("cuDevResourceGenerateDesc", ctypes.byref(descriptor), ctypes.byref(part), 1)
    call("cuGreenCtxCreate", ctypes.byref(context), descriptor, number, _DEFAULT_STREAM)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, priority)
    assert stream.value is not None
    note_partition(stream.value, part.sms)
    return torch.cuda.ExternalStream(stream.value, device)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(asked: str, name: str, *arguments: object) -> None:
    try:
        status = getattr(_driver(), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise UnavailableError(asked, str(error), "use a CUDA driver from 12.4 on") from error
    if status:
        raise UnavailableError(
            asked, f"{name} gave CUDA error {status}", "use a stream on all of the GPU"
        )
