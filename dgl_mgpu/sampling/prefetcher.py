"""Prefetching: mini-batches made before they are asked for, with the same contents."""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch

from dgl_mgpu.sampling.side_stream import Event, SideStream

#: Batches in a timing window, batches skipped before each window, and the most windows before the
#: slower mode is tried again.
_WINDOW, _SETTLING, _MAX = 5, 3, 32

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Source(Protocol[BatchOut]):
    """Makes mini-batches, in order."""

    def seeds(self) -> Any:
        """The seeds of the next batch; raises StopIteration after the last."""

    def start(self, number: int, seeds: Any) -> Any:
        """A future of the samples of batch ``number``; None if nothing can start now."""

    def make(self, number: int, seeds: Any, future: Any = None) -> BatchOut:
        """Batch ``number``, the same however often and whenever it is made.

        ``future`` is what :meth:`start` returned on the same stream, if it was called.
        """

    def go_on(self, future: Any) -> None:
        """Start what is left of the samples of a future, which the batch before need not wait for.

        Called where other ranks take part in making a batch.
        """

    def dependencies(self) -> object:
        """A snapshot of what else batches depend on and the script may change; keeps it alive."""

    def new_shared_state(self) -> object:
        """Additions to state shared by batches and others since the last call; None without any."""

    def hand_over(self, *made: object) -> None:
        """Let the script's stream use what the side stream made; the script may free it in use."""


@dataclass
class _Entry(Generic[Batch]):
    """A batch to hand out, or the error of making it; neither if it is made on demand."""

    number: int
    seeds: Any
    future: Any = None  # its samples in flight
    event: Event | None = None  # on the side stream, if the batch or its seeds were made there
    stream: int | None = None  # the script's, if its sampling was started there
    batch: Batch | None = None
    error: Exception | None = None


class PrefetchTuner:
    """Decides how an idle GPU gets its batches sooner: prefetched, or made on demand.

    Prefetching overlaps reading a batch with the host's work for the model.  Making it on demand,
    on the script's stream, saves the host some calls.  The tuner compares the time between batches:
    it tries both modes for a few batches and keeps to the faster one, for twice as long each time
    up to a limit, before it tries the other again.  While the GPU mostly has work left it tries
    nothing, because only the steps in which the host happened to be late would be compared.
    """

    def __init__(self) -> None:
        self.is_on_demand = False
        self._faster = False
        #: Windows left in the faster mode, and how many there were the last time.
        self._windows_left, self._windows_to_stay = 0, 1
        self._last_step = math.nan
        #: Batches still to skip: made or waited for in the other mode, or the first of a pass.
        self._settling = _SETTLING
        self._window: list[float] = []
        #: How many of these found the GPU idle.
        self._idle = 0
        #: Median seconds of a step, by ``is_on_demand``.
        self._seconds = {False: math.nan, True: math.nan}

    def start_pass(self) -> None:
        """Start a pass over the loader; the time before it does not count."""
        self._last_step, self._settling = math.nan, _SETTLING

    def after_step(self, is_idle: bool) -> None:
        """Note that a batch is handed out, and whether the GPU is idle."""
        before, self._last_step = self._last_step, perf_counter()
        if math.isnan(before):
            return
        if self._settling:
            self._settling -= 1
            return
        self._window.append(self._last_step - before)
        self._idle += is_idle
        if len(self._window) == _WINDOW:
            self._seconds[self.is_on_demand] = median(self._window)
            was_idle = 2 * self._idle > _WINDOW
            self._window, self._idle, self._settling = [], 0, _SETTLING
            if was_idle:
                self._choose()

    def _choose(self) -> None:
        if self._windows_left > 1:
            self._windows_left -= 1
        elif self._windows_left == 1 or math.isnan(self._seconds[not self.is_on_demand]):
            self._windows_left = 0
            self.is_on_demand = not self.is_on_demand
        else:
            self.is_on_demand = self._seconds[True] < self._seconds[False]
            self._windows_to_stay = (
                min(2 * self._windows_to_stay, _MAX) if self.is_on_demand == self._faster else 1
            )
            self._faster, self._windows_left = self.is_on_demand, self._windows_to_stay


