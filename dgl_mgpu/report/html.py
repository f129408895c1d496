"""A run on one page: a file that needs no other, no network and no script."""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dgl_mgpu.placement import Plan
from dgl_mgpu.report import markup
from dgl_mgpu.report.colours import GREY, STAGE_COLOURS, TIER_COLOURS
from dgl_mgpu.report.epoch import (
    MEANINGS,
    WITHIN_OTHERS,
    EpochReport,
    best_epoch,
    stages_of,
    usual_longest,
)
from dgl_mgpu.report.metrics import METRICS_FILE, read_metrics, replace_file
from dgl_mgpu.report.placement import is_on_cpu, tier_bandwidths
from dgl_mgpu.report.placement_plot import plot_placements
from dgl_mgpu.report.plots import plot_curves
from dgl_mgpu.report.profile import TIMELINE_FILE, TRACE_FILE, StepProfile, read_profile
from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share

REPORT_FILE = "report.html"

#: What a rank reads each tier over.
LINKS = {
    "device": "own memory",
    "peer": "links to other ranks",
    "host": "way to host memory",
    "disk": "disk",
}

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
    plan: Plan | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.html`` into the folder of a run, from what the run has written there.

    That is ``metrics.jsonl``, of this version or an earlier one, and, where steps were traced,
    ``profile.json`` and ``timeline.png``.  The run need not have ended.

    Parameters
    ----------
    folder : path
    title : str
    configuration : mapping, optional
        What the run was configured with, by keys as a command line has them.
    machine : mapping of str to str, optional
        See :func:`dgl_mgpu.report.environment.environment`.
    plan : Plan, optional
        Where the store kept rows; with it the page has its picture, and how much of its bandwidths
        the run used.
    summary : mapping, optional
        Of the whole run, where its metrics have none yet.

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
    reports, kept = read_metrics(folder / METRICS_FILE)
    summary = summary or kept
    profile = read_profile(folder)
    body = [
        f"<h1>{escape(title)}</h1>",
        _overview(reports, summary or {}, profile),
        *_curves(reports, title),
        *_epochs(reports),
        *_stages(reports),
        *_placement(plan),
        *_tiers(reports, plan),
        *_profile(profile, folder),
        *markup.facts("Configuration", configuration or {}),
        *markup.facts("Machine and versions", machine or {}),
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
            f"valid {best.figure}": _accuracy(best.valid_accuracy),
            f"test {best.figure}": _accuracy(test),
            "seeds/s (median)": human_count(statistics.median(r.seeds_per_second for r in reports)),
            "epoch (median)": human_seconds(statistics.median(r.seconds.total for r in reports)),
        }
    if summary.get("restarts"):
        figures["restarts"] = f"{summary['restarts']}"
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
    yield markup.image(
        picture.getvalue(),
        f"loss, {reports[0].figure}, time by stage and rows by tier of each epoch",
    )


def _epochs(reports: Sequence[EpochReport]) -> Iterator[str]:
    if not reports:
        return
    stages = [stage for stage in stages_of(reports) if stage != "total"]
    parts = [stage for stage in stages if stage not in WITHIN_OTHERS]
    yield "<h2>Epochs</h2>"
    yield markup.legend({stage: STAGE_COLOURS.get(stage, GREY) for stage in parts})
    head = ["epoch", "loss", "train", "valid", "test", "seeds/s", *stages, "total", ""]
    rows = []
    measured = [report.seconds.measured() for report in reports]
    # Of stages that overlap the sum may be longer.
    longest = usual_longest(
        [max(sum(each.get(part, 0.0) for part in parts), each["total"]) for each in measured]
    )
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
                markup.bar(
                    (STAGE_COLOURS.get(part, GREY), seconds[part] / longest)
                    for part in parts
                    if part in seconds and longest > 0.0
                ),
            ]
        )
    yield markup.table(head, rows)
    yield (
        f'<p class="note">{_figure(reports[0])}{_of_ranks(reports)}{_within_others(stages)}'
        "Stages that overlap each count in full: together "
        "they may take longer than the epoch. An epoch that took far longer than most, as the "
        "first one does that compiles, fills its bar.</p>"
    )


def _stages(reports: Sequence[EpochReport]) -> Iterator[str]:
    if not reports:
        return
    yield "<h2>Stages</h2>"
    rows = []
    for name in stages_of(reports):
        if name in ("evaluate", "total"):  # no part of training
            continue
        each = [(r, spent) for r in reports if (spent := getattr(r.seconds, name)) is not None]
        share = statistics.median(
            spent / r.training_seconds if r.training_seconds > 0.0 else 0.0 for r, spent in each
        )
        rows.append([
            name,
            human_seconds(statistics.median(spent for _, spent in each)),
            human_seconds(statistics.median(spent / max(r.steps, 1) for r, spent in each)),
            human_share(share),
            markup.bar([(STAGE_COLOURS.get(name, GREY), share)]),
        ])  # fmt: skip
    yield markup.table(["stage", "an epoch", "a step", "share of training", ""], rows)
    within = _within_others(stages_of(reports))
    yield f'<p class="note">{_of_ranks(reports)}{within}Medians over the epochs.</p>'


def _figure(report: EpochReport) -> str:
    """What train, valid and test are, where those are no accuracies."""
    return f"{MEANINGS[report.figure]}. " if report.figure in MEANINGS else ""


