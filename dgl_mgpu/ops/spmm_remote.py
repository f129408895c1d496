"""Sums of rows that lie in several memories; see ``kernels/spmm_remote.cu``.

On the CPU all of these are memory of this process.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import DTYPES, ID_DTYPES, MAX_ROW_BYTES, check_integer
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, Size, direct
from dgl_mgpu.ops.spmm import add_spmm, spmm
from dgl_mgpu.ops.spmm_layout import ELEMENTS, VECTOR_BYTES, joining_blocks

#: MGG's search space (section 4).
_MAX = {"ps": 32, "dist": 16, "wpb": 16}
_ACTION = "add up rows in the memory of several ranks"


@dataclass(frozen=True)
class Pipeline:
    """How the work is dealt out to warps (MGG, section 4, whose names these are).

    A neighbour partition has ``ps`` entries of one row (1 to 32), which are added up at a time, of
    the local and of the remote ones each.  Defaults are what MGG's studies fix (section 5), and the
    middle of the range of ``dist``.  Raises InvalidInputError if one is out of its range.
    """

    ps: int = 16
    dist: int = 8  # interleaving distance: a warp's pairs of local and remote partitions; 1 to 16
    wpb: int = 2  # warps per block; 1 to 16

    def __post_init__(self) -> None:
        for name, most in _MAX.items():
            value = check_integer(getattr(self, name), name, 1, "set up a pipeline")
            if value > most:
                raise InvalidInputError(
                    "set up a pipeline", f"{name} is {value}", f"pass at most {most}"
                )


class Entries(NamedTuple):
    """One virtual graph (MGG, section 3.1): the entries of each row that are in one kind of memory.

    Rows are multiplied with the weights, each of which stands for as many columns as another.
    """

    indptr: Tensor  # int32 or int64, (num_rows + 1,)
    columns: Tensor  # dtype of indptr, (nnz,)
    weights: Tensor | None = None  # dtype of the rows, (nnz, num_weights)


class Sources(NamedTuple):
    """Where the rows are.

    ``rows`` are this rank's own, ``bases`` the addresses of all ranks' rows as this process sees
    them: contiguous, like ``rows``.
    """

    rows: Tensor  # float32, float64, float16 or bfloat16, (num_own, width)
    bases: Tensor  # int64, (num_ranks,)
    starts: Tensor  # int64, (num_ranks,): number of each rank's first row, in ascending order
    alignment: Size = 16  # in bytes; every base is a multiple of it


class Pairs(NamedTuple):
    """The pairs of partitions that rows are made of; see `pair_up`."""

    before: Tensor  # int64, (num_rows + 1,): how many pairs there are before each row
    total: Size
    ps: Size


def pair_up(local_indptr: Tensor, remote_indptr: Tensor, ps: int) -> Pairs:
    """Cut rows into pairs of a local and a remote partition of at most ``ps`` entries.

    Unlike in MGG both are of one row: its sum stays with a warp.  A row has as many pairs as its
    larger kind of entries takes, and at least one, which may be empty.  Waits for the device.
    """
    counts = torch.maximum(local_indptr.diff(), remote_indptr.diff()).long()
    pairs = ((counts + (ps - 1)) // ps).clamp(min=1)
    before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])
    return Pairs(before, int(before[-1]), ps)


@Operator
def spmm_remote_op(
    local: Entries, remote: Entries, pairs: Pairs, dist: Size, wpb: Size, sources: Sources
) -> Tensor:
    return output(local.indptr, sources.rows)


def output(indptr: Tensor, rows: Tensor) -> Tensor:
    """Allocate the operator's output."""
    return rows.new_empty(indptr.shape[0] - 1, rows.shape[1])


