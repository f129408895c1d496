"""The side stream: where mini-batches are made beside the script's own work."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import AbstractContextManager

import torch

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.utils.streams import current_stream, record_event

#: Share of a GPU's multiprocessors that make batches; the model has the others to itself.  Fewer
#: were too slow, more took too much from the model (docs/decisions/capture.md).
_SHARE = 1 / 4
#: The driver partitions them in multiples of this.
_GRANULE = 8
#: High: its kernels are short, and the next step waits for them.
_PRIORITY = -1


#: A point in the work queued on a stream.
Event = torch.cuda.Event
_SM_RESOURCE = 1
_DEFAULT_STREAM = _NON_BLOCKING = 1


class SideStream:
    """A stream of a GPU beside the one that the script uses.

    ``is_full`` says whether a batch made here has exceeded the GPU's memory.
    """

    def __init__(self, device: torch.device, sms: int | None) -> None:
        if sms is None:
            total = torch.cuda.get_device_properties(device).multi_processor_count
            sms = max(1, int(_SHARE * total / _GRANULE)) * _GRANULE
        try:
            self._stream = partition_stream(device, sms, _PRIORITY)
        except UnavailableError:
            self._stream = torch.cuda.Stream(device, priority=_PRIORITY)
        self._device = device
        self.is_full = False

    def use(self) -> AbstractContextManager[object]:
        """Within, work is queued on this stream."""
        return torch.cuda.stream(self._stream)

    @property
    def script_stream(self) -> int:
        """Address of the stream that the script uses now; not within :meth:`use`."""
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def record_event(self) -> Event:
        """Record an event on the script's stream, or within :meth:`use` on this one."""
        return record_event(self._device)

    def wait_for_script(self) -> None:
        """Make this stream wait for what is queued on the script's stream."""
        self._stream.wait_stream(current_stream(self._device))

    def make_script_wait(self, event: Event) -> None:
        """Make the script's stream wait for an event on this one."""
        current_stream(self._device).wait_event(event)


def may_prefetch() -> bool:
    """Whether the environment lets mini-batches be made ahead of their time."""
    return os.environ.get("DGL_MGPU_PREFETCH") != "0"


_cuda_side_stream = functools.cache(SideStream)


def side_stream_of(device: torch.device, sms: int | None = None) -> SideStream | None:
    """The side stream of a GPU; None for another device.

    Each GPU has one: torch's allocator and operators keep memory per stream, so all loaders reuse
    the same memory.  It is kept to ``sms`` multiprocessors, by default a quarter of them.
    """
    return _cuda_side_stream(device, sms) if device.type == "cuda" else None


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

    Raises UnavailableError if the driver or the GPU cannot.  A kernel that waits for memory keeps
    room on every multiprocessor that it has a block on, so that a matrix product beside it finds
    none; on few multiprocessors it is nearly as fast and in nobody's way.  CUDA has green contexts
    for that, in drivers from 12.4 on; torch has a stream of one from 2.12 on, so the driver is
    called here.
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


def _call(action: str, name: str, *arguments: object) -> None:
    try:
        status = getattr(_driver(), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise UnavailableError(action, str(error), "use a CUDA driver from 12.4 on") from error
    if status:
        raise UnavailableError(
            action, f"{name} gave CUDA error {status}", "use a stream on all of the GPU"
        )
