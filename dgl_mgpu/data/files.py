"""Folders that are built once and completely, downloads, and errors of damaged files."""

from __future__ import annotations

import contextlib
import csv
import glob
import logging
import os
import shutil
import stat
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from dgl_mgpu.data.checksums import changed_file, write_checksums
from dgl_mgpu.errors import ConfigError, DataFormatError, OutputError
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.atomic_write import typed_output
from dgl_mgpu.utils.checksums import DAMAGE
from dgl_mgpu.utils.file_lock import locked
from dgl_mgpu.utils.units import human_bytes

log = logging.getLogger(__name__)

#: What to do about damaged files in OGB's format.
FIX = "fetch or generate the data set again"
#: Seconds without a byte after which a download fails.
_TIMEOUT_S = 30
_CHUNK_BYTES = 1 << 22
_LOOK_SECONDS = 0.1
_PARTIAL = ".partial"


def derived_once(target: Path, fill: Callable[[Path], None], sources: Sequence[Path] = ()) -> Path:
    """Return `target` as `build_once`, which makes it again if its files have changed.

    `sources` are files elsewhere that must not have changed either.
    """

    def fill_and_sum(folder: Path) -> None:
        fill(folder)
        write_checksums(folder, sources)

    return build_once(target, fill_and_sum, partial(changed_file, sources=sources))


def build_once(
    target: Path,
    fill: Callable[[Path], None],
    damage: Callable[[Path], str | None] = lambda folder: None,
) -> Path:
    """Return `target`, a folder; let `fill` fill an empty folder if it is not there yet.

    The folder is renamed to `target` when it is complete, so that an interrupted run leaves nothing
    that looks complete.  One process builds it, and others that want it wait.  Its content must
    follow from its name.  If `damage` names a problem of a folder that is there, it is made again.

    Raises OutputError if the folder cannot be made or filled, another process has not done so
    within `timeouts.BUILD` seconds, or another user has put it where everybody may write.
    """
    fix = "choose another data root, a folder that can be written and has space"
    with typed_output(f"make {target}", fix):
        if _exists(target) and damage(target) is None:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock"), _wait_callback(target)):
            # Another process may have made it again meanwhile.
            if _exists(target) and (problem := damage(target)) is not None:
                log.warning("%s: %s; it is made again", target, problem)
                _discard(target)
            if not target.is_dir():
                _build(target, fill)
        return target


def _exists(target: Path) -> bool:
    require_trusted(target)
    return target.is_dir()


def require_trusted(target: Path) -> None:
    """Raise OutputError if another user has put a folder where everybody may write."""
    if not target.is_dir():
        return
    entry, folder = target.lstat(), target.parent.stat()
    # The superuser and the owner of the parent folder could change it anyway.
    if folder.st_mode & stat.S_IWOTH and entry.st_uid not in (os.getuid(), 0, folder.st_uid):
        raise OutputError(
            f"use {target}",
            f"another user (id {entry.st_uid}) has put it into a folder that anybody can write to",
            "choose a data root of your own, or let only a group that you trust write to this one "
            "(chmod o-w)",
        )


def _discard(target: Path) -> None:
    """Remove a folder, after its name: processes that have its files mapped keep them."""
    old = Path(mkdtemp(_PARTIAL, f".{target.name}.", target.parent))
    target.rename(old / "old")
    shutil.rmtree(old, ignore_errors=True)


def _build(target: Path, fill: Callable[[Path], None]) -> None:
    # Of killed runs; those of other users may stay.
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    # Other users can neither guess its name nor read or write it.
    partial = Path(mkdtemp(_PARTIAL, f".{target.name}.", target.parent))
    try:
        filled = partial / "filled"
        filled.mkdir()
        fill(filled)
        for path in filled.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # the rename must not reach the disk before the data
        filled.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wait_callback(target: Path) -> Callable[[str], None]:
    """A callback while another process makes `target`: log which one, give up at the deadline."""
    deadline = time.monotonic() + timeouts.BUILD
    logged = ""

    def busy(holder: str) -> None:
        nonlocal logged
        if time.monotonic() >= deadline:
            raise OutputError(
                f"make {target}",
                f"{holder} has been making it for {timeouts.BUILD:g} s and longer",
                "see whether it still works, and end it if not; or choose another data root",
            )
        if holder != logged:
            log.warning("waiting for %s, which is making %s", holder, target)
            logged = holder
        time.sleep(_LOOK_SECONDS)

    return busy


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ConfigError if the disk of `folder` has less than `num_bytes` free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            asked=f"write {what} to {folder}",
            found=f"it takes {human_bytes(num_bytes)}, and {human_bytes(free)} are free",
            fix="free space, choose another data root, or a smaller data set",
        )


def require_files(folder: Path, names: list[str], what: str) -> None:
    """Raise DataFormatError naming every file of `names` that is not in `folder`."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataFormatError(
            asked=f"read {what}",
            found=f"there is no file {', '.join(missing)} in {folder}",
            fix=f"put {'it' if len(missing) == 1 else 'them'} there",
        )


def download_zip(url: str, folder: Path, instead: str) -> None:
    """Download a zip archive and extract it into an existing folder.

    `instead` is the advice for a machine without a network.  Raises DataFormatError if the archive
    cannot be fetched or is corrupt, and ConfigError if the disk is too small.
    """
    archive = folder / ".download.zip"
    try:
        _fetch(url, archive)
        with zipfile.ZipFile(archive) as content:
            require_space(folder, sum(info.file_size for info in content.infolist()), url)
            content.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DataFormatError(
            asked=f"download {url}", found=f"it failed: {reason}", fix=instead
        ) from error
    finally:
        archive.unlink(missing_ok=True)


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0))
        require_space(path.parent, total, url)
        log.info("downloading %s (%s)", url, human_bytes(total))
        done, next_report = 0, total // 10
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            if total and done >= next_report:
                log.info("%s: %d %%", url, 100 * done // total)
                next_report += total // 10
        if done < total:
            raise OSError(f"the connection ended after {done} of {total} bytes")


def wrong_content(path: Path, problem: str) -> DataFormatError:
    """The error of a file in OGB's format that contradicts another one, or the format."""
    return DataFormatError(f"read {path}", problem, FIX)


def corrupt_file(path: Path, problem: str, fix: str = "fetch the file again") -> DataFormatError:
    """The error of a file that does not hold what it should."""
    return DataFormatError(f"read {path}", f"the file is truncated or corrupt: {problem}", fix)


@contextlib.contextmanager
def reading(path: Path, fix: str = "fetch the file again") -> Iterator[None]:
    """Raise DataFormatError, which names the file, for whatever its bytes lead readers to raise."""
    try:
        yield
    except DataFormatError:
        raise
    except (*DAMAGE, csv.Error, SyntaxError) as error:
        raise corrupt_file(path, f"{type(error).__name__}: {error}", fix) from error
