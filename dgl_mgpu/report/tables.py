"""Tables for the terminal: the summary of a run, a plan's rows, and a machine."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from dgl_mgpu.report.epoch import MEANINGS, EpochReport, best_epoch, stage_names
from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share

if TYPE_CHECKING:
    from dgl_mgpu.machine import Cluster, Topology

_STAGE_NAMES = {
    "sample": "sampling",
    "gather": "feature gathering",
    "compute": "forward/backward",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange of rows",
    "waiting": "waiting for rows",
    "update": "update",
    "evaluate": "evaluation",
    "total": "whole epoch",
}

#: GPUs of which each has a row and a column in a table of links.
_MOST_GPUS = 16
#: Groups of GPUs that share a way to the host, of which each is told.
_MOST_GROUPS = 4
#: Columns of a plan whose cells are no longer than this keep them on one line.
_UNBROKEN = 12


def summary_table(
    reports: Sequence[EpochReport],
    title: str = "Training",
    test_accuracy: float | None = None,
) -> Table:
    """The summary of a whole run, merged over the ranks, to be printed at its end.

    Two columns: the best epoch's loss and accuracies (`test_accuracy`, in 0..1, if its model was
    tested once at the end), medians over the epochs of seeds/s and of each stage's time, and for
    each table the rows and bytes that each tier served in the whole run.
    """
    table = Table(title=escape(title), show_header=False)
    table.add_column("quantity", style="bold")
    table.add_column("value", justify="right")
    best = best_epoch(reports)
    table.add_row("epochs", f"{len(reports)}", end_section=best is None)
    if best is None:
        return table
    table.add_row("ranks", f"{best.ranks}", end_section=True)
    notes = ["stages: mean of the ranks; whole epoch: the slowest"] if best.ranks > 1 else []
    if best.metric_name in MEANINGS:
        notes.append(MEANINGS[best.metric_name])
    table.caption = "\n".join(notes) or None

    table.add_row("best epoch", f"{best.epoch}")
    table.add_row("loss", f"{best.loss:.4f}")
    accuracies = {
        f"train {best.metric_name}": best.train_accuracy,
        f"valid {best.metric_name}": best.valid_accuracy,
        f"test {best.metric_name}": best.test_accuracy if test_accuracy is None else test_accuracy,
    }
    for name, value in accuracies.items():
        table.add_row(name, "-" if value is None else f"{100 * value:.2f}%")
    table.add_section()

    speed = statistics.median(report.seeds_per_second for report in reports)
    table.add_row("seeds/s (median)", human_count(speed))
    for stage in stage_names(reports):
        # Not every epoch is evaluated.
        spent = [
            seconds[stage]
            for report in reports
            if stage in (seconds := report.seconds.measured())
            and (stage != "evaluate" or report.valid_accuracy is not None)
        ]
        if spent:
            median = human_seconds(statistics.median(spent))
            table.add_row(f"{_STAGE_NAMES[stage]} (median)", median)
    table.add_section()

    for name in dict.fromkeys(name for report in reports for name in report.tables):
        rows: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for report in reports:
            rows.update(report.tier_rows(name))
            sizes.update(report.tier_bytes(name))
        total = sum(rows.values())
        for tier, count in rows.items():
            share = human_share(count / total if total else 0.0)
            table.add_row(
                escape(f"{name} rows from {tier}"),
                f"{share}, {human_count(count)}, {human_bytes(sizes[tier])}",
            )
    return table


def plan_table(rows: Sequence[Mapping[str, Any]], title: str = "Placement plan") -> Table:
    """Any list of dicts as a table, each number in the unit its key names.

    A key's words choose the unit: ``bytes`` and ``memory`` binary units; ``share``, ``ratio``,
    ``fraction``, ``rate`` and ``accesses`` (a plan gives their share) percent; ``seconds``
    milliseconds.  Other integers get thousands separators and other floats four
    significant digits.  In a list, neighbours that read the same are counted: ``8 x 1.230``.
    The columns are the union of the rows' keys, in order of appearance.
    """
    # Without frames, because a plan's rows are wide and a terminal may have 80 columns.
    table = Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        values = [row.get(key) for row in rows]
        header = key.replace("_", " ").replace("seconds", "ms")
        table.add_column(
            escape(header),
            justify="right" if any(map(_is_numeric, values)) else "left",
            # A narrow terminal may break long texts and lists, but no number and no name.
            no_wrap=all(len(_cell(key, value)) <= _UNBROKEN for value in values),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(escape(_cell(key, row.get(key))) for key in keys))
    return table


def _unit(key: str) -> str:
    words = set(key.lower().replace("-", "_").split("_"))
    if words & {"bytes", "memory"}:
        return "bytes"
    if words & {"share", "ratio", "fraction", "rate", "accesses"}:
        return "share"
    if "seconds" in words:
        return "ms"
    return ""


def _cell(key: str, value: Any) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return join_runs([_cell(key, part) for part in value])
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(key, part)}" for name, part in value.items())
    if not _is_number(value):
        return str(value)
    unit = _unit(key)
    if unit == "bytes":
        return human_bytes(value)
    if unit == "share":
        return human_share(value)
    if unit == "ms":
        return f"{1e3 * value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def join_runs(texts: Sequence[str]) -> str:
    """Texts with commas between them, runs of equal ones as ``8 x text``."""
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_number(part) for part in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def machine_tables(machines: Cluster, names: Sequence[str]) -> list[RenderableType]:
    """A table of a machine's GPUs and links, and lines with facts and all known machines' names."""
    topology, network = machines.machine, machines.network
    several = f"{machines.num_machines} x " if machines.num_machines > 1 else ""
    links = _links_of_each(topology) if topology.num_gpus <= _MOST_GPUS else _links(topology)
    links.title = f"{several}{topology.name}"
    shared = [
        f"GPUs {', '.join(map(str, group.gpus))} share {group.bandwidth:g} GB/s to host memory"
        for group in topology.host_groups[:_MOST_GROUPS]
    ]
    if len(topology.host_groups) > len(shared):
        shared.append(f"… so do the others of {topology.num_gpus}")
    if network is not None:
        shared.append(
            f"each GPU receives {network.bandwidth:g} GB/s from other machines, and sends as much; "
            f"an exchange takes {human_seconds(network.latency)} or more"
        )
    explanation = (
        "no GPU: GB/s at which ranks read each other's shared memory, which are assumed"
        if topology.name == "cpu"
        else "GB/s at which the GPU of a row reads the memory of a column's"
    )
    facts = [
        explanation,
        f"host memory {human_bytes(float(topology.host_memory))}",
        *shared,
        f"known by name: {', '.join(names)}; several of one: 8x-hgx-h200",
    ]
    return [links, *facts]


def _links_of_each(topology: Topology) -> Table:
    """A row and a column for each GPU."""
    devices = range(topology.num_gpus)
    links = Table("")
    for column in (*map(str, devices), "host", "memory"):
        links.add_column(column, justify="right")
    for row in devices:
        reads = [f"{value:g}" if value else "-" for value in topology.link_bandwidth[row].round(1)]
        links.add_row(
            str(row),
            *reads,
            f"{topology.host_bandwidth[row]:g}",
            human_bytes(float(topology.gpu_memory[row])),
        )
    return links


def _links(topology: Topology) -> Table:
    """A row for all GPUs that are alike."""
    links = Table("")
    for column in ("own", "each of the others", "all others", "host", "memory"):
        links.add_column(column, justify="right")
    alike: dict[tuple[str, ...], list[int]] = {}
    for gpu, reads in enumerate(topology.link_bandwidth.round(1)):
        others = [f"{reads[peer]:g}" for peer in range(len(reads)) if peer != gpu]
        figures = (
            f"{reads[gpu]:g}",
            join_runs(sorted(others)),
            f"{topology.port_bandwidth[gpu]:g}",
            f"{topology.host_bandwidth[gpu]:g}",
            human_bytes(float(topology.gpu_memory[gpu])),
        )
        alike.setdefault(figures, []).append(gpu)
    for row, gpus in alike.items():
        links.add_row(f"{len(gpus)} GPUs from {gpus[0]} on", *row)
    return links
