"""Writing and training rows of tables over tiers; see ``kernels/scatter.cu``.

Both operators take ids in any order and with repeats, sort them, and let one thread or warp see
to all entries of one id, in the order in which they came.  So no two threads write one row, and
the result is the same, bit for bit, on the CPU and on a GPU.

Where a table is kept in several copies, or read by several ranks, ``shares`` says which rows this
rank writes; :mod:`dgl_mgpu.store.row_updates` has all ranks write theirs.

Unlike other operators, these do not raise errors of earlier calls on a GPU: ranks change rows
together, and one that did not would have other rows from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import check_ids, check_tensor, raise_at_id_outside
from dgl_mgpu.ops.cpu import (
    Rows,
    copy_bytes,
    inline,
    kernel,
    load_id,
    position_of,
    rows_argument,
    segment_of,
)
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer, position_type
from dgl_mgpu.ops.library import Operator, Size, Written
from dgl_mgpu.ops.view import RowView


# What is written lies behind the pointers: to torch that is a change of theirs, which keeps the
# order of calls and the calls themselves.
class WrittenRows(NamedTuple):
    """What operators that write rows take of a table: arguments of its view, and ``shares``."""

    tiers: Tensor
    pointers: Written
    position: Tensor
    shares: Tensor
    num_rows: Size


@Operator
def scatter_rows_op(ids: Tensor, rows: Tensor, table: WrittenRows) -> None:
    return None


@Operator
def update_rows_op(
    ids: Tensor, gradients: Tensor, table: WrittenRows, rule: int, settings: Sequence[float]
) -> None:
    return None


@dataclass(frozen=True)
class SGD:
    """``row -= lr * g``, where ``g`` is the sum of the row's gradients.

    With ``lr=-1`` the sums are added to the rows: an accumulating scatter.
    """

    lr: float

    number: ClassVar[int] = 0
    num_states: ClassVar[int] = 0

    @property
    def settings(self) -> list[float]:
        """The rule's numbers as kernels take them."""
        return [self.lr]


@dataclass(frozen=True)
class Adagrad:
    """``sum += g²; row -= lr * g / (√sum + eps)``, as ``torch.optim.Adagrad``."""

    lr: float
    eps: float = 1e-10

    number: ClassVar[int] = 1
    num_states: ClassVar[int] = 1

    @property
    def settings(self) -> list[float]:
        """The rule's numbers as kernels take them."""
        return [self.lr, self.eps]


@dataclass(frozen=True)
class Adam:
    """One step of ``torch.optim.SparseAdam``: the moments of the rows at hand decay, others wait.

    Attributes
    ----------
    lr : float
    step : int
        Number of this step, from 1 on; one count for the whole table.
    betas : tuple of float
    eps : float
    """

    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    number: ClassVar[int] = 2
    num_states: ClassVar[int] = 2

    @property
    def settings(self) -> list[float]:
        """The rule's numbers as kernels take them."""
        first, second = (1 - beta**self.step for beta in self.betas)
        step_size = self.lr * math.sqrt(second) / first
        return [step_size, 1 - self.betas[0], 1 - self.betas[1], self.eps]


Rule = SGD | Adagrad | Adam


