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
from dgl_mgpu.ops.cpu import (
    AHEAD,
    NARROW,
    WIDE,
    choose,
    filled,
    inline,
    kernel,
    load_id,
    load_vector,
    prefetch,
    prefetch_row,
    store_id,
    store_vector,
)
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


#: Rows, and numbers in all of their messages, that are worth waking a thread for.
_GRAIN, _NUMBERS = 64, 1 << 17
#: How many entries ahead rows are prefetched that are only added up.
_PREFETCH_DISTANCE = 24
#: Of messages that are made at a time, to choose of them.
_MESSAGE_BYTES = 1 << 13

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


@inline
def _row_at(ids: int, entry: int, id_width: int) -> int:
    return load_id(ids, entry, id_width) if ids != 0 else entry


@inline
def _prefetch_operands(
    u: np.ndarray, e: np.ndarray, indices: int, eids: int, id_width: int, entry: int, end: int
) -> None:
    """Prefetch what an entry's message is made of, if there is one before ``end``."""
    if entry < end:
        prefetch_row(u, load_id(indices, entry, id_width))
        if eids != 0:
            prefetch_row(e, load_id(eids, entry, id_width))


@inline
def _add_rows(
    target: np.ndarray, rows: np.ndarray, ids: int, id_width: int, first: int, last: int, end: int
) -> None:
    """Add the rows of entries ``[first, last)`` to ``target``, in their order.

    Sums of some columns are kept in registers over all entries.  ``end`` is the end of all entries,
    up to which rows are prefetched.
    """
    zero = target.dtype.type(0.0)
    wide, narrow = filled(zero, WIDE), filled(zero, NARROW)
    size, num_bytes = target.itemsize, len(target) * target.itemsize
    at, to = rows.ctypes.data, target.ctypes.data
    done = 0
    while done + 4 * WIDE <= num_bytes:
        a, b = load_vector(wide, to + done), load_vector(wide, to + done + WIDE)
        c = load_vector(wide, to + done + 2 * WIDE)
        d = load_vector(wide, to + done + 3 * WIDE)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            for line in range(4):
                prefetch(at + done + ahead * num_bytes + line * WIDE)
            address = at + done + _row_at(ids, entry, id_width) * num_bytes
            a, b = a + load_vector(wide, address), b + load_vector(wide, address + WIDE)
            c = c + load_vector(wide, address + 2 * WIDE)
            d = d + load_vector(wide, address + 3 * WIDE)
        store_vector(to + done, a)
        store_vector(to + done + WIDE, b)
        store_vector(to + done + 2 * WIDE, c)
        store_vector(to + done + 3 * WIDE, d)
        done += 4 * WIDE
    while done + WIDE <= num_bytes:
        a = load_vector(wide, to + done)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            prefetch(at + done + ahead * num_bytes)
            a = a + load_vector(wide, at + done + _row_at(ids, entry, id_width) * num_bytes)
        store_vector(to + done, a)
        done += WIDE
    while done + NARROW <= num_bytes:
        e = load_vector(narrow, to + done)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            prefetch(at + done + ahead * num_bytes)
            e = e + load_vector(narrow, at + done + _row_at(ids, entry, id_width) * num_bytes)
        store_vector(to + done, e)
        done += NARROW
    for column in range(done // size, len(target)):
        total = target[column]
        for entry in range(first, last):
            total += rows[_row_at(ids, entry, id_width), column]
        target[column] = total


@inline
def _choose_rows(
    best: np.ndarray, chosen: np.ndarray, rows: np.ndarray, ids: int, id_width: int, first: int,
    last: int, end: int, number: int, highest: bool,
) -> None:  # fmt: skip
    """Put the rows of entries ``[first, last)`` in place of ``best`` where they are better.

    As `_add_rows`.  ``chosen``, of integers as wide as the values, becomes the number of the entry,
    of which ``number`` is the first one's.
    """
    wide, narrow = filled(best.dtype.type(0), WIDE), filled(best.dtype.type(0), NARROW)
    zero = chosen.dtype.type(0)
    wide_choice, narrow_choice = filled(zero, WIDE), filled(zero, NARROW)
    size, num_bytes = best.itemsize, len(best) * best.itemsize
    at, to, chosen_to = rows.ctypes.data, best.ctypes.data, chosen.ctypes.data
    number -= first
    done = 0
    while done + 2 * WIDE <= num_bytes:
        a, in_a = load_vector(wide, to + done), load_vector(wide_choice, chosen_to + done)
        b = load_vector(wide, to + done + WIDE)
        in_b = load_vector(wide_choice, chosen_to + done + WIDE)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            for line in range(2):
                prefetch(at + done + ahead * num_bytes + line * WIDE)
            address = at + done + _row_at(ids, entry, id_width) * num_bytes
            values = load_vector(wide, address)
            a, in_a = choose(a, in_a, values, number + entry, highest)
            values = load_vector(wide, address + WIDE)
            b, in_b = choose(b, in_b, values, number + entry, highest)
        store_vector(to + done, a)
        store_vector(to + done + WIDE, b)
        store_vector(chosen_to + done, in_a)
        store_vector(chosen_to + done + WIDE, in_b)
        done += 2 * WIDE
    while done + WIDE <= num_bytes:
        a, in_a = load_vector(wide, to + done), load_vector(wide_choice, chosen_to + done)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            prefetch(at + done + ahead * num_bytes)
            values = load_vector(wide, at + done + _row_at(ids, entry, id_width) * num_bytes)
            a, in_a = choose(a, in_a, values, number + entry, highest)
        store_vector(to + done, a)
        store_vector(chosen_to + done, in_a)
        done += WIDE
    while done + NARROW <= num_bytes:
        c, in_c = load_vector(narrow, to + done), load_vector(narrow_choice, chosen_to + done)
        for entry in range(first, last):
            ahead = _row_at(ids, min(entry + _PREFETCH_DISTANCE, end - 1), id_width)
            prefetch(at + done + ahead * num_bytes)
            values_c = load_vector(narrow, at + done + _row_at(ids, entry, id_width) * num_bytes)
            c, in_c = choose(c, in_c, values_c, number + entry, highest)
        store_vector(to + done, c)
        store_vector(chosen_to + done, in_c)
        done += NARROW
    for column in range(done // size, len(best)):
        value, entry_of_value = best[column], chosen[column]
        for entry in range(first, last):
            other = rows[_row_at(ids, entry, id_width), column]
            if (other > value) if highest else (other < value):
                value, entry_of_value = other, number + entry
        best[column], chosen[column] = value, entry_of_value


@inline
def _reduce(
    result: np.ndarray, chosen: np.ndarray, rows: np.ndarray, ids: int, id_width: int, first: int,
    last: int, end: int, number: int, reduce: int,
) -> None:  # fmt: skip
    if reduce in (_MAX, _MIN):
        highest = reduce == _MAX
        _choose_rows(result, chosen, rows, ids, id_width, first, last, end, number, highest)
    else:
        _add_rows(result, rows, ids, id_width, first, last, end)


@inline
def _set_message(
    target: np.ndarray, left: np.ndarray, right: np.ndarray, repeat: int, op: int
) -> None:
    """Set ``target`` to a message; each column of ``right`` goes with ``repeat`` of ``left``."""
    zero = target.dtype.type(0.0)
    wide, narrow = filled(zero, WIDE), filled(zero, NARROW)
    size = target.itemsize
    to, at, by = target.ctypes.data, left.ctypes.data, right.ctypes.data
    # Columns ``[done, stop)`` have one column of ``right`` in common or, of as many, one each.
    done = stop = block = 0
    while stop < len(target) * size:
        stop += (len(target) if repeat == 1 else repeat) * size
        value = right[block]
        while done + WIDE <= stop:
            a = load_vector(wide, by + done) if repeat == 1 else filled(value, WIDE)
            store_vector(to + done, _message(load_vector(wide, at + done), a, op))
            done += WIDE
        while done + NARROW <= stop:
            b = load_vector(narrow, by + done) if repeat == 1 else filled(value, NARROW)
            store_vector(to + done, _message(load_vector(narrow, at + done), b, op))
            done += NARROW
        while done < stop:
            column = done // size
            value = right[column] if repeat == 1 else value
            target[column] = _message(left[column], value, op)
            done += size
        block += 1


@inline
def _store_ids(arg: int, row: int, chosen: np.ndarray, ids: int, id_width: int, first: int) -> None:
    """Store whose the chosen entries of a row are, 0 where none was chosen."""
    for column in range(len(chosen)):
        this = 0 if chosen[column] < 0 else _row_at(ids, first + chosen[column], id_width)
        store_id(arg, row * len(chosen) + column, id_width, this)


@kernel
def _spmm(
    begin: int, end: int, indptr: int, indices: int, eids: int, id_width: int, u: np.ndarray,
    e: np.ndarray, repeat: int, op: int, reduce: int, out: np.ndarray, numbers: np.ndarray,
    arg_u: int, arg_e: int,
) -> None:  # fmt: skip
    """Rows ``[begin, end)``; ids and args are addresses of arrays, 0 where there is none.

    ``numbers`` is empty, of the type that counts a row's entries: of integers as wide as values.
    """
    width = out.shape[1]
    chosen = np.empty(width, numbers.dtype)
    at_once = max(1, _MESSAGE_BYTES // max(1, width * out.itemsize))
    messages = np.empty((at_once, width), out.dtype)
    start = -np.inf if reduce == _MAX else np.inf if reduce == _MIN else 0.0
    end_of_all = load_id(indptr, end, id_width)
    for row in range(begin, end):
        result = out[row]
        result[:] = start
        chosen[:] = -1
        first, last = load_id(indptr, row, id_width), load_id(indptr, row + 1, id_width)
        if op in (_COPY_LHS, _COPY_RHS):
            rows, ids = (u, indices) if op == _COPY_LHS else (e, eids)
            _reduce(result, chosen, rows, ids, id_width, first, last, end_of_all, 0, reduce)
        else:
            for part in range(first, last, at_once):
                stop = min(part + at_once, last)
                for entry in range(part, stop):
                    if entry + AHEAD < end_of_all:
                        prefetch_row(u, load_id(indices, entry + AHEAD, id_width))
                        if eids != 0:
                            prefetch_row(e, load_id(eids, entry + AHEAD, id_width))
                    source = load_id(indices, entry, id_width)
                    edge = _row_at(eids, entry, id_width)
                    _set_message(messages[entry - part], u[source], e[edge], repeat, op)
                count = stop - part
                _reduce(result, chosen, messages, 0, 0, 0, count, count, part - first, reduce)
        if reduce == _MEAN and last > first:
            for column in range(width):
                result[column] /= last - first
        if arg_u != 0:
            _store_ids(arg_u, row, chosen, indices, id_width, first)
        if arg_e != 0:
            _store_ids(arg_e, row, chosen, eids, id_width, first)


@spmm_op.cpu
def _spmm_cpu(
    messages: MessageOperands, shape: Sequence[int], op: str, reduce: str
) -> list[Tensor]:
    indptr, indices, eids, u, e = messages
    out, arg_u, arg_e = outputs(indptr, u, e, shape, reduce)
    indptr = indptr.contiguous()
    indices, eids = (None if ids is None else ids.contiguous() for ids in (indices, eids))
    entries = next(len(ids) for ids in (indices, eids, e) if ids is not None)
    # A place in a list, of which a maximum is, is a number as wide as the values.
    is_wide = out.dtype == torch.float64 or entries >= 1 << 31
    number = torch.float64 if is_wide else torch.float32
    width = math.prod(shape)
    left = full_rows(u, shape, number)
    repeat = 1 if e is None else repeats(e.shape[1:], shape)
    if op.startswith("copy") or repeat is None:
        right, repeat = full_rows(e, shape, number), 1
    else:
        right = matrix(e, number)  # type: ignore[arg-type]
    results = out.view(len(out), width) if out.dtype == number else None
    results = torch.empty(len(out), width, dtype=number) if results is None else results
    grain = max(_GRAIN, _NUMBERS * len(out) // max(entries * width, 1))
    numbers = np.empty(0, np.int64 if number == torch.float64 else np.int32)
    cpu.run(
        _spmm, len(out), grain, address(indptr), address(indices), address(eids),
        indptr.element_size(), left.numpy(), right.numpy(), repeat, OPS.index(op),
        REDUCES.index(reduce), results.numpy(), numbers, address(arg_u), address(arg_e),
    )  # fmt: skip
    if out.dtype != number:
        out.copy_(results.view(out.shape))
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


def address(ids: Tensor | None) -> int:
    return ids.data_ptr() if ids is not None and ids.numel() else 0


def matrix(operand: Tensor, number: torch.dtype) -> Tensor:
    """An operand as rows of so many numbers."""
    return operand.detach().to(number).reshape(len(operand), operand[0:1].numel()).contiguous()


def full_rows(operand: Tensor | None, shape: Sequence[int], number: torch.dtype) -> Tensor:
    """An operand with a column for each of the output."""
    if operand is None:
        return torch.empty(0, 0, dtype=number)
    rows = operand.detach().to(number)
    if tuple(rows.shape[1:]) != tuple(shape):
        lacking = [1] * (len(shape) - rows.dim() + 1)
        rows = rows.reshape(len(rows), *lacking, *rows.shape[1:]).expand(len(rows), *shape)
    return rows.reshape(len(rows), math.prod(shape)).contiguous()


def repeats(row_shape: Sequence[int], shape: Sequence[int]) -> int | None:
    """How many columns in a row each one of an operand goes with; None if it is not so many."""
    padded = [1] * (len(shape) - len(row_shape)) + list(row_shape)
    alike = 0  # dimensions in which there is one for each
    while alike < len(shape) and padded[alike] == shape[alike]:
        alike += 1
    return math.prod(shape[alike:]) if all(size == 1 for size in padded[alike:]) else None