def _of_ranks(reports: Sequence[EpochReport]) -> str:
    if all(report.ranks == 1 for report in reports):
        return ""
    return "Of several ranks, stages show the mean, and the total is the slowest rank's. "


def _within_others(stages: Sequence[str]) -> str:
    if not WITHIN_OTHERS.intersection(stages):
        return ""
    return (
        "Forward and backward include the exchange of rows with other ranks, and the time in "
        "which they waited for rows, as nothing was left to be computed meanwhile. "
    )


def _placement(plan: Plan | None) -> Iterator[str]:
    if plan is None:
        return
    yield "<h2>Placement</h2>"
    yield (
        "<p>What each rank's memory, the host's and the disk hold, and how busy the cost model "
        "expects links to be. It was made before training; what the run read follows below.</p>"
    )
    picture = io.BytesIO()
    plot_placements([plan], picture, [f"policy {plan.policy} on {plan.topology}"])
    yield markup.image(
        picture.getvalue(), "what each memory holds, and how busy each link is modelled"
    )


def _tiers(reports: Sequence[EpochReport], plan: Plan | None) -> Iterator[str]:
    tables = dict.fromkeys(name for report in reports for name in report.tables)
    if not tables:
        return
    names = list(dict.fromkeys(tier.name for report in reports for tier in report.tiers))
    names.sort(key=lambda name: (*TIER_COLOURS, name).index(name))
    yield "<h2>Rows by tier</h2>"
    rows = []
    for table in tables:
        total = sum(sum(report.tier_rows(table).values()) for report in reports)
        for tier in names:
            count = sum(report.tier_rows(table).get(tier, 0) for report in reports)
            sizes = [report.tier_bytes(table).get(tier, 0) for report in reports]
            if not count:
                continue
            rows.append([
                escape(table),
                escape(tier),
                human_count(count),
                human_share(count / total),
                markup.bar([(_tier_colour(tier), count / total)]),
                human_bytes(sum(sizes)),
                _per_second(_rate(reports, sizes, _gathering)),
            ])  # fmt: skip
    yield markup.table(
        ["table", "tier", "rows", "share", "", "bytes", "bytes/s while gathering"], rows
    )
    yield "<h2>Link use</h2>"
    yield from _links(reports, plan)
    yield "<h2>Bytes by tier and epoch</h2>"
    yield markup.legend({name: _tier_colour(name) for name in names})
    yield markup.table(
        ["epoch", *names, "share of rows"],
        [
            [
                f"{report.epoch}",
                *(human_bytes(report.tier_bytes().get(name, 0)) for name in names),
                markup.bar((_tier_colour(n), report.tier_shares().get(n, 0.0)) for n in names),
            ]
            for report in reports
        ],
    )


def _links(reports: Sequence[EpochReport], plan: Plan | None) -> Iterator[str]:
    # Nobody has measured what shared memory could do.
    bandwidths = {} if plan is None or is_on_cpu(plan) else tier_bandwidths(plan)
    head = ["tier", "read over", "bytes", "bytes/s while gathering", "in all training"]
    if bandwidths:
        head += ["bandwidth in the plan", "use while gathering", "in all training"]
    rows = []
    for tier, link in LINKS.items():
        sizes = [report.tier_bytes().get(tier, 0) for report in reports]
        if not any(sizes):
            continue
        rates = [_rate(reports, sizes, seconds) for seconds in (_gathering, _training)]
        row = [tier, link, human_bytes(sum(sizes)), *map(_per_second, rates)]
        if bandwidths:
            most = bandwidths.get(tier)
            row += [_per_second(most), *(_use(rate, most) for rate in rates)]
        rows.append(row)
    yield markup.table(head, rows)
    yield (
        '<p class="note">Bytes of features and labels, of all epochs and ranks. Bytes/s are a '
        "rank's, in the median epoch: over the time of the stage gather, in which all tiers are "
        "read at once, and over all of training, evaluation left out.</p>"
    )


def _gathering(report: EpochReport) -> float:
    return report.seconds.gather or 0.0


def _training(report: EpochReport) -> float:
    return report.training_seconds


def _rate(
    reports: Sequence[EpochReport],
    sizes: Sequence[int],
    seconds: Callable[[EpochReport], float],
) -> float | None:
    """Bytes a second of one rank, in the median epoch; None where no time was measured."""
    rates = [
        size / report.ranks / seconds(report)
        for report, size in zip(reports, sizes, strict=True)
        if seconds(report) > 0.0
    ]
    return statistics.median(rates) if rates else None


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{human_bytes(rate)}/s"


def _use(rate: float | None, most: float | None) -> str:
    return "-" if rate is None or most is None else human_share(rate / most)


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
        yield markup.image(picture.read_bytes(), "timeline of one step")
    stages = dict.fromkeys([*profile.host_seconds, *profile.work_seconds])
    yield markup.table(
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
    yield markup.table(
        ["kernel, copy or operator", "calls a step", "time a step"],
        [
            [escape(_short(name)), f"{calls:.4g}", human_seconds(seconds)]
            for name, calls, seconds in profile.operations
        ],
    )


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _tier_colour(name: str) -> str:
    return TIER_COLOURS.get(name, GREY)


def _short(name: str, most: int = 90) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."