@dataclass(frozen=True)
class AlignedTables:
    """Tables of one shape whose rows lie in the same tiers and parts: parameters and their state.

    Attributes
    ----------
    tiers, position : Tensor
        As in :class:`RowView`.
    pointers : Tensor, int64, shape (sum of parts, tables)
    shares : Tensor, int64, shape (sum of parts, 2) or (0, 2)
        As in :func:`scatter_rows`.
    num_rows : int
    row_shape : tuple of int
    owner : object
        Whatever keeps the addressed memory mapped.
    """

    tiers: Tensor
    position: Tensor
    pointers: Tensor
    shares: Tensor
    num_rows: int
    row_shape: tuple[int, ...]
    owner: object

    @classmethod
    def of(cls, views: Sequence[RowView], shares: Tensor | None = None) -> AlignedTables:
        """Join the views of a table and of its optimizer's state.

        Make it once: it compares the views, for which a GPU is waited for.

        Raises
        ------
        InvalidInputError
            If a view's dtype is not float32, one is laid out otherwise than the first or lies on
            another device, or has rows on disk that a GPU cannot reach.
        """
        first = views[0]
        action = f"train a table of {first.num_rows} rows of shape {first.row_shape}"
        for number, view in enumerate(views):
            what = "the table" if number == 0 else f"state {number}"
            _check_reachable(view, what, action)
            if view.dtype != torch.float32:
                raise InvalidInputError(
                    action, f"{what} has dtype {view.dtype}", "store it as torch.float32"
                )
            if view.tiers.device != first.tiers.device:
                raise InvalidInputError(
                    action,
                    f"{what} is on '{view.tiers.device}'",
                    f"store it with the table, on '{first.tiers.device}'",
                )
            same = (view.num_rows, view.row_shape) == (first.num_rows, first.row_shape)
            if not same or not (
                torch.equal(view.tiers, first.tiers) and torch.equal(view.position, first.position)
            ):
                raise InvalidInputError(
                    action,
                    f"{what} is placed in other tiers than the table"
                    if same
                    else f"{what} has {view.num_rows} rows of shape {view.row_shape}",
                    "store the state with the table's shape and placement",
                )
        return cls(
            first.tiers,
            first.position,
            torch.stack([view.pointers for view in views], dim=1),
            _checked_shares(shares, first, action),
            first.num_rows,
            first.row_shape,
            [view.owner for view in views],
        )


def scatter_rows(view: RowView, ids: Tensor, rows: Tensor, shares: Tensor | None = None) -> None:
    """Write rows of a table, wherever they are kept.

    Parameters
    ----------
    view : RowView
        The table as this rank sees it.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids; where one is repeated its last row is kept.
    rows : Tensor, ``view.dtype``, shape (n, *view.row_shape)
        On the device of ``ids``.
    shares : Tensor, int64, shape (len(view.pointers), 2), optional
        For each segment, a number of writers and this rank's place among them: it writes the
        segment's rows ``r`` with ``r % writers == place``, and none where the number is 0.
        By default all rows are written.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype or shape, or the table has rows on disk that a GPU cannot
        reach (``view.disk``).
    IdOutOfRangeError
        If an id is negative or not smaller than ``view.num_rows``; nothing is written then.  On
        a GPU it is raised by the next operator call, as for
        :func:`~dgl_mgpu.ops.gather.gather_rows`.
    """
    action = f"write rows of a table of {view.num_rows} rows"
    _check_reachable(view, "the table", action)
    ids = check_ids(ids, action, view.tiers.device)
    shape = (ids.numel(), *view.row_shape)
    check_tensor(rows, "rows", action, view.dtype, shape, ids.device)
    shares = _checked_shares(shares, view, action)
    torch.ops.dgl_mgpu.scatter_rows(
        ids, rows.detach().contiguous(), view.tiers, view.pointers, view.position, shares,
        view.num_rows,
    )  # fmt: skip


def update_rows(tables: AlignedTables, ids: Tensor, gradients: Tensor, rule: Rule) -> None:
    """Take an optimizer's step on the rows that have gradients.

    Parameters
    ----------
    tables : AlignedTables
        The table and, for :class:`Adagrad`, the sum of squares, for :class:`Adam` the first and
        the second moment.
    ids : Tensor, int32 or int64, shape (n,)
        Row ids; the gradients of a repeated one are summed in the order in which they come.
    gradients : Tensor, float32, shape (n, *tables.row_shape)
        On the device of ``ids``.
    rule : SGD, Adagrad or Adam
        Computed in float32 without fused operations.

    Raises
    ------
    InvalidInputError
        If an argument has the wrong dtype or shape, or there are more or fewer states than the
        rule has.
    IdOutOfRangeError
        As :func:`scatter_rows`.

    Notes
    -----
    Summing is what autograd does with the rows of a repeated id.  ``dgl.optim`` takes the mean
    instead, and counts Adam's steps for each row.
    """
    action = f"update rows of a table of {tables.num_rows} rows"
    ids = check_ids(ids, action, tables.tiers.device)
    shape = (ids.numel(), *tables.row_shape)
    check_tensor(gradients, "gradients", action, torch.float32, shape, ids.device)
    num_states = tables.pointers.shape[1] - 1
    if num_states != rule.num_states:
        raise InvalidInputError(
            action,
            f"there are {num_states} tables of state for {type(rule).__name__}",
            f"pass {rule.num_states} of them",
        )
    torch.ops.dgl_mgpu.update_rows(
        ids, gradients.detach().contiguous(), tables.tiers, tables.pointers, tables.position,
        tables.shares, tables.num_rows, rule.number, rule.settings,
    )  # fmt: skip


