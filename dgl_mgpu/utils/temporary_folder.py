"""Temporary folders that go with their process, or when the next one finds that it was killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path

from dgl_mgpu.errors import OutputError
from dgl_mgpu.utils import timeouts
from dgl_mgpu.utils.file_lock import killed_holder, locked

_PREFIX = "dgl-mgpu-"
# Says whose a folder is: it is locked as long as that process lives.
_LOCK = "owner"
_SHARED_MEMORY = Path("/dev/shm")
# A file for each process of the job that hands over tensors; its number follows.
_SHARES = "shares-"
# The longest name that a socket may have, and what multiprocessing puts behind the folder's place.
_MAX_NAME, _SOCKET = 107, f"/{_PREFIX}xxxxxxxx/listener-xxxxxxxx"
_LOOK_SECONDS = 0.005
# What ends with this process.
_life = contextlib.ExitStack()


@contextlib.contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A new folder of this process alone, which is removed afterwards.

    Those that killed processes of the same user left in the same place are removed first. Raises
    OSError.
    """
    for left_over in place.glob(f"{_PREFIX}*"):
        if _is_own_folder(left_over) and killed_holder(left_over / _LOCK):
            _remove(left_over)
    owner = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with locked(folder / _LOCK, _waiting_for_lookers()):
            yield folder
    finally:
        if os.getpid() == owner:  # not in a process that it has forked
            _remove(folder)


def keep_together() -> None:
    """Have multiprocessing keep its files in a folder of this process, from now until its end.

    Children share it: sockets by which DataLoader workers hand over tensors, which lie in a folder
    of each (``pymp-…``) otherwise, where that of a worker that is killed stays. Semaphores, which
    have names in ``/dev/shm`` for a moment, are named after the folder. Raises OutputError.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:  # the job's, which this is a process of
        return
    try:
        folder = _life.enter_context(temporary_folder(_place_of_sockets()))
    except OSError as error:
        raise OutputError(
            "make a temporary folder",
            str(error),
            "set TMPDIR to a folder that can be written and has space",
        ) from error
    # As multiprocessing removes its own, after all that may use it has ended.
    util.Finalize(None, _life.close, exitpriority=-100)
    config.update(tempdir=str(folder), semprefix=f"/{folder.name}")


def _place_of_sockets() -> Path:
    """TMPDIR, or ``/tmp`` where that is too long for the names of sockets in it."""
    place = Path(tempfile.gettempdir())
    return place if len(os.fsencode(place)) + len(_SOCKET) <= _MAX_NAME else Path("/tmp")


def note_sharing() -> None:
    """Note in the job's folder that this process hands over tensors in shared memory.

    torch gives each a name, ``torch_<pid>_…``, and takes it away at once.  The name that a process
    leaves that is killed in between is removed with the folder.
    """
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:
        with contextlib.suppress(OSError):  # a full disk: then such a name may stay
            Path(folder, f"{_SHARES}{os.getpid()}").touch()


def _remove(folder: Path) -> None:
    for share in folder.glob(f"{_SHARES}*"):
        process = share.name.removeprefix(_SHARES)
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            for tensor in _SHARED_MEMORY.glob(f"torch_{process}_*"):
                with contextlib.suppress(OSError):  # another user's process had that number
                    tensor.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    for semaphore in _SHARED_MEMORY.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)


def _is_own_folder(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _waiting_for_lookers() -> Callable[[str], None]:
    """Let other processes look whether the owner of a new folder lives: each takes the lock."""
    deadline = time.monotonic() + timeouts.END

    def wait(holder: str) -> None:
        if time.monotonic() > deadline:  # the one that looks is stopped
            raise TimeoutError(f"another process keeps a new folder locked for {timeouts.END:g} s")
        time.sleep(_LOOK_SECONDS)

    return wait
