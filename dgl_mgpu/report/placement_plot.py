"""The picture of a plan: the contents of each memory, and how busy the links are."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.placement import Plan
from dgl_mgpu.report.colours import LOCATION_COLOURS, TIER_COLOURS
from dgl_mgpu.report.machine_map import BUSY, MachineMap, gpu_name, with_numbers
from dgl_mgpu.report.placement import (
    LinkUtilisation,
    bytes_by_location,
    device_noun,
    modelled_time,
    short_name,
)
from dgl_mgpu.utils.extras import required
from dgl_mgpu.utils.units import human_bytes, human_seconds

with required("draw a picture"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

#: File formats of a picture, by the ending of its name.
FORMATS = ("png", "svg", "pdf")

_SERVED = {"local": "device", "peer": "peer", "host": "host", "disk": "disk"}
_WIDTH, _HEIGHT = 12.5, 11.0  # inches of one plan's picture
_MAX_TABLES = 6
_FEWEST_ROWS = 6  # that the table of links has room for
#: Hatching of reads, coloured by the memory that serves them; other bars, by the rows' locations.
_READS = "//"


def plot_placements(
    plans: Sequence[Plan], file: str | os.PathLike[str] | BinaryIO, titles: Sequence[str]
) -> None:
    """Draw plans side by side, each with its title.

    Each shows the machine with the contents of every memory and the load of the links; the same
    loads as numbers; and for every table the memories of its rows and those that serve reads.

    The name of ``file`` ends in .png, .svg or .pdf, else ConfigError; a binary file gets a PNG.
    Raises InvalidInputError if there is no plan, or one without the loads of links.
    """
    kind = picture_format(file) if isinstance(file, str | os.PathLike) else "png"
    placement_figure(plans, titles).savefig(file, format=kind)


def placement_figure(plans: Sequence[Plan], titles: Sequence[str]) -> Figure:
    """The figure of `plot_placements`."""
    if not plans:
        raise InvalidInputError("draw placements", "there is no plan", "pass one or more")
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(_WIDTH * len(plans), _HEIGHT), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    columns = figure.subfigures(1, len(plans), squeeze=False)[0]
    for column, plan, title in zip(columns, plans, titles, strict=True):
        _draw(column, plan, title)
    return figure


def picture_format(file: str | os.PathLike[str]) -> str:
    """The format by a picture's file name; ConfigError if it is none of `FORMATS`."""
    kind = os.path.splitext(file)[1].lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(
            f"draw a placement into '{os.fspath(file)}'",
            f"its name does not end in .{', .'.join(FORMATS)}",
            "name a file like placement.png",
        )
    return kind


def _draw(figure: SubFigure, plan: Plan, title: str) -> None:
    busy = LinkUtilisation.from_plan(plan)
    panels = figure.subplot_mosaic(
        [["machine", "machine"], ["links", "tables"]],
        height_ratios=[1.25, 1.0], width_ratios=[1.35, 1.0],
    )  # fmt: skip
    figure.suptitle(f"{title}\n{modelled_time(plan)}", fontsize=12)
    MachineMap(panels["machine"], plan, busy).draw()
    figure.colorbar(
        ScalarMappable(Normalize(0, 100), BUSY),
        ax=panels["machine"],
        label="link busy, % of a step's modelled time",
        fraction=0.025,
        pad=0.01,
    )
    _draw_links(panels["links"], plan, busy)
    _draw_tables(panels["tables"], plan)


def _draw_links(axes: Axes, plan: Plan, busy: LinkUtilisation) -> None:
    """Shares of time as a table: a row for each GPU, a column for each link that it reads over."""
    n = plan.num_gpus
    labelled = with_numbers(n)
    columns: dict[str, np.ndarray] = {gpu_name(plan, gpu): busy.links[:, gpu] for gpu in range(n)}
    if len(labelled) < n:
        columns = {"own\nmemory": np.diag(busy.links)}
    columns["all\nothers"], columns["serves\nothers"] = busy.taken, busy.served
    columns["host"] = busy.host
    if busy.shared:
        columns["host,\nshared"] = np.array([
            max((share for gpus, share in busy.shared.items() if gpu in gpus), default=np.nan)
            for gpu in range(n)
        ])  # fmt: skip
    columns["network"] = busy.network
    if plan.disk_bytes:
        columns["disk"] = np.full(n, busy.disk)
    columns = {name: shares for name, shares in columns.items() if not np.isnan(shares).all()}
    shares = np.stack(list(columns.values()), 1)
    axes.imshow(np.ma.masked_invalid(shares), cmap=BUSY, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        if row not in labelled:
            continue
        axes.text(
            column, row, "-" if math.isnan(share) else f"{100 * share:.0f}",
            ha="center", va="center", fontsize=9, color="white" if share > 0.5 else "black",
        )  # fmt: skip
    axes.set_xticks(range(len(columns)), list(columns), fontsize=8)
    axes.set_yticks(labelled, [gpu_name(plan, gpu) for gpu in labelled], fontsize=9)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, n), minor=True)
    axes.set_ylim(max(n, _FEWEST_ROWS) - 0.5, -0.5)
    axes.grid(
        axis="both" if len(labelled) == n else "x", which="minor", color="white", linewidth=1.5
    )
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"how busy each link is, in % of the step's {human_seconds(plan.step_seconds)}\n"
        "row: who reads, column: from where (diagonal: own memory)",
        fontsize=11,
    )


def _draw_tables(axes: Axes, plan: Plan) -> None:
    """The memories of each table's bytes, and below those that serve its reads."""
    by_location = {name: bytes_by_location(plan, name) for name in plan.tables}
    totals = {name: sum(sizes.values()) for name, sizes in by_location.items() if sizes}
    names = sorted(totals, key=lambda name: -totals[name])[:_MAX_TABLES]
    ticks: list[tuple[float, str]] = []
    for index, name in enumerate(names):
        y, total = 3.0 * index, totals[name]
        _stack(
            axes,
            y,
            [(LOCATION_COLOURS[at], size / total) for at, size in by_location[name].items()],
        )
        rates = plan.hit_rates[name]
        reads = [(TIER_COLOURS[tier], rates[source]) for source, tier in _SERVED.items()]
        _stack(axes, y + 1.0, reads, hatch=_READS)
        ticks += [(y, f"{short_name(name)}:\n{human_bytes(total)}"), (y + 1.0, "reads of it")]
    axes.set_ylim(3.0 * len(names) - 1.2, -0.8)
    axes.set_xlim(0, 1)
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("where each table lies (colours as above),\nand what serves reads", fontsize=11)
    labels = {"local": "own memory", "peer": f"other {device_noun(plan)}s", "host": "host memory"}
    handles = [
        Patch(
            facecolor=TIER_COLOURS[tier], edgecolor="white", hatch=_READS,
            label=labels.get(source, source),
        )
        for source, tier in _SERVED.items()
        if any(plan.hit_rates[name][source] for name in names)
    ]  # fmt: skip
    axes.legend(
        handles=handles, title="reads served by", loc="upper center", bbox_to_anchor=(0.5, 0.0),
        ncols=4, frameon=False, fontsize=9,
    )  # fmt: skip


def _stack(axes: Axes, y: float, parts: list[tuple[str, float]], hatch: str = "") -> None:
    start = 0.0
    for colour, share in parts:
        axes.barh(
            y, share, 0.85, left=start, color=colour, hatch=hatch, edgecolor="white", linewidth=0
        )
        if share >= 0.06:
            axes.text(
                start + share / 2, y, f"{100 * share:.0f}%", ha="center", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9},
            )  # fmt: skip
        start += share