def _check_reachable(view: RowView, what: str, action: str) -> None:
    if view.disk is not None:
        raise InvalidInputError(
            action,
            f"{what} has rows on disk, which a GPU cannot write",
            "keep it in GPU or host memory, where it is changed",
        )


def _checked_shares(shares: Tensor | None, view: RowView, action: str) -> Tensor:
    if shares is None:
        return view.pointers.new_empty((0, 2))
    shape = (len(view.pointers), 2)
    check_tensor(shares, "shares", action, torch.int64, shape, shares.device)
    return shares.to(view.pointers.device).contiguous()


#: Bytes written per range of ids that are worth waking a thread for.
_GRAIN_BYTES = 64 * 1024

_SGD, _ADAGRAD = SGD.number, Adagrad.number


@inline
def _find(row: int, rows: Rows, shares: np.ndarray) -> tuple[int, int]:
    """Segment of a row, or -1 where it is not this rank's to write; and its row there."""
    tiers, _, position, position_width = rows
    segment, local = segment_of(position_of(row, position, position_width), tiers)
    if len(shares) != 0:
        writers, place = shares[segment, 0], shares[segment, 1]
        if writers == 0 or (writers != 1 and local % writers != place):
            return -1, local
    return segment, local


@kernel
def _scatter(
    begin: int, end: int, ids: int, id_width: int, order: np.ndarray, source: int, rows: Rows,
    shares: np.ndarray, row_bytes: int,
) -> None:  # fmt: skip
    """Write the rows of the sorted ids ``[begin, end)`` that are the last of their id."""
    for place in range(begin, end):
        row = load_id(ids, place, id_width)
        if place + 1 < len(order) and load_id(ids, place + 1, id_width) == row:
            continue
        segment, local = _find(row, rows, shares)
        if segment >= 0:
            target = rows[1][segment, 0] + local * row_bytes
            copy_bytes(target, source + order[place] * row_bytes, row_bytes)


@kernel
def _update(
    begin: int, end: int, ids: int, id_width: int, order: np.ndarray, gradients: np.ndarray,
    rows: Rows, shares: np.ndarray, rule: int, settings: np.ndarray,
) -> None:  # fmt: skip
    """Take a step on the rows of the sorted ids ``[begin, end)`` that are the first of their id."""
    pointers = rows[1]
    tables, width = pointers.shape[1], gradients.shape[1]
    row_bytes = 4 * width
    values = np.empty((3, width), np.float32)
    param, first, second = values[0], values[1], values[2]
    total = np.empty(width, np.float32)
    for place in range(begin, end):
        row = load_id(ids, place, id_width)
        if place > 0 and load_id(ids, place - 1, id_width) == row:
            continue
        segment, local = _find(row, rows, shares)
        if segment < 0:
            continue
        total[:] = gradients[order[place]]
        other = place + 1
        while other < len(order) and load_id(ids, other, id_width) == row:
            for column in range(width):
                total[column] += gradients[order[other], column]
            other += 1
        for table in range(tables):
            address = pointers[segment, table] + local * row_bytes
            copy_bytes(values[table].ctypes.data, address, row_bytes)
        if rule == _SGD:
            for column in range(width):
                param[column] -= settings[0] * total[column]
        elif rule == _ADAGRAD:
            for column in range(width):
                gradient = total[column]
                first[column] += gradient * gradient
                ratio = gradient / (np.sqrt(first[column]) + settings[1])
                param[column] -= settings[0] * ratio
        else:
            for column in range(width):
                gradient = total[column]
                first[column] += (gradient - first[column]) * settings[1]
                second[column] += (gradient * gradient - second[column]) * settings[2]
                ratio = first[column] / (np.sqrt(second[column]) + settings[3])
                param[column] -= settings[0] * ratio
        for table in range(tables):
            address = pointers[segment, table] + local * row_bytes
            copy_bytes(address, values[table].ctypes.data, row_bytes)


