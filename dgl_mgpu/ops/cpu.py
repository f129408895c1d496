"""Kernels of the CPU: how they are compiled, read the store's memory, and run on torch's threads.

A segment is an address and nothing else, so kernels load and store through addresses.  An id
may be 4 or 8 bytes wide; the width is an argument and not a type, which keeps every kernel
to one compiled version (the branch is the same for a whole call and costs nothing measured).

Kernels are scalar Numba functions without the interpreter lock, so they run in parallel on
any threads.  The threads are torch's own OpenMP team: after each of torch's operators its
workers spin for some milliseconds waiting for more, and threads of another pool would compete
with them for the cores (on two cores that costs all of the second one).

A forked child (a DataLoader worker) inherits the team's state but none of its threads, so it
uses a pool of its own.  Numba's ``parallel=True`` is not used: its OpenMP layer dies in such
a child, and its work queue is not safe when two threads of one process call it.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from torch import Tensor

from dgl_mgpu.ops.view import FIRST, PARTS, START, STOP

# A fork waits until no other thread compiles a kernel: the child would find Numba's lock taken for
# ever, and LLVM in an inconsistent state.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)

#: What is divided by zero is infinite or NaN, as torch has it; Python's error would also keep loops
#: from becoming vector instructions.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

#: Decorator of the parts of a kernel: always inlined, so that a call costs nothing.
inline: Callable[..., Any] = numba.njit(**_OPTIONS, forceinline=True)
#: Decorator of a function that emits LLVM code; typed, unlike Numba's.
intrinsic: Callable[..., Any] = numba.extending.intrinsic

#: State of the files whose functions are inlined into kernels of other files.
_SHARED_STAMP = tuple(
    (Path(__file__).with_name(name).stat().st_mtime, Path(__file__).with_name(name).stat().st_size)
    for name in ("cpu.py", "edges.py", "philox.py", "view.py")
)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a kernel: without the interpreter lock, compiled once and kept on disk."""
    dispatcher: Any = numba.njit(**_OPTIONS, cache=True)(function)
    # Numba recompiles when the kernel's own file changes; look at the shared ones, too.
    index = getattr(dispatcher._cache, "_cache_file", None)
    if index is not None:
        index._source_stamp = (index._source_stamp, _SHARED_STAMP)
    return dispatcher


#: Tiers, pointers and the address and item size (0, 4 or 8 bytes) of ``position``.
Rows = tuple[np.ndarray, np.ndarray, int, int]

CACHE_LINE = 64


def _load(dtype: types.Type) -> Callable[[int], Any]:
    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            return builder.load(pointer)

        return dtype(types.int64), codegen

    return load


