"""What is queued for a GPU, captured as a CUDA graph that queues it again at once."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from dgl_mgpu.errors import DGLMGPUError, UnavailableError

Result = TypeVar("Result")


def captures(device: torch.device) -> bool:
    """Whether work for a device can be captured."""
    return device.type == "cuda"


#: Of a point in what is queued for a device; none for one that queues nothing.
Point = torch.cuda.Event | None


def point(device: torch.device) -> Point:
    """The end of what is queued on the current stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(queued: Point, device: torch.device) -> None:
    """Have the current stream wait for what was queued on another one."""
    if queued is not None:
        torch.cuda.current_stream(device).wait_event(queued)


def new_pool(device: torch.device) -> Any:
    """Memory for what is captured that several can share."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(
    run: Callable[[], Result], device: torch.device, pool: Any = None
) -> Callable[[], Result]:
    """Capture what a function queues, and return what queues that again and has its result.

    Parameters
    ----------
    run : callable
    device : torch.device
    pool : optional
        Of :func:`new_pool`: others that share it run on the same stream, and overwrite results.

    Raises
    ------
    UnavailableError
        If the host waits for the GPU in it.
    """
    from dgl_mgpu.ops.workspace import captured_with

    graph, stream = torch.cuda.CUDAGraph(), _capturing_stream(device)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    causes: list[tuple[str, bool]] = []
    try:
        # Other threads, NCCL's among them, may do meanwhile what none can that is captured.
        with (
            torch.cuda.device(device),
            captured_with(device, stream.cuda_stream) as space,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                result = run()
            except RuntimeError as error:
                # What the end of the capture raises then tells of that alone.
                causes.append((str(error), isinstance(error, torch.OutOfMemoryError)))
                raise
    except RuntimeError as error:
        # It would wait for the capture to go on.
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


@functools.cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same one: libraries keep working memory for each that they have seen."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def told_as_not_captured() -> Iterator[None]:
    """Within, what a model raises of rows to spare is told as what keeps it from being captured."""
    try:
        yield
    except (DGLMGPUError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _not_captured(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def waits_refused() -> Iterator[None]:
    """Within, torch raises where the host would wait for a GPU, before a capture breaks at it."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it may miss some: the capture itself finds those.
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
        "leave out what waits for the GPU (GraphConv and others look for nodes without in-edges "
        "unless allow_zero_in_degree=True), or train without capturing steps",
    )
