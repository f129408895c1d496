"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when it is complete and on disk.

    Its folder is made if need be.  If anything is raised within, nothing is left of it, and what
    was there under its name before is as it was.

    Raises
    ------
    OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this process alone: others may write the same file.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
