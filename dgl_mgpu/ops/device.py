"""Compiles the CUDA kernels in ``kernels/`` and launches them on torch's current stream.

An operator's CUDA implementation names a kernel by its file and a C++ expression and calls it::

    kernel = Kernel("copy_list.cu", "dgl_mgpu::copy_list<int, 16>")
    kernel(blocks, threads, struct(count, chunks, *items), device=ids.device)

A kernel gets tensors as pointers, integers as ``int64``, floats as ``double`` and None as a null
pointer.  :func:`struct` packs many such values into one struct, which costs the host much less.
CuPy is imported at the first launch, so that processes without a GPU do not need it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from struct import Struct
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from dgl_mgpu.errors import IdOutOfRangeError, UnavailableError
from dgl_mgpu.utils.resources import resource_folder
from dgl_mgpu.utils.streams import record_event

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class Kernel:
    """One kernel: a file in ``kernels/`` and the C++ name of a template's instance in it.

    Parameters
    ----------
    source : str
        File name.
    expression : str
        As in ``dgl_mgpu::copy_list<int, 16>``.
    cooperative : bool
        Whether its blocks wait for each other, so that all must be resident.
    """

    _all: ClassVar[dict[tuple[str, str, bool], Kernel]] = {}

    def __new__(cls, source: str, expression: str, cooperative: bool = False) -> Kernel:
        # One object per kernel, so that it is compiled once.
        kernel = cls._all.get((source, expression, cooperative))
        if kernel is None:
            kernel = super().__new__(cls)
            kernel.source, kernel.expression = source, expression
            kernel.cooperative = cooperative
            #: The driver's compiled functions, by device.
            kernel.loaded = {}
            cls._all[source, expression, cooperative] = kernel
        return kernel

    source: str
    expression: str
    cooperative: bool
    loaded: dict[Any, Any]

    def __call__(self, blocks: int, threads: int, *arguments: Any, device: torch.device) -> None:
        """Launch on the device's current stream; returns at once."""
        if blocks:
            driver.launch(self, device, blocks, threads, arguments)

    def resident_blocks(self, threads: int, device: torch.device) -> int:
        """Number of blocks that the whole device holds."""
        return driver.resident_blocks(self, device, threads)


class Launch:
    """A launch of a kernel that is prepared once, and changed a little before each time.

    ``arguments`` may be replaced; ``words``, int64, are those of the first one, a packed struct.
    """

    __slots__ = ("_blocks", "_device", "_kernel", "_threads", "arguments", "words")

    def __init__(
        self, kernel: Kernel, blocks: int, threads: int, *arguments: Any, device: torch.device
    ) -> None:
        self._kernel, self._blocks, self._threads, self._device = kernel, blocks, threads, device
        self.arguments = [*arguments]
        if isinstance(arguments[0], np.ndarray):
            self.words = arguments[0].data.cast("B").cast("q")

    def __call__(self) -> None:
        """Launch it on the device's current stream; returns at once."""
        self._kernel(self._blocks, self._threads, *self.arguments, device=self._device)


class Event(Protocol):
    """A point in a stream's work, as a CUDA event records it."""

    def synchronize(self) -> None:
        """Block the host until the stream has reached this point."""


class Driver(Protocol):
    """Launches kernels; tests replace it to run them without a GPU."""

    def launch(
        self,
        kernel: Kernel,
        device: torch.device,
        blocks: int,
        threads: int,
        arguments: tuple[Any, ...],
    ) -> None:
        """Launch a kernel on the device's current stream."""

    def resident_blocks(self, kernel: Kernel, device: torch.device, threads: int) -> int:
        """Number of blocks of a kernel that the device holds."""

    def num_sms(self, device: torch.device) -> int:
        """Multiprocessors of a device."""

    def cache_bytes(self, device: torch.device) -> int:
        """Size of the L2 cache in bytes."""

    def current_stream(self, device: torch.device) -> int:
        """Address of the device's current stream."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device's current stream."""

    def mark(self, device: torch.device) -> Event:
        """Record an event on the device's current stream."""

    def host_buffer(self, count: int) -> torch.Tensor:
        """An int64 vector that the host and every device can access at the same address."""


