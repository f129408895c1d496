"""Generalised sparse-dense product; the CPU computes one row after another."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.check import DTYPES, ID_DTYPES, MAX_ROW_BYTES, check_tensor
from dgl_mgpu.ops.cpu import inline, kernel, load_id, store_id
from dgl_mgpu.ops.library import Operator, Sizes, Written, call

OPS = ("add", "sub", "mul", "div", "copy_lhs", "copy_rhs")
REDUCES = ("sum", "mean", "max", "min")
#: Those that choose one of the messages.
CHOICES = ("max", "min")


def outputs(
    indptr: Tensor, u: Tensor | None, e: Tensor | None, shape: Sequence[int], reduce: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Allocate the operator's outputs; a choice is None where the reduction makes none."""
    out_shape = (indptr.shape[0] - 1, *shape)
    example: Tensor = e if u is None else u  # type: ignore[assignment]
    out = example.new_empty(out_shape)
    if reduce not in CHOICES:
        return out, None, None
    arg_u = None if u is None else indptr.new_empty(out_shape)
    arg_e = None if e is None else indptr.new_empty(out_shape)
    return out, arg_u, arg_e


class MessageOperands(NamedTuple):
    """Edges in CSC and the operands of their messages, as :func:`spmm` takes them."""

    indptr: Tensor
    indices: Tensor | None
    eids: Tensor | None
    u: Tensor | None
    e: Tensor | None


@Operator
def spmm_op(messages: MessageOperands, shape: Sizes, op: str, reduce: str) -> list[Tensor]:
    indptr, _, _, u, e = messages
    return [tensor for tensor in outputs(indptr, u, e, shape, reduce) if tensor is not None]


@Operator
def add_spmm_op(out: Written, messages: MessageOperands, op: str) -> None:
    return None


@Operator
def spmm_shares_op(indptr: Tensor, indices: Tensor, bounds: Tensor, u: Tensor) -> Tensor:
    return u.new_empty(indptr.shape[0] - 1, *u.shape[1:])


