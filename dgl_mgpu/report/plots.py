"""The picture of a run: loss, accuracy, time by stage and tiers over its epochs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.report.epoch import EpochReport

# Okabe and Ito's palette, told apart with every common kind of colour blindness.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _RED, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"

_STAGE_COLOURS = {
    "sample": _ORANGE,
    "gather": _SKY,
    "compute": _GREEN,
    "forward": _SKY,
    "backward": _BLUE,
    "update": _ORANGE,
    "evaluate": _PURPLE,
}
_TIER_COLOURS = {
    "device": _GREEN,
    "replica": _SKY,
    "peer": _BLUE,
    "host": _ORANGE,
    "disk": _RED,
}
_MOST_BARS = 40
_MOST_MARKERS = 30


def plot_curves(
    reports: Sequence[EpochReport], path_png: str | os.PathLike[str], title: str = "Training"
) -> None:
    """Draw loss, accuracy, time by stage and, if any were read, share of rows by tier.

    Parameters
    ----------
    reports : sequence of EpochReport
        At least one epoch, in order; merged over the ranks.
    path_png : path
        Picture to write, 1500 by 1050 pixels.
    title : str
        Printed above the panels.

    Raises
    ------
    InvalidInputError
        If there is no epoch to draw.
    """
    if not reports:
        raise InvalidInputError("plot the curves of a run", "no epoch", "train one epoch first")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches, keeps text off the edges
    figure = Figure(figsize=(10.0, 7.0), dpi=150, layout=layout)
    canvas = FigureCanvasAgg(figure)
    served = dict.fromkeys(tier.name for report in reports for tier in report.tiers)
    panels = figure.subplot_mosaic(
        [["loss", "accuracy"], ["stages", "tiers" if served else "stages"]]
    )
    loss, accuracy, stages = panels["loss"], panels["accuracy"], panels["stages"]
    figure.suptitle(title, fontweight="bold")
    epochs = np.array([report.epoch for report in reports])

    _curve(loss, epochs, [report.loss for report in reports], "train", _BLACK, "-")
    loss.set_title("Loss")
    _curve(accuracy, epochs, [r.train_accuracy for r in reports], "train", _BLACK, "-")
    _curve(accuracy, epochs, [r.valid_accuracy for r in reports], "valid", _BLUE, "--")
    _curve(accuracy, epochs, [r.test_accuracy for r in reports], "test", _RED, ":")
    accuracy.set_title("Accuracy")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))

    _stacked(
        stages,
        epochs,
        {
            stage: np.array([getattr(report.seconds, stage) for report in reports])
            for stage in reports[0].seconds.measured()
            if stage in _STAGE_COLOURS
        },
        _STAGE_COLOURS,
    )
    _curve(stages, epochs, [report.seconds.total for report in reports], "total", _BLACK, "-")
    stages.set_title("Seconds per epoch")

    if served:
        _draw_tiers(panels["tiers"], epochs, reports, list(served))
    for axes in panels.values():
        _finish(axes, epochs)
    canvas.print_png(os.fspath(path_png))


def _draw_tiers(
    axes: Axes, epochs: np.ndarray, reports: Sequence[EpochReport], served: list[str]
) -> None:
    names = [name for name in _TIER_COLOURS if name in served]
    names += [name for name in served if name not in _TIER_COLOURS]
    shares = [report.tier_shares() for report in reports]
    _stacked(
        axes,
        epochs,
        {name: np.array([share.get(name, 0.0) for share in shares]) for name in names},
        {name: _TIER_COLOURS.get(name, _GREY) for name in names},
    )
    axes.set_title("Rows served by tier, all tables")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.0)


def _curve(
    axes: Axes,
    epochs: np.ndarray,
    values: Sequence[float | None],
    label: str,
    colour: str,
    dashes: str,
) -> None:
    """One line over the epochs that have a finite figure; nothing if none has."""
    heights = np.array([math.nan if value is None else value for value in values], dtype=float)
    measured = np.isfinite(heights)
    if not measured.any():
        return
    # A figure of every fifth epoch is still a curve: join what was measured.
    few = measured.sum() <= _MOST_MARKERS
    axes.plot(
        epochs[measured],
        heights[measured],
        color=colour,
        linestyle=dashes,
        marker="o" if few else "",
        markersize=4,
        label=label,
    )


def _stacked(
    axes: Axes, epochs: np.ndarray, parts: dict[str, np.ndarray], colours: dict[str, str]
) -> None:
    """Parts on top of each other: bars while they can be told apart, areas beyond."""
    if not parts:
        return
    if len(epochs) > _MOST_BARS:
        axes.stackplot(
            epochs, *parts.values(), labels=list(parts), colors=[colours[n] for n in parts]
        )
        return
    bottom = np.zeros(len(epochs))
    for name, heights in parts.items():
        axes.bar(epochs, heights, 0.8, bottom=bottom, color=colours[name], label=name)
        bottom = bottom + heights


def _finish(axes: Axes, epochs: np.ndarray) -> None:
    """Integer epochs, a quiet grid, and the legend below, where it hides no data."""
    axes.set_xlim(epochs[0] - 0.6, epochs[-1] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncols=len(labels),
            frameon=False,
            handlelength=1.6,
            columnspacing=1.2,
        )
    elif not handles:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center")
