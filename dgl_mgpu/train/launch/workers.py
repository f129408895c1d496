"""A DataLoader's worker that is gone, for the error that tells of it."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection, reduction

from dgl_mgpu.errors import DGLMGPUError, LimitError, SharedMemoryError, WorkerFailedError
from dgl_mgpu.train.launch.heartbeat import stage_of

# How long after a worker's connection is lost a busy system may take to tell of its end.
_SIGNAL_SECONDS = 5.0
# What torch says of a worker that is gone, or cannot be heard.  Of an error that one raised it says
# that it was «in DataLoader worker process 0».
_OF_TORCH = "DataLoader worker (pid", "Too many open files. Communication with the workers"

# What tells more than that a worker has ended.
_EXPLAINED = WorkerFailedError, LimitError, SharedMemoryError


@contextlib.contextmanager
def worker_losses_typed() -> Iterator[None]:
    """Raise what torch raises of a worker that was killed as the error that says what to do.

    Raises WorkerFailedError.
    """
    try:
        yield
    except Exception as error:
        # Torch's handler of SIGCHLD raises wherever this process is: also while it waits for other
        # ranks or writes a checkpoint, whose errors then say that this has failed.
        lost = None if isinstance(error, _EXPLAINED) else _lost_worker(error)
        if lost is None:
            raise
        raise WorkerFailedError(
            "sample mini-batches in sampler.num_workers processes",
            lost + stage_of(error),
            "see why it ended: mostly the system has run out of memory, which fewer workers or a "
            "smaller trainer.batch_size leave more of",
        ) from error


def _lost_worker(error: BaseException) -> str | None:
    """What torch tells of a worker that is gone, if that is what an error is of."""
    each: BaseException | None = error
    while each is not None:
        is_torchs = isinstance(each, RuntimeError) and not isinstance(each, DGLMGPUError)
        if is_torchs and any(text in str(each) for text in _OF_TORCH):
            return str(each).strip().removesuffix(".")
        each = each.__cause__ or each.__context__
    if not _is_of_connection(error):
        return None
    try:
        # Its connection closes first, and what torch does at its end would interrupt what follows.
        time.sleep(_SIGNAL_SECONDS)
    except RuntimeError as late:
        return _lost_worker(late)
    return f"the connection to one was lost ({error!r})"


def _is_of_connection(error: BaseException) -> bool:
    """Whether it is of a connection between processes, which a rank has with its workers alone."""
    if not isinstance(error, ConnectionError | EOFError):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    # Tensors come by descriptors of files, which another module receives.
    return innermost.f_globals.get("__name__") in (connection.__name__, reduction.__name__)