def _sorted(ids: Tensor, num_rows: int, action: str) -> tuple[Tensor, Tensor]:
    """Ids in ascending order and the place of each, equal ones as they came."""
    sorted_ids, order = torch.sort(ids, stable=True)
    if sorted_ids[0] < 0 or sorted_ids[-1] >= num_rows:
        raise_at_id_outside(ids, num_rows, action)
    return sorted_ids, order


@scatter_rows_op.cpu
def _scatter_rows_cpu(ids: Tensor, rows: Tensor, table: WrittenRows) -> None:
    tiers, pointers, position, shares, num_rows = table
    count = ids.numel()
    if count == 0:
        return
    sorted_ids, order = _sorted(ids, num_rows, "write rows")
    row_bytes = rows.numel() // count * rows.element_size()
    cpu.run(
        _scatter, count, max(1, _GRAIN_BYTES // max(row_bytes, 8)), sorted_ids.data_ptr(),
        sorted_ids.element_size(), order.numpy(), rows.data_ptr(),
        rows_argument(tiers, pointers[:, None], position), shares.numpy(), row_bytes,
    )  # fmt: skip


@update_rows_op.cpu
def _update_rows_cpu(
    ids: Tensor, gradients: Tensor, table: WrittenRows, rule: int, settings: Sequence[float]
) -> None:
    tiers, pointers, position, shares, num_rows = table
    count = ids.numel()
    if count == 0:
        return
    sorted_ids, order = _sorted(ids, num_rows, "update rows")
    cpu.run(
        _update, count, max(1, _GRAIN_BYTES // max(4 * gradients.numel() // count, 8)),
        sorted_ids.data_ptr(), sorted_ids.element_size(), order.numpy(),
        gradients.reshape(count, -1).numpy(), rows_argument(tiers, pointers, position),
        shares.numpy(), rule, np.array(settings, np.float32),
    )  # fmt: skip


_THREADS = 256
_WARPS = _THREADS // 32
_VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
_RULES = {SGD.number: "SGD", Adagrad.number: "Adagrad", Adam.number: "Adam"}
#: Numbers that every rule's kernel takes; the last ones are those of Adam alone.
_NUM_SETTINGS = 4


@scatter_rows_op.cuda
def _scatter_rows_cuda(ids: Tensor, rows: Tensor, table: WrittenRows) -> None:
    count = ids.numel()
    row_bytes = 0 if count == 0 else rows.numel() // count * rows.element_size()
    if row_bytes == 0:
        return
    vector = _VECTORS[math.gcd(row_bytes, rows.data_ptr(), 16)]
    _launch(
        f"scatter<{c_type(ids.dtype)}, {position_type(table.position)}, {vector}>",
        ids,
        rows,
        table,
        row_bytes,
    )


@update_rows_op.cuda
def _update_rows_cuda(
    ids: Tensor, gradients: Tensor, table: WrittenRows, rule: int, settings: Sequence[float]
) -> None:
    count = ids.numel()
    if gradients.numel() == 0:
        return
    _launch(
        f"update<{c_type(ids.dtype)}, {position_type(table.position)}, dgl_mgpu::{_RULES[rule]}>",
        ids,
        gradients,
        table,
        gradients.numel() // count,
        *settings,
        *[0.0] * (_NUM_SETTINGS - len(settings)),
    )


def _launch(
    expression: str, ids: Tensor, rows: Tensor, table: WrittenRows, *arguments: float
) -> None:
    tiers, pointers, position, shares, num_rows = table
    device, count = ids.device, ids.numel()
    sorted_ids, order = torch.sort(ids, stable=True)
    kernel = Kernel("scatter.cu", f"dgl_mgpu::{expression}")
    kernel(
        gpu.blocks_within(kernel, _THREADS, -(-count // _WARPS), device), _THREADS, sorted_ids,
        order, count, rows, tiers, len(tiers), pointers, position_pointer(position),
        shares if len(shares) else None, num_rows, gpu.fault_record(device), *arguments,
        device=device,
    )  # fmt: skip
