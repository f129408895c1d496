"""Figures measured on GPUs, against a peer, a ceiling and what is to be reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from dgl_mgpu.comm.communicator import Communicator

#: Units of which less is better.
LESS_IS_BETTER = ("ms", "MB")


@dataclass(frozen=True)
class Figure:
    """One measured case, and what it is to reach.

    Attributes
    ----------
    case : str
    unit : str
        'GB/s', of which more is better, or one of :data:`LESS_IS_BETTER`.
    ours, peer : float
        The mean over ranks of each rank's median; ``peer`` is None without one.
    ceiling : float or None
    times_peer, of_ceiling : float or None
        What is to be reached.
    more : mapping
        What else is known of the case, for the JSON.
    """

    case: str
    unit: str
    ours: float
    peer: float | None = None
    ceiling: float | None = None
    times_peer: float | None = None
    of_ceiling: float | None = None
    more: Mapping[str, Any] | None = None

    @property
    def ratio_to_peer(self) -> float | None:
        if self.peer is None:
            return None
        less = self.unit in LESS_IS_BETTER
        return self.peer / self.ours if less else self.ours / self.peer

    @property
    def ratio_to_ceiling(self) -> float | None:
        return None if self.ceiling is None else self.ours / self.ceiling

    @property
    def reached(self) -> bool | None:
        """Whether every target is reached; None where one could not be compared."""
        pairs = [(self.ratio_to_peer, self.times_peer), (self.ratio_to_ceiling, self.of_ceiling)]
        asked = [(ratio, target) for ratio, target in pairs if target is not None]
        if any(ratio is None for ratio, _ in asked) or not asked:
            return None
        return all(ratio >= target for ratio, target in asked if ratio is not None)

    def to_dict(self) -> dict[str, Any]:
        derived = ("ratio_to_peer", "ratio_to_ceiling", "reached")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


class Report:
    """Prints figures as they come and keeps them in a JSON file, on the first rank."""

    def __init__(self, ranks: Communicator, out: Path | None, **about: Any) -> None:
        self._first = ranks.rank == 0
        self._out = out
        self._about = {"machine": describe_machine(), **about} if self._first else {}
        self._figures: list[Figure] = []

    def add(self, figure: Figure) -> None:
        if not self._first:
            return
        if not self._figures:
            print(
                f"{'case':46} {'ours':>8} {'peer':>8} {'ceiling':>8}"
                f"  {'x peer':>6} {'target':>6}  {'of ceil.':>8} {'target':>6}  reached"
            )
        self._figures.append(figure)
        verdict = {True: "yes", False: "no", None: "-"}[figure.reached]
        print(
            f"{figure.case:46} {_number(figure.ours, 8)} {_number(figure.peer, 8)}"
            f" {_number(figure.ceiling, 8)}  {_number(figure.ratio_to_peer, 6)}"
            f" {_number(figure.times_peer, 6)}  {_number(figure.ratio_to_ceiling, 8)}"
            f" {_number(figure.of_ceiling, 6)}  {verdict}",
            flush=True,
        )
        if self._out:
            # Anew each time: a run that is cut off leaves what it has found.
            content = {**self._about, "figures": [f.to_dict() for f in self._figures]}
            self._out.write_text(json.dumps(content, indent=1) + "\n")


def _number(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{value:{width}.1f}" if value >= 100 else f"{value:{width}.2f}"
