"""Sums of rows that lie in several memories: the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import ID_DTYPES, check_integer
from dgl_mgpu.ops.library import Operator, Size, call

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LONGEST_ROW = 1 << 32
#: MGG's search space (section 4).
_MOST = {"ps": 32, "dist": 16, "wpb": 16}
_ASKED = "add up rows in the memory of several ranks"


@dataclass(frozen=True)
class Pipeline:
    """How the work is dealt out to warps (MGG, section 4, whose names these are).

    Defaults are what MGG's studies fix (section 5), and the middle of the range of ``dist``.

    Attributes
    ----------
    ps : int
        Size of a neighbour partition: entries of one row that are added up at a time, of the local
        and of the remote ones each; 1 to 32.
    dist : int
        Interleaving distance: pairs of a local and a remote partition of a warp; 1 to 16.
    wpb : int
        Warps per block; 1 to 16.

    Raises
    ------
    InvalidInputError
        If one is out of its range.
    """

    ps: int = 16
    dist: int = 8
    wpb: int = 2

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = check_integer(getattr(self, name), name, 1, "set up a pipeline")
            if value > most:
                raise InvalidInputError(
                    "set up a pipeline", f"{name} is {value}", f"pass at most {most}"
                )


class Entries(NamedTuple):
    """One virtual graph (MGG, section 3.1): the entries of each row that are in one kind of memory.

    Attributes
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
    columns : Tensor, dtype of ``indptr``, shape (nnz,)
    weights : Tensor, dtype of the rows, shape (nnz, num_weights), or None
        What rows are multiplied with: each weight as many columns as another.
    """

    indptr: torch.Tensor
    columns: torch.Tensor
    weights: torch.Tensor | None = None


class Sources(NamedTuple):
    """Where the rows are.

    Attributes
    ----------
    rows : Tensor, float32, float64, float16 or bfloat16, shape (num_own, width)
        This rank's own.
    bases : Tensor, int64, shape (num_ranks,)
        Addresses of all ranks' rows, as this process sees them: contiguous, like ``rows``.
    starts : Tensor, int64, shape (num_ranks,)
        Number of each rank's first row, in ascending order.
    alignment : int
        What every base is a multiple of, in bytes.
    """

    rows: torch.Tensor
    bases: torch.Tensor
    starts: torch.Tensor
    alignment: int = 16


class Pairs(NamedTuple):
    """The pairs of partitions that rows are made of; see `pair_up`.

    Attributes
    ----------
    before : Tensor, int64, shape (num_rows + 1,)
        How many there are before each row.
    total : int
    ps : int
    """

    before: torch.Tensor
    total: int
    ps: int


def pair_up(local_indptr: torch.Tensor, remote_indptr: torch.Tensor, ps: int) -> Pairs:
    """Cut rows into pairs of a local and a remote partition of at most ``ps`` entries.

    Unlike in MGG both are of one row: its sum stays with a warp.  A row has as many pairs as its
    larger kind of entries takes, and at least one, which may be empty.  Waits for the device.
    """
    counts = torch.maximum(local_indptr.diff(), remote_indptr.diff()).long()
    pairs = ((counts + (ps - 1)) // ps).clamp(min=1)
    before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])
    return Pairs(before, int(before[-1]), ps)


class LocalEntries(NamedTuple):
    """:class:`Entries` of rows in this rank's memory, as the operator takes them."""

    local_indptr: torch.Tensor
    local_columns: torch.Tensor
    local_weights: torch.Tensor | None


class RemoteEntries(NamedTuple):
    """:class:`Entries` of rows in other memories, as the operator takes them."""

    remote_indptr: torch.Tensor
    remote_columns: torch.Tensor
    remote_weights: torch.Tensor | None


@Operator
def spmm_remote_op(
    local: LocalEntries,
    remote: RemoteEntries,
    rows: torch.Tensor,
    bases: torch.Tensor,
    starts: torch.Tensor,
    pairs: torch.Tensor,
    num_pairs: Size,
    ps: Size,
    dist: Size,
    wpb: Size,
    alignment: Size,
) -> torch.Tensor:
    return output(local.local_indptr, rows)


