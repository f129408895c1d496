"""Locks that are free in a child: there only the thread that forks continues."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()


def _release() -> None:
    for lock in _locks:
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_release)


def freed_at_fork(lock: Any) -> Any:
    """A ``threading.Lock`` or ``RLock`` as it is, which a child finds free, whoever holds it here.

    What it protects must be of use there also if a thread was about to change it.
    """
    _locks.add(lock)
    return lock