def _store(dtype: types.Type) -> Callable[[int, Any], None]:
    @intrinsic
    def store(typing_context, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            builder.store(args[1], pointer)
            return context.get_dummy_value()

        return types.void(types.int64, dtype), codegen

    return store


load_uint8 = _load(types.uint8)
load_int32 = _load(types.int32)
load_int64 = _load(types.int64)
load_float32 = _load(types.float32)
load_float64 = _load(types.float64)
store_int32 = _store(types.int32)
store_int64 = _store(types.int64)


class Vector(types.Type):
    """Several numbers that a processor adds at once, as the type of a kernel's variable.

    A compiler makes vectors of a loop over columns, but keeps sums of rows of any width in memory.
    """

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        super().__init__(name=f"Vector({dtype}, {lanes})")
        self.dtype, self.lanes = dtype, lanes


@numba.extending.register_model(Vector)
class _VectorModel(numba.extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        number = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


#: Bytes of the vectors that kernels have: of a cache line, and for what is left of a row.
WIDE, NARROW = CACHE_LINE, 16


@intrinsic
def filled(typing_context, value, num_bytes):  # type: ignore[no-untyped-def]
    """A vector with ``value``, a number, in every lane; ``num_bytes`` is a constant."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        return None
    vector = Vector(value, num_bytes.literal_value * 8 // value.bitwidth)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _in_every_lane(builder, context.get_value_type(vector), args[0])

    return vector(value, num_bytes), codegen


def _in_every_lane(builder: ir.IRBuilder, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    first_lane = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, first_lane)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, first, zeros)


@intrinsic
def load_vector(typing_context, example, address):  # type: ignore[no-untyped-def]
    """The vector at an address, of the type of ``example``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[1], args[0].type.as_pointer())
        return builder.load(pointer, align=example.dtype.bitwidth // 8)

    return example(example, types.int64), codegen


@intrinsic
def store_vector(typing_context, address, vector):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        builder.store(args[1], pointer, align=vector.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, vector), codegen


def _take_vectors(function: Callable[..., Any], instruction: str) -> None:
    """Have a function of Python's operators take two vectors of floating-point numbers."""

    @intrinsic
    def apply(typing_context, left, right):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return getattr(builder, instruction)(*args)

        return left(left, right), codegen

    @numba.extending.overload(function)
    def of_vectors(left, right):  # type: ignore[no-untyped-def]
        if isinstance(left, Vector) and left == right:
            return lambda left, right: apply(left, right)
        return None


_take_vectors(operator.add, "fadd")
_take_vectors(operator.sub, "fsub")
_take_vectors(operator.mul, "fmul")
_take_vectors(operator.truediv, "fdiv")


@intrinsic
def choose(typing_context, best, chosen, values, choice, highest):  # type: ignore[no-untyped-def]
    """``best`` and ``chosen`` with the lanes replaced in which ``values`` are better.

    These become ``values``, and of ``chosen``, a vector of integers as wide, ``choice``.  Better is
    what is higher or, unless ``highest``, lower: nothing is better than NaN, nor is NaN itself.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        best, chosen, values, choice, highest = args
        is_better = builder.select(
            builder.trunc(highest, ir.IntType(1)),
            builder.fcmp_ordered(">", values, best),
            builder.fcmp_ordered("<", values, best),
        )
        integer = chosen.type.element
        choice = builder.trunc(choice, integer) if integer.width < 64 else choice
        choices = _in_every_lane(builder, chosen.type, choice)
        best = builder.select(is_better, values, best)
        chosen = builder.select(is_better, choices, chosen)
        return context.make_tuple(builder, signature.return_type, [best, chosen])

    pair = types.Tuple([best, chosen])
    return pair(best, chosen, values, types.int64, types.boolean), codegen


@intrinsic
def copy_bytes(typing_context, target, source, count):  # type: ignore[no-untyped-def]
    """memcpy between two addresses."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        byte_pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, byte_pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typing_context, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address, which need not be valid."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        int32, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [byte_pointer],
            ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]),
        )
        read, keep_in_all_levels, data = (ir.Constant(int32, value) for value in (0, 3, 1))
        pointer = builder.inttoptr(args[0], byte_pointer)
        builder.call(function, [pointer, read, keep_in_all_levels, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def count_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """Number of set bits of an int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


#: How many entries ahead kernels prefetch rows, and how much of one at most.
AHEAD, _MAX_PREFETCHED = 8, 1024


@inline
def prefetch_row(rows: np.ndarray, row: int) -> None:
    """Prefetch a row of a contiguous matrix."""
    num_bytes = rows.shape[1] * rows.itemsize
    address = rows.ctypes.data + row * num_bytes
    for offset in range(0, min(num_bytes, _MAX_PREFETCHED), CACHE_LINE):
        prefetch(address + offset)


@inline
def load_id(address: int, index: int, width: int) -> np.int64:
    """Element ``index`` of an array of 4- or 8-byte integers, as int64."""
    if width == 8:
        return load_int64(address + 8 * index)
    return np.int64(load_int32(address + 4 * index))


@inline
def store_id(address: int, index: int, width: int, value: int) -> None:
    """Set element ``index`` of an array of 4- or 8-byte integers."""
    if width == 8:
        store_int64(address + 8 * index, value)
    else:
        store_int32(address + 4 * index, np.int32(value))


@inline
def position_of(row: int, position: int, position_width: int) -> int:
    """Place of a row in the order of hotness."""
    if position_width == 0:
        return row
    return load_id(position, row, position_width)


@inline
def segment_in(tier: int, place: int, tiers: np.ndarray) -> tuple[int, int]:
    """Which segment of a tier holds a position, and which of the segment's rows it is."""
    offset = place - tiers[tier, START]
    parts = tiers[tier, PARTS]
    first = tiers[tier, FIRST]
    if parts == 1:  # replicated, host and disk tiers: spare them the division
        return first, offset
    local = offset // parts
    return first + (offset - local * parts), local


@inline
def segment_of(place: int, tiers: np.ndarray) -> tuple[int, int]:
    """Which segment holds a position, and which of the segment's rows it is."""
    tier = 0
    for earlier in range(len(tiers) - 1):  # counted, not searched: there is nothing to mispredict
        tier += place >= tiers[earlier, STOP]
    return segment_in(tier, place, tiers)


def rows_argument(tiers: Tensor, pointers: Tensor, position: Tensor) -> Rows:
    """The tensors of a view as kernels take them."""
    width = position.element_size() if position.numel() else 0
    return tiers.numpy(), pointers.numpy(), position.data_ptr(), width


# Fresh pages cost more than the work done in them, as the operating system clears each at first
# touch. A buffer that a thread keeps costs nothing the second time.
_scratch = threading.local()


def scratch(name: str, size: int) -> np.ndarray:
    """An uninitialised int64 array of ``size``, overwritten by the next call with ``name``.

    It belongs to the calling thread: pass it to kernels, never return it to a user.
    """
    buffer = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size + size // 4, dtype=np.int64)
        setattr(_scratch, name, buffer)
    return buffer[:size]


#: Ranges per thread: enough that a slow one (hub nodes) does not keep the others waiting.
_RANGES_PER_THREAD = 4

#: ``void fn(void *data)``, what GOMP_parallel runs on each thread of the team.
_TeamFunction = ctypes.CFUNCTYPE(None, ctypes.py_object)


@_TeamFunction
def _call(work: Callable[[], None]) -> None:
    work()


def _find_team() -> Callable[..., None] | None:
    """``GOMP_parallel(fn, data, threads, flags)`` of the OpenMP runtime that torch loaded.

    GNU's, LLVM's and Intel's runtimes all export it.  None if torch was built without OpenMP.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    team.argtypes = [_TeamFunction, ctypes.py_object, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team


_team = _find_team()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    global _team, _pool, _pool_size
    _team, _pool, _pool_size = None, None, 0


os.register_at_fork(after_in_child=_after_fork)


def _on_pool(work: Callable[[], None], threads: int) -> None:
    global _pool, _pool_size
    if _pool is None or _pool_size < threads:
        _pool, _pool_size = ThreadPoolExecutor(threads, thread_name_prefix="dgl_mgpu"), threads
    helpers = [_pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()


def _on_team(team: Callable[..., None], work: Callable[[], None], threads: int) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # must not unwind through the OpenMP runtime
            errors.append(error)

    team(_call, guarded, threads, 0)
    if errors:
        raise errors[0]


def split(total: int, grain: int) -> list[int]:
    """Bounds of near-equal ranges of at least ``grain`` items that cover ``[0, total)``."""
    ranges = max(1, min(total // grain, _RANGES_PER_THREAD * torch.get_num_threads()))
    return [total * index // ranges for index in range(ranges + 1)]


def run(kernel: Callable[..., Any], total: int, grain: int, *arguments: Any) -> list[Any]:
    """Call ``kernel(begin, end, *arguments)`` on ranges that cover ``[0, total)``.

    Returns the kernel's results in the order of the ranges.  The kernel is compiled with
    ``nogil=True``.  What it writes must depend on the items alone and not on how they fall into
    ranges.  ``grain`` is the smallest range worth a thread: fewer than twice as many items run
    inline.
    """
    bounds = split(total, grain)
    count = len(bounds) - 1
    threads = min(torch.get_num_threads(), count)
    if threads == 1:
        return [kernel(0, total, *arguments)]
    results: list[Any] = [None] * count
    tickets = itertools.count()

    def work() -> None:
        while (ticket := next(tickets)) < count:
            results[ticket] = kernel(bounds[ticket], bounds[ticket + 1], *arguments)

    if _team is None:
        _on_pool(work, threads)
    else:
        _on_team(_team, work, threads)
    return results
