"""How operands' rows meet the rows of a sparse-dense product, as its kernels take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu

#: Rows and entries that are worth a warp.
_MIN_SHARE = 64
#: As many as a warp can count with 32 bits, with the rest of the row that its share ends in.
_MAX_SHARE = (1 << 30) - 1
#: Warps for a multiprocessor where there are many rows and entries: at least, and at most. What it
#: holds at once is a small part, so that none is left with nothing to do for long; and where
#: neighbours lie near each other, the rows that are read at one time stay in the cache. The wider
#: rows are, the fewer of them fit: so many warps for each of their bytes.
_MIN_WARPS, _MAX_WARPS, _WARPS_PER_BYTE = 1024, 2048, 4
#: Where the cache has all rows anyway.
_WARPS_IN_CACHE = 256
#: Bytes for what shares have of rows: at most, and if that is more, this share of the result's.
_SCRATCH_BYTES, _SCRATCH_OF_RESULT = 64 << 20, 0.25
#: Lanes of a warp.
_LANES = 32
#: Bytes of the largest vector that is read, and of a line of the cache.
VECTOR_BYTES, _LINE = 16, 128
#: Bytes of columns that a warp takes of a row: more columns are done by other warps, later.  Fewer
#: where those of all rows that are read then stay in the cache, and its lines are still read whole.
_MAX_TILE_BYTES = _LANES * VECTOR_BYTES
#: Entries to a row that is read from which on it pays to copy rows to where they begin at lines, or
#: at vectors.
_ENTRIES_TO_COPY = 8
#: Share of the cache that rows are sure to find room in.
_OF_CACHE = 0.75
#: Times as much as the cache has room for from which on tiles cost less than what it does not have.
_WORTH_TILES = 1.75
#: How many times there are blocks to join all shares' parts of rows, each for other columns.
_MAX_TURNS = 8
#: How often rows may be repeated by one lane, and numbers that a lane may have of them all.
REPEATS, _MAX_NUMBERS = (2, 4, 8), 32
#: Most dimensions of an output's row, where neighbours that the same operands have are one.
_DIMENSIONS = 4

ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "dgl_mgpu::Float16",
    torch.bfloat16: "dgl_mgpu::BFloat16",
}


@dataclass(frozen=True)
class OperandLayout:
    """How a product's kernel lays out rows, as types and shapes decide it."""

    expand: bool  # the operands must have the shape of the output first; see `expanded`
    left: str  # how an operand meets a vector of the output
    right: str
    vector: int  # columns of a lane
    lanes: int  # of a row
    repeats: int  # of the left operand's row in a row, each with one number of the right one's
    tiles: int  # warps that a row's columns take
    width: int  # columns of a row
    numbers: bytes  # the kernels' struct RowLayout


