"""Other users than the superuser, whom only that one can become."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import struct

import pytest

_KEEP_CAPS, _DUMPABLE, _AMBIENT, _RAISE, _READ_ALL = 8, 4, 47, 2, 2
_VERSION = 0x20080522

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def become(user: int) -> None:
    """Be another user from here on, who can read all files, as the interpreter's own must be.

    It is as if it had been started by that user: others of the same user reach it by ``/proc``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_KEEP_CAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    bits = 1 << _READ_ALL
    header, data = struct.pack("Ii", _VERSION, 0), struct.pack("6I", bits, bits, bits, 0, 0, 0)
    if libc.capset(header, data) or libc.prctl(_AMBIENT, _RAISE, _READ_ALL, 0, 0):
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)


def forget_job() -> None:
    """Be no process of the job, another test's, that this one's parent has run."""
    multiprocessing.current_process()._config.pop("tempdir", None)
    multiprocessing.current_process()._config["semprefix"] = "/mp"
