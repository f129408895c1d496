"""Locks between processes, each of a file, that the kernel takes back when their holder ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

log = logging.getLogger(__name__)

# A file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_TEXT = 300
# Descriptors of locks held.
_held: set[int] = set()


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[str]:
    """Hold an exclusive lock on a file, which is made if need be and is gone afterwards.

    Only this process holds it, and none that it forks. Other users may lock the file as well, also
    where its holder was killed and it is still there.

    While another one holds the lock, ``busy`` is called with who that is: its process, host and
    since when.  It raises, or returns after a while, and then the lock is tried again.  Yields who
    held it before and ended without removing the file, since it was killed; or "".
    """
    while True:
        descriptor = _open(path)
        try:
            while not _lock(descriptor, path):
                busy(_text(descriptor) or "another process")
            # The previous holder removed its file: a lock on that one excludes nobody.
            if is_held := _is_at(descriptor, path):
                before = _text(descriptor)
                _sign(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if is_held:
            break
        os.close(descriptor)
    _held.add(descriptor)
    try:
        yield before
    finally:
        if descriptor in _held:  # in a process that was forked it is not
            _held.remove(descriptor)
            if _is_at(descriptor, path):
                with contextlib.suppress(OSError):  # another user's, in a sticky folder
                    path.unlink()
            os.close(descriptor)


def killed_holder(path: Path) -> str:
    """Who held the lock of a file and was killed; "" if nobody was, or if somebody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _text(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # what another user has put there may be a link or a pipe
    while True:
        try:
            # Not by O_CREAT: the kernel refuses that of another user's file in a sticky folder.
            descriptor = os.open(path, os.O_RDWR | flags)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
            except FileExistsError:
                continue
            os.fchmod(descriptor, 0o666)  # whatever the umask
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY | flags)  # can be locked, but not written
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "It is no regular file", str(path))


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the lock could be taken now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("nothing keeps other jobs out of %s: %s", path.parent, error.strerror)
    return True


def _sign(descriptor: int) -> None:
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
    with contextlib.suppress(OSError):  # a full disk, or another user's file
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _text(descriptor: int) -> str:
    text = os.pread(descriptor, _MAX_TEXT, 0).decode(errors="replace")
    return text if text.isprintable() else ""


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at a path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _after_fork() -> None:
    # A DataLoader's worker, say, which outlives a process that is killed.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_after_fork)
