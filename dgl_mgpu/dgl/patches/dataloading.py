"""DGL's DataLoader and samplers for graphs of this package."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from dgl_mgpu.errors import WorkerFailedError
from dgl_mgpu.graph.originals import originals

#: Files that a worker keeps open, to have as many to spare when there are no more to be had: those
#: that it takes to hand over what it has made before.
_SPARE_FILES = 2


@contextmanager
def samplers_of_all_hops() -> Iterator[None]:
    """Execute ``dgl.dataloading``, and then teach its classes what this package's graphs offer."""
    yield
    from dgl_mgpu.sampling.dataloading import serve_dataloading

    serve_dataloading()


def begin_worker(self: Any, worker_id: int) -> None:
    """In place of ``WorkerInitWrapper.__call__``: leaves alone what the process has of its parent.

    An event of a GPU among the parent's garbage would end a worker that collects it, since CUDA
    does not work there.

    It tells the process that waits for it of a mini-batch that it cannot hand over: Python drops
    what a queue cannot take, and that process would wait for ever.  When that process is gone, it
    says nothing: whoever watches that tells of its end.
    """
    gc.freeze()
    sys.excepthook = _without_lost_readers
    spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_SPARE_FILES)]
    dropped = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def not_handed_over(queue: Queue, error: Exception, item: Any) -> None:
        while spare:
            os.close(spare.pop())
        match item:
            case (int(number), _):  # torch's: a mini-batch and which it is
                _put_first(queue, (number, _NotHandedOver(error)))
            case _:
                dropped(error, item)

    Queue._on_queue_feeder_error = not_handed_over  # type: ignore[attr-defined]
    originals["dgl.dataloading.dataloader:WorkerInitWrapper.__call__"](self, worker_id)


def _without_lost_readers(kind: type[BaseException], *error: Any) -> None:
    """In place of ``sys.excepthook``: the thread from which tensors are fetched shows errors so."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *error)


def _put_first(queue: Any, item: Any) -> None:
    """Put what comes in an item's place, on the thread that has taken that out of the queue.

    What a worker has put there since must not overtake it: torch waits for no mini-batch any more,
    and says nothing, of a worker that has said that it has made its last.
    """
    queue._sem.acquire()
    with queue._notempty:
        queue._buffer.appendleft(item)


class _NotHandedOver(ExceptionWrapper):
    """What torch raises, where a mini-batch is waited for, of one that did not come."""

    def __init__(self, error: Exception) -> None:
        super().__init__((type(error), error, error.__traceback__), "in a DataLoader worker")
        # Torch raises a RuntimeError where there is no room for shared memory.
        is_of_system = isinstance(error, OSError) or "shared memory" in str(error)
        self._error = WorkerFailedError(
            "hand a mini-batch over from a DataLoader worker",
            f"{type(error).__name__}: {error}",
            "free shared memory (/dev/shm), raise the limit on open files (ulimit -n), or use "
            "fewer workers or smaller batches"
            if is_of_system
            else "have the sampler return what can be pickled",
        )

    def reraise(self) -> NoReturn:
        raise self._error
