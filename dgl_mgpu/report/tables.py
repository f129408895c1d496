"""Tables for the terminal: the summary of a run and the plan of a placement."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dgl_mgpu.report.epoch import MEANINGS, EpochReport, best_epoch, stages_of
from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share

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

_UNBROKEN = 12
"""Columns of a plan whose cells are no longer than this keep them on one line."""


def summary_table(
    reports: Sequence[EpochReport],
    title: str = "Training",
    test_accuracy: float | None = None,
) -> Table:
    """The figures of a whole run, to be printed at its end.

    Parameters
    ----------
    reports : sequence of EpochReport
        The epochs of the run, merged over the ranks; may be empty.
    title : str
        Printed above the table.
    test_accuracy : float, optional
        Accuracy in 0..1 of the best epoch's model, where it was tested once at the end; by
        default what the best epoch's report holds.

    Returns
    -------
    rich.table.Table
        Two columns. The epoch of best validation accuracy with its loss and accuracies, the
        median over the epochs of seeds/s and of the time of each stage (of several ranks, their
        mean), and for each table the rows and bytes that each tier served in the whole run.
    """
    table = Table(title=escape(title), show_header=False)
    table.add_column("figure", style="bold")
    table.add_column("value", justify="right")
    best = best_epoch(reports)
    table.add_row("epochs", f"{len(reports)}", end_section=best is None)
    if best is None:
        return table
    table.add_row("ranks", f"{best.ranks}", end_section=True)
    notes = ["stages: mean of the ranks; whole epoch: the slowest"] if best.ranks > 1 else []
    if best.figure in MEANINGS:
        notes.append(MEANINGS[best.figure])
    table.caption = "\n".join(notes) or None

    table.add_row("best epoch", f"{best.epoch}")
    table.add_row("loss", f"{best.loss:.4f}")
    accuracies = {
        f"train {best.figure}": best.train_accuracy,
        f"valid {best.figure}": best.valid_accuracy,
        f"test {best.figure}": best.test_accuracy if test_accuracy is None else test_accuracy,
    }
    for name, value in accuracies.items():
        table.add_row(name, "-" if value is None else f"{100 * value:.2f}%")
    table.add_section()

    speed = statistics.median(report.seeds_per_second for report in reports)
    table.add_row("seeds/s (median)", human_count(speed))
    for stage in stages_of(reports):
        each = [_seconds(report, stage) for report in reports]
        spent = [seconds for seconds in each if seconds is not None]
        if spent:
            usual = human_seconds(statistics.median(spent))
            table.add_row(f"{_STAGE_NAMES[stage]} (median)", usual)
    table.add_section()

    for name in dict.fromkeys(name for report in reports for name in report.tables):
        rows = _sum([report.tier_rows(name) for report in reports])
        sizes = _sum([report.tier_bytes(name) for report in reports])
        total = sum(rows.values())
        for tier, count in rows.items():
            share = human_share(count / total if total else 0.0)
            table.add_row(
                escape(f"{name} rows from {tier}"),
                f"{share}, {human_count(count)}, {human_bytes(sizes[tier])}",
            )
    return table


def _seconds(report: EpochReport, stage: str) -> float | None:
    """Of a stage, if there was one: not every epoch is evaluated."""
    if stage == "evaluate" and report.valid_accuracy is None:
        return None
    return report.seconds.measured().get(stage)


def plan_table(rows: Sequence[Mapping[str, Any]], title: str = "Placement plan") -> Table:
    """Any list of dicts as a table, each number in the unit its key names.

    A key's words choose the unit: ``bytes`` and ``memory`` binary units; ``share``, ``ratio``,
    ``fraction``, ``rate`` and ``accesses`` (a plan gives their share) percent; ``seconds``
    milliseconds.  Other integers get thousands separators and other floats four
    significant digits.  In a list, neighbours that read the same are counted: ``8 x 1.230``.

    Parameters
    ----------
    rows : sequence of mapping
        One a line; the columns are the union of their keys, in order of appearance.
    title : str
        Printed above the table.
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
        return joined([_cell(key, part) for part in value])
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


def joined(texts: Sequence[str]) -> str:
    """Texts with commas between them, runs of equal ones as ``8 x text``."""
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_number(part) for part in value)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            sums[name] = sums.get(name, 0) + value
    return sums