def spmm_remote(
    local: Entries,
    remote: Entries,
    sources: Sources,
    *,
    pairs: Pairs | None = None,
    pipeline: Pipeline | None = None,
) -> Tensor:
    """Sum, for every row, of its local and its remote entries' rows.

    Remote rows are read where they are, while local ones are added up (MGG, section 3).  The result
    has the dtype of the rows and shape (num_rows, width).  Half types are summed up in float32 and
    rounded once.  The same pipeline gives the same bits on every run.

    Columns of ``local`` are rows of ``sources.rows``.  ``remote`` has as many rows, and columns of
    the same dtype that number the rows of all ranks: ``sources.starts`` tells whose they are.  On
    the CPU addresses are this process's.  ``pairs`` is what `pair_up` returns for these entries and
    ``pipeline.ps``, made for this call by default.  Nobody may change any rank's rows until the
    device is done.

    Raises InvalidInputError if an argument has the wrong dtype, shape or device, or ``pairs`` are
    of other partitions.  What the tensors of integers hold is not checked.
    """
    pipeline = Pipeline() if pipeline is None else pipeline
    _check(local, remote, sources)
    if pairs is None:
        pairs = pair_up(local.indptr, remote.indptr, pipeline.ps)
    if pairs.ps != pipeline.ps or pairs.before.shape != local.indptr.shape:
        raise InvalidInputError(
            _ACTION,
            f"pairs was made for partitions of {pairs.ps} entries and {len(pairs.before) - 1} rows,"
            f" not for {pipeline.ps} entries and {len(local.indptr) - 1} rows",
            "make pairs with pair_up for this graph and pipeline, or pass None",
        )
    function = direct("spmm_remote", (*local, *remote, *sources[:3], pairs.before))
    function = function or torch.ops.dgl_mgpu.spmm_remote.default
    return function(*local, *remote, *pairs, pipeline.dist, pipeline.wpb, *sources)


def _check(local: Entries, remote: Entries, sources: Sources) -> None:
    rows, bases, starts, alignment = sources
    if rows.dtype not in DTYPES or rows.dim() != 2:
        raise InvalidInputError(
            _ACTION,
            f"rows has dtype {rows.dtype} and shape {tuple(rows.shape)}",
            f"pass a matrix whose dtype is one of {', '.join(map(str, DTYPES))}",
        )
    if rows.shape[1] * rows.element_size() >= MAX_ROW_BYTES:
        raise InvalidInputError(
            _ACTION,
            f"a row has {rows.shape[1]} elements of {rows.element_size()} bytes",
            f"pass rows of less than {MAX_ROW_BYTES} bytes",
        )
    for table in (bases, starts):
        if table.dtype != torch.int64 or table.dim() != 1 or len(table) != len(bases):
            raise InvalidInputError(
                _ACTION,
                f"bases has dtype {bases.dtype} and shape {tuple(bases.shape)}, and starts has"
                f" dtype {starts.dtype} and shape {tuple(starts.shape)}",
                "pass two int64 vectors with an entry for each rank",
            )
    if not len(bases) or check_integer(alignment, "alignment", 1, _ACTION) % rows.element_size():
        raise InvalidInputError(
            _ACTION,
            f"there are {len(bases)} addresses, and alignment is {alignment} bytes",
            "pass an address for each rank, and an alignment that is a multiple of"
            f" {rows.element_size()} bytes",
        )
    for entries in (local, remote):
        _check_entries(entries, local.indptr, rows)
    if (local.weights is None) != (remote.weights is None) or (
        local.weights is not None and local.weights.shape[1] != remote.weights.shape[1]  # type: ignore[union-attr]
    ):
        raise InvalidInputError(
            _ACTION,
            "local and remote entries do not have the same number of weights",
            "pass as many weights for each entry of both, or None for both",
        )
    for tensor in (*local, *remote, bases, starts):
        if tensor is not None and tensor.device != rows.device:
            raise InvalidInputError(
                _ACTION,
                f"some tensors are on '{rows.device}' and some on '{tensor.device}'",
                "move them to one device",
            )


def _check_entries(entries: Entries, like: Tensor, rows: Tensor) -> None:
    indptr, columns, weights = entries
    if (
        indptr.dtype not in ID_DTYPES
        or indptr.dim() != 1
        or indptr.numel() == 0
        or indptr.shape != like.shape
        or indptr.dtype != like.dtype
        or columns.dtype != like.dtype
        or columns.dim() != 1
    ):
        raise InvalidInputError(
            _ACTION,
            f"indptr has dtype {indptr.dtype} and shape {tuple(indptr.shape)}, and columns has"
            f" dtype {columns.dtype} and shape {tuple(columns.shape)}",
            "pass vectors of int32 or int64, all of one dtype, and for local and for remote entries"
            " an indptr with one element more than there are rows",
        )
    if weights is None:
        return
    if (
        weights.dtype != rows.dtype
        or weights.dim() != 2
        or len(weights) != len(columns)
        or weights.shape[1] == 0
        or rows.shape[1] % weights.shape[1]
    ):
        raise InvalidInputError(
            _ACTION,
            f"weights has dtype {weights.dtype} and shape {tuple(weights.shape)}",
            f"pass weights of dtype {rows.dtype} and shape ({len(columns)}, n), where n divides the"
            f" rows' width {rows.shape[1]}",
        )


