"""Keeps libxsmm, in DGL's C++, from following what another user has put into ``/tmp``.

When it is initialised, libxsmm opens two files of predictable names to
write (``libxsmm_init`` in its ``src/libxsmm_main.c``).  It follows a link there, and makes an empty
file, with the user's rights, wherever that leads; no setting of its own prevents that.
"""

from __future__ import annotations

import functools
import logging
import os
import stat

log = logging.getLogger(__name__)

_FILES = "/tmp/.libxsmm.{}", "/tmp/.libxsmm.stdio.{}"


def strangers_file() -> str | None:
    """Make libxsmm's files, which nobody else can replace then; the first that is somebody else's.

    None if all are this user's, or cannot be there.
    """
    paths = [file.format(os.getuid()) for file in _FILES]
    return next((p for p in paths if not _is_own_file(p) and os.path.lexists(p)), None)


@functools.cache
def make_safe() -> None:
    """Do without libxsmm where somebody else has put what it would open."""
    path = strangers_file()
    if path is not None:
        from dgl.global_config import use_libxsmm  # this module is there before DGL is

        use_libxsmm(False)
        log.warning(
            "%s is not a file of this user's: sums on the CPU go on without libxsmm, which "
            "would open it; remove it to have them faster",
            path,
        )


def _is_own_file(path: str) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    finally:
        os.close(descriptor)
