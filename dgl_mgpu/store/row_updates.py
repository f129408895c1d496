"""Changing stored rows: every rank's changes, in every copy, at a stated point.

A change is collective.  All ranks tell each other theirs, and each rank makes all of them in the
memory it answers for: its own, and its share of what several ranks read but none of them holds
(host memory).  When the call returns on one rank, all memory has been changed, and every rank
reads the new rows.  Whatever a rank read before it made the call (on a GPU: on the stream that is
current at the call), it read unchanged.

Changes are made in the order of ranks and, within a rank, as they come, so that copies stay equal
bit for bit, and n ranks do what one would with all their changes.

Of a store over several machines each changes the rows that it keeps.

A rank that makes no change where others do keeps them waiting; ranks that make different ones, of
another table or with another learning rate, are told so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from dgl_mgpu.comm.communicator import Communicator, error_text
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device
from dgl_mgpu.ops.check import check_ids, check_tensor, raise_at_id_outside
from dgl_mgpu.ops.scatter import SGD, Adagrad, Adam, AlignedTables, Rule, scatter_rows, update_rows
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.placement import HOST
from dgl_mgpu.store.memory.format import RowFormat, narrow
from dgl_mgpu.store.memory.table import Table

#: Of rows that a rank brings at a time, of a table that is replaced.
_STRETCH_BYTES = 32 << 20


def write_rows(
    table: Table, ids: torch.Tensor, rows: torch.Tensor, ranks: Communicator | None = None
) -> None:
    """Replace rows of a table, on all ranks together.

    Parameters
    ----------
    table : Table
        Of rows, in GPU or host memory.
    ids : Tensor, int32 or int64, shape (n,)
        This rank's rows; n may differ between ranks and be 0.  Of rows for the same id the last
        one of the last rank is kept.
    rows : Tensor, shape (n, *row_shape)
        Of the dtype of the rows that the table was built from.
    ranks : Communicator, optional
        Those that take part, by default all ranks of the job, on all machines.

    Raises
    ------
    InvalidInputError
        If the table is one of topology or has rows on disk, an argument has the wrong dtype
        or shape, the type in which rows are kept has no such numbers, or ranks change different
        tables.
    IdOutOfRangeError
        If an id is no row.
    StoreClosedError
        If the table's store was closed.
    RankFailedError
        If another rank's arguments are wrong; as with the errors above, nothing is changed.
    """
    action = "write rows of a stored table"
    shares = _shares(table, action)
    changes = _Changes([table], ranks or Communicator.of_all_machines(), action)
    every_id, every_row = changes.of_all_ranks(ids, rows, "new rows")
    changes.make(lambda: scatter_rows(_row_view(table, action), every_id, every_row, shares))


def replace_rows(table: Table, rows: torch.Tensor, ranks: Communicator | None = None) -> None:
    """Replace all rows of a table, on all ranks together.

    Parameters, but for the same rows on all ranks, and errors are those of :func:`write_rows`.
    """
    ranks = ranks or Communicator.of_all_machines()
    step = max(1, _STRETCH_BYTES // max(table.row_bytes, 1)) * ranks.size
    for begin in range(0, len(rows), step):
        # Each rank brings a share of them.
        mine = slice(begin + ranks.rank, begin + step, ranks.size)
        ids = torch.arange(*mine.indices(len(rows)))
        write_rows(table, ids, rows[mine], ranks)


class SparseOptimizer(ABC):
    """Trains the rows of a table that get gradients; see the classes below.

    Making one is collective if ``ranks`` is left out.  It keeps the tables' memory until their
    store is closed.

    Parameters
    ----------
    table : Table
        Of float32 rows, in GPU or host memory.
    states : list of Table
        Placed as ``table`` is.
    ranks : Communicator, optional
        Whose gradients are summed, by default those of all ranks of the job, on all machines.

    Attributes
    ----------
    lr : float
        The learning rate, which may be changed between steps, on all ranks.
    steps : int
        Steps taken; a checkpoint needs it beside the tables.
    """

    def __init__(
        self, table: Table, states: list[Table], lr: float, ranks: Communicator | None
    ) -> None:
        action = "train a stored table"
        for state in states:
            if state.plan.tiers != table.plan.tiers:
                raise InvalidInputError(
                    action,
                    f"the tables '{table.plan.name}' and '{state.plan.name}' are placed "
                    "differently",
                    "place the optimizer's state as its table is placed",
                )
        self._tables = AlignedTables.of(
            [_row_view(aligned, action) for aligned in (table, *states)],
            _shares(table, action),
        )
        self._changes = _Changes([table, *states], ranks or Communicator.of_all_machines(), action)
        self.lr = lr
        self.steps = 0

    def step(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Update the rows for which any rank has a gradient; collective.

        Parameters
        ----------
        ids : Tensor, int32 or int64, shape (n,)
            This rank's rows, also repeated; n may differ between ranks and be 0.
        gradients : Tensor, float32, shape (n, *row_shape)
            Those of one row are summed, over ranks too.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, StoreClosedError, RankFailedError
            As :func:`write_rows`; the first also if ranks' rules are not the same.
        """
        rule = self._next_rule()
        every_id, every_gradient = self._changes.of_all_ranks(ids, gradients, rule)
        self._changes.make(lambda: update_rows(self._tables, every_id, every_gradient, rule))
        self.steps += 1

    @abstractmethod
    def _next_rule(self) -> Rule:
        """What the next step does."""


class SparseSGD(SparseOptimizer):
    """``torch.optim.SGD`` on sparse gradients, without momentum."""

    def __init__(self, table: Table, lr: float, ranks: Communicator | None = None) -> None:
        super().__init__(table, [], lr, ranks)

    def _next_rule(self) -> Rule:
        return SGD(self.lr)