def make_layout(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    left_shape: tuple[int, ...],
    right_shape: tuple[int, ...] | None,
    left_offset: int,
    right_offset: int,
    tile_bytes: int = _MAX_TILE_BYTES,
    left_row_bytes: int = 0,
    *,
    repeating: bool = False,
) -> OperandLayout:
    """The layout of a product of rows of these shapes, None where there is no right operand.

    Operands begin so many bytes behind where a vector might.  A warp takes columns of at most
    ``tile_bytes``.  The left operand's rows are ``left_row_bytes`` apart, if that is more than
    they have, and they are not expanded; what is behind them is read where vectors are longer.
    ``repeating`` says that the kernel may repeat a left row by one lane.
    """
    dims = _joined_dimensions(shape, left_shape, right_shape)
    expand = len(dims) > _DIMENSIONS
    if expand:
        left_shape, right_shape = shape, None if right_shape is None else shape
        left_offset = right_offset = 0
        dims = _joined_dimensions(shape, left_shape, right_shape)
    width = math.prod(shape)
    run, of_left, of_right = dims[-1]
    entry_scalar = right_shape is not None and math.prod(right_shape) == 1
    run_bytes = run * dtype.itemsize
    if of_left and len(dims) == 1 and left_row_bytes > run_bytes:
        run_bytes, left_offset = left_row_bytes, 0
    vector = math.gcd(
        run_bytes,
        left_offset if of_left else 0,
        right_offset if of_right and not entry_scalar else 0,
        run * dtype.itemsize if of_right and not entry_scalar else 0,
        VECTOR_BYTES,
    ) // dtype.itemsize  # fmt: skip
    repeats = _repeats(dims) if repeating else 1
    if repeats > 1:
        entry_scalar, vector = True, min(vector, _MAX_NUMBERS // repeats)
    left = "Vectors" if of_left or vector == 1 else "Scalars"
    right = "Vectors" if of_right or vector == 1 else "Scalars"
    if right_shape is None:
        right = "Absent"
    elif entry_scalar:
        right = "EntryScalar"
    lanes = min(_LANES, tile_bytes // (vector * dtype.itemsize))
    vectors = -(-(width // repeats) // vector)
    lanes = min(lanes, 1 << (vectors - 1).bit_length())
    tiles = -(-vectors // lanes)
    numbers = gpu.struct(
        tiles, width, max(math.prod(left_shape) * dtype.itemsize, 0 if expand else left_row_bytes),
        0 if right_shape is None else math.prod(right_shape) * dtype.itemsize, len(dims),
        *_strides(dims),
    )  # fmt: skip
    return OperandLayout(
        expand, left, right, vector, lanes, repeats, tiles, width, numbers.tobytes()
    )


def columns_in_cache(rows: Tensor | None, entries: int, whole: bool) -> tuple[int, bool, int]:
    """Of how many columns of rows are read from the cache, not from memory.

    Many entries have the same row: it is read again and again.  Where not even a line of all rows
    fits, as many columns as there may be, and also where most of what rows have fits.  Rows that
    begin anywhere in a line would have most lines read by two warps; rows that begin anywhere in a
    vector are read number by number, by more warps.  Both are to be copied to where they do not.

    ``whole`` says that an entry has one number at most for all of a row's columns.  Returns the
    bytes of these columns, whether the cache has room for them of all rows, and the bytes from one
    row to the next: more than a row has if they are to be copied.
    """
    if rows is None or not rows.numel():
        return _MAX_TILE_BYTES, False, 0
    count = rows.shape[0]
    row_bytes = rows.numel() // count * rows.element_size()
    many = entries >= _ENTRIES_TO_COPY * count
    if whole and many:
        row_bytes = _in_vectors(row_bytes)
    capacity = _OF_CACHE * gpu.driver.cache_bytes(rows.device)
    if capacity < count * row_bytes <= _WORTH_TILES * capacity:
        return _MAX_TILE_BYTES, False, row_bytes
    tile = _MAX_TILE_BYTES
    while count * min(row_bytes, tile) > capacity:
        if tile == _LINE:
            return _MAX_TILE_BYTES, False, row_bytes
        tile //= 2
    if tile < _MAX_TILE_BYTES and row_bytes % _LINE:
        if not many:
            return _MAX_TILE_BYTES, False, row_bytes
        row_bytes = -(-row_bytes // _LINE) * _LINE
    return tile, True, row_bytes


def _in_vectors(row_bytes: int) -> int:
    """From one row to the next, longer where rows are read by fewer warps for it."""
    longer = -(-row_bytes // VECTOR_BYTES) * VECTOR_BYTES
    warps, fewer = (
        -(-size // (_LANES * math.gcd(size, VECTOR_BYTES))) for size in (row_bytes, longer)
    )
    return longer if fewer < warps else row_bytes


def at_lines(rows: Tensor, row_bytes: int) -> Tensor:
    """A copy of rows with a given stride in bytes."""
    count = len(rows)
    flat = rows.view(count, -1)
    copied = flat.new_empty(count, row_bytes // flat.element_size())
    copied[:, : flat.shape[1]] = flat
    return copied


def shares(
    length: int,
    row_bytes: int,
    device: torch.device,
    in_cache: bool = False,
    most: int | None = None,
) -> tuple[int, int]:
    """Of so many rows and entries, how many are a warp's share, and how many shares there are.

    ``row_bytes`` are of a row of the result.  ``in_cache`` says that the cache has all rows that
    are read; there is room for ``most`` shares.
    """
    warps = min(_MAX_WARPS, max(_MIN_WARPS, _WARPS_PER_BYTE * row_bytes))
    count = (_WARPS_IN_CACHE if in_cache else warps) * gpu.driver.num_sms(device)
    if most is not None:
        count = min(count, most)
    share = min(_MAX_SHARE, max(_MIN_SHARE, -(-length // count)))
    return share, -(-length // share)


def max_shares(part_bytes: int, result_bytes: int) -> int:
    """How many shares may have parts of rows, of so many bytes each, in the memory for them."""
    budget = max(_SCRATCH_BYTES, int(_SCRATCH_OF_RESULT * result_bytes))
    return max(1, budget // part_bytes)


def joining_blocks(num_shares: int, width: int, threads: int) -> int:
    """Number of blocks that join the parts of rows that several shares have."""
    if num_shares < 2:
        return 0
    turns = min(_MAX_TURNS, -(-width // _LANES))
    return -(-num_shares // threads) * turns


def expanded(operand: Tensor, shape: Sequence[int]) -> Tensor:
    """An operand with rows of a shape."""
    rows, missing = len(operand), len(shape) + 1 - operand.dim()
    aligned = operand.view(rows, *[1] * missing, *operand.shape[1:])
    return aligned.expand(rows, *shape).contiguous()


def _joined_dimensions(
    shape: tuple[int, ...], left_shape: tuple[int, ...], right_shape: tuple[int, ...] | None
) -> list[tuple[int, bool, bool]]:
    """The dimensions of the output's rows, outermost first: size, and which operand has it.

    Neighbours that the same operands have are one, and those of size 1 are none.
    """
    dims: list[tuple[int, bool, bool]] = []
    for place in range(-len(shape), 0):
        size = shape[place]
        if size == 1:
            continue
        has_left, has_right = (
            row is not None and -place <= len(row) and row[place] != 1
            for row in (left_shape, right_shape)
        )
        if dims and dims[-1][1:] == (has_left, has_right):
            size *= dims.pop()[0]
        dims.append((size, has_left, has_right))
    return dims or [(1, True, right_shape is not None)]


def _repeats(dims: list[tuple[int, bool, bool]]) -> int:
    """How often a row has all of the left operand's, each time with another number of the right
    operand's, as heads do that share rows."""
    if len(dims) != 2 or dims[0][1:] != (False, True) or dims[1][1:] != (True, False):
        return 1
    return dims[0][0] if dims[0][0] in REPEATS else 1


def _strides(dims: list[tuple[int, bool, bool]]) -> list[int]:
    """Sizes of the dimensions and the operands' strides, as the kernel takes them."""
    table = []
    for operand in (1, 2):
        strides, stride = [], 1
        for dim in reversed(dims):
            strides.append(stride if dim[operand] else 0)
            stride *= dim[0] if dim[operand] else 1
        table.append(strides[::-1])
    padding = [1] * (_DIMENSIONS - len(dims))
    return [
        *(dim[0] for dim in dims), *padding, *table[0], *padding, *table[1], *padding,
    ]  # fmt: skip
