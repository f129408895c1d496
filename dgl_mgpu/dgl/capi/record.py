"""Records calls: a log line for each with ``DGL_MGPU_LOG=1``, and counts in a profile.

Methods of `TensorIndex` and operators are called without a C function. While calls are recorded,
functions that count them stand in their place.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from dgl_mgpu.dgl.capi.table import ENTRIES, Implementation

log = logging.getLogger("dgl_mgpu.calls")


@dataclass
class CallStatistics:
    """Calls of one C function.

    Attributes
    ----------
    place : Implementation
        What ran them.
    calls : int
    seconds : float
        On the host; kernels may still run when a call returns.
    """

    place: Implementation
    calls: int = 0
    seconds: float = 0.0


@dataclass
class Profile:
    """What `dgl_mgpu.profile_calls` saw.

    Attributes
    ----------
    functions : dict of str to CallStatistics
        By the C function's name.
    """

    functions: dict[str, CallStatistics] = field(default_factory=dict)

    def add(self, name: str, place: Implementation, seconds: float) -> None:
        """Count one call."""
        statistics = self.functions.setdefault(name, CallStatistics(place))
        statistics.calls += 1
        statistics.seconds += seconds

    def __str__(self) -> str:
        lines = [f"{'function':<64} {'place':<14} {'calls':>8} {'host ms':>10}"]
        for name, calls in sorted(self.functions.items(), key=lambda item: -item[1].seconds):
            lines.append(
                f"{name:<64} {calls.place.value:<14} {calls.calls:>8} {calls.seconds * 1e3:>10.2f}"
            )
        return "\n".join(lines)


_OPERATORS = {
    "gspmm_forward": "SpMM",
    "gsddmm_forward": "SDDMM",
    "edge_softmax": "Edge_softmax_forward",
    "edge_softmax_backward": "Edge_softmax_backward",
}
# Owner, attribute and own function of what is wrapped.
_wrapped: list[tuple[Any, str, Any]] = []
_profiles: list[Profile] = []
_logs_calls = os.environ.get("DGL_MGPU_LOG", "0") not in ("", "0")
_warned: set[str] = set()
#: Whether calls are worth the time that recording takes.
recording = _logs_calls

if _logs_calls:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    log.setLevel(logging.INFO)


@contextmanager
def call(name: str, place: Implementation) -> Iterator[None]:
    """Record the call of a C function that is made inside."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        for profile in _profiles:
            profile.add(name, place, seconds)
        if _logs_calls:
            log.info("%s: %s, %.0f us on the host", name, place.value, seconds * 1e6)


@contextmanager
def profile_calls() -> Iterator[Profile]:
    """Count the calls of DGL's C functions with graphs or arrays on a GPU, and time them.

    Yields
    ------
    Profile
        Filled while the block runs; ``print(profile)`` shows a table.
    """
    global recording
    profile = Profile()
    _profiles.append(profile)
    recording = True
    wrap_methods()
    try:
        yield profile
    finally:
        _profiles.remove(profile)
        recording = _logs_calls or bool(_profiles)
        while _wrapped and not recording:
            setattr(*_wrapped.pop())


def wrap_methods() -> None:
    """Record methods and operators too; idempotent."""
    for owner, attribute, name in () if _wrapped else _methods():
        function = vars(owner)[attribute]
        _wrapped.append((owner, attribute, function))
        setattr(owner, attribute, _recorded(function, name))


def _methods() -> Iterator[tuple[Any, str, str]]:
    """Owner, attribute and C function of what is called without one."""
    from dgl_mgpu.graph.index import TensorIndex  # needs DGL, which needs this module
    from dgl_mgpu.graph.message_passing import operators

    seen = set()
    for name, entry in ENTRIES.items():
        method = entry.by.removeprefix("graph.index:TensorIndex.")
        is_method = isinstance(vars(TensorIndex).get(method), FunctionType)
        if method != entry.by and is_method and method not in seen:
            seen.add(method)
            yield TensorIndex, method, name
    for operator, kernel in _OPERATORS.items():
        yield operators, operator, f"sparse._CAPI_DGLKernel{kernel}"


def _recorded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        with call(name, ENTRIES[name].implementation):
            return function(*arguments, **options)

    return recorded


def warn_of_round_trip(name: str) -> None:
    """Log once a process that a function goes through the CPU."""
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "%s has no implementation on GPUs: the graph is copied to the CPU for every call",
            name,
        )
