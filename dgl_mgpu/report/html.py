"""A run on one page: a file that needs no other, no network and no script."""

from __future__ import annotations

import base64
import io
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dgl_mgpu.report.colours import GREY, STAGE_COLOURS, TIER_COLOURS
from dgl_mgpu.report.epoch import EpochReport, best_epoch, stages_of
from dgl_mgpu.report.metrics import METRICS_FILE, read_metrics, replace_file
from dgl_mgpu.report.plots import plot_curves
from dgl_mgpu.report.profile import TIMELINE_FILE, TRACE_FILE, StepProfile, read_profile
from dgl_mgpu.report.units import human_bytes, human_count, human_seconds, human_share

REPORT_FILE = "report.html"

#: What a GPU reads each tier over; a device's own memory and its replica are behind no link.
LINKS = {"peer": "to other GPUs", "host": "to host memory", "disk": "to the disk"}

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; }
h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
img { max-width: 100%; height: auto; }
dl { display: flex; flex-wrap: wrap; gap: .8em 2.2em; margin: 1em 0; }
dt { color: #666; font-size: .85em; }
dd { margin: 0; font-size: 1.25em; }
.scroll { overflow: auto; max-height: 34em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .9em .15em 0; text-align: right; white-space: nowrap; }
th { color: #666; font-weight: normal; font-size: .9em; position: sticky; top: 0;
     background: #fff; }
th:first-child, td:first-child { text-align: left; }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr:nth-child(even) td { background: #f7f7f7; }
.bar { display: flex; width: 14em; min-width: 14em; height: .8em; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
p.note { color: #666; }
@media print { .scroll { overflow: visible; max-height: none; } }
"""


def write_report(
    folder: str | os.PathLike[str],
    title: str = "Training",
    configuration: Mapping[str, Any] | None = None,
    machine: Mapping[str, str] | None = None,
    bandwidths: Mapping[str, float] | None = None,
) -> Path:
    """Write ``report.html`` into the folder of a run, from what the run has written there.

    That is ``metrics.jsonl``, of this version or an earlier one, and, where steps were traced,
    ``profile.json`` and ``timeline.png``.  The run need not have ended.

    Parameters
    ----------
    folder : path
    title : str
    configuration : mapping, optional
        What the run was configured with; may be nested.
    machine : mapping of str to str, optional
        See :func:`dgl_mgpu.report.environment.environment`.
    bandwidths : mapping of str to float, optional
        Bytes a second at which one rank can read the tiers ``"peer"``, ``"host"`` and ``"disk"``,
        where they are known; see :func:`dgl_mgpu.report.machine.tier_bandwidths`.

    Returns
    -------
    Path
        Of the file.

    Raises
    ------
    DataFormatError
        If the metrics or the profile are damaged.
    OSError
        If there are no metrics, or the page cannot be written.
    """
    folder = Path(folder)
    reports, summary = read_metrics(folder / METRICS_FILE)
    profile = read_profile(folder)
    body = [
        f"<h1>{escape(title)}</h1>",
        _overview(reports, summary or {}, profile),
        *_curves(reports, title),
        *_epochs(reports),
        *_tiers(reports, bandwidths or {}),
        *_profile(profile, folder),
        *_facts("Configuration", dict(_flat(configuration or {}))),
        *_facts("Machine and versions", machine or {}),
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    replace_file(folder / REPORT_FILE, page)
    return folder / REPORT_FILE


def _overview(
    reports: Sequence[EpochReport], summary: Mapping[str, Any], profile: StepProfile | None
) -> str:
    figures = {"epochs": f"{len(reports)}"}
    best = best_epoch(reports)
    if best is not None:
        test = summary.get("test_accuracy")
        test = best.test_accuracy if test is None else test
        figures |= {
            "ranks": f"{best.ranks}",
            "best epoch": f"{best.epoch}",
            "loss": f"{best.loss:.4f}",
            "valid accuracy": _accuracy(best.valid_accuracy),
            "test accuracy": _accuracy(test),
            "seeds/s (median)": human_count(statistics.median(r.seeds_per_second for r in reports)),
            "epoch (median)": human_seconds(statistics.median(r.seconds.total for r in reports)),
        }
    if profile is not None and profile.busy_share is not None:
        figures["GPU busy"] = human_share(profile.busy_share)
    parts = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items())
    return f"<dl>{''.join(parts)}</dl>"


def _curves(reports: Sequence[EpochReport], title: str) -> Iterator[str]:
    yield "<h2>Curves</h2>"
    if not reports:
        yield '<p class="note">No epoch was trained to its end.</p>'
        return
    picture = io.BytesIO()
    plot_curves(reports, picture, title)
    yield _image(picture.getvalue(), "loss, accuracy, time by stage and rows by tier of each epoch")


def _epochs(reports: Sequence[EpochReport]) -> Iterator[str]:
    if not reports:
        return
    stages = [stage for stage in stages_of(reports) if stage != "total"]
    yield "<h2>Epochs</h2>"
    yield _legend({stage: STAGE_COLOURS.get(stage, GREY) for stage in stages})
    head = ["epoch", "loss", "train", "valid", "test", "seeds/s", *stages, "total", ""]
    rows = []
    measured = [report.seconds.measured() for report in reports]
    # Of stages that overlap the sum may be longer.
    longest = max(max(sum(each.values()) - each["total"], each["total"]) for each in measured)
    for report, seconds in zip(reports, measured, strict=True):
        rows.append(
            [
                f"{report.epoch}",
                f"{report.loss:.4f}",
                _accuracy(report.train_accuracy),
                _accuracy(report.valid_accuracy),
                _accuracy(report.test_accuracy),
                human_count(report.seeds_per_second),
                *(human_seconds(seconds[s]) if s in seconds else "-" for s in stages),
                human_seconds(report.seconds.total),
                _bar(
                    (STAGE_COLOURS.get(stage, GREY), seconds[stage] / longest)
                    for stage in stages
                    if stage in seconds and longest > 0.0
                ),
            ]
        )
    yield _table(head, rows)
    yield (
        '<p class="note">Stages that overlap each count in full: together they may take longer '
        "than the epoch.</p>"
    )


def _tiers(reports: Sequence[EpochReport], bandwidths: Mapping[str, float]) -> Iterator[str]:
    tables = dict.fromkeys(name for report in reports for name in report.tables)
    if not tables:
        return
    yield "<h2>Rows by tier</h2>"
    # A run may resume on other ranks than it began.
    seconds = sum(each.ranks * (each.seconds.total - each.seconds.evaluate) for each in reports)
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for read in (read for report in reports for read in report.tiers):
        rows, size = sums.get((read.table, read.name), (0, 0))
        sums[read.table, read.name] = rows + read.rows, size + read.bytes
    totals = {table: sum(n for (t, _), (n, _) in sums.items() if t == table) for table in tables}
    yield _table(
        ["table", "tier", "rows", "share", "", "bytes", "bytes/s of a rank"],
        [
            [
                escape(table),
                escape(tier),
                human_count(rows),
                human_share(rows / totals[table] if totals[table] else 0.0),
                _bar([(_tier_colour(tier), rows / totals[table] if totals[table] else 0.0)]),
                human_bytes(size),
                _rate(size, seconds),
            ]
            for table in tables
            for (of, tier), (rows, size) in sums.items()
            if of == table
        ],
    )
    links = []
    for tier, link in LINKS.items():
        size = sum(nbytes for (_, name), (_, nbytes) in sums.items() if name == tier)
        if not size:
            continue
        most = bandwidths.get(tier)
        used = size / seconds / most if most and seconds > 0.0 else None
        links.append(
            [
                link,
                human_bytes(size),
                _rate(size, seconds),
                "-" if most is None else f"{human_bytes(most)}/s",
                "-" if used is None else human_share(used),
            ]
        )
    if links:
        yield "<h2>Link use</h2>"
        yield _table(["link", "bytes", "bytes/s of a rank", "bandwidth", "use"], links)
    yield (
        '<p class="note">Of all epochs and ranks; bytes/s are those of the whole time of training, '
        "evaluation left out.</p>"
    )
    yield "<h2>Bytes by tier and epoch</h2>"
    names = list(dict.fromkeys(tier.name for report in reports for tier in report.tiers))
    names.sort(key=lambda name: (*TIER_COLOURS, name).index(name))
    yield _legend({name: _tier_colour(name) for name in names})
    yield _table(
        ["epoch", *names, "share of rows"],
        [
            [
                f"{report.epoch}",
                *(human_bytes(report.tier_bytes().get(name, 0)) for name in names),
                _bar((_tier_colour(n), report.tier_shares().get(n, 0.0)) for n in names),
            ]
            for report in reports
        ],
    )


def _profile(profile: StepProfile | None, folder: Path) -> Iterator[str]:
    if profile is None:
        return
    yield "<h2>One step</h2>"
    where = "on the CPU" if profile.busy_share is None else "on the GPU"
    busy = ""
    if profile.busy_share is not None:
        busy = (
            f" The first rank's GPU ran a kernel or a copy for {human_share(profile.busy_share)} "
            "of their time."
        )
    yield (
        f"<p>{profile.steps} steps were traced, of {human_seconds(profile.step_seconds)} "
        f"(median).{busy} Tracing slows the host down. The trace, for ui.perfetto.dev: "
        f"{TRACE_FILE}.</p>"
    )
    picture = folder / TIMELINE_FILE
    if picture.exists():
        yield _image(picture.read_bytes(), "timeline of one step")
    stages = dict.fromkeys([*profile.host_seconds, *profile.work_seconds])
    yield _table(
        ["stage, of a step", "on the host", where],
        [
            [
                escape(stage or "no stage"),
                *(
                    human_seconds(seconds[stage]) if stage in seconds else "-"
                    for seconds in (profile.host_seconds, profile.work_seconds)
                ),
            ]
            for stage in stages
        ],
    )
    yield "<h3>What took the longest</h3>"
    yield _table(
        ["kernel, copy or operator", "calls a step", "time a step"],
        [
            [escape(_short(name)), f"{calls:.4g}", human_seconds(seconds)]
            for name, calls, seconds in profile.operations
        ],
    )


def _facts(title: str, facts: Mapping[str, str]) -> Iterator[str]:
    if facts:
        rows = (f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
        yield f"<h2>{escape(title)}</h2>"
        yield f'<table class="facts">{"".join(rows)}</table>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys as the command line has them: ``trainer.lr``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "-" if value is None else str(value)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    """A bar of colours, and the shares of its width that they take."""
    spans = (
        f'<span style="width:{100 * share:.2f}%;background:{colour}"></span>'
        for colour, share in parts
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _legend(colours: Mapping[str, str]) -> str:
    keys = (
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for name, colour in colours.items()
    )
    return f"<p>{''.join(keys)}</p>"


def _image(png: bytes, text: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'


def _rate(size: int, seconds: float) -> str:
    return f"{human_bytes(size / seconds)}/s" if seconds > 0.0 else "-"


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _tier_colour(name: str) -> str:
    return TIER_COLOURS.get(name, GREY)


def _short(name: str, most: int = 90) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."