def source_text(name: str) -> str:
    """A file of ``kernels/`` with its includes in place.

    The compiler's cache is keyed by this text, so a change in a header recompiles the kernel.
    """
    folder = resource_folder("kernels")
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (folder / file).read_text()
        return _INCLUDE.sub(lambda match: expand(match[1]), text.replace("#pragma once\n", ""))

    return expand(name)


_TYPES = {torch.int32: "int", torch.int64: "dgl_mgpu::int64"}


def c_type(dtype: torch.dtype) -> str:
    """C++ type of an id."""
    return _TYPES[dtype]


def position_type(position: torch.Tensor) -> str:
    """C++ type of a view's positions; arbitrary where ids are positions."""
    return _TYPES[position.dtype if position.numel() else torch.int32]


def position_pointer(position: torch.Tensor) -> torch.Tensor | None:
    """A view's positions as a kernel takes them: null where ids are positions."""
    return position if position.numel() else None


def blocks_within(
    kernel: Kernel, threads: int, wanted: int, device: torch.device, sms: int = 0
) -> int:
    """Number of blocks to launch: ``wanted``, but at least one and no more than the device holds.

    Parameters
    ----------
    sms : int
        Limit to as many blocks as fill this many multiprocessors, which leaves room for concurrent
        kernels; 0 for all of them, or all in the current stream's partition.  It limits the number
        of blocks only: the GPU may spread them over more multiprocessors.
    """
    most, all_sms = kernel.resident_blocks(threads, device), driver.num_sms(device)
    part = _partitions.get(driver.current_stream(device), all_sms) if _partitions else all_sms
    sms = min(sms or part, part)
    if 0 < sms < all_sms:
        most = max(1, most * sms // all_sms)
    return max(1, min(most, wanted))


#: Most buckets, runs of addresses, by which kernels list rows in the order of their addresses
#: (``kernels/buckets.cuh``).  More do not bring rows that are read together closer to each other,
#: and one thread block sums how many rows each has.
MAX_BUCKETS = 1 << 13
#: Their number is a multiple of what that block sums at a time: four for each of 256 threads.
_ADDED = 1 << 10


def buckets_of(num_rows: int) -> tuple[int, int]:
    """Buckets for rows at ``num_rows`` positions.

    Returns
    -------
    shift : int
        Each has ``2 ** shift`` positions.
    number : int
    """
    shift = max(0, (num_rows - 1).bit_length() - (MAX_BUCKETS.bit_length() - 1))
    return shift, -(-((num_rows - 1 >> shift) + 1) // _ADDED) * _ADDED


# Multiprocessors in the partitions of streams, by the streams' addresses.
_partitions: dict[int, int] = {}


def note_partition(stream: int, sms: int) -> None:
    """Tell operators that a stream is limited to a partition of ``sms`` multiprocessors."""
    _partitions[stream] = sms


class _Faults:
    """Error record of kernels that the host does not wait for: {is_bad, id, number of rows}."""

    __slots__ = ("numbers", "words")

    def __init__(self, words: torch.Tensor) -> None:
        #: For kernels; and the same memory for the host, which checks it at every call.
        self.words, self.numbers = words, words.numpy()


_faults: dict[torch.device, _Faults] = {}


def fault_record(device: torch.device) -> torch.Tensor:
    """Record in which kernels that the host does not wait for store an id out of range."""
    record = _faults.get(device)
    if record is None:
        record = _faults.setdefault(device, _Faults(driver.host_buffer(3).zero_()))
    return record.words


def raise_faults(device: torch.device, *, wait: bool) -> None:
    """Raise the error that kernels of a device have recorded since the last call.

    Gathers do not wait for the GPU: an id out of range first gives a row of zeros, and its error is
    raised here, at the device's next operator call, or immediately with ``wait``.

    Parameters
    ----------
    wait : bool
        Wait for all kernels of the current stream first.

    Raises
    ------
    IdOutOfRangeError
    """
    if wait:
        driver.synchronize(device)
    record = _faults.get(device)
    if record is None or not record.numbers[0]:
        return
    # Kernels still running may record the same ids, which are reported once.
    driver.synchronize(device)
    _, bad, num_rows = record.numbers.tolist()
    record.numbers[:] = 0
    raise IdOutOfRangeError(
        "look up rows on the GPU",
        f"id {bad} is not among the {num_rows} rows",
        f"pass ids in [0, {num_rows})",
    )


class _Stream:
    """A stream as CuPy launches on it."""

    __slots__ = ("ptr",)

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer


class _CuPyDriver:
    def launch(
        self,
        kernel: Kernel,
        device: torch.device,
        blocks: int,
        threads: int,
        arguments: tuple[Any, ...],
    ) -> None:
        index = device.index
        # torch's low-level functions: the public ones first check for CUDA, which a tensor proves.
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(device):
                self.launch(kernel, device, blocks, threads, arguments)
            return
        function = kernel.loaded.get(index) or self._function(kernel, device)
        function(
            (blocks,),
            (threads,),
            [_argument(argument) for argument in arguments],
            0,  # bytes of dynamic shared memory
            _Stream(torch._C._cuda_getCurrentRawStream(index)),
            kernel.cooperative,
        )

    def _function(self, kernel: Kernel, device: torch.device) -> Any:
        # Called with the device current: a module is loaded for one device.
        function = kernel.loaded.get(device.index)
        if function is None:
            module = cupy().RawModule(
                code=source_text(kernel.source),
                options=("-std=c++17",),
                name_expressions=(kernel.expression,),
            )
            function = module.get_function(kernel.expression).kernel
            kernel.loaded[device.index] = function
        return function

    def resident_blocks(self, kernel: Kernel, device: torch.device, threads: int) -> int:
        blocks = kernel.loaded.get((device.index, threads))
        if blocks is None:
            with torch.cuda.device(device):
                function = self._function(kernel, device)
                occupancy = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
                blocks = occupancy(function.ptr, threads, 0) * self.num_sms(device)
            kernel.loaded[device.index, threads] = blocks
        return blocks

    @functools.cache  # noqa: B019  (there is one driver)
    def num_sms(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    @functools.cache  # noqa: B019  (there is one driver)
    def cache_bytes(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).L2_cache_size

    def current_stream(self, device: torch.device) -> int:
        # As torch.cuda.current_stream(), without creating a Stream object.
        return torch._C._cuda_getCurrentRawStream(device.index)

    def synchronize(self, device: torch.device) -> None:
        # The default stream, 0, belongs to whichever device is current.
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                self.synchronize(device)
            return
        cupy().cuda.runtime.streamSynchronize(self.current_stream(device))

    def mark(self, device: torch.device) -> Event:
        return record_event(device)

    def host_buffer(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=True)


#: Replaced in tests, which run kernels without a GPU.
driver: Driver = _CuPyDriver()


def current_stream(device: torch.device) -> int:
    """Address of the stream on which work for a device is queued."""
    return driver.current_stream(device)


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return np.float64(value)
    return np.int64(0 if value is None else value)


def struct(*values: int | torch.Tensor | None, then: bytes = b"") -> np.ndarray:
    """Pack a kernel parameter: a struct of pointers and 64-bit integers.

    Parameters
    ----------
    then : bytes
        Another packed struct to append.
    """
    words = [
        value if isinstance(value, int) else 0 if value is None else value.data_ptr()
        for value in values
    ]
    return packed(words, then)


def packed(words: Sequence[int], then: bytes = b"") -> np.ndarray:
    """As :func:`struct`, of integers alone."""
    layout, element = _words(len(words), len(then))
    # One element, which CuPy passes by value.
    return np.frombuffer(bytearray(layout.pack(*words) + then), element)  # may be changed


@functools.cache
def _words(count: int, more_bytes: int) -> tuple[Struct, np.dtype]:
    return Struct(f"{count}q"), np.dtype(f"V{8 * count + more_bytes}")


def cupy() -> Any:
    """The CuPy module.

    Raises
    ------
    UnavailableError
        If it is not installed or finds no CUDA.
    """
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise UnavailableError(
            "run a CUDA kernel",
            f"CuPy cannot be imported ({error})",
            f"pip install '.[cuda{major}]'",
        ) from error
    return cupy
