"""The picture of a run: loss, accuracy, time by stage and shares of tiers over its epochs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.report.colours import BLACK, BLUE, GREY, RED, STAGE_COLOURS, TIER_COLOURS
from dgl_mgpu.report.epoch import EpochReport, stage_names, usual_longest
from dgl_mgpu.utils.extras import required
from dgl_mgpu.utils.units import human_seconds

with required("draw a picture"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

_MAX_BARS = 40
_MAX_MARKERS = 30
_MAX_CUT = 3  # labels of bars that are longer than the picture


def plot_curves(
    reports: Sequence[EpochReport],
    path_png: str | os.PathLike[str] | BinaryIO,
    title: str = "Training",
) -> None:
    """Draw loss, accuracy, time by stage and, if any were read, shares of rows by tier.

    The picture has 1500 by 1050 pixels.  Reports are merged over the ranks; InvalidInputError if
    there is none.
    """
    if not reports:
        raise InvalidInputError(
            "plot the curves of a run", "there is no epoch", "train one epoch first"
        )
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

    _curve(loss, epochs, [report.loss for report in reports], "train", BLACK, "-")
    loss.set_title("Loss")
    for split, colour, dashes in (("train", BLACK, "-"), ("valid", BLUE, "--"), ("test", RED, ":")):
        values = [getattr(report, f"{split}_accuracy") for report in reports]
        _curve(accuracy, epochs, values, split, colour, dashes)
    metric = reports[0].metric_name
    accuracy.set_title(metric[0].upper() + metric[1:])
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))

    _draw_stages(stages, epochs, reports)
    if served:
        _draw_tiers(panels["tiers"], epochs, reports, list(served))
    for axes in panels.values():
        _finish(axes, epochs)
    canvas.print_png(os.fspath(path_png) if isinstance(path_png, os.PathLike) else path_png)


def _draw_stages(axes: Axes, epochs: np.ndarray, reports: Sequence[EpochReport]) -> None:
    parts = {
        stage: np.array([getattr(report.seconds, stage) or 0.0 for report in reports])
        for stage in stage_names(reports)
        if stage in STAGE_COLOURS
    }
    totals = np.array([report.seconds.total for report in reports])
    _stacked(axes, epochs, parts, STAGE_COLOURS)
    of_ranks = any(report.ranks > 1 for report in reports)
    _curve(axes, epochs, totals.tolist(), f"total{', slowest' * of_ranks}", BLACK, "-")
    axes.set_title(f"Seconds per epoch{', mean of ranks' * of_ranks}")
    heights = np.maximum(totals, sum(parts.values()))
    top = usual_longest(heights.tolist())
    cut = np.flatnonzero(heights > top)
    if not len(cut):
        return
    axes.set_ylim(0.0, 1.15 * top)
    for index in cut[:_MAX_CUT]:
        axes.text(
            epochs[index], 1.13 * top, human_seconds(totals[index]), ha="center", va="top",
            fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip


def _draw_tiers(
    axes: Axes, epochs: np.ndarray, reports: Sequence[EpochReport], served: list[str]
) -> None:
    names = [name for name in TIER_COLOURS if name in served]
    names += [name for name in served if name not in TIER_COLOURS]
    shares = [report.tier_shares() for report in reports]
    _stacked(
        axes,
        epochs,
        {name: np.array([share.get(name, 0.0) for share in shares]) for name in names},
        {name: TIER_COLOURS.get(name, GREY) for name in names},
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
    """One line through the finite values, which joins those of every fifth epoch, too."""
    heights = np.array(values, dtype=float)  # None becomes NaN
    measured = np.isfinite(heights)
    if not measured.any():
        return
    marker = "o" if measured.sum() <= _MAX_MARKERS else ""
    axes.plot(
        epochs[measured], heights[measured], color=colour, linestyle=dashes, marker=marker,
        markersize=4, label=label,
    )  # fmt: skip


def _stacked(
    axes: Axes, epochs: np.ndarray, parts: dict[str, np.ndarray], colours: dict[str, str]
) -> None:
    """Parts on top of each other: bars while they can be told apart, areas beyond."""
    if not parts:
        return
    if len(epochs) > _MAX_BARS:
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
        columns = min(len(labels), 4)  # which are not wider than the panel
        axes.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns,
            frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip
    elif not handles:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center")
