"""Checksums of files that are mapped and not read: of files made here, and of downloaded ones.

A folder made here has them in ``checksums.json``.  Comparing them takes reading all files, so it is
done once for each state of a file (inode, size, times of change), which ``checked.json`` records.
For other files they are recorded when they are first read (`unchanged_since_first_read`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dgl_mgpu.errors import DataFormatError
from dgl_mgpu.utils import safe_json
from dgl_mgpu.utils.atomic_write import atomic_write
from dgl_mgpu.utils.checksums import with_sum, without_sum

log = logging.getLogger(__name__)

_SUMS, _CHECKED = "checksums.json", "checked.json"
_CHUNK_BYTES = 1 << 24


def write_checksums(folder: Path, sources: Iterable[Path] = ()) -> None:
    """Write the checksums of all files in a folder, and of files elsewhere that it depends on."""
    inside = (path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in inside} | _by_name(sources)
    content = {"chunk": _CHUNK_BYTES, "files": dict(zip(names, _sums(names.values()), strict=True))}
    (folder / _SUMS).write_text(json.dumps(content))


def changed_file(folder: Path, sources: Iterable[Path] = ()) -> str | None:
    """Name a file that is not as it was when its checksum was written, or return None."""
    try:
        content = safe_json.loads((folder / _SUMS).read_text())
        expected = {
            str(name): [int(value) for value in sums] for name, sums in content["files"].items()
        }
        if content["chunk"] != _CHUNK_BYTES:
            return f"{_SUMS} is of another version"
    except FileNotFoundError:
        return f"there is no {_SUMS}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{_SUMS} is damaged ({error})"
    elsewhere = _by_name(sources)
    paths = {name: elsewhere.get(name, folder / name) for name in expected}
    try:
        states = {name: _state(path) for name, path in paths.items()}
        checked = _read_checked(folder)
        doubtful = [name for name in paths if states[name] != checked.get(name)]
        for name, sums in zip(doubtful, _sums(paths[name] for name in doubtful), strict=True):
            if sums != expected[name]:
                return f"{name} is not as it was made"
    except FileNotFoundError as error:
        return f"there is no {os.path.relpath(error.filename, folder)}"
    if doubtful:
        # On a read-only disk, they are compared each time.
        with contextlib.suppress(OSError), atomic_write(folder / _CHECKED) as file:
            file.write(json.dumps(states).encode())
    return None


@contextlib.contextmanager
def unchanged_since_first_read(record: Path, files: Iterable[Path]) -> Iterator[None]:
    """Check that files of a folder match `record`, a file in it.

    A missing record is written after the block, if that raises nothing and the folder can be
    written.  Raises DataFormatError if a file has changed or is gone.
    """
    paths = {path.name: path for path in files}
    expected = _recorded(record, paths.keys())
    try:
        actual = dict(zip(paths, _sums(paths.values()), strict=True))
    except OSError as error:
        raise DataFormatError(f"read {error.filename}", str(error), "put the file there") from error
    for name, sums in (expected or {}).items():
        if sums != actual[name]:
            raise DataFormatError(
                f"read {paths[name]}",
                f"it is not as it was when it was first read, says {record.name}",
                f"fetch the file again; or, if it was meant to change, remove {record}",
            )
    yield
    if expected is None:
        # On a read-only disk, nothing is compared.
        with contextlib.suppress(OSError), atomic_write(record) as file:
            file.write(json.dumps(with_sum({"chunk": _CHUNK_BYTES, "files": actual})).encode())


def _recorded(record: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """The recorded sums of the files of these names; None if there are none to compare."""
    try:
        content = without_sum(safe_json.loads(record.read_text()))
        sums = content["files"] if content["chunk"] == _CHUNK_BYTES else {}
        if sums.keys() == set(names):
            return sums
        problem = "it is of other files"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"it is damaged ({error})"
    log.warning("%s: %s; it is made again, and nothing compared", record, problem)
    return None


def _by_name(sources: Iterable[Path]) -> dict[str, Path]:
    """Files elsewhere, by names that no file of the folder has."""
    return {f"//{path.name}": path for path in sources}


def _state(path: Path) -> list[int]:
    """Attributes that change with the file; users cannot set the inode's time of change."""
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_checked(folder: Path) -> dict[str, Any]:
    try:
        checked = safe_json.loads((folder / _CHECKED).read_text())
    except (OSError, ValueError):
        return {}
    return checked if isinstance(checked, dict) else {}


def _sums(paths: Iterable[Path]) -> list[list[int]]:
    """Size and CRC-32 of each chunk of each file; zlib releases the interpreter meanwhile."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pending = [
            (size, [pool.submit(_sum, path, start) for start in range(0, size, _CHUNK_BYTES)])
            for path, size in ((path, path.stat().st_size) for path in paths)
        ]
        return [[size, *(chunk.result() for chunk in chunks)] for size, chunks in pending]


def _sum(path: Path, start: int) -> int:
    with path.open("rb") as file:
        return zlib.crc32(os.pread(file.fileno(), _CHUNK_BYTES, start))
