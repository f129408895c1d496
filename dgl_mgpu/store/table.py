"""A table as one rank has it mapped: the pieces its plan has it read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dgl_mgpu.ops.view import GraphView, RowView
from dgl_mgpu.placement import HOST, TablePlan
from dgl_mgpu.store.format import TableFormat, local_rows
from dgl_mgpu.store.segment import Segment


@dataclass(frozen=True)
class Piece:
    """Part ``part`` of tier ``tier`` of a table, in the memory of GPU ``holder``.

    What lies in host memory or on disk has holder ``HOST`` and is made by the first rank.
    """

    tier: int
    part: int
    holder: int

    @property
    def maker(self) -> int:
        """The rank that creates it."""
        return 0 if self.holder == HOST else self.holder


def all_pieces(plan: TablePlan) -> Iterator[Piece]:
    """Every piece of a table, in an order that all ranks agree on."""
    for index, tier in enumerate(plan.tiers):
        for part in range(tier.parts):
            for holder in tier.copies[part] if tier.memory == "gpu" else ():
                yield Piece(index, part, holder)
            # Also of a GPU's tier, where some other GPU reaches no copy.
            if tier.memory == "disk" or tier.on_host(part):
                yield Piece(index, part, HOST)


def read_pieces(plan: TablePlan, rank: int) -> Iterator[Piece]:
    """The pieces that ``rank`` reads, one for every tier and part, in pointer order."""
    for index, tier in enumerate(plan.tiers):
        for part in range(tier.parts):
            yield Piece(index, part, tier.source[rank][part] if tier.memory == "gpu" else HOST)


class Table:
    """One table, mapped.

    Parameters
    ----------
    format : TableFormat
    plan : TablePlan
    rank : int
        Whose view this is.
    segments : list of Segment
        The pieces this rank reads, as :func:`read_pieces` lists them.
    position : Segment or None
        Row id → position, when rows are not kept in the order of their ids.
    """

    def __init__(
        self,
        format: TableFormat,
        plan: TablePlan,
        rank: int,
        segments: list[Segment],
        position: Segment | None,
    ) -> None:
        self.format = format
        self.plan = plan
        self.rank = rank
        self._segments = segments
        self._position = position
        self._map()

    def _map(self) -> None:
        # Addresses hold in this process only: a table that reached a DataLoader worker by
        # spawn maps its segments again.
        rows = [
            self.format.pointers(segment, len(local_rows(self.plan.tiers[piece.tier], piece.part)))
            for piece, segment in zip(
                read_pieces(self.plan, self.rank), self._segments, strict=True
            )
        ]
        position = np.empty(0, np.int64)
        if self._position is not None:
            position = position_array(self._position, self.format.num_rows)
        self.view: RowView | GraphView = self.format.view(
            _tier_tensor(self.plan),
            torch.tensor(rows, dtype=torch.int64),
            torch.from_numpy(position),
            owner=self._segments,
        )

    def memory_of(self, tier: int, part: int) -> str:
        """Where this rank reads a part from: 'device', 'peer', 'host' or 'disk'."""
        where = self.plan.tiers[tier]
        if where.memory != "gpu":
            return where.memory
        holder = where.source[self.rank][part]
        if holder == HOST:
            return "host"
        return "device" if holder == self.rank else "peer"

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "view"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._map()


def position_dtype(num_rows: int) -> np.dtype:
    """The smallest id type that holds ``num_rows`` positions."""
    return np.dtype(np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64)


def position_array(segment: Segment, num_rows: int) -> np.ndarray:
    """The positions kept in a segment."""
    return segment.array(position_dtype(num_rows), (num_rows,))


def _tier_tensor(plan: TablePlan) -> torch.Tensor:
    rows, first = [], 0
    for tier in plan.tiers:
        rows.append((tier.start, tier.stop, tier.parts, first))
        first += tier.parts
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
