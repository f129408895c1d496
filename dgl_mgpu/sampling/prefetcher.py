"""Batches that are made before they are asked for, and are what they would have been then."""

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

#: Batches by which one way is compared with the other, those before them that do not count, and
#: such windows at most until the other way is tried again.
_WINDOW, _SETTLING, _MOST = 5, 3, 32

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Source(Protocol[BatchOut]):
    """What batches are made of."""

    def seeds(self) -> Any:
        """What the next batch is made from; each is taken once.

        Raises
        ------
        StopIteration
            After the last.
        """

    def begin(self, number: int, seeds: Any) -> Any:
        """Queue what can be queued of batch ``number`` without waiting; None if that is nothing."""

    def make(self, number: int, seeds: Any, begun: Any = None) -> BatchOut:
        """Batch ``number``, the same however often and whenever it is made.

        ``begun`` is what :meth:`begin` has returned, on the same stream, if that was called.
        """

    def state(self) -> object:
        """What else batches depend on, which the script may change; holds on to it."""

    def left_behind(self) -> object:
        """What is new, since the last call, in what batches and others share; or None."""

    def hand_over(self, *made: object) -> None:
        """Let the script's stream use what was made on the lane: it may free it while in use."""


@dataclass
class _Entry(Generic[Batch]):
    """A batch that is to be handed out, or what making it has raised; neither if it is to be made.

    Attributes
    ----------
    begun : object, optional
        What the source has begun of it.
    mark : Mark, optional
        On the lane, if it or its seeds come by it.
    """

    number: int
    seeds: Any
    begun: Any = None
    mark: Event | None = None
    batch: Batch | None = None
    error: Exception | None = None


class PrefetchTuner:
    """Whether a GPU that has nothing left to do gets its batches sooner if they are made ahead all
    the same, so that what reading them takes is beside the host's work for the model, or when they
    are asked for, where the script is, which spares the host some calls.

    Told by the time from one batch to the next.  Both ways are tried for some batches; the faster
    one is kept to for twice as long each time, up to a limit, before the other is tried again.
    While the GPU mostly has work left nothing is tried: a host that is late once in a while would
    have only the steps compared in which it was.

    Attributes
    ----------
    rests : bool
        Whether batches are to be made when they are asked for.
    """

    def __init__(self) -> None:
        self.rests = False
        self._kept = False
        #: Windows for which the faster way is still kept to, and was the last time.
        self._left, self._stay = 0, 1
        self._at = math.nan
        #: Batches that do not count: they were still made, or waited for, in the other way, or as
        #: the first of a pass.
        self._settling = _SETTLING
        self._window: list[float] = []
        #: Of these, how many found the GPU with nothing left to do.
        self._idle = 0
        #: Of a step, by whether batches are made at rest.
        self._seconds = {False: math.nan, True: math.nan}

    def begin(self) -> None:
        """Begin a pass: what was before it is not timed."""
        self._at, self._settling = math.nan, _SETTLING

    def after_step(self, is_idle: bool) -> None:
        """Note that a batch is handed out, and whether the GPU has nothing left to do by now."""
        before, self._at = self._at, perf_counter()
        if math.isnan(before):
            return
        if self._settling:
            self._settling -= 1
            return
        self._window.append(self._at - before)
        self._idle += is_idle
        if len(self._window) == _WINDOW:
            self._seconds[self.rests] = median(self._window)
            was_idle = 2 * self._idle > _WINDOW
            self._window, self._idle, self._settling = [], 0, _SETTLING
            if was_idle:
                self._choose()

    def _choose(self) -> None:
        if self._left > 1:
            self._left -= 1
        elif self._left == 1 or math.isnan(self._seconds[not self.rests]):
            self._left = 0
            self.rests = not self.rests
        else:
            self.rests = self._seconds[True] < self._seconds[False]
            self._stay = min(2 * self._stay, _MOST) if self.rests == self._kept else 1
            self._kept, self._left = self.rests, self._stay