def output(indptr: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Allocate the operator's output."""
    return rows.new_empty(indptr.shape[0] - 1, rows.shape[1])


def spmm_remote(
    local: Entries,
    remote: Entries,
    sources: Sources,
    *,
    pairs: Pairs | None = None,
    pipeline: Pipeline | None = None,
) -> torch.Tensor:
    """Sum, for every row, of its local and its remote entries' rows.

    Remote rows are read where they are, while local ones are added up (MGG, section 3).

    Parameters
    ----------
    local : Entries
        Columns are rows of ``sources.rows``.
    remote : Entries
        Of as many rows, with columns of the same dtype: numbers of rows of all ranks, so that
        ``sources.starts`` tells whose they are.
    sources : Sources
    pairs : Pairs, optional
        What `pair_up` returns for these entries and ``pipeline.ps``: made for this call by default.
    pipeline : Pipeline, optional

    Returns
    -------
    Tensor, dtype of the rows, shape (num_rows, width)
        Half types are summed up in float32 and rounded once.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device, or ``pairs`` are of other partitions.

    Notes
    -----
    The same bits on every run with the same pipeline.  On the CPU addresses are this process's.
    Nobody may change any rank's rows until the device is done.

    What the tensors of integers hold is not checked.
    """
    pipeline = Pipeline() if pipeline is None else pipeline
    _check(local, remote, sources)
    if pairs is None:
        pairs = pair_up(local.indptr, remote.indptr, pipeline.ps)
    if pairs.ps != pipeline.ps or pairs.before.shape != local.indptr.shape:
        raise InvalidInputError(
            _ASKED,
            f"pairs was made for partitions of {pairs.ps} entries and {len(pairs.before) - 1} rows,"
            f" not for {pipeline.ps} entries and {len(local.indptr) - 1} rows",
            "make pairs with pair_up for this graph and pipeline, or pass None",
        )
    tensors = (*_spread(local), *_spread(remote), *sources[:3], pairs.before)
    return call(
        "spmm_remote",
        tensors,
        pairs.total,
        pipeline.ps,
        pipeline.dist,
        pipeline.wpb,
        sources.alignment,
    )


def _spread(entries: Entries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return entries.indptr, entries.columns, entries.weights


def _check(local: Entries, remote: Entries, sources: Sources) -> None:
    rows, bases, starts, alignment = sources
    if rows.dtype not in DTYPES or rows.dim() != 2:
        raise InvalidInputError(
            _ASKED,
            f"rows has dtype {rows.dtype} and shape {tuple(rows.shape)}",
            f"pass a matrix whose dtype is one of {', '.join(map(str, DTYPES))}",
        )
    if rows.shape[1] * rows.element_size() >= _LONGEST_ROW:
        raise InvalidInputError(
            _ASKED,
            f"a row has {rows.shape[1]} elements of {rows.element_size()} bytes",
            f"pass rows of less than {_LONGEST_ROW} bytes",
        )
    for table in (bases, starts):
        if table.dtype != torch.int64 or table.dim() != 1 or len(table) != len(bases):
            raise InvalidInputError(
                _ASKED,
                f"bases has dtype {bases.dtype} and shape {tuple(bases.shape)}, and starts has"
                f" dtype {starts.dtype} and shape {tuple(starts.shape)}",
                "pass two int64 vectors with an entry for each rank",
            )
    if not len(bases) or check_integer(alignment, "alignment", 1, _ASKED) % rows.element_size():
        raise InvalidInputError(
            _ASKED,
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
            _ASKED,
            "local and remote entries do not have the same number of weights",
            "pass as many weights for each entry of both, or None for both",
        )
    for tensor in (*_spread(local), *_spread(remote), bases, starts):
        if tensor is not None and tensor.device != rows.device:
            raise InvalidInputError(
                _ASKED,
                f"some tensors are on '{rows.device}' and some on '{tensor.device}'",
                "move them to one device",
            )


def _check_entries(entries: Entries, like: torch.Tensor, rows: torch.Tensor) -> None:
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
            _ASKED,
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
            _ASKED,
            f"weights has dtype {weights.dtype} and shape {tuple(weights.shape)}",
            f"pass weights of dtype {rows.dtype} and shape ({len(columns)}, n), where n divides the"
            f" rows' width {rows.shape[1]}",
        )
