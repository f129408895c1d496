"""Files that are complete or absent: folders built once, and downloads."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from .. import limits
from ..errors import ConfigError, DataFormatError, DGLMGPUError, OutputError
from ..units import human_bytes
from .checksums import changed_file, write_checksums

log = logging.getLogger(__name__)

#: Seconds without a byte after which a download is given up.
_TIMEOUT_S = 30
_CHUNK_BYTES = 1 << 22
_LOOK_SECONDS = 0.1


def _nothing(folder: Path) -> str | None:
    return None


def derived_once(target: Path, fill: Callable[[Path], None], sources: Sequence[Path] = ()) -> Path:
    """Return `target` as `build_once`, with checksums of its files, which are compared first.

    Files that changed since are told of, and the folder is made again.

    Parameters
    ----------
    target, fill
        As for `build_once`.
    sources : sequence of Path
        Files elsewhere that are to be as they were when `target` was made of them.

    Raises
    ------
    OutputError
        As `build_once`; also if a file cannot be read.
    """

    def fill_and_sum(folder: Path) -> None:
        fill(folder)
        write_checksums(folder, sources)

    return build_once(target, fill_and_sum, partial(changed_file, sources=sources))


def build_once(
    target: Path,
    fill: Callable[[Path], None],
    wrong: Callable[[Path], str | None] = _nothing,
) -> Path:
    """Return `target`, a folder; let `fill` make its content if it is not there yet.

    The folder is filled under another name and renamed when it is complete, so that an
    interrupted run leaves nothing that looks complete.  Of several processes that want the same
    folder, one builds it and the others wait.

    Parameters
    ----------
    target : Path
        The folder.  What it holds must follow from its name alone.
    fill : callable
        Called with an empty folder to fill.
    wrong : callable
        Says of a folder that is there what is wrong with it, so that it is made again.

    Raises
    ------
    OutputError
        The folder cannot be made or filled, or another process has not done so within
        `limits.BUILD` seconds.
    """
    try:
        if target.is_dir() and wrong(target) is None:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), target):
            # Another process may have made it anew meanwhile.
            if target.is_dir() and (found := wrong(target)) is not None:
                log.warning("%s: %s; it is made again", target, found)
                _discard(target)
            if not target.is_dir():
                _build(target, fill)
    except OSError as error:
        if isinstance(error, DGLMGPUError):
            raise
        raise OutputError(
            f"make {target}",
            str(error),
            "choose another data root, a folder that can be written and has space",
        ) from error
    return target


def _discard(target: Path) -> None:
    """Remove a folder, whose name goes first: who has its files open or mapped keeps them."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a run that was killed
    target.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _build(target: Path, fill: Callable[[Path], None]) -> None:
    begun = target.with_name(f".{target.name}.partial")
    shutil.rmtree(begun, ignore_errors=True)  # left by a run that was killed
    begun.mkdir()
    try:
        fill(begun)
        for path in begun.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # the rename must not reach the disk before the data
        begun.rename(target)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the file is gone again afterwards.

    It says which process holds it, for those that wait for `target`.
    """
    deadline = time.monotonic() + limits.BUILD
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor, target, deadline)
            # The previous holder removed its file: a lock on that one excludes nobody.
            if _is_at(descriptor, path):
                try:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(
                        descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                    )
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, target: Path, deadline: float) -> None:
    """Lock an open file; say who has it if that takes a while."""
    told = ""
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        if time.monotonic() >= deadline:
            raise OutputError(
                f"make {target}",
                f"{holder} has been making it for {limits.BUILD:g} s and longer",
                "see whether it still works, and end it if not; or choose another data root",
            )
        if holder != told:
            log.warning("waiting for %s, which is making %s", holder, target)
            told = holder
        time.sleep(_LOOK_SECONDS)


def _is_at(descriptor: int, path: Path) -> bool:
    """Say whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
    """Download a zip archive and extract it into `folder`.

    Parameters
    ----------
    url : str
        Address of the archive.
    folder : Path
        Existing folder for the archive's content.
    instead : str
        What the user can do where there is no network, for the error.

    Raises
    ------
    DataFormatError
        The archive cannot be fetched, or is corrupt.
    ConfigError
        The disk is too small.
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


def corrupt_file(path: Path, found: str) -> DataFormatError:
    """The error of a file that does not hold what it should."""
    return DataFormatError(
        f"read {path}", f"the file is truncated or corrupt: {found}", "fetch the file again"
    )
