"""Parts of a state dict that are too large for memory, each in a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dgl_mgpu.comm.serialization import register
from dgl_mgpu.utils.temporary_folder import temporary_folder

_PIECE_BYTES = 16 << 20


class SpilledState:
    """A part of a state dict, in a file without a name, which goes with the last reference to it.

    Copies of the state dict share it. It lies in ``TMPDIR``, or else in ``/var/tmp``: ``/tmp`` may
    be memory. Of a job's ranks the first one has it: what it sends the others is empty. ``file``:
    open for reading, and changed by nobody.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file

    @classmethod
    def written_by(cls, write: Callable[[Path], None]) -> SpilledState:
        """What ``write`` writes to the path that it is given; empty if it makes no file there.

        Raises OSError.
        """
        place = os.environ.get("TMPDIR", "/var/tmp")
        with temporary_folder(Path(place)) as folder:
            path = folder / "state"
            write(path)
            return cls(open(path, "rb") if path.exists() else None)

    @classmethod
    def copy_of(cls, source: IO[bytes]) -> SpilledState:
        """What is left to read of a file. Raises OSError."""

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                shutil.copyfileobj(source, file, _PIECE_BYTES)

        return cls.written_by(write)

    @property
    def path(self) -> Path:
        """Where this process can read it, as long as it refers to it."""
        return Path(os.devnull if self._file is None else f"/proc/self/fd/{self._file.fileno()}")

    def copy_to(self, target: IO[bytes]) -> None:
        """Write all of it to a file, a piece at a time. Raises OSError."""
        with open(self.path, "rb") as source:
            shutil.copyfileobj(source, target, _PIECE_BYTES)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpilledState:
        return self


register(SpilledState, lambda state: None, lambda _: SpilledState())
