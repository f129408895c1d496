"""Writing and training rows of tables over tiers: the contract.

Both operators take ids in any order and with repeats, sort them, and let one thread or warp see
to all entries of one id, in the order in which they came.  So no two threads write one row, and
the result is the same, bit for bit, on the CPU and on a GPU.

Where a table is kept in several copies, or read by several ranks, ``shares`` says which rows this
rank writes; :mod:`dgl_mgpu.store.row_updates` has all ranks write theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import check_ids
from dgl_mgpu.ops.library import Operator, Size, Written
from dgl_mgpu.ops.view import RowView


# What is written lies behind the pointers: to torch that is a change of theirs, which keeps the
# order of calls and the calls themselves.
class WrittenRows(NamedTuple):
    """What operators that write rows take of a table: arguments of its view, and ``shares``."""

    tiers: torch.Tensor
    pointers: Written
    position: torch.Tensor
    shares: torch.Tensor
    num_rows: Size


@Operator
def scatter_rows_op(ids: torch.Tensor, rows: torch.Tensor, table: WrittenRows) -> None:
    return None


@Operator
def update_rows_op(
    ids: torch.Tensor,
    gradients: torch.Tensor,
    table: WrittenRows,
    rule: int,
    settings: Sequence[float],
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

    tiers: torch.Tensor
    position: torch.Tensor
    pointers: torch.Tensor
    shares: torch.Tensor
    num_rows: int
    row_shape: tuple[int, ...]
    owner: object

    @classmethod
    def of(cls, views: Sequence[RowView], shares: torch.Tensor | None = None) -> AlignedTables:
        """Join the views of a table and of its optimizer's state.

        Make it once: it compares the views, for which a GPU is waited for.

        Raises
        ------
        InvalidInputError
            If a view's dtype is not float32, one is laid out otherwise than the first or lies on
            another device, or has rows on disk that a GPU cannot reach.
        """
        first = views[0]
        asked = f"train a table of {first.num_rows} rows of shape {first.row_shape}"
        for number, view in enumerate(views):
            what = "the table" if number == 0 else f"state {number}"
            _check_reachable(view, what, asked)
            if view.dtype != torch.float32:
                raise InvalidInputError(
                    asked, f"{what} has dtype {view.dtype}", "store it as torch.float32"
                )
            if view.tiers.device != first.tiers.device:
                raise InvalidInputError(
                    asked,
                    f"{what} is on '{view.tiers.device}'",
                    f"store it with the table, on '{first.tiers.device}'",
                )
            same = (view.num_rows, view.row_shape) == (first.num_rows, first.row_shape)
            if not same or not (
                torch.equal(view.tiers, first.tiers) and torch.equal(view.position, first.position)
            ):
                raise InvalidInputError(
                    asked,
                    f"{what} is placed in other tiers than the table"
                    if same
                    else f"{what} has {view.num_rows} rows of shape {view.row_shape}",
                    "store the state with the table's shape and placement",
                )
        return cls(
            first.tiers,
            first.position,
            torch.stack([view.pointers for view in views], dim=1),
            _checked_shares(shares, first, asked),
            first.num_rows,
            first.row_shape,
            [view.owner for view in views],
        )


def scatter_rows(
    view: RowView, ids: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor | None = None
) -> None:
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
        :func:`~dgl_mgpu.ops.gather.op.gather_rows`.
    """
    asked = f"write rows of a table of {view.num_rows} rows"
    _check_reachable(view, "the table", asked)
    ids = check_ids(ids, asked, view.tiers.device)
    rows = _checked_rows(rows, "rows", ids, view.row_shape, view.dtype, asked)
    shares = _checked_shares(shares, view, asked)
    torch.ops.dgl_mgpu.scatter_rows(
        ids, rows, view.tiers, view.pointers, view.position, shares, view.num_rows
    )


def update_rows(
    tables: AlignedTables, ids: torch.Tensor, gradients: torch.Tensor, rule: Rule
) -> None:
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
    asked = f"update rows of a table of {tables.num_rows} rows"
    ids = check_ids(ids, asked, tables.tiers.device)
    gradients = _checked_rows(gradients, "gradients", ids, tables.row_shape, torch.float32, asked)
    num_states = tables.pointers.shape[1] - 1
    if num_states != rule.num_states:
        raise InvalidInputError(
            asked,
            f"there are {num_states} tables of state for {type(rule).__name__}",
            f"pass {rule.num_states} of them",
        )
    torch.ops.dgl_mgpu.update_rows(
        ids,
        gradients,
        tables.tiers,
        tables.pointers,
        tables.position,
        tables.shares,
        tables.num_rows,
        rule.number,
        rule.settings,
    )


def _check_reachable(view: RowView, what: str, asked: str) -> None:
    if view.disk is not None:
        raise InvalidInputError(
            asked,
            f"{what} has rows on disk, which a GPU cannot write",
            "keep it in GPU or host memory, where it is changed",
        )


def _checked_rows(
    rows: torch.Tensor,
    name: str,
    ids: torch.Tensor,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    asked: str,
) -> torch.Tensor:
    shape = (ids.numel(), *row_shape)
    if tuple(rows.shape) != shape or rows.dtype != dtype or rows.device != ids.device:
        raise InvalidInputError(
            asked,
            f"{name} has shape {tuple(rows.shape)} and dtype {rows.dtype} on {rows.device}",
            f"pass {name} of shape {shape} and dtype {dtype} on {ids.device}",
        )
    return rows.detach().contiguous()


def _checked_shares(shares: torch.Tensor | None, view: RowView, asked: str) -> torch.Tensor:
    if shares is None:
        return view.pointers.new_empty((0, 2))
    shape = (len(view.pointers), 2)
    if tuple(shares.shape) != shape or shares.dtype != torch.int64:
        raise InvalidInputError(
            asked,
            f"shares has shape {tuple(shares.shape)} and dtype {shares.dtype}",
            f"pass shares of shape {shape} and dtype torch.int64",
        )
    return shares.to(view.pointers.device).contiguous()
