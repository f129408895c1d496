"""Pictures of results: a paper's figures beside ours, and how much faster what is."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.claims.page import machine_text, picture
from benchmarks.claims.registry import Figure, Paper, Results, papers
from dgl_mgpu.report.colours import BLACK, BLUE, GREEN, GREY, ORANGE

#: Quotient of the largest and smallest number of a panel from which its axis is logarithmic.
_LOGARITHMIC = 30
_INCHES_A_ROW, _INCHES_A_PANEL = 0.3, 0.85
_LABELS = _PAPER, _RANGE, _OURS, _MODELLED, _PEER, _CEILING = (
    *("paper", "paper, a range", "ours", "ours, modelled", "peer", "ceiling"),
)
_RANGE_OPACITY = 0.4
#: What papers write before a number that is not exact, and between which numbers theirs then is.
_WORDS = {
    "about": (1.0, 1.0),
    "on average": (1.0, 1.0),
    "close to": (1.0, 1.0),
    "up to": (0.0, 1.0),
    "less than": (0.0, 1.0),
    "more than": (1.0, math.inf),
}
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Bar:
    """A figure of a claim, its numbers; None for what there is none of.

    The paper's is between two, which are one where the paper says one.
    """

    case: str
    paper: tuple[float, float] | None
    ours: float
    peer: float | None
    ceiling: float | None
    modelled: bool

    @property
    def numbers(self) -> list[float]:
        """All that are somewhere on a logarithmic axis."""
        found = [*(self.paper or ()), self.ours, self.peer, self.ceiling]
        return [number for number in found if number and number < math.inf]


@dataclass(frozen=True)
class Speedups:
    """How many times as fast something is, in all cases of a result.

    Attributes
    ----------
    what, machine : str
    quotients : list of float
        At least one.
    """

    what: str
    machine: str
    quotients: list[float]

    @property
    def text(self) -> str:
        """Their range, and the median of several."""
        least, most = min(self.quotients), max(self.quotients)
        if len(self.quotients) == 1:
            return f"{most:.2f}"
        return f"{least:.2f} to {most:.2f}, median {median(self.quotients):.2f}"


@dataclass(frozen=True)
class Panel:
    """Figures of a claim that have one unit."""

    title: str
    bars: list[Bar]

    @property
    def compares(self) -> bool:
        """Whether there is something to see: more than one number that is not zero."""
        return len(self.numbers) > 1

    @property
    def numbers(self) -> list[float]:
        return [number for bar in self.bars for number in bar.numbers]

    @property
    def inches(self) -> float:
        return _INCHES_A_PANEL + _INCHES_A_ROW * len(self.bars)


def draw(results: Results, folder: Path) -> list[Path]:
    """A picture for each paper that a result answers."""
    paths = []
    for stem, paper in papers().items():
        found = panels(paper, results)
        if found:
            paths.append(folder / picture(stem))
            _draw(paper.name, found, paths[-1])
    return paths


def draw_speedups(found: list[Speedups], path: Path) -> None:
    """A picture of what is how many times as fast as something else, and on what."""
    canvas = Canvas(figsize=(9, 1.1 + 0.5 * len(found)), dpi=100, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    end = 1.6 * max(max(each.quotients) for each in found)
    for row, each in enumerate(found):
        axes.plot(
            [min(each.quotients), max(each.quotients)],
            [row, row],
            color=BLUE,
            lw=5,
            solid_capstyle="butt",
        )
        axes.plot([median(each.quotients)], [row], "o", color=BLUE, markersize=9)
        axes.text(
            1.02, row, each.text, fontsize=8, va="center", transform=axes.get_yaxis_transform()
        )
    axes.axvline(1, color=BLACK, lw=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *(min(each.quotients) for each in found)), end)
    ticks = [tick for tick in (0.5, 1, 2, 3, 5, 10, 20, 50, 100) if tick < end]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    names = [f"{each.what}\n{each.machine}" for each in found]
    axes.set_yticks(range(len(found)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("times as fast: all cases of a result, and their median", fontsize=9)
    canvas.savefig(path, metadata={"Software": None})


def panels(paper: Paper, results: Results) -> list[Panel]:
    """What there is to draw of a paper."""
    found = []
    for claim in paper.claims:
        by_unit: dict[str, list[Bar]] = defaultdict(list)
        for figure in claim.figures:
            bar = _bar(figure, results)
            if bar is not None:
                by_unit[figure.unit].append(bar)
        found += [
            Panel(f"{claim.where}: {claim.what} [{unit}]", bars) for unit, bars in by_unit.items()
        ]
    return [panel for panel in found if panel.compares]


def between(paper: float | str | None) -> tuple[float, float] | None:
    """Between which numbers the paper's is; None if it states none."""
    if not isinstance(paper, str):
        return None if paper is None else (paper, paper)
    if of_range := re.fullmatch(f"{_NUMBER} to {_NUMBER}", paper):
        return float(of_range[1]), float(of_range[2])
    if of_words := re.fullmatch(f"({'|'.join(_WORDS)}) {_NUMBER}", paper):
        low, high = _WORDS[of_words[1]]
        return low * float(of_words[2]), high * float(of_words[2])
    return None


