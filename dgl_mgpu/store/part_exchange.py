"""Rows of a graph's other parts, which machines ask each other for while a store is filled."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator, error_text
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.store.part_files import Rows

#: How a machine comes to a round: it asks for rows, has all that it needs, or cannot go on.
_ASKS, _DONE, _FAILED = range(3)
_BUILD = "build the store"


class PartExchange:
    """Rows of other machines' parts, asked for in rounds of machines' first ranks.

    In a round each machine asks for rows of a table, or of none, and sends what it is asked for.
    Machines read different rows, in their own order: so one that has all takes part until all have.
    """

    def __init__(self, machines: Communicator) -> None:
        self._machines = machines
        #: By table, the rows of this machine and the first one of each machine.
        self._tables: dict[str, tuple[Rows, np.ndarray]] = {}
        self._has_failed = False

    def rows(
        self, table: str, own: Rows, firsts: np.ndarray, extremes: tuple[int, int] = (0, 0)
    ) -> PartRows:
        """All rows of a table, of which ``own`` are here; machine ``m`` has those from
        ``firsts[m]`` up to ``firsts[m + 1]``.

        ``extremes`` are the least and greatest of the own rows, where they are asked for.
        """
        self._tables[table] = own, firsts
        first, stop = firsts[self._machines.rank :][:2].tolist()
        return PartRows(self, table, own, first, stop, int(firsts[-1]), *extremes)

    def fetch(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Rows that others have; the machines take part in a round each time."""
        own, firsts = self._tables[table]
        order = np.argsort(ids, kind="stable")
        asked = ids[order]
        counts = np.diff(np.searchsorted(asked, firsts)).tolist()
        received = self._round(_ASKS, table, torch.from_numpy(asked), counts)
        assert received is not None  # a round in which a machine asks is not the last
        rows = np.empty((len(ids), *own.shape[1:]), own.dtype)
        rows[order] = received.numpy().view(own.dtype).reshape(rows.shape)
        return rows

    def finish(self) -> None:
        """Take part until all machines have their rows.

        Raises RankFailedError if another machine cannot go on.
        """
        while self._round(_DONE, "", torch.empty(0, dtype=torch.int64), None) is not None:
            pass

    def fail(self, error: Exception) -> None:
        """Tell the other machines that this one cannot go on, unless one of them could not."""
        if not self._has_failed:
            with contextlib.suppress(RankFailedError):  # told within a round, or one is gone
                self._machines.all_gather((_FAILED, error_text(error), []))

    def _round(
        self, state: int, table: str, ids: torch.Tensor, counts: list[int] | None
    ) -> torch.Tensor | None:
        """What the machines send of the rows that this one asks for, as bytes; None at the end."""
        machines = self._machines
        counts = [0] * machines.size if counts is None else counts
        every = machines.all_gather((state, table, counts))
        for machine, (other, reason, _) in enumerate(every):
            if other == _FAILED:
                self._has_failed = True
                raise machines.failed(_BUILD, machine, reason)
        if all(other == _DONE for other, _, _ in every):
            return None
        asked_of = [of_each[machines.rank] for _, _, of_each in every]
        with machines.told_of_errors():
            asked = machines.all_to_all(ids, counts, asked_of).split(asked_of)
            answers = [
                self._own_rows(name, wanted.numpy())
                for (_, name, _), wanted in zip(every, asked, strict=True)
            ]
            row_bytes = self._row_bytes(table)
            return machines.all_to_all(
                torch.cat(answers),
                [len(answer) for answer in answers],
                [row_bytes * count for count in counts],
            )

    def _own_rows(self, table: str, ids: np.ndarray) -> torch.Tensor:
        """Rows of this machine, as bytes."""
        if not len(ids):
            return torch.empty(0, dtype=torch.uint8)
        own, firsts = self._tables[table]
        rows = np.ascontiguousarray(own[ids - firsts[self._machines.rank]])
        return torch.from_numpy(rows.reshape(-1).view(np.uint8))

    def _row_bytes(self, table: str) -> int:
        if not table:
            return 0
        own, _ = self._tables[table]
        return int(np.prod(own.shape[1:], dtype=np.int64)) * own.dtype.itemsize


@dataclass(frozen=True)
class PartRows:
    """A table's rows by ids of the whole graph, those of other machines by an exchange."""

    exchange: PartExchange
    table: str
    own: Rows
    first: int  # of the own rows
    stop: int
    num_rows: int  # of all machines
    lowest: int
    highest: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, *self.own.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.own.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        is_own = (ids >= self.first) & (ids < self.stop)
        if is_own.all():
            return self.own[ids - self.first]
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        rows[is_own] = self.own[ids[is_own] - self.first]
        rows[~is_own] = self.exchange.fetch(self.table, ids[~is_own])
        return rows

    def min(self) -> int:
        """Of the own rows."""
        return self.lowest

    def max(self) -> int:
        """Of the own rows."""
        return self.highest