class SparseAdagrad(SparseOptimizer):
    """``torch.optim.Adagrad`` on sparse gradients.

    Parameters
    ----------
    state_sum : Table
        Sums of squared gradients, float32, zeros at first.
    """

    def __init__(
        self,
        table: Table,
        state_sum: Table,
        lr: float = 1e-2,
        eps: float = 1e-10,
        ranks: Communicator | None = None,
    ) -> None:
        super().__init__(table, [state_sum], lr, ranks)
        self.eps = eps

    def _next_rule(self) -> Rule:
        return Adagrad(self.lr, self.eps)


class SparseAdam(SparseOptimizer):
    """``torch.optim.SparseAdam``: moments of rows without a gradient wait, steps count for all.

    ``dgl.optim.SparseAdam`` differs: it takes the mean of a row's gradients, not their sum, and
    counts steps for each row.

    Parameters
    ----------
    exp_avg, exp_avg_sq : Table
        The moments, float32, zeros at first.
    """

    def __init__(
        self,
        table: Table,
        exp_avg: Table,
        exp_avg_sq: Table,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ranks: Communicator | None = None,
    ) -> None:
        super().__init__(table, [exp_avg, exp_avg_sq], lr, ranks)
        self.betas = betas
        self.eps = eps

    def _next_rule(self) -> Rule:
        return Adam(self.lr, self.steps + 1, self.betas, self.eps)


class _Changes:
    """Brings the changes of all ranks to each, and has all make them."""

    def __init__(self, tables: list[Table], ranks: Communicator, action: str) -> None:
        self._tables = tables
        self._ranks = ranks
        self._action = action
        self._device = tables[0].device

    def of_all_ranks(
        self, ids: torch.Tensor, values: torch.Tensor, kind: Rule | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids (int64) and values of all ranks, one rank after the other, of rows that are here.

        When it returns, every rank has read what it asked for before, and all make a change of
        this ``kind``.
        """
        change = f"{kind} in table '{self._tables[0].plan.name}'"
        try:
            mine = self._checked(ids, values)
        except Exception as error:
            self._ranks.all_gather((change, error_text(error)))
            raise
        changes = self._ranks.all_gather((change, ""))
        for rank, (_, reason) in enumerate(changes):
            if reason:
                raise self._ranks.failed(self._action, rank, reason)
        for rank, (other, _) in enumerate(changes):
            if other != changes[0][0]:
                raise InvalidInputError(
                    self._action,
                    f"rank 0 has {changes[0][0]}, but rank {rank} {other}",
                    "change the same tables in the same order on all ranks, in the same way",
                )
        every_id, every_value = self._ranks.all_gather_cat(self._action, mine)
        view, table = _row_view(self._tables[0], self._action), self._tables[0]
        if table.keeps_all_rows:
            return every_id, every_value
        is_here = view.position[every_id] >= table.first_own  # others are on other machines
        return every_id[is_here], every_value[is_here]

    def make(self, change: Callable[[], None]) -> None:
        """Run the change; when it returns, every rank has made its part."""

        def finish() -> None:
            for table in self._tables:
                table.version += 1
            change()
            # Faults are not looked at: ids have been checked, so that they are those of other
            # threads, and were one rank to stop for them, its copies would differ.
            if self._device.type == "cuda":
                device.driver.synchronize(self._device)

        self._ranks.run_all(self._action, finish)

    def _checked(
        self, ids: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Raises where a store is closed: the addresses may be others' by then.
        view, *_ = [_row_view(table, self._action) for table in self._tables]
        if self._device.type == "cuda":
            device.raise_faults(self._device, wait=True)
        ids = check_ids(ids, self._action).to(self._device)
        shape = (len(ids), *view.row_shape)
        layout = self._tables[0].format
        assert isinstance(layout, RowFormat)
        check_tensor(values, "values", self._action, layout.source_dtype, shape, values.device)
        if layout.dtype != layout.source_dtype:
            values = narrow(values.detach(), layout.dtype, "rows")
        raise_at_id_outside(ids, view.num_rows, self._action)
        return ids.long(), values.detach().to(self._device).contiguous()


def _row_view(table: Table, action: str) -> RowView:
    if not isinstance(table.view, RowView):
        raise InvalidInputError(
            action, f"'{table.plan.name}' is a graph's topology", "pass a table of rows"
        )
    return table.view


def _shares(table: Table, action: str) -> torch.Tensor:
    """For each segment in pointer order, how many ranks write the copy that a table's rank reads,
    and this one's place among them; int64, shape (segments, 2).

    Who holds a copy writes it, also one of another machine.  Copies in host memory are dealt out
    over those who read them: they have it mapped.
    """
    plan, rank = table.plan, table.rank
    shares = [(0, 0)] * table.num_mapped
    for tier in plan.tiers:
        if tier.memory == "disk":
            raise InvalidInputError(
                action,
                f"{tier.num_rows} rows of table '{plan.name}' are on disk",
                "place tables that change in GPU or host memory: build the store with more of it, "
                "or without disk_path",
            )
        for part in range(tier.parts):
            holders = [reads[part] if tier.memory == "gpu" else HOST for reads in tier.source]
            holder = holders[rank]
            readers = [reader for reader, other in enumerate(holders) if other == holder]
            if holder in readers:
                shares.append((1, 0) if holder == rank else (0, 0))
            else:
                shares.append((len(readers), readers.index(rank)))
    return torch.tensor(shares, dtype=torch.int64).view(-1, 2)