def _bar(figure: Figure, results: Results) -> Bar | None:
    answer = results.answer(figure)
    if answer is None or answer.ours is None:
        return None
    return Bar(
        figure.case,
        between(figure.paper),
        answer.ours,
        answer.peer,
        answer.ceiling,
        machine_text(answer.result) == "modelled",
    )


def _draw(name: str, found: list[Panel], path: Path) -> None:
    columns = _columns(found)
    height = max(sum(panel.inches for panel in column) for column in columns) + 0.6
    canvas = Canvas(figsize=(7.5 * len(columns), height), dpi=100, layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(f"{name}: the paper's figures and ours")
    parts = canvas.subfigures(1, len(columns), squeeze=False)[0]
    for part, column in zip(parts, columns, strict=True):
        heights = [panel.inches for panel in column]
        blank = height - sum(heights)
        grid = part.subplots(
            len(column) + 1, 1, squeeze=False, gridspec_kw={"height_ratios": [*heights, blank]}
        )
        for axes, panel in zip(grid[:, 0], column, strict=False):
            _draw_panel(axes, panel)
        grid[-1, 0].axis("off")
    handles = {
        label: handle
        for axes in canvas.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [label for label in _LABELS if label in handles]
    canvas.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6)
    canvas.savefig(path, metadata={"Software": None})


def _columns(found: list[Panel]) -> list[list[Panel]]:
    """Panels in their order, in two columns of about one height; one, if they are few."""
    total = sum(panel.inches for panel in found)
    if total < 8:
        return [found]
    above, split = 0.0, 0
    while above + found[split].inches / 2 < total / 2:
        above, split = above + found[split].inches, split + 1
    return [found[:split], found[split:]]


def _draw_panel(axes: Axes, panel: Panel) -> None:
    least, most = min(panel.numbers), max(panel.numbers)
    is_logarithmic = most > _LOGARITHMIC * least
    begin, end = least / 2 if is_logarithmic else 0.0, 1.1 * most
    for row, bar in enumerate(panel.bars):
        shown = [
            (_MODELLED if bar.modelled else _OURS, bar.ours, GREEN if bar.modelled else BLUE),
            (_PEER, bar.peer, ORANGE),
        ]
        there = [each for each in shown if each[1] is not None]
        thickness = 0.8 / (len(there) + (bar.paper is not None))
        at = row - 0.4 + thickness / 2
        if bar.paper is not None:
            _draw_stated(axes, at, thickness, bar.paper, (begin, end))
            at += thickness
        for label, value, colour in there:
            axes.barh(at, value or 0, thickness, color=colour, label=label)
            at += thickness
        if bar.ceiling is not None:
            axes.plot([bar.ceiling] * 2, [row - 0.4, row + 0.4], color=BLACK, lw=2, label=_CEILING)
    if is_logarithmic:
        axes.set_xscale("log")
    axes.set_xlim(begin, end)
    axes.set_yticks(range(len(panel.bars)), [bar.case for bar in panel.bars], fontsize=7)
    axes.invert_yaxis()
    # It may begin over the cases' names.
    axes.set_title(panel.title, fontsize=8, loc="right")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)


def _draw_stated(
    axes: Axes, at: float, thickness: float, paper: tuple[float, float], ends: tuple[float, float]
) -> None:
    """The paper's number, or a paler band where it says between which ones that is."""
    low, high = paper
    if low == high:
        axes.barh(at, high, thickness, color=GREY, label=_PAPER)
        return
    left, right = max(low, ends[0]), min(high, ends[1])
    axes.barh(
        at, right - left, thickness, left=left, color=GREY, alpha=_RANGE_OPACITY, label=_RANGE
    )
