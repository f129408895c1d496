"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dgl_mgpu.errors import DGLMGPUError, OutputError

_ENDING = ".partial"


@contextlib.contextmanager
def typed_output(action: str, fix: str) -> Iterator[None]:
    """Raise OutputError, with this action and advice, for an OSError that is none of ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DGLMGPUError):
            raise
        raise OutputError(action, str(error), fix) from error


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write, and read again, that appears under its name when it is complete and on disk.

    Its folder is made if need be. If anything is raised within, nothing is left of it, and what was
    there under its name before is as it was. What a killed process leaves of it, the next one to
    write it here removes. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a folder, or a device, whose place it would take
        raise FileExistsError(errno.EEXIST, "It is no regular file", str(path))
    # Of this process alone: others may write the same file.  Its id says which process it is on
    # one host, and there in one namespace: containers may share both folder and host name.
    place = f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    beginning = f"{path.name}.{place}."
    _remove_abandoned(path.parent, beginning)
    # Nobody else can know the name before: not even a link is there that would be followed.
    partial = path.with_name(f"{beginning}{os.getpid()}.{secrets.token_hex(8)}{_ENDING}")
    try:
        with open(partial, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _remove_abandoned(folder: Path, beginning: str) -> None:
    """Remove the files with a name of this beginning whose processes are gone."""
    for partial in folder.glob(f"{glob.escape(beginning)}*{_ENDING}"):
        process = partial.name[len(beginning) :].partition(".")[0]
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            partial.unlink(missing_ok=True)
