"""What is seen of the calls: a log line each with ``DGL_MGPU_LOG=1``, and counts in a profile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dgl_mgpu.dgl.capi.table import Implementation

log = logging.getLogger("dgl_mgpu.calls")


@dataclass
class CallStatistics:
    """Calls of one C function.

    Attributes
    ----------
    place : Implementation
        Where they ran.
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
        for name, seen in sorted(self.functions.items(), key=lambda item: -item[1].seconds):
            lines.append(
                f"{name:<64} {seen.place.value:<14} {seen.calls:>8} {seen.seconds * 1e3:>10.2f}"
            )
        return "\n".join(lines)


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


def begin(profile: Profile) -> None:
    """Count calls in a profile from now on."""
    global recording
    _profiles.append(profile)
    recording = True


def end(profile: Profile) -> None:
    """Count no more calls in it."""
    global recording
    _profiles.remove(profile)
    recording = _logs_calls or bool(_profiles)


def warn_of_round_trip(name: str) -> None:
    """Say once a process that a function goes through the CPU."""
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "%s has no implementation on GPUs: the graph is copied to the CPU for every call",
            name,
        )
