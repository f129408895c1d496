"""Generalised sparse-dense product on the CPU: a row after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.memory import inline, kernel, load_id, store_id
from dgl_mgpu.ops.spmm import op as contract
from dgl_mgpu.ops.spmm.op import MessageOperands, add_spmm_op, spmm_op, spmm_shares_op

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
    begin: int,
    end: int,
    indptr: int,
    indices: int,
    eids: int,
    id_width: int,
    u: np.ndarray,
    e: np.ndarray,
    u_columns: np.ndarray,
    e_columns: np.ndarray,
    op: int,
    reduce: int,
    out: np.ndarray,
    arg_u: int,
    arg_e: int,
) -> None:
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
) -> list[torch.Tensor]:
    indptr, indices, eids, u, e = messages
    out, arg_u, arg_e = contract.outputs(indptr, u, e, shape, reduce)
    indptr = indptr.contiguous()
    indices, eids = (None if ids is None else ids.contiguous() for ids in (indices, eids))
    number = torch.float64 if out.dtype == torch.float64 else torch.float32
    u_rows, u_columns = _rows(u, shape, number)
    e_rows, e_columns = _rows(e, shape, number)
    sums = torch.empty(len(out), out[0:1].numel() if len(out) else 0, dtype=number)
    parallel.run(
        _spmm,
        len(out),
        _GRAIN,
        _address(indptr),
        _address(indices),
        _address(eids),
        indptr.element_size(),
        u_rows,
        e_rows,
        u_columns,
        e_columns,
        contract.OPS.index(op),
        contract.REDUCES.index(reduce),
        sums.numpy(),
        _address(arg_u),
        _address(arg_e),
    )
    out.copy_(sums.view(out.shape))
    return [found for found in (out, arg_u, arg_e) if found is not None]


@add_spmm_op.cpu
def _add_spmm_cpu(out: torch.Tensor, messages: MessageOperands, op: str) -> None:
    out += _spmm_cpu(*messages, list(out.shape[1:]), op, "sum")[0]


@spmm_shares_op.cpu
def _spmm_shares_cpu(
    indptr: torch.Tensor, indices: torch.Tensor, bounds: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    number = torch.float64 if u.dtype == torch.float64 else torch.float32
    # The shares of sources without entries are never read.
    shares = bounds.diff().to(number).reciprocal().view(-1, *[1] * (u.dim() - 1))
    rows, shape = u.detach().to(number) * shares, list(u.shape[1:])
    (out,) = _spmm_cpu(indptr, indices, None, rows, None, shape, "copy_lhs", "sum")
    return out.to(u.dtype)


def _address(ids: torch.Tensor | None) -> int:
    return ids.data_ptr() if ids is not None and ids.numel() else 0


def _rows(
    operand: torch.Tensor | None, shape: Sequence[int], number: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """An operand as a matrix, and its column for each column of the output."""
    if operand is None:
        return np.empty((0, 0), torch.empty(0, dtype=number).numpy().dtype), np.empty(0, np.int64)
    row_shape = operand.shape[1:]
    columns = torch.arange(row_shape.numel()).view(row_shape).expand(shape)
    rows = operand.detach().to(number).reshape(len(operand), row_shape.numel())
    return rows.contiguous().numpy(), columns.reshape(-1).numpy()
