"""Samples in flight: queued on a GPU, and waited for where the result is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from dgl_mgpu.ops.library import direct

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")


class SampleFuture(Generic[T]):
    """The result of sampling that has been started on a GPU.

    Until the result is needed the host can do other work, and queue more on the stream on which
    sampling was started.  Ask for the result on that same stream.  Dropping a future without asking
    for its result is allowed.

    Parameters
    ----------
    wait : callable
        Waits for the result, or computes it where nothing could be started.  Called once, at the
        first :meth:`result`.
    go_on : callable, optional
        Starts what could not be started at first.  Called once, before ``wait`` at the latest.
    """

    __slots__ = ("_go_on", "_result", "_wait")

    def __init__(self, wait: Callable[[], T], go_on: Callable[[], object] | None = None) -> None:
        self._wait: Callable[[], T] | None = wait
        self._go_on = go_on
        self._result: Any = None

    def go_on(self) -> None:
        """Start what is left to start: what other work should not have to wait for."""
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()

    def result(self) -> T:
        """The result; the first call waits for it."""
        self.go_on()
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result

    def then(self, function: Callable[[T], U]) -> SampleFuture[U]:
        """A future of ``function`` of the result, called when that future is waited for."""
        return SampleFuture(lambda: function(self.result()), self.go_on)


def start(name: str, tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> SampleFuture[Any]:
    """Start an operator on its arguments, among which ``tensors`` are.

    Where it cannot be started, it runs when the result is asked for.
    """
    start_now = direct(f"{name}_async", tensors, even_profiled=True)
    if start_now is not None:
        return start_now(*arguments)
    return SampleFuture(partial(getattr(torch.ops.dgl_mgpu, name).default, *arguments))


class HopsFuture(SampleFuture[Any]):
    """A mini-batch's blocks, or None; its hops can be taken instead, without making blocks.

    ``hops`` results in None if this package cannot sample them and DGL has to.  ``make_blocks``
    makes input nodes, output nodes and blocks of the hops.
    """

    __slots__ = ("hops",)

    def __init__(self, hops: SampleFuture[Any], make_blocks: Callable[[Any], Any]) -> None:
        super().__init__(
            lambda: None if (sampled := hops.result()) is None else make_blocks(sampled),
            hops.go_on,
        )
        self.hops = hops


def returning_wait(start: Callable[P, SampleFuture[T]]) -> Callable[P, Callable[[], T]]:
    """A function that starts sampling, as it was before futures: it returns a callable that waits.

    Only deprecated names use it.
    """

    @functools.wraps(start)
    def started(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return start(*args, **kwargs).result

    return started
