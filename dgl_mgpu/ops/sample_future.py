"""Samples in flight: what was queued on a GPU, and is waited for where its result is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SampleFuture(Generic[T]):
    """The result of sampling that a GPU has started.

    Meanwhile the host can do other things, and queue them on the stream that samples.  Wait on that
    stream: it is the one that the result is there for.

    Parameters
    ----------
    wait : callable
        Waits for the result, or computes it where nothing was started.  It is called once.
    """

    __slots__ = ("_result", "_wait")

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._result: Any = None

    def result(self) -> T:
        """The result, waited for at the first call."""
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result

    def then(self, function: Callable[[T], Any]) -> SampleFuture[Any]:
        """A future of a function of the result; the function runs when the future is waited for."""
        return SampleFuture(lambda: function(self.result()))

    def __call__(self) -> T:
        return self.result()
