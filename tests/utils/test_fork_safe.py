"""A process that is forked while other threads hold locks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from numba.core.compiler_lock import global_compiler_lock

from dgl_mgpu.graph import random
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.store.feature_storage import Traffic

_kept = Traffic()


@pytest.mark.parametrize(
    "lock",
    [_kept._lock, random._common._lock, dataloading._start_lock, global_compiler_lock._lock],
    ids=["traffic", "random", "passes", "numba"],
)
def test_a_child_finds_locks_free(lock: Any):
    is_held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            forked.wait(0.5)  # the fork may wait for this

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        os._exit(not lock.acquire(timeout=5))
    forked.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    assert lock.acquire(timeout=5)  # and so does the parent
    lock.release()
