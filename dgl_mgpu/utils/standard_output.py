"""Standard output that takes no more: its disk is full, or its reader is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """A text file that is written to for as long as it takes anything, and then no more."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._dropping_after_error():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping_after_error():
            self._file.flush()

    @contextlib.contextmanager
    def _dropping_after_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            drop(self._file)
            warnings.warn(
                f"what this run shows goes nowhere from here on: stdout takes no more ({error}). "
                "The run continues, and its folder has the metrics.",
                stacklevel=4,
            )


@contextlib.contextmanager
def lasting_stdout() -> Iterator[None]:
    """Within, what is written to stdout and cannot be is dropped, with a warning, once."""
    with contextlib.redirect_stdout(cast(TextIO, _Lasting(sys.stdout))):
        yield


def open_standard_files() -> None:
    """Have something in the place of standard files that the process was started without.

    A file that is opened later would have the number of one, and get what is written to it.
    """
    with contextlib.suppress(OSError):  # no more may be opened, and so these are there
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def is_of_stdout(error: Exception) -> bool:
    """Whether it is what stdout raises that takes no more, and no file with a name."""
    numbers = (errno.ENOSPC, errno.EPIPE)
    return isinstance(error, OSError) and error.filename is None and error.errno in numbers


def drop(file: TextIO) -> None:
    """Let what is left in a file's memory, and all that follows, go nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())
