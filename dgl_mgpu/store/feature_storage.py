"""Tables of the store as DGL feature storages, and counts of what was read from each memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from dgl.storages import FeatureStorage

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import UnsupportedByStoreError
from dgl_mgpu.ops import count_tiers, gather_rows
from dgl_mgpu.ops.device import current_stream, raise_faults
from dgl_mgpu.ops.gather import Pick, can_be_picked, to_be_picked
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store.graph_structure import spread_over_machines
from dgl_mgpu.store.memory import Table
from dgl_mgpu.store.memory.format import RowFormat
from dgl_mgpu.store.remote import GatheredRows, OtherMachines, RemoteTable, TableRead
from dgl_mgpu.store.row_updates import replace_rows, write_rows
from dgl_mgpu.utils.fork_safe import freed_at_fork

T = TypeVar("T")


class Traffic:
    """Rows and bytes read from each kind of memory, and the time it took.

    Attributes
    ----------
    rows, nbytes : Counter of (table, memory)
        ``memory`` is 'device', 'peer', 'host' or 'disk'; 'remote' for what other machines sent.
        Filled in by :meth:`take`.
    seconds : float
        Wall time of the calls that gather.  For a store on GPUs that put the rows there too, it is
        the time that launching takes: the GPU is not waited for.
    watchers : list of callable
        Called with the table and the ids of each gather.
    is_counting : bool
        Whether rows, bytes and seconds are counted, for which a GPU is given work.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[Table, torch.Tensor], None]] = []
        self.is_counting = True
        self.rows: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self.seconds = 0.0
        # Rows of tables with one segment.
        self._single: Counter[tuple[str, Table]] = Counter()
        # Rows of tables that other machines sent.
        self._remote: Counter[tuple[str, Table]] = Counter()
        # Rows read from each segment of a view, of which the last are a table's, on the device that
        # read them: copying them with every gather would wait for it.  By how many segments there
        # are, and by stream, since nothing orders what streams add.
        self._counts: dict[tuple[str, Table, int, int], torch.Tensor] = {}
        self._lock = freed_at_fork(threading.Lock())

    def add(
        self,
        name: str,
        table: Table,
        ids: torch.Tensor,
        begin: float,
        gathered: GatheredRows | None = None,
    ) -> None:
        """Count one gather of ``ids`` from ``table``, begun at ``begin`` by the clock.

        ``gathered`` says where they were, where machines share the table.
        """
        with self._lock:
            if self.is_counting:
                if gathered is None:
                    assert isinstance(table.view, RowView)
                    self._count(name, table, table.view, ids)
                else:
                    num_here = len(gathered.rows) - gathered.num_received
                    self._count(name, table, gathered.view, gathered.ids, num_here)
                    self._remote[name, table] += gathered.num_received
                self.seconds += time.perf_counter() - begin
            for watch in self.watchers:
                watch(table, ids)

    def _count(
        self,
        name: str,
        table: Table,
        view: RowView,
        ids: torch.Tensor,
        num_here: int | None = None,
    ) -> None:
        """Count the rows of ``ids`` in ``view``, whose last segments are the table's.

        ``num_here`` of them are in these; all, if it is None.
        """
        device = table.device
        assert isinstance(table.view, RowView)
        if table.view.pointers.shape[0] == 1:
            self._single[name, table] += ids.shape[0] if num_here is None else num_here
        else:
            stream = current_stream(device) if device.type == "cuda" else 0
            key = name, table, view.pointers.shape[0], stream
            self._counts[key] = count_tiers(view, ids, self._counts.get(key))

    def take(self) -> Traffic:
        """Return what was counted since the last call, and reset the counts."""
        taken = Traffic()
        with self._lock:
            single, self._single = self._single, Counter()
            remote, self._remote = self._remote, Counter()
            counts, self._counts = self._counts, {}
            taken.seconds, self.seconds = self.seconds, 0.0
        for device in {table.device for _, table, _, _ in counts if table.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        by_part = [(name, table, [rows]) for (name, table), rows in single.items()]
        by_part += [(name, table, rows.tolist()) for (name, table, _, _), rows in counts.items()]
        for name, table, rows in by_part:
            memories = table.memories
            for memory, count in zip(memories, rows[-len(memories) :], strict=True):
                if count:
                    key = name, memory
                    taken.rows[key] += count
                    taken.nbytes[key] += count * table.row_bytes
        for (name, table), count in remote.items():
            if count:
                taken.rows[name, "remote"] += count
                taken.nbytes[name, "remote"] += count * table.row_bytes
        return taken

    def __reduce__(self):
        # A worker counts what it reads itself.
        return _new_traffic, (self.is_counting,)


def _new_traffic(is_counting: bool) -> Traffic:
    traffic = Traffic()
    traffic.is_counting = is_counting
    return traffic


class TableStorage(FeatureStorage):
    """One feature table behind DGL's ``FeatureStorage`` interface.

    Parameters
    ----------
    name : str
        Under which its traffic is counted.
    table : Table
    traffic : Traffic
    remote : RemoteTable, optional
        Reads the rows that other machines have, where these have some.
    others : OtherMachines, optional
        Those with which rows are written, where there are any.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        traffic: Traffic,
        remote: RemoteTable | None = None,
        others: OtherMachines | None = None,
    ) -> None:
        self._name = name
        self._table = table
        self._traffic = traffic
        self._remote = remote
        self._others = others

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole table."""
        return torch.Size((self._kept.num_rows, *self._kept.row_shape))

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is fetched: that of the rows that the store was built from."""
        assert isinstance(self._table.format, RowFormat)
        return self._table.format.source_dtype

    @property
    def view(self) -> RowView:
        """The table as operators and kernels take it (:mod:`dgl_mgpu.ops`).

        Raises UnsupportedByStoreError if other machines have some of its rows.
        """
        if self._remote is not None:
            raise AttributeError("view")  # of which __getattr__ says why
        return self._kept

    @property
    def _kept(self) -> RowView:
        """The rows that this machine has."""
        assert isinstance(self._table.view, RowView)
        return self._table.view

    def __repr__(self) -> str:
        return f"TableStorage({self._name!r}, {tuple(self.shape)}, {self.dtype})"

    def __len__(self) -> int:
        return self._kept.num_rows

    def __getitem__(self, indices: Any) -> torch.Tensor:
        """Rows, as of a tensor: by ids (int32 or int64), a mask, a slice or one id.

        Rows at ids on a device are put there, others where the store is.
        """
        if isinstance(indices, Integral):
            return self[torch.tensor([int(indices)])][0]
        with self._told_of_read():
            ids = self._ids(indices)
        return self.fetch(ids, ids.device)

    def __setitem__(self, indices: Any, rows: Any) -> None:
        """Replace rows, which are named as for reading; of all ranks together.

        Each rank passes rows of its own, none if it has none; of all of a table (``[:]``) all pass
        the same.  When the call returns all ranks read them.

        Raises
        ------
        InvalidInputError
            If rows are not of the table's :attr:`dtype` and shape, or some of the table are on
            disk.
        IdOutOfRangeError, StoreClosedError, RankFailedError
            As :func:`dgl_mgpu.store.row_updates.write_rows`.
        """
        replaces_all = isinstance(indices, slice) and indices == slice(None)

        def prepared() -> tuple[torch.Tensor | None, torch.Tensor]:
            new, at = torch.as_tensor(rows), indices
            if isinstance(at, Integral):
                at, new = [int(at)], new if new.dim() == 0 else new[None]
            if new.dim() == 0:
                new = new.to(self.dtype).expand(len(self._ids(at)), *self.shape[1:])
            return None if replaces_all and len(new) == len(self) else self._ids(at), new

        how = "replace all rows of" if replaces_all else "write rows of"
        ids, rows = self._prepare_change(how, prepared)
        if ids is None:
            replace_rows(self._table, rows)
        else:
            write_rows(self._table, ids, rows)

    def _prepare_change(self, how: str, prepare: Callable[[], T]) -> T:
        """Prepare what all ranks of a job do to rows, or raise on all of them.

        All raise where one cannot, or is to do something else.
        """
        others = self._others
        if others is None:
            return prepare()
        what = f"{how} feature '{self._name}'"

        def step() -> T:
            with others.told(what):
                _ = self._kept  # raises if the store was closed
                prepared = prepare()
            others.agree(what)
            return prepared

        everyone = Communicator.of_all_machines()
        # Other ranks of a machine have others to ask, and learn nothing of what these are told.
        return step() if everyone.size == others.machines.size else everyone.run_all(what, step)

    def _told_of_read(self) -> AbstractContextManager[None]:
        """Have machines told of an error, that are about to read rows of each other."""
        if self._remote is None:
            return contextlib.nullcontext()
        return self._remote.others.told(f"gather rows of '{self._remote.name}'")

    if not TYPE_CHECKING:  # which knows the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name == "view":
                raise spread_over_machines(f"read feature '{self._name}' directly")
            if not name.startswith("__") and hasattr(torch.Tensor, name):
                raise UnsupportedByStoreError(
                    f"use '{name}' of a stored feature",
                    "the feature is a table in the store, not a tensor",
                    "read rows of it first, storage[ids], or all of them, storage[:]",
                )
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def _ids(self, indices: Any) -> torch.Tensor:
        """Ids of the rows that an index of a tensor selects."""
        if isinstance(indices, slice):
            return torch.arange(*indices.indices(len(self)), device=self._table.device)
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool and indices.shape == (len(self),):
            return indices.nonzero().flatten()
        return indices

    def to_be_picked(self, ids: torch.Tensor) -> Pick | None:
        """What :func:`dgl_mgpu.ops.gather.pick_all` is to do in place of :meth:`fetch`.

        That is for rows of several tables that one launch can copy; None if these are not such.
        """
        if self._remote is not None or self.dtype != self._kept.dtype:
            return None
        view = self._kept
        if not can_be_picked(ids, view):
            return None
        self._traffic.add(self._name, self._table, ids, time.perf_counter())
        return to_be_picked(ids, view)

    @property
    def spans_machines(self) -> bool:
        """Whether other machines have some of its rows."""
        return self._remote is not None

    @staticmethod
    def fetch_all(
        reads: Sequence[tuple[TableStorage, torch.Tensor]],
        device: torch.device | str,
        pin_memory: bool | None = False,
    ) -> list[torch.Tensor]:
        """:meth:`fetch` of some tables that span machines, for which these ask each other once."""
        begin, fetched = time.perf_counter(), []
        with reads[0][0]._told_of_read():
            of_tables = [storage._read(ids, pin_memory=pin_memory) for storage, ids in reads]
        gathered = of_tables[0].table.others.gather(of_tables)
        for (storage, _), read, rows in zip(reads, of_tables, gathered, strict=True):
            fetched.append(rows.rows.to(device, non_blocking=read.out is not None))
            storage._traffic.add(storage._name, storage._table, read.ids, begin, rows)
            begin = time.perf_counter()
        return fetched

    def _read(
        self,
        indices: torch.Tensor,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        *,
        pin_memory: bool | None = False,
    ) -> TableRead:
        """What :meth:`fetch` asks of a table that spans machines."""
        assert self._remote is not None
        ids, dtype = indices.to(self._table.device), dtype or self.dtype
        if out is None:
            out = self._pinned(len(ids), dtype) if pin_memory else None
        return TableRead(self._remote, self._kept, ids, dtype, out)

    def _pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Page-locked memory for rows, where they are gathered in the host's."""
        if self._table.device.type != "cpu":
            return None
        return torch.empty((count, *self._kept.row_shape), dtype=dtype, pin_memory=True)

    def fetch(
        self,
        indices: torch.Tensor,
        device: torch.device | str,
        pin_memory: bool | None = False,
        *,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Gather rows where the store is, and put them on ``device``.

        Parameters
        ----------
        indices : Tensor, int32 or int64, shape (n,)
        device : torch.device
        pin_memory : bool
            Gather into page-locked memory, so that the copy to a GPU is asynchronous; for a
            store on GPUs, where rows need no such copy, it has no effect.
        dtype : torch.dtype, optional
            Cast on the way, as :func:`dgl_mgpu.ops.gather_rows` can; :attr:`dtype` by default.
        out : Tensor, shape (n, *row_shape), optional
            Where to gather them, on the store's device, as :func:`dgl_mgpu.ops.gather_rows` says.

        Returns
        -------
        Tensor, ``dtype``, shape (n, *row_shape)

        Raises
        ------
        InvalidInputError
        IdOutOfRangeError
            For rows that stay on a GPU by a later call, as :func:`dgl_mgpu.ops.gather_rows` says.
        """
        begin, store_device = time.perf_counter(), self._table.device
        pin_memory = bool(pin_memory) and store_device.type == "cpu"
        gathered = None
        if self._remote is None:
            view, dtype, indices = self._kept, dtype or self.dtype, indices.to(store_device)
            if pin_memory and out is None:
                out = self._pinned(len(indices), dtype)
            rows = gather_rows(view, indices, out=out, dtype=dtype)
        else:
            with self._told_of_read():
                read = self._read(indices, dtype, out, pin_memory=pin_memory)
            (gathered,) = self._remote.others.gather([read])
            indices, rows = read.ids, gathered.rows
        rows = rows.to(device, non_blocking=pin_memory)
        if store_device.type == "cuda" and rows.device.type == "cpu":
            # The copy has waited for the gather.
            raise_faults(store_device, wait=False)
        self._traffic.add(self._name, self._table, indices, begin, gathered)
        return rows