@spmm_remote_op.cpu
def _spmm_remote_cpu(
    local: Entries, remote: Entries, pairs: Pairs, dist: int, wpb: int, sources: Sources
) -> Tensor:
    rows, bases, starts, _ = sources
    out = output(local.indptr, rows)
    if out.numel() == 0:
        return out
    number = torch.float64 if rows.dtype == torch.float64 else torch.float32
    num_weights = 1 if local.weights is None else local.weights.shape[1]
    shape = (num_weights, rows.shape[1] // num_weights)

    def operands(of_entries: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None, str]:
        of_entries = of_entries.to(number).view(-1, *shape)
        if weights is None:
            return of_entries, None, "copy_lhs"
        return of_entries, weights.to(number).unsqueeze(2), "mul"

    own = operands(rows.contiguous(), local.weights)
    total = spmm(local.indptr, local.columns, None, *own, "sum")[0]
    fetched = _fetched(remote.columns.long(), rows, bases, starts)
    entries = torch.arange(len(fetched), dtype=remote.indptr.dtype)
    add_spmm(total, remote.indptr, entries, None, *operands(fetched, remote.weights))
    return out.copy_(total.view(out.shape))


def _fetched(columns: Tensor, rows: Tensor, bases: Tensor, starts: Tensor) -> Tensor:
    """A row for each column."""
    owners = torch.searchsorted(starts, columns, right=True) - 1
    places = columns - starts[owners]
    fetched = rows.new_empty(len(columns), rows.shape[1])
    for rank, base in enumerate(bases.tolist()):
        action = (owners == rank).nonzero().squeeze(1)
        if len(action):
            count = int(places[action].max()) + 1
            fetched[action] = _matrix_at(base, count, rows)[places[action]]
    return fetched


def _matrix_at(address: int, count: int, like: Tensor) -> Tensor:
    """The rows at an address of this process, of the type and width of others."""
    num_bytes = count * like.shape[1] * like.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(count, like.shape[1])


_WARP = 32
_JOINING_THREADS = 256


@spmm_remote_op.cuda
def _spmm_remote_cuda(
    local: Entries, remote: Entries, pairs: Pairs, dist: int, wpb: int, sources: Sources
) -> Tensor:
    rows, bases, starts, alignment = sources
    before, num_pairs, ps = pairs
    out = output(local.indptr, rows)
    if out.numel() == 0:
        return out
    number = torch.float64 if rows.dtype == torch.float64 else torch.float32
    rows, width, device = rows.contiguous(), rows.shape[1], rows.device
    num_weights = 1 if local.weights is None else local.weights.shape[1]
    per_weight = width // num_weights
    bytes_together = per_weight * rows.element_size()
    vector = math.gcd(VECTOR_BYTES, alignment, rows.data_ptr(), bytes_together)
    vector //= rows.element_size()
    lanes = min(_WARP, 1 << (width // vector - 1).bit_length())
    tiles = -(-width // (vector * lanes))
    num_runs = -(-num_pairs // dist)
    # Of a run two parts of rows and the row that it ends in.
    scratch = torch.empty(
        num_runs * (8 + 2 * width * number.itemsize), dtype=torch.uint8, device=device
    )
    open_rows = scratch.data_ptr()
    local, remote = (
        entries._replace(weights=None if entries.weights is None else entries.weights.to(number))
        for entries in (local, remote)
    )
    tensors = [
        None if tensor is None else tensor.contiguous()
        for tensor in (before, *local, *remote, rows, bases, starts)
    ]
    request = gpu.struct(
        *tensors, out, open_rows + 8 * num_runs, open_rows, len(bases), len(out), num_pairs,
        num_runs, ps, dist, width, tiles, num_weights, per_weight,
    )  # fmt: skip
    types = f"{c_type(local.indptr.dtype)}, {ELEMENTS[rows.dtype]}"
    weighted = "false" if local.weights is None else "true"
    sums = Kernel(
        "spmm_remote.cu", f"dgl_mgpu::spmm_remote<{types}, {weighted}, {vector}, {lanes}, {wpb}>"
    )
    sums(-(-num_runs * tiles // wpb), wpb * _WARP, request, device=device)
    join = Kernel("spmm_remote.cu", f"dgl_mgpu::join_remote_parts<{types}>")
    blocks = joining_blocks(num_runs, width, _JOINING_THREADS)
    join(blocks, _JOINING_THREADS, request, device=device)
    return out
