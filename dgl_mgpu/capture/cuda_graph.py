"""Capturing work for a GPU as a CUDA graph, which replays it with one launch."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from dgl_mgpu.errors import DGLMGPUError, UnavailableError
from dgl_mgpu.utils import streams

Result = TypeVar("Result")


def captures(device: torch.device) -> bool:
    """Whether work for a device can be captured."""
    return device.type == "cuda"


#: An event on a stream; None on a device without streams.
StreamEvent = torch.cuda.Event | None


def record_event(device: torch.device) -> StreamEvent:
    """Record an event on the current stream."""
    return streams.record_event(device) if device.type == "cuda" else None


def wait_event(queued: StreamEvent, device: torch.device) -> None:
    """Make the current stream wait for an event."""
    if queued is not None:
        streams.current_stream(device).wait_event(queued)


def new_pool(device: torch.device) -> Any:
    """A memory pool that several captured graphs can share."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(
    run: Callable[[], Result], device: torch.device, pool: Any = None
) -> Callable[[], Result]:
    """Capture the work that a function queues; return a function that replays it.

    Parameters
    ----------
    run : callable
    device : torch.device
    pool : optional
        Of :func:`new_pool`: graphs that share it run on one stream and overwrite each other's
        results.

    Raises
    ------
    UnavailableError
        If the function makes the host wait for the GPU.
    """
    from dgl_mgpu.ops.workspace import captured_with

    graph, stream = torch.cuda.CUDAGraph(), _capturing_stream(device)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    causes: list[tuple[str, bool]] = []
    try:
        # Other threads, such as NCCL's, may meanwhile make calls that a capture forbids.
        with (
            _no_garbage_collected(),
            torch.cuda.device(device),
            captured_with(device, stream.cuda_stream) as space,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                result = run()
            except RuntimeError as error:
                # The end of the capture raises an error of its own, without this cause.
                causes.append((str(error), isinstance(error, torch.OutOfMemoryError)))
                raise
    except RuntimeError as error:
        # Otherwise the generator would wait for the capture to continue.
        fresh = torch.Generator(device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh)
        cause, is_full = causes[0] if causes else (str(error), False)
        if is_full:
            raise torch.OutOfMemoryError(cause) from error
        raise _not_captured(cause) from error

    def replay(kept: object = space) -> Result:
        graph.replay()
        return result

    return replay


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Within, the garbage collector does not run: what it frees may be a store, which waits for
    the GPU and frees its memory, and that ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture on; one per device, as libraries keep workspaces per stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def errors_as_not_captured() -> Iterator[None]:
    """Within, errors that a model raises on padded blocks become UnavailableError."""
    try:
        yield
    except (DGLMGPUError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _not_captured(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def host_waits_refused() -> Iterator[None]:
    """Within, torch raises where the host would wait for a GPU, instead of breaking a capture.

    Not while other threads run, such as a loader's: torch would raise in them, too.
    """
    if not torch.cuda.is_initialized() or threading.active_count() > 1:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # The warning says that it may miss some waits; the capture itself finds those.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise _not_captured(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _not_captured(cause: str) -> UnavailableError:
    return UnavailableError(
        "capture a training step as a CUDA graph",
        cause.splitlines()[0],
        "remove operations that wait for the GPU (GraphConv and others look for nodes without "
        "in-edges unless allow_zero_in_degree=True), or train without capturing steps",
    )
