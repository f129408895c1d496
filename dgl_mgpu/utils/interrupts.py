"""Ctrl-C and Ctrl-\\ end a command, whatever it is at; a run may save its state first.

Python runs a signal's handler between two steps of the main thread.  One that waits in C, for
another rank say, hears of it late or never; and what a handler raises within a callback, of a fork
or a finalizer, Python prints and drops.  So a thread hears of Ctrl-C as well, by the descriptor to
which Python writes the numbers of signals, and ends the process when the main thread does not.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from dgl_mgpu.utils import timeouts

#: The exit status of a command that was interrupted.
STATUS = 128 + signal.SIGINT
#: What a run stops by, after it has written a checkpoint.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_DONE = b"\0"  # no signal has this number
# Two that are closer than this are one wish: a terminal and a wrapper may send one each.
_ECHO_SECONDS = 0.3


class Stopped(SystemExit):
    """Ends a process that stopped because of a signal, with the exit status of that."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(128 + signum)
        self.by = signal.Signals(signum).name


class StopSignals:
    """Takes the signals `STOPPING`, within ``with``, for a wish to stop.

    One that is ignored stays so: SIGHUP by ``nohup``, SIGINT by a shell for a command in the
    background. On another than the main thread, which hears no signals, nothing is done.
    ``notify`` is called after each signal, in its handler.  ``first`` is the signal that came
    first, and ``again`` says whether Ctrl-C came after that, which is to end the process at once;
    where `Interrupts` hears it, too, that does so.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.first: int | None = None
        self.again = False
        self._notify = notify
        self._restoring = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._is_alone = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for signum in STOPPING:
            before = signal.getsignal(signum)
            if before is not signal.SIG_IGN or signum == signal.SIGTERM:
                self._restoring.callback(signal.signal, signum, before)
                signal.signal(signum, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restoring.close()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        _leave_lost_terminal()
        now = time.monotonic()
        if self.first is None:
            self.first, self._since = signum, now
        elif signum == signal.SIGINT and self._is_alone and now > self._since + _ECHO_SECONDS:
            self.again = True
        self._notify()


def _leave_lost_terminal() -> None:
    """Write no more to a terminal that was closed, where writing fails: the run still continues."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class Interrupts:
    """Hears Ctrl-C within ``with``: the first raises KeyboardInterrupt, a second ends at once.

    So does the first, after `timeouts.INTERRUPT` seconds, if the process is still within; unless
    `StopSignals` has heard it.  SIGQUIT, Ctrl-\\, ends at once, too.  On another than the main
    thread, and where SIGINT is not Python's to handle (a shell has a command in the background
    ignore it), nothing is done.

    ``last_words``, called on another thread, is what to say before a signal ends the process.
    ``heard`` says whether Ctrl-C was heard, whatever has become of the KeyboardInterrupt.  Raises
    RuntimeError if no thread can be started.
    """

    def __init__(self, last_words: Callable[[int], str]) -> None:
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
            self._at_quit = signal.getsignal(signal.SIGQUIT)
            if self._at_quit is signal.SIG_DFL:
                signal.signal(signal.SIGQUIT, _pass)
            self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._hears:
            return
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, self._at_quit)
        os.write(self._writer, _DONE)
        self._thread.join(timeouts.END)
        os.close(self._writer)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.heard = True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        first: float | None = None
        limit: float | None = None
        while True:
            left = None if limit is None else max(limit - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._reader], [], [], left)
            received = os.read(self._reader, 4096) if ready else b""
            if _DONE in received:
                break
            if signal.SIGQUIT in received:
                self._end(signal.SIGQUIT)
            elif first is None:
                if signal.SIGINT in received:
                    first = time.monotonic()
                    if signal.getsignal(signal.SIGINT) == self._hear:
                        self.heard, limit = True, first + timeouts.INTERRUPT
            elif not ready or (
                signal.SIGINT in received and time.monotonic() > first + _ECHO_SECONDS
            ):
                self._end(signal.SIGINT)
        os.close(self._reader)

    def _end(self, signum: int) -> None:
        try:
            words = self._last_words(signum)
        except Exception:  # the files it looks at are being written
            words = f"ended by {signal.Signals(signum).name}"
        # Not by sys.stderr, whose lock the main thread may hold.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{words}\n".encode())
        os._exit(128 + signum)


def _pass(signum: int, frame: FrameType | None) -> None:
    """Python writes the number of a signal that has a handler."""


def _after_fork() -> None:
    # A DataLoader's worker, to which a terminal sends Ctrl-C as well, has nothing to report.
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)
