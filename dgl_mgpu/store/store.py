"""The store: all tables of a data set, each once on the machine, read by all its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.placement import Plan, TablePlan
from dgl_mgpu.store.exchange import Ranks
from dgl_mgpu.store.format import CSCWriter, RowWriter, TableFormat, TableWriter, local_rows
from dgl_mgpu.store.segment import SHARED_MEMORY, Segment, require_room
from dgl_mgpu.store.source import FeatureSource, TopologySource
from dgl_mgpu.store.table import (
    Piece,
    Table,
    all_pieces,
    position_array,
    position_dtype,
    read_pieces,
)

Source = FeatureSource | TopologySource

#: A piece of a table by the table's name, or (with None) the positions of an order by its.
PieceKey = tuple[str, Piece | None]

_BUILD = "build the store"


@dataclass(frozen=True)
class Blueprint:
    """What a store is to hold and where.

    Attributes
    ----------
    sources : mapping of str to FeatureSource or TopologySource
        The data, by table.
    orders : mapping of str to ndarray
        For each order that a source names, the row ids by position.
    plan : Plan
        One table for every source, for as many GPUs as there are ranks.
    disk_path : Path, optional
        Folder for what the plan keeps on disk.
    """

    sources: Mapping[str, Source]
    orders: Mapping[str, np.ndarray]
    plan: Plan
    disk_path: Path | None = None


@dataclass(frozen=True)
class Store:
    """Mapped tables by name (XGNN's global GNN memory store, section 4).

    Attributes
    ----------
    tables : dict of str to Table
    plan : Plan
        Where each row of each table is.
    rank, num_ranks : int
        This process among those that share the store.
    """

    tables: dict[str, Table]
    plan: Plan
    rank: int
    num_ranks: int


def build(blueprint: Blueprint | None, ranks: Ranks) -> Store:
    """Lay a blueprint out in memory and map it on every rank.

    Collective.  The machine's first rank has the data and fills all memory from it, chunk by
    chunk; the others make room for what the plan has them hold.  So the data is read once,
    and only one process needs to have it open.

    Parameters
    ----------
    blueprint : Blueprint
        On the machine's first rank; the others' is not looked at.
    ranks : Ranks

    Raises
    ------
    InvalidInputError
        If the plan is not one for these sources and ranks.
    SharedMemoryError
        If a folder has too little room; before anything is allocated.
    RankFailedError
        If another rank failed.
    """
    filler = ranks.together(_BUILD, lambda: _filler(blueprint, ranks))
    layout = ranks.from_first(_BUILD, lambda: _checked_layout(filler))
    own = ranks.together(_BUILD, lambda: layout.create(ranks.rank))
    found = {
        key: where
        for part in ranks.all_gather({key: segment.path for key, segment in own.items()})
        for key, where in part.items()
    }

    def segment(key: PieceKey) -> Segment:
        return own[key] if key in own else Segment.attach(found[key], layout.nbytes[key])

    ranks.together(_BUILD, lambda: filler.fill(segment) if filler is not None else None)
    # No rank goes on, and perhaps ends, before all have mapped what it holds.
    tables = ranks.together(_BUILD, lambda: layout.map_tables(ranks.rank, segment))
    return Store(tables, layout.plan, ranks.rank, ranks.size)


def _filler(blueprint: Blueprint | None, ranks: Ranks) -> _Filler | None:
    if ranks.rank != 0:
        return None
    if blueprint is None:
        raise InvalidInputError(_BUILD, "no data on the machine's first rank", "pass it there")
    return _Filler(blueprint, ranks.size)


def _checked_layout(filler: _Filler | None) -> _Layout:
    assert filler is not None  # the first rank has one
    filler.layout.require_room()
    return filler.layout


@dataclass(frozen=True)
class _Layout:
    """What every rank needs to know to make and map its part."""

    plan: Plan
    formats: dict[str, TableFormat]
    #: By table, the name of the order its rows are kept in; '' for the order of their ids.
    orders: dict[str, str]
    nbytes: dict[PieceKey, int]
    disk_path: Path | None

    def folder_of(self, key: PieceKey) -> Path:
        name, piece = key
        on_disk = piece is not None and self.plan.tables[name].tiers[piece.tier].memory == "disk"
        # Without a GPU a rank's own memory is shared memory too: the same path runs.
        return self.disk_path if on_disk and self.disk_path is not None else SHARED_MEMORY

    def require_room(self) -> None:
        """Raise unless every folder can take what is to be placed in it."""
        need: Counter[Path] = Counter()
        for key, nbytes in self.nbytes.items():
            need[self.folder_of(key)] += nbytes
        for folder, nbytes in need.items():
            require_room(nbytes, folder)

    def create(self, rank: int) -> dict[PieceKey, Segment]:
        """Make the segments that ``rank`` holds, empty."""
        return {
            key: Segment.create(nbytes, self.folder_of(key))
            for key, nbytes in self.nbytes.items()
            if rank == (key[1].maker if key[1] is not None else 0)
        }

    def map_tables(self, rank: int, segment: Callable[[PieceKey], Segment]) -> dict[str, Table]:
        """Map what ``rank`` reads."""
        positions = {name: segment((name, None)) for name in set(self.orders.values()) if name}
        return {
            name: Table(
                format,
                self.plan.tables[name],
                rank,
                [segment((name, p)) for p in read_pieces(self.plan.tables[name], rank)],
                positions.get(self.orders[name]),
            )
            for name, format in self.formats.items()
        }


class _Filler:
    """Writes a blueprint's data into segments, on the machine's first rank."""

    def __init__(self, blueprint: Blueprint, num_ranks: int) -> None:
        _check(blueprint, num_ranks)
        plans = {name: blueprint.plan.tables[name] for name in blueprint.sources}
        # An order matters only where tiers differ: within one tier every row is as near.
        order_of = {
            name: source.position if len(plans[name].tiers) > 1 else ""
            for name, source in blueprint.sources.items()
        }
        self._orders = {name: blueprint.orders[name] for name in set(order_of.values()) if name}
        self._writers = {
            name: _writer(source, plans[name], self._orders.get(order_of[name]))
            for name, source in blueprint.sources.items()
        }
        self._positions = {
            (name, piece): local_rows(plan.tiers[piece.tier], piece.part)
            for name, plan in plans.items()
            for piece in all_pieces(plan)
        }
        nbytes: dict[PieceKey, int] = {
            key: self._writers[key[0]].nbytes(rows) for key, rows in self._positions.items()
        }
        for name, order in self._orders.items():
            nbytes[name, None] = position_dtype(len(order)).itemsize * len(order)
        formats = {name: writer.format for name, writer in self._writers.items()}
        self.layout = _Layout(blueprint.plan, formats, order_of, nbytes, blueprint.disk_path)

    def fill(self, segment: Callable[[PieceKey], Segment]) -> None:
        for (name, piece), rows in self._positions.items():
            self._writers[name].fill(segment((name, piece)), rows)
        for name, order in self._orders.items():
            position = position_array(segment((name, None)), len(order))
            position[order] = np.arange(len(order), dtype=position.dtype)


def _writer(source: Source, plan: TablePlan, order: np.ndarray | None) -> TableWriter:
    if isinstance(source, FeatureSource):
        return RowWriter(source, order)
    one_piece = len(plan.tiers) == 1 and plan.tiers[0].parts == 1
    return CSCWriter(source, order, keep_eids=source.eids is not None or not one_piece)


def _check(blueprint: Blueprint, num_ranks: int) -> None:
    for name, source in blueprint.sources.items():
        table = blueprint.plan.tables.get(name)
        covered = table.tiers[-1].stop if table is not None and table.tiers else 0
        if table is None or covered != source.num_rows:
            raise InvalidInputError(
                f"place table '{name}' of {source.num_rows} rows",
                "the plan has no such table" if table is None else f"the plan covers {covered}",
                "solve the plan for the data that is stored",
            )
        for tier in table.tiers:
            if tier.memory == "gpu" and len(tier.source) != num_ranks:
                raise InvalidInputError(
                    f"place table '{name}' for {num_ranks} ranks",
                    f"a plan for {len(tier.source)}",
                    "solve the plan for as many GPUs as there are ranks",
                )
            if tier.memory == "disk" and blueprint.disk_path is None:
                raise InvalidInputError(
                    f"place part of table '{name}' on disk",
                    "no folder for it",
                    "pass disk_path (store.disk_path)",
                )
