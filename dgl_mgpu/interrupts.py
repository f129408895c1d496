"""Ctrl-C ends a command, whatever it is at.

Python runs a signal's handler between two steps of the main thread.  One that waits in C, for
another rank say, hears of it late or never; and what a handler raises within a callback, of a fork
or a finalizer, Python prints and drops.  So a thread hears of Ctrl-C as well, by the descriptor to
which Python writes the numbers of signals, and ends the process when the main thread does not.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from . import limits

#: The exit status of a command that was interrupted.
STATUS = 128 + signal.SIGINT
_DONE = b"\0"  # no signal has this number
# Two that are closer than this are one wish: a terminal and a wrapper may send one each.
_ECHO_SECONDS = 0.3


class Interrupts:
    """Hears Ctrl-C within ``with``: the first raises KeyboardInterrupt, a second ends at once.

    So does the first, after `limits.INTERRUPT` seconds, if the process is still within.  On another
    than the main thread, and where SIGINT is not Python's to handle (a shell has a command in the
    background ignore it), nothing is done.

    Parameters
    ----------
    last_words : callable
        What to say before the process is ended; called on another thread.

    Attributes
    ----------
    heard : bool
        Whether Ctrl-C was heard, whatever has become of the KeyboardInterrupt.
    """

    def __init__(self, last_words: Callable[[], str]) -> None:
        self.heard = False
        self._last_words = last_words

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        self._hears = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._hears:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            signal.signal(signal.SIGINT, self._hear)
            self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._hears:
            return
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(self._writer, _DONE)
        self._thread.join(limits.END)
        os.close(self._writer)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.heard = True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        first = None
        while True:
            left = None if first is None else first + limits.INTERRUPT - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], left and max(left, 0.0))
            told = os.read(self._reader, 4096) if ready else b""
            if _DONE in told:
                break
            if first is None:
                if signal.SIGINT in told:
                    first, self.heard = time.monotonic(), True
            elif not ready or (signal.SIGINT in told and time.monotonic() > first + _ECHO_SECONDS):
                self._end()
        os.close(self._reader)

    def _end(self) -> None:
        try:
            words = self._last_words()
        except Exception:  # the files it looks at are being written
            words = "interrupted"
        # Not by sys.stderr, whose lock the main thread may hold.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{words}\n".encode())
        os._exit(STATUS)


def _after_fork() -> None:
    # A DataLoader's worker, to which a terminal sends Ctrl-C as well, is not to tell of its own.
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)
