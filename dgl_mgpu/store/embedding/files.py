"""Files of learned rows and their optimizer's state: a NumPy archive, written and read in chunks.

An archive holds each table as an array in the order of row ids, wherever the store had the rows,
so that any number of ranks reads what any other has written.  The first rank does both, and needs
two chunks of memory; a chunk of what it reads goes to all ranks, each of which writes its share.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import CheckpointError
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.ops.view import RowView
from dgl_mgpu.store.memory import Table
from dgl_mgpu.store.row_updates import write_rows
from dgl_mgpu.utils.atomic_write import atomic_write

_CHUNK_BYTES = 32 << 20
_STEPS = "steps"
_OTHER = "load another file"
# What the readers of archives and arrays raise at bytes that make no sense to them.
_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, SyntaxError)


def save_tables(path: Path, tables: Mapping[str, Table], steps: int, ranks: Communicator) -> None:
    """Write tables to a file, which appears under its name when it is complete and on disk.

    Collective; the first rank writes, and raises CheckpointError if it cannot: the others then
    raise RankFailedError.
    """
    action = f"save rows to {path}"
    reads_all = all(table.keeps_all_rows or table.reads_all_rows for table in tables.values())
    if all(ranks.all_gather(reads_all)):  # also where one machine has all rows, and others none
        ranks.broadcast_from_rank0(
            action, lambda: _write(path, tables, steps, _rows_of(tables.values()))
        )
        return
    # Of a store over machines all ranks bring what they keep, also when it cannot be written.
    rows = _rows_of_all(tables.values(), ranks)

    def write() -> None:
        try:
            if ranks.rank == 0:
                _write(path, tables, steps, rows)
        finally:
            for _ in rows:
                pass

    ranks.run_all(action, write)


def load_tables(path: Path, tables: Mapping[str, Table], ranks: Communicator) -> int:
    """Read tables from a file that :func:`save_tables` wrote, and return its ``steps``.

    Collective; the first rank reads.  Nothing is changed unless the whole file is sound: else the
    first rank raises CheckpointError, and the others RankFailedError.
    """
    action = f"load rows from {path}"
    steps = ranks.broadcast_from_rank0(action, lambda: _checked(path, tables))
    with contextlib.ExitStack() as stack:

        def rows_of(name: str) -> IO[bytes] | None:
            if ranks.rank != 0:
                return None
            archive = stack.enter_context(zipfile.ZipFile(path))
            file = stack.enter_context(archive.open(f"{name}.npy"))
            _header(file)
            return file

        for name, table in tables.items():
            file = ranks.run_all(action, partial(rows_of, name))
            for run in _chunks(table):
                rows = ranks.run_all(action, partial(_read, file, table, run, path))
                ids = torch.arange(run.start, run.start + len(rows))
                write_rows(table, ids, rows, ranks)
    return steps


def _view(table: Table) -> RowView:
    assert isinstance(table.view, RowView)
    return table.view


def _chunks(table: Table) -> Iterator[range]:
    num_rows, size = _view(table).num_rows, max(1, _CHUNK_BYTES // table.row_bytes)
    for begin in range(0, num_rows, size):
        yield range(begin, min(begin + size, num_rows))


def _rows_of(tables: Iterable[Table]) -> Iterator[torch.Tensor]:
    """The rows of tables, chunk by chunk."""
    for table in tables:
        for run in _chunks(table):
            yield gather_rows(_view(table), torch.arange(run.start, run.stop, device=table.device))


def _rows_of_all(tables: Iterable[Table], ranks: Communicator) -> Iterator[torch.Tensor]:
    """The same of tables of which each machine keeps a part; collective, on the first rank."""
    for table in tables:
        view = _view(table)
        for run in _chunks(table):
            ids = torch.arange(run.start, run.stop, device=table.device)
            # A machine's first rank brings its rows; there are others' as well that are the same.
            here = ids if table.rank == 0 else ids[:0]
            if not table.keeps_all_rows:
                here = here[view.position[here] >= table.first_own]
            mine = [here, gather_rows(view, here)]
            every_id, every_row = ranks.all_gather_cat("save rows", mine)
            rows = torch.empty(len(run), *view.row_shape, dtype=view.dtype, device=table.device)
            rows[every_id - run.start] = every_row
            yield rows


def _write(
    path: Path, tables: Mapping[str, Table], steps: int, rows: Iterator[torch.Tensor]
) -> None:
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, table in tables.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
                    _write_table(target, table, rows)
            with archive.open(f"{_STEPS}.npy", "w") as target:
                npy.write_array(target, np.array(steps, np.int64))
    except OSError as error:
        raise CheckpointError(
            f"save rows to {path}", str(error), "free space there, or choose another place"
        ) from error


def _write_table(target: IO[bytes], table: Table, rows: Iterator[torch.Tensor]) -> None:
    view = _view(table)
    header = {
        "descr": npy.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": (view.num_rows, *view.row_shape),
    }
    npy.write_array_header_1_0(target, header)
    for _ in _chunks(table):
        target.write(next(rows).cpu().numpy().data)


def _checked(path: Path, tables: Mapping[str, Table]) -> int:
    """Look at all of a file, and return the steps in it."""
    action = f"load rows from {path}"
    if not path.is_file():
        raise CheckpointError(action, "there is no such file", "check the path")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            if not names >= {*tables, _STEPS}:
                raise CheckpointError(
                    action,
                    f"it holds {sorted(names)}, not {sorted({*tables, _STEPS})}",
                    "load it into an embedding for the same optimizer, or its rows alone",
                )
            damaged = archive.testzip()
            if damaged:
                raise CheckpointError(action, f"its part {damaged} is damaged", _OTHER)
            for name, table in tables.items():
                shape = _view(table).num_rows, *_view(table).row_shape
                with archive.open(f"{name}.npy") as file:
                    header = _header(file)
                if header != (shape, False, np.dtype(np.float32)):
                    raise CheckpointError(
                        action,
                        f"'{name}' has shape {header[0]} and {header[2]}, not {shape} and float32",
                        "load it into an embedding of the same nodes and dim",
                    )
            with archive.open(f"{_STEPS}.npy") as file:
                return int(npy.read_array(file))
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(action, f"it is damaged ({error})", _OTHER) from error


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and element type of an array, whose elements come next."""
    if npy.read_magic(file) != (1, 0):
        raise ValueError("an array of another format")
    return npy.read_array_header_1_0(file)


def _read(file: IO[bytes] | None, table: Table, run: range, path: Path) -> torch.Tensor:
    """The rows of a run on the first rank, none on the others."""
    view = _view(table)
    if file is None:
        return torch.empty((0, *view.row_shape), dtype=view.dtype)
    nbytes = len(run) * table.row_bytes
    content = bytearray(file.read(nbytes))
    if len(content) != nbytes:
        raise CheckpointError(
            f"load rows from {path}", "the file was changed while it was read", _OTHER
        )
    return torch.frombuffer(content, dtype=view.dtype).reshape(len(run), *view.row_shape)