class Prefetcher(Iterator[Batch]):
    """Hands out batches in order, and makes the next ones on a lane before it returns, while the
    GPU still works on what the script has queued.  The one after those is begun before, so that the
    lane has done by then what the host is to wait for.

    The host waits for the lane there and not for the model, which goes on meanwhile.  That wait
    ends with the model of two batches ago at the earliest, so that the host, and with it the
    memory of batches in use, does not get further ahead.

    A GPU that has nothing to do by then waits for the host.  It may be better then to make the next
    batch when it is asked for, where the script is: whichever takes less time
    (:class:`PrefetchTuner`). After the first batch it is not made ahead: that one may be all that
    the script wants.

    The first batch is made where the script is: caches that others use too are filled then.  If
    something changes later on which batches depend, what was made is dropped and made again, and
    nothing is made ahead any more; likewise if there is no memory for it.  What making a batch
    raises is raised when it is its turn.

    Parameters
    ----------
    source : Source
    lane : Lane, optional
        Without one, batches are made when they are asked for.
    depth : int
        Batches to make ahead.
    pace : Pace, optional
        Of earlier passes over the same.
    """

    def __init__(
        self,
        source: Source[Batch],
        lane: SideStream | None,
        depth: int,
        pace: PrefetchTuner | None = None,
    ) -> None:
        self._queue: deque[_Entry[Batch]] = deque()
        #: The batch after those in the queue, if it has been begun on the lane.
        self._begun: _Entry[Batch] | None = None
        #: Whether there is memory for it beside a batch that is made.
        self._begins = True
        self._source, self._lane, self._depth = source, lane, depth
        #: Threads that share a pass get its batches one after the other.
        self._turn = threading.Lock()
        self._taken = 0
        #: Of the source when the first batch had been made.
        self._state: object = None
        #: What the script had queued when the last batch was asked for.
        self._queued: Event | None = None
        self._pace = pace or PrefetchTuner()
        self._pace.begin()

    def __next__(self) -> Batch:
        with self._turn:
            return self._next()

    def _next(self) -> Batch:
        if self._state is not None and self._source.state() != self._state:
            self._stop()
        lane = self._lane
        # The end of what the script has queued so far.
        queued = None if lane is None else lane.mark()
        if lane is not None and self._begun is not None and not self._queue:
            self._make_next(lane)
        is_at_rest = self._state is not None and not self._queue
        entry = self._queue.popleft() if self._queue else self._take()
        if entry.mark is not None and self._lane is not None:
            self._lane.wait(entry.mark)
            self._source.hand_over(entry.seeds, entry.batch)
        if entry.error is not None:
            raise entry.error
        batch = entry.batch
        if batch is None:
            batch = self._source.make(entry.number, entry.seeds)
        if self._lane is not None and queued is not None:
            self._look_ahead(self._lane, queued, is_at_rest)
        if lane is not None and self._lane is None:
            warnings.warn(
                "The next mini-batch does not fit into the GPU's memory beside this one: from here "
                "on they are made one by one, when they are asked for.",
                stacklevel=3,
            )
        return batch

    def _take(self) -> _Entry[Batch]:
        entry: _Entry[Batch] = _Entry(self._taken, self._source.seeds())
        self._taken += 1
        return entry

    def _look_ahead(self, lane: SideStream, queued: Event, is_at_rest: bool) -> None:
        """Make the next batches, if the GPU has work left or has them sooner that way."""
        is_first = self._state is None
        if is_first:
            self._state = self._source.state()
        before, self._queued = self._queued, queued
        is_idle = is_at_rest or queued.query()
        self._pace.after_step(is_idle)
        if is_idle and (self._pace.rests or is_first):
            return
        if is_first or is_at_rest:
            # The lane is to see what was made where the script is.
            self._source.left_behind()
            lane.follow()
        if before is not None and not is_idle:
            before.synchronize()
        while self._lane is not None and len(self._queue) < self._depth:
            if not self._make_next(lane):
                return

    def _make_next(self, lane: SideStream) -> bool:
        """Make a batch on the lane, if there is one more; whether there was."""
        if self._source.left_behind() is not None:
            lane.follow()  # the script's stream may still be making it
        is_full = False
        with lane.work():
            if self._begun is None and not self._begin_next(lane):
                return False
            entry, self._begun = self._begun, None
            assert entry is not None
            self._queue.append(entry)
            # First what the lane is to do while the host waits for it no longer.
            if self._begins and not self._pace.rests:
                self._begin_next(lane)
            try:
                if entry.error is None:
                    entry.batch = self._made(entry)
            except torch.OutOfMemoryError:
                is_full = True
            except Exception as error:
                # Kept also if the batch is made again: it may tell of other work on the GPU.
                entry.error = error
            finally:
                entry.begun = None
                entry.mark = lane.mark()
        left = self._source.left_behind()
        if left is not None:
            lane.wait(entry.mark)
            self._source.hand_over(left)
        if is_full:
            lane.is_full = True
            self._stop()
        return True

    def _made(self, entry: _Entry[Batch]) -> Batch:
        try:
            return self._source.make(entry.number, entry.seeds, entry.begun)
        except torch.OutOfMemoryError:
            if self._begun is None or self._begun.begun is None:
                raise
        # What is begun takes as much as the largest sample: from here on it waits for its turn.
        self._begun.begun = entry.begun = None
        self._begins = False
        return self._source.make(entry.number, entry.seeds)

    def _begin_next(self, lane: SideStream) -> bool:
        """On the lane, begin with one more batch; whether there was one."""
        try:
            entry = self._begun = self._take()
        except StopIteration:
            return False
        try:
            entry.begun = self._source.begin(entry.number, entry.seeds)
        except torch.OutOfMemoryError:
            pass  # there may be memory for it when it is its turn
        except Exception as error:
            entry.error = error
        finally:
            entry.mark = lane.mark()
        return True

    def _to_be_made(self, entry: _Entry[Batch]) -> None:
        """Have a batch made when it is asked for, where the script is."""
        if entry.mark is not None and self._lane is not None:
            self._lane.wait(entry.mark)
            self._source.hand_over(entry.seeds)
        entry.begun = entry.mark = entry.batch = None

    def _stop(self) -> None:
        """Make the batches to come when they are asked for."""
        if self._begun is not None:
            self._queue.append(self._begun)
            self._begun = None
        for entry in self._queue:
            self._to_be_made(entry)
        self._lane = self._state = self._queued = None

    def __del__(self) -> None:
        # What the lane still reads may be freed next, for others to write there.
        marks = [each.mark for each in (self._begun, *self._queue) if each is not None]
        for mark in marks:
            if mark is not None:
                mark.synchronize()
