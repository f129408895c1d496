"""Faults tried at random: how often, from which seed, and where what came of them is kept."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: The long form, which ``make faults`` runs and docs/reliability.md shows; ``make test-all`` runs
#: the short one.
LONG = os.environ.get("DGL_MGPU_FAULTS") == "long"
SEED = int(os.environ.get("DGL_MGPU_FAULTS_SEED", "0"))


class Outcomes:
    """What became of the faults that one test tried.

    Parameters
    ----------
    name : str
        The test's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, float] = {}

    def add(self, outcome: str) -> None:
        """Count one fault by what came of it, in words: ``"resumed to the same bits"``, say."""
        self.counts[outcome] += 1

    def longest(self, what: str, seconds: float) -> None:
        """Keep the longest time of several, such as that from a kill to the job's end."""
        self.worst[what] = max(seconds, self.worst.get(what, 0.0))


@pytest.fixture
def rounds() -> Callable[[int, int], int]:
    """How often to try: ``rounds(short, long)``."""
    return lambda short, long: long if LONG else short


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test alone; a failure names the seed to repeat it with."""
    request.node.add_report_section("setup", "seed", f"DGL_MGPU_FAULTS_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Counts of what came of each fault, kept in the file that DGL_MGPU_FAULTS_OUT names."""
    found = Outcomes(request.node.nodeid.removeprefix("tests/faults/"))
    start = time.monotonic()
    yield found
    assert found.counts, "the test counted nothing that it tried"
    if path := os.environ.get("DGL_MGPU_FAULTS_OUT"):
        line: dict[str, Any] = {
            "test": found.name,
            "seed": SEED,
            "seconds": round(time.monotonic() - start, 1),
            "outcomes": dict(found.counts),
            "longest_seconds": {key: round(value, 2) for key, value in found.worst.items()},
        }
        with Path(path).open("a") as lines:  # one write: tests run beside each other
            lines.write(json.dumps(line) + "\n")
