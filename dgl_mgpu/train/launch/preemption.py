"""Signals of schedulers, terminals and users to stop a run, which first writes a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.utils.interrupts import STOPPING, Stopped, StopSignals
from dgl_mgpu.utils.temporary_folder import note_sharing

# How often a worker checks that its rank lives.
_LOOK_SECONDS = 1.0


class PreemptionHandler:
    """Signals to stop, agreed upon by all ``ranks`` at the same step."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._signals = StopSignals(self._end_if_repeated)
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[PreemptionHandler]:
        """Hear SIGTERM, SIGHUP and Ctrl-C, the first of maybe several.

        A rank may get the same signal twice: schedulers signal all processes of a job, of which the
        launcher or torchrun's agent passes it on, and ``timeout`` signals its child and then the
        group.  So a repeated signal does not cancel the checkpoint, except for Ctrl-C.
        """
        with self._signals:
            yield self

    def stopped(self) -> Stopped:
        """The exception with which a stopped rank ends."""
        return Stopped(signal.SIGTERM if self._signals.first is None else self._signals.first)

    def _end_if_repeated(self) -> None:
        if self._signals.again:
            raise KeyboardInterrupt

    @property
    def _has_signal(self) -> bool:
        return self._signals.first is not None

    def after_step(self) -> bool:
        """Whether to stop after this step; called by all ranks after the same steps.

        The answer is that of the step before, so that no rank waits for others.
        """
        if self._ranks.size == 1:
            return self._has_signal
        pending, self._pending = self._pending, self._count()
        return pending is not None and _any_rank(*pending)

    def after_epoch(self) -> bool:
        """Whether to stop after this epoch; a barrier of all ranks."""
        self._pending = None
        return self._has_signal if self._ranks.size == 1 else _any_rank(*self._count())

    def _count(self) -> tuple[torch.Tensor, dist.Work]:
        """Start to count the ranks that have received a signal."""
        count = torch.tensor(int(self._has_signal))
        return count, dist.all_reduce(count, async_op=True)


def _any_rank(count: torch.Tensor, pending: dist.Work) -> bool:
    pending.wait()
    return bool(count)


class DeferredSignals:
    """Defers signals to stop, within ``with``, until `check`.

    A handler that raises does so anywhere: between the start of a process and its place in the list
    of those to be ended, or in a callback of ``fork``, where Python prints what is raised and drops
    it.  ``sign``, a list for ``multiprocessing.connection.wait``, is readable when a signal is
    pending; it is empty on other threads than the main one, which get no signals.
    """

    def __init__(self) -> None:
        self.sign: list[int] = []
        self._signals = StopSignals(self._give_sign)
        self._is_raised = False
        self._restoring = contextlib.ExitStack()

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, self._writer = os.pipe()
        for end in (reader, self._writer):
            os.set_blocking(end, False)
            self._restoring.callback(os.close, end)
        self.sign = [reader]
        self._restoring.enter_context(self._signals)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self._restoring.close()

    def check(self) -> None:
        """Raise for the signals since the last check, for each once.

        That is Stopped, or of Ctrl-C while ranks stop KeyboardInterrupt.  A repeated SIGTERM is to
        interrupt nothing: ranks stop, and then are cleared away.
        """
        for descriptor in self.sign:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)
        if self._signals.again:
            self._signals.again = False
            raise KeyboardInterrupt
        if self._signals.first is not None and not self._is_raised:
            self._is_raised = True
            raise Stopped(self._signals.first)

    def _give_sign(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full
            os.write(self._writer, b".")


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals, for ever in processes that are started within."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_sigterm(rank: int, worker: int) -> None:
    """End a DataLoader's worker, started with `STOPPING` blocked, when its rank sends SIGTERM.

    A SIGTERM to all processes is for the rank, which stops after a step and needs its workers until
    then; torch ends a worker that does not end by itself by a SIGTERM of the rank.  The system
    merges two pending signals: the rank's may be lost behind another one, and multiprocessing sends
    it again at its end.

    It ends, too, when its rank was killed, which torch's workers notice only if that happens after
    they have begun.  ``rank`` is the rank's process, and ``worker`` the worker's number, with which
    a DataLoader calls its ``worker_init_fn``.
    """
    # Again, since a spawned process does not inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    note_sharing()
    threading.Thread(target=_exit_on_sigterm_of, args=(rank,), daemon=True).start()


def _exit_on_sigterm_of(process: int) -> None:
    while os.getppid() == process:
        # Waiting tells the sender.
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if received is not None and received.si_pid == process:
            break
    os._exit(0)