class Prefetcher(Iterator[Batch]):
    """Hands out batches in order, and makes the next ones on a side stream before it returns.

    Meanwhile the GPU still works on what the script has queued.  Sampling of the batch after those
    is started first, so that the side stream has finished it when the host needs its sizes.  The
    host waits for the side stream there, not for the model.  It also waits for the script's work
    before the previous batch, which bounds how far ahead it runs and how many batches are in use.

    When the GPU is idle by then, making the next batch on demand may be faster:
    :class:`PrefetchTuner` decides.  Only its sampling is then started at once, on the script's
    stream.  After the first batch an idle GPU gets no prefetched one, as the script may want no
    more.

    The first batch is made on the script's stream, and fills caches that others use too.  If
    something that batches depend on changes later, prefetched batches are dropped and made again,
    and prefetching ends; likewise if memory runs out.  What making a batch raises is raised when
    that batch is due.

    With ``in_lockstep`` other ranks take part in making a batch.  Then what is made when depends on
    nothing that differs between ranks: batches are prefetched whether the GPU is idle or not, and
    one for which there is no memory is an error.

    Without a ``side_stream``, batches are made on demand.  ``depth`` batches are prefetched, and
    ``tuner`` is that of earlier passes over the same loader.
    """

    def __init__(
        self,
        source: Source[Batch],
        side_stream: SideStream | None,
        depth: int,
        tuner: PrefetchTuner | None = None,
        *,
        in_lockstep: bool = False,
    ) -> None:
        self._queue: deque[_Entry[Batch]] = deque()
        #: The batch after those in the queue, if its sampling has started on the side stream.
        self._started: _Entry[Batch] | None = None
        #: Whether there is memory for its samples beside a batch.
        self._starts_early = True
        self._source, self._side_stream, self._depth = source, side_stream, depth
        self._in_lockstep = in_lockstep
        #: Threads may share a pass; each batch goes to one of them.
        self._lock = threading.Lock()
        self._num_taken = 0
        #: The source's, when the first batch had been made.
        self._dependencies: object = None
        #: What the script had queued when the last batch was asked for.
        self._queued: Event | None = None
        self._tuner = tuner or PrefetchTuner()
        self._tuner.start_pass()

    def __next__(self) -> Batch:
        with self._lock:
            return self._next()

    def _next(self) -> Batch:
        if self._dependencies is not None and self._source.dependencies() != self._dependencies:
            self._stop()
        side_stream = self._side_stream
        # The end of what the script has queued so far.
        queued = None if side_stream is None else side_stream.record_event()
        if side_stream is not None and self._started is not None and not self._queue:
            if self._started.stream is None:
                self._make_next(side_stream)
            elif self._started.stream != side_stream.script_stream:
                self._started.future = self._started.stream = None
        is_unprefetched = self._dependencies is not None and not self._queue
        entry = self._queue.popleft() if self._queue else self._take()
        if entry.event is not None and self._side_stream is not None:
            self._side_stream.make_script_wait(entry.event)
            self._source.hand_over(entry.seeds, entry.batch)
        if entry.error is not None:
            raise entry.error
        batch = entry.batch
        if batch is None:
            batch = self._source.make(entry.number, entry.seeds, entry.future)
        if self._side_stream is not None and queued is not None:
            self._prefetch(self._side_stream, queued, is_unprefetched)
        if side_stream is not None and self._side_stream is None:
            warnings.warn(
                "The next mini-batch does not fit into the GPU's memory beside this one: "
                "prefetching stops, and mini-batches are made one at a time.",
                stacklevel=3,
            )
        return batch

    def _take(self) -> _Entry[Batch]:
        """The next batch: the one whose sampling has started, if there is one."""
        entry, self._started = self._started, None
        if entry is None:
            entry = _Entry(self._num_taken, self._source.seeds())
            self._num_taken += 1
        return entry

    def _prefetch(self, side_stream: SideStream, queued: Event, is_unprefetched: bool) -> None:
        """Make the next batches, if the GPU is busy or the tuner says that it is faster."""
        is_first = self._dependencies is None
        if is_first:
            self._dependencies = self._source.dependencies()
        before, self._queued = self._queued, queued
        is_idle = not self._in_lockstep and (is_unprefetched or queued.query())
        if not self._in_lockstep:
            self._tuner.after_step(is_idle)
        if is_idle and (self._tuner.is_on_demand or is_first):
            if not is_first and self._started is None and not self._queue:
                # The idle GPU samples it while the script queues its work.
                self._start_next(side_stream, stream=side_stream.script_stream)
            return
        if is_first or is_unprefetched:
            # The side stream is to see what was made on the script's stream.
            self._source.new_shared_state()
            side_stream.wait_for_script()
        if before is not None and not is_idle:
            before.synchronize()
        while self._side_stream is not None and len(self._queue) < self._depth:
            if not self._make_next(side_stream):
                return

    def _make_next(self, side_stream: SideStream) -> bool:
        """Make a batch on the side stream; False if there are no more."""
        if self._source.new_shared_state() is not None:
            side_stream.wait_for_script()  # the script's stream may still be making it
        is_full = False
        with side_stream.use():
            if self._started is None and not self._start_next(side_stream):
                return False
            entry, self._started = self._started, None
            assert entry is not None
            if entry.stream is not None:
                entry.future = entry.stream = None
            self._queue.append(entry)
            # Queued first, so that the side stream is not idle after the host's wait.
            if self._starts_early and not self._tuner.is_on_demand:
                self._start_next(side_stream)
            try:
                if entry.error is None:
                    entry.batch = self._made(entry)
            except torch.OutOfMemoryError as error:
                is_full = not self._in_lockstep
                entry.error = None if is_full else error
            except Exception as error:
                # Kept also if the batch is made again: it may tell of other work on the GPU.
                entry.error = error
            finally:
                entry.future = None
                entry.event = side_stream.record_event()
            if self._in_lockstep and self._started is not None:
                self._go_on(self._started, side_stream)
        added = self._source.new_shared_state()
        if added is not None:
            side_stream.make_script_wait(entry.event)
            self._source.hand_over(added)
        if is_full:
            side_stream.is_full = True
            self._stop()
        return True

    def _go_on(self, started: _Entry[Batch], side_stream: SideStream) -> None:
        """Start what is left of a batch's sampling."""
        try:
            if started.future is not None:
                self._source.go_on(started.future)
        except Exception as error:
            started.error = error
        finally:
            started.event = side_stream.record_event()

    def _made(self, entry: _Entry[Batch]) -> Batch:
        try:
            return self._source.make(entry.number, entry.seeds, entry.future)
        except torch.OutOfMemoryError:
            if self._in_lockstep or self._started is None or self._started.future is None:
                raise
        # Samples in flight take as much as the largest sample: start no more of them early.
        self._started.future = entry.future = None
        self._starts_early = False
        return self._source.make(entry.number, entry.seeds)

    def _start_next(self, side_stream: SideStream, *, stream: int | None = None) -> bool:
        """Start sampling one more batch on the side stream, or on ``stream``, the script's.

        False if there are no more.
        """
        try:
            entry = self._started = self._take()
        except StopIteration:
            return False
        entry.stream = stream
        try:
            entry.future = self._source.start(entry.number, entry.seeds)
        except torch.OutOfMemoryError as error:
            # There may be memory when the batch is due; but other ranks have started it by then.
            entry.error = error if self._in_lockstep else None
        except Exception as error:
            entry.error = error
        finally:
            if stream is None:
                entry.event = side_stream.record_event()
        return True

    def _drop(self, entry: _Entry[Batch]) -> None:
        """Drop what was made of a batch, so that it is made on demand."""
        if entry.event is not None and self._side_stream is not None:
            self._side_stream.make_script_wait(entry.event)
            self._source.hand_over(entry.seeds)
        entry.future = entry.event = entry.batch = entry.stream = None

    def _stop(self) -> None:
        """Make all batches to come on demand."""
        if self._started is not None:
            self._queue.append(self._started)
            self._started = None
        for entry in self._queue:
            self._drop(entry)
        self._side_stream = self._dependencies = self._queued = None

    def __del__(self) -> None:
        # Memory that the side stream still reads may be freed and reused next.
        events = [entry.event for entry in (self._started, *self._queue) if entry is not None]
        for event in events:
            if event is not None:
                event.synchronize()