def spmm(
    indptr: Tensor,
    indices: Tensor | None,
    eids: Tensor | None,
    u: Tensor | None,
    e: Tensor | None,
    op: str,
    reduce: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reduce, for every destination node, what an operation makes of its in-edges.

    An edge's message is ``op(u[source], e[edge])``; ``copy_lhs`` is the former operand alone,
    ``copy_rhs`` the latter.  Shapes of rows broadcast against each other as NumPy's do.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
        Where each destination's entries begin, and the end of the last.
    indices : Tensor, dtype of ``indptr``, shape (nnz,), or None
        Source node of each entry; not looked at by ``copy_rhs``.
    eids : Tensor, dtype of ``indptr``, shape (nnz,), or None
        Edge of each entry; None where entry ``i`` is edge ``i``.  Not looked at by ``copy_lhs``.
    u : Tensor, float32, float64, float16 or bfloat16, shape (num_src, *u_shape), or None
        Not looked at by ``copy_rhs``.
    e : Tensor, dtype of ``u``, shape (num_edges, *e_shape), or None
        Not looked at by ``copy_lhs``.
    op : {'add', 'sub', 'mul', 'div', 'copy_lhs', 'copy_rhs'}
    reduce : {'sum', 'mean', 'max', 'min'}

    Returns
    -------
    out : Tensor, dtype of the operands, shape (num_rows, *shape)
        ``shape`` is what the operands' shapes broadcast to.  Half types are summed up in float32
        and rounded once.  Of a row without entries sum and mean are 0, the maximum is -inf and the
        minimum inf.
    arg_u, arg_e : Tensor, dtype of ``indptr``, shape of ``out``, or None
        Source node and edge of the entry chosen, the first of equal ones; 0 where none was.  None
        for sums and means, and where ``op`` lacks the operand.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device, or ``op`` or ``reduce`` is unknown.

    Notes
    -----
    The same bits on every run.  Maxima and minima begin with -inf and inf and an entry takes
    over if it is larger or smaller, as in DGL's operator for the CPU: so NaN is never chosen, nor
    is -inf or inf in place of what they begin with.

    What ``indptr``, ``indices`` and ``eids`` hold is not checked: ids must be rows.
    """
    if op == "copy_rhs":
        u = indices = None
    elif op == "copy_lhs":
        e = eids = None
    shape = message_shape(op, reduce, row_type(u), row_type(e))
    check_entries(indptr, indices, eids, u, e)
    results = call("spmm", (indptr, indices, eids, u, e), shape, op, reduce)
    if reduce not in CHOICES:
        return results[0], None, None
    return results[0], None if u is None else results[1], None if e is None else results[-1]


def add_spmm(
    out: Tensor,
    indptr: Tensor,
    indices: Tensor | None,
    eids: Tensor | None,
    u: Tensor | None,
    e: Tensor | None,
    op: str,
) -> None:
    """Add to ``out`` what :func:`spmm` with these arguments and 'sum' returns.

    The same sum, of sources that are not all there at a time: MG-GCN's rounds (section 4.3).

    Parameters
    ----------
    out : Tensor, dtype of the operands, shape (num_rows, *shape)
        Contiguous, at a multiple of 16 bytes.  Half types are rounded each time.
    indptr, indices, eids, u, e, op
        As for :func:`spmm`.

    Raises
    ------
    InvalidInputError
        As :func:`spmm`, or if ``out`` is not what that returns, or not contiguous.
    """
    if op == "copy_rhs":
        u = indices = None
    elif op == "copy_lhs":
        e = eids = None
    shape = message_shape(op, "sum", row_type(u), row_type(e))
    check_entries(indptr, indices, eids, u, e)
    example: Tensor = e if u is None else u  # type: ignore[assignment]
    action, out_shape = "add sums of messages", (indptr.shape[0] - 1, *shape)
    check_tensor(out, "out", action, example.dtype, out_shape, indptr.device, contiguous=True)
    if out.data_ptr() % 16:
        raise InvalidInputError(
            action, f"out is at address {out.data_ptr()}", "pass it at a multiple of 16 bytes"
        )
    call("add_spmm", (out, indptr, indices, eids, u, e), op)


def spmm_shares(indptr: Tensor, indices: Tensor, bounds: Tensor, u: Tensor) -> Tensor:
    """Sum, for every row, equal shares of its sources' rows: a mean, transposed.

    A source's row is shared equally by all entries that the source has in another matrix: this one
    transposed, for the gradient of a mean.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
        Where each row's entries begin, and the end of the last.
    indices : Tensor, dtype of ``indptr``, shape (nnz,)
        Source of each entry.
    bounds : Tensor, dtype of ``indptr``, shape (num_src + 1,)
        The other matrix's ``indptr``, by sources.
    u : Tensor, float32, float64, float16 or bfloat16, shape (num_src, *shape)

    Returns
    -------
    Tensor, dtype of ``u``, shape (num_rows, *shape)
        The sum of ``u[source] * (1 / (bounds[source + 1] - bounds[source]))``.  Half types are
        multiplied and summed up in float32 and rounded once.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype, shape or device.

    Notes
    -----
    The same bits on every run.  What ``indptr``, ``indices`` and ``bounds`` hold is not checked.
    """
    message_shape("copy_lhs", "sum", row_type(u), None)
    check_entries(indptr, indices, None, u, None)
    shape = (u.shape[0] + 1,)
    check_tensor(bounds, "bounds", "add shares of rows", indptr.dtype, shape, indptr.device)
    return call("spmm_shares", (indptr, indices, bounds, u))


RowType = tuple[torch.dtype, tuple[int, ...]]


def row_type(operand: Tensor | None) -> RowType | None:
    """What checks of an operand depend on: a cache key, of which a program has few."""
    if operand is None:
        return None
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        raise InvalidInputError(
            "reduce messages",
            f"an operand is {operand!r}",
            "pass a tensor with a row for each node or edge",
        )
    return operand.dtype, operand.shape[1:]


def message_shape(op: str, reduce: str, u: RowType | None, e: RowType | None) -> tuple[int, ...]:
    """Shape of a message."""
    # torch.compile warns of caches, which it looks through.
    find = _message_shape if torch.compiler.is_compiling() else _known_message_shape
    return find(op, reduce, u, e)


def _message_shape(op: str, reduce: str, u: RowType | None, e: RowType | None) -> tuple[int, ...]:
    action = f"reduce messages of {op!r} by {reduce!r}"
    if op not in OPS or reduce not in REDUCES:
        raise InvalidInputError(
            action,
            f"there is no op={op!r}" if op not in OPS else f"there is no reduce={reduce!r}",
            f"pass one of {', '.join(OPS if op not in OPS else REDUCES)}",
        )
    if (u is None and op != "copy_rhs") or (e is None and op != "copy_lhs"):
        missing = "u" if u is None and op != "copy_rhs" else "e"
        raise InvalidInputError(action, f"{missing} is None", f"pass {missing}")
    dtypes = {operand[0] for operand in (u, e) if operand is not None}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        found = " and ".join(sorted(map(str, dtypes)))
        raise InvalidInputError(
            action,
            f"the operands have dtype {found}",
            f"pass operands of one dtype, one of {', '.join(map(str, DTYPES))}",
        )
    shapes = [operand[1] for operand in (u, e) if operand is not None]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise InvalidInputError(
            action,
            f"the rows have shapes {tuple(shapes[0])} and {tuple(shapes[1])}",
            "pass shapes that broadcast against each other",
        ) from error
    if math.prod(shape) * dtypes.pop().itemsize >= MAX_ROW_BYTES:
        raise InvalidInputError(
            action, f"a message has shape {shape}", f"pass rows of less than {MAX_ROW_BYTES} bytes"
        )
    return shape


_known_message_shape = functools.lru_cache(maxsize=4096)(_message_shape)


def check_entries(
    indptr: Tensor, indices: Tensor | None, eids: Tensor | None, u: Tensor | None, e: Tensor | None
) -> None:
    action = "reduce messages over in-edges"
    if indptr.dtype not in ID_DTYPES or indptr.dim() != 1 or indptr.numel() == 0:
        raise InvalidInputError(
            action,
            f"indptr has dtype {indptr.dtype} and shape {tuple(indptr.shape)}",
            "pass a vector of int32 or int64, one longer than there are destinations",
        )
    for ids in (indices, eids):
        if ids is not None and (ids.dtype != indptr.dtype or ids.dim() != 1):
            raise InvalidInputError(
                action,
                f"indptr has dtype {indptr.dtype}, but the ids have dtype {ids.dtype} and shape"
                f" {tuple(ids.shape)}",
                "pass vectors of one dtype",
            )
    for tensor in (indices, eids, u, e):
        if tensor is not None and tensor.device != indptr.device:
            raise InvalidInputError(
                action,
                f"some tensors are on '{indptr.device}' and some on '{tensor.device}'",
                "move them to one device",
            )
    if u is not None and indices is None:
        raise InvalidInputError(action, "indices is None", "pass the source of each entry")
    if indices is not None and eids is not None and indices.shape != eids.shape:
        raise InvalidInputError(
            action,
            f"there are {len(indices)} sources, but {len(eids)} edge ids",
            "pass both for each entry",
        )
    if indices is not None and eids is None and e is not None and len(e) < len(indices):
        raise InvalidInputError(
            action,
            f"there are {len(indices)} entries, but e has {len(e)} rows, and there are no eids",
            "pass a row for each entry, or eids",
        )


#: Rows that are worth waking a thread for.
_GRAIN = 64

_ADD, _SUB, _MUL, _DIV, _COPY_LHS, _COPY_RHS = range(6)
_SUM, _MEAN, _MAX, _MIN = range(4)


@inline
def _message(left: float, right: float, op: int) -> float:
    if op == _ADD:
        return left + right
    if op == _SUB:
        return left - right
    if op == _MUL:
        return left * right
    return left / right


@kernel
def _spmm(
    begin: int, end: int, indptr: int, indices: int, eids: int, id_width: int, u: np.ndarray,
    e: np.ndarray, u_columns: np.ndarray, e_columns: np.ndarray, op: int, reduce: int,
    out: np.ndarray, arg_u: int, arg_e: int,
) -> None:  # fmt: skip
    """Rows ``[begin, end)``; ids are addresses of arrays, 0 where there is none."""
    width = out.shape[1]
    for row in range(begin, end):
        for column in range(width):
            out[row, column] = -np.inf if reduce == _MAX else np.inf if reduce == _MIN else 0.0
            if arg_u != 0:
                store_id(arg_u, row * width + column, id_width, 0)
            if arg_e != 0:
                store_id(arg_e, row * width + column, id_width, 0)
        first, last = load_id(indptr, row, id_width), load_id(indptr, row + 1, id_width)
        for entry in range(first, last):
            source = load_id(indices, entry, id_width) if indices != 0 else 0
            edge = load_id(eids, entry, id_width) if eids != 0 else entry
            for column in range(width):
                if op == _COPY_LHS:
                    value = u[source, u_columns[column]]
                elif op == _COPY_RHS:
                    value = e[edge, e_columns[column]]
                else:
                    value = _message(u[source, u_columns[column]], e[edge, e_columns[column]], op)
                if reduce in (_SUM, _MEAN):
                    out[row, column] += value
                    continue
                best = out[row, column]
                if (reduce == _MAX and best < value) or (reduce == _MIN and best > value):
                    out[row, column] = value
                    if arg_u != 0:
                        store_id(arg_u, row * width + column, id_width, source)
                    if arg_e != 0:
                        store_id(arg_e, row * width + column, id_width, edge)
        if reduce == _MEAN and last > first:
            for column in range(width):
                out[row, column] /= last - first


@spmm_op.cpu
def _spmm_cpu(
    messages: MessageOperands, shape: Sequence[int], op: str, reduce: str
) -> list[Tensor]:
    indptr, indices, eids, u, e = messages
    out, arg_u, arg_e = outputs(indptr, u, e, shape, reduce)
    indptr = indptr.contiguous()
    indices, eids = (None if ids is None else ids.contiguous() for ids in (indices, eids))
    number = torch.float64 if out.dtype == torch.float64 else torch.float32
    u_rows, u_columns = _rows(u, shape, number)
    e_rows, e_columns = _rows(e, shape, number)
    sums = torch.empty(len(out), out[0:1].numel() if len(out) else 0, dtype=number)
    cpu.run(
        _spmm, len(out), _GRAIN, _address(indptr), _address(indices), _address(eids),
        indptr.element_size(), u_rows, e_rows, u_columns, e_columns, OPS.index(op),
        REDUCES.index(reduce), sums.numpy(), _address(arg_u), _address(arg_e),
    )  # fmt: skip
    out.copy_(sums.view(out.shape))
    return [tensor for tensor in (out, arg_u, arg_e) if tensor is not None]


@add_spmm_op.cpu
def _add_spmm_cpu(out: Tensor, messages: MessageOperands, op: str) -> None:
    out += _spmm_cpu(*messages, list(out.shape[1:]), op, "sum")[0]


@spmm_shares_op.cpu
def _spmm_shares_cpu(indptr: Tensor, indices: Tensor, bounds: Tensor, u: Tensor) -> Tensor:
    number = torch.float64 if u.dtype == torch.float64 else torch.float32
    # The shares of sources without entries are never read.
    shares = bounds.diff().to(number).reciprocal().view(-1, *[1] * (u.dim() - 1))
    rows, shape = u.detach().to(number) * shares, list(u.shape[1:])
    (out,) = _spmm_cpu(indptr, indices, None, rows, None, shape, "copy_lhs", "sum")
    return out.to(u.dtype)


def _address(ids: Tensor | None) -> int:
    return ids.data_ptr() if ids is not None and ids.numel() else 0


def _rows(
    operand: Tensor | None, shape: Sequence[int], number: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """An operand as a matrix, and its column for each column of the output."""
    if operand is None:
        return np.empty((0, 0), torch.empty(0, dtype=number).numpy().dtype), np.empty(0, np.int64)
    row_shape = operand.shape[1:]
    columns = torch.arange(row_shape.numel()).view(row_shape).expand(shape)
    rows = operand.detach().to(number).reshape(len(operand), row_shape.numel())
    return rows.contiguous().numpy(), columns.reshape(-1).numpy()
