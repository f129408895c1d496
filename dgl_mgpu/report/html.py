"""The report of a run: one HTML page that needs no other file, no network and no script."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from dgl_mgpu.placement import Plan
from dgl_mgpu.report.colours import GREY, STAGE_COLOURS, TIER_COLOURS
from dgl_mgpu.report.epoch import (
    MEANINGS,
    WITHIN_OTHERS,
    EpochReport,
    best_epoch,
    stage_names,
    usual_longest,
)
from dgl_mgpu.report.metrics import METRICS_FILE, read_metrics
from dgl_mgpu.report.placement import is_on_cpu, tier_bandwidths
from dgl_mgpu.report.profile import TIMELINE_FILE, TRACE_FILE, StepProfile, read_profile
from dgl_mgpu.utils.atomic_write import atomic_write
from dgl_mgpu.utils.extras import EXTRAS, install_command, is_installed
from dgl_mgpu.utils.units import human_bytes, human_count, human_seconds, human_share

REPORT_FILE = "report.html"

#: What a rank reads each tier over.
LINKS = {
    "device": "own memory",
    "peer": "links to other ranks",
    "host": "way to host memory",
    "disk": "disk",
}
_PACKAGES = ("dgl-mgpu", "dgl", "torch", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x")

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters |= {"seconds": human_seconds, "share": human_share}

#: Parts of a bar: colours and the shares of its width.
Bar = list[tuple[str, float]]


class _Table(NamedTuple):
    head: list[str]
    rows: list[list[str | Bar]]
    colours: dict[str, str] | None = None  # of the legend above it


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

    ``configuration`` has the keys of the command line, and ``machine`` those of `environment`.
    ``plan`` adds the picture of the placement, and the share of its bandwidths that the run used.
    ``summary`` is of the whole run, where its metrics have none yet.

    Raises DataFormatError if the metrics or the profile are damaged, and OSError if there are no
    metrics, or the page cannot be written.
    """
    folder = Path(folder)
    reports, last_line = read_metrics(folder / METRICS_FILE)
    profile = read_profile(folder)
    content: dict[str, Any] = {
        "title": title,
        "reports": reports,
        "overview": _overview(reports, summary or last_line or {}, profile),
        "curves": None,
        "several_ranks": any(report.ranks > 1 for report in reports),
        "within_others": not WITHIN_OTHERS.isdisjoint(stage_names(reports)),
        "placement": None,
        "without_pictures": None,
        "tiers": _tiers(reports),
        "links": _links(reports, plan),
        "bytes_by_epoch": _bytes_by_epoch(reports),
        "profile": profile,
        "configuration": configuration,
        "machine": machine,
    }
    if reports:
        content |= {
            "meaning": MEANINGS.get(reports[0].metric_name),
            "epochs": _epochs(reports),
            "stages": _stages(reports),
        }
    if is_installed("matplotlib"):
        content |= _pictures(reports, title, plan)
    else:
        content["without_pictures"] = install_command(EXTRAS["matplotlib"])
    if profile is not None:
        timeline = folder / TIMELINE_FILE
        content |= {
            "trace_file": TRACE_FILE,
            "timeline": timeline.exists() and _base64(timeline.read_bytes()),
            "step_stages": _step_stages(profile),
            "operations": _Table(
                ["kernel, copy or operator", "calls a step", "time a step"],
                [
                    [name if len(name) <= 90 else f"{name[:87]}...", f"{calls:.4g}",
                     human_seconds(seconds)]
                    for name, calls, seconds in profile.operations
                ],
            ),
        }  # fmt: skip
    page = _TEMPLATES.get_template("report.html.jinja").render(content)
    with atomic_write(folder / REPORT_FILE) as file:
        file.write(page.lstrip().encode())
    return folder / REPORT_FILE


def _pictures(reports: list[EpochReport], title: str, plan: Plan | None) -> dict[str, str]:
    from dgl_mgpu.report.placement_plot import plot_placements
    from dgl_mgpu.report.plots import plot_curves

    pictures = {}
    if reports:
        pictures["curves"] = _picture(lambda file: plot_curves(reports, file, title))
    if plan is not None:
        titles = [f"policy {plan.policy} on {plan.topology}"]
        pictures["placement"] = _picture(lambda file: plot_placements([plan], file, titles))
    return pictures


def environment() -> dict[str, str]:
    """This machine's hardware and the versions of the software, as names and values to show.

    What is not known is left out.
    """
    import torch  # reading a report does not need it

    facts = {
        "CPU": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.machine(),
        "CPU cores": str(len(os.sched_getaffinity(0))),
        "host memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        facts[f"GPU {number}"] = (
            f"{gpu.name}, {human_bytes(gpu.total_memory)}, "
            f"{gpu.multi_processor_count} multiprocessors"
        )
    facts |= {
        "operating system": platform.platform(),
        "NVIDIA driver": _first_match(
            "/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)\s"
        ),
        "CUDA of torch": torch.version.cuda or "",
        "Python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }
    return {name: value for name, value in facts.items() if value}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_match(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match.group(1).strip() if match else ""


def _overview(
    reports: Sequence[EpochReport], summary: Mapping[str, Any], profile: StepProfile | None
) -> dict[str, str]:
    values = {"epochs": f"{len(reports)}"}
    best = best_epoch(reports)
    if best is not None:
        test = summary.get("test_accuracy")
        values |= {
            "ranks": f"{best.ranks}",
            "best epoch": f"{best.epoch}",
            "loss": f"{best.loss:.4f}",
            f"valid {best.metric_name}": _accuracy(best.valid_accuracy),
            f"test {best.metric_name}": _accuracy(best.test_accuracy if test is None else test),
            "seeds/s (median)": human_count(statistics.median(r.seeds_per_second for r in reports)),
            "epoch (median)": human_seconds(statistics.median(r.seconds.total for r in reports)),
        }
    if summary.get("restarts"):
        values["restarts"] = f"{summary['restarts']}"
    if profile is not None and profile.busy_share is not None:
        values["GPU busy"] = human_share(profile.busy_share)
    return values


def _epochs(reports: Sequence[EpochReport]) -> _Table:
    stages = [stage for stage in stage_names(reports) if stage != "total"]
    parts = [stage for stage in stages if stage not in WITHIN_OTHERS]
    measured = [report.seconds.measured() for report in reports]
    # The sum may be longer than the total, where stages overlap.
    longest = usual_longest(
        [max(sum(s.get(part, 0.0) for part in parts), s["total"]) for s in measured]
    )
    rows: list[list[str | Bar]] = [
        [
            f"{report.epoch}",
            f"{report.loss:.4f}",
            _accuracy(report.train_accuracy),
            _accuracy(report.valid_accuracy),
            _accuracy(report.test_accuracy),
            human_count(report.seeds_per_second),
            *(human_seconds(seconds[stage]) if stage in seconds else "-" for stage in stages),
            human_seconds(report.seconds.total),
            [
                (_stage_colour(part), seconds[part] / longest)
                for part in parts
                if part in seconds and longest > 0.0
            ],
        ]
        for report, seconds in zip(reports, measured, strict=True)
    ]
    head = ["epoch", "loss", "train", "valid", "test", "seeds/s", *stages, "total", ""]
    return _Table(head, rows, {stage: _stage_colour(stage) for stage in parts})


def _stages(reports: Sequence[EpochReport]) -> _Table:
    rows: list[list[str | Bar]] = []
    for stage in stage_names(reports):
        if stage in ("evaluate", "total"):  # not a part of training
            continue
        spent = [(r, s) for r in reports if (s := getattr(r.seconds, stage)) is not None]
        share = statistics.median(
            s / r.training_seconds if r.training_seconds > 0.0 else 0.0 for r, s in spent
        )
        rows.append([
            stage,
            human_seconds(statistics.median(s for _, s in spent)),
            human_seconds(statistics.median(s / max(r.steps, 1) for r, s in spent)),
            human_share(share),
            [(_stage_colour(stage), share)],
        ])  # fmt: skip
    return _Table(["stage", "an epoch", "a step", "share of training", ""], rows)


def _tier_names(reports: Sequence[EpochReport]) -> list[str]:
    """Tiers that were read, near ones first."""
    names = dict.fromkeys(tier.name for report in reports for tier in report.tiers)
    return sorted(names, key=lambda name: (*TIER_COLOURS, name).index(name))


def _tiers(reports: Sequence[EpochReport]) -> _Table:
    rows: list[list[str | Bar]] = []
    for table in dict.fromkeys(name for report in reports for name in report.tables):
        total = sum(sum(report.tier_rows(table).values()) for report in reports)
        for tier in _tier_names(reports):
            count = sum(report.tier_rows(table).get(tier, 0) for report in reports)
            sizes = [report.tier_bytes(table).get(tier, 0) for report in reports]
            if count:
                rows.append([
                    table,
                    tier,
                    human_count(count),
                    human_share(count / total),
                    [(_tier_colour(tier), count / total)],
                    human_bytes(sum(sizes)),
                    _per_second(_rate(reports, sizes, _gathering)),
                ])  # fmt: skip
    return _Table(["table", "tier", "rows", "share", "", "bytes", "bytes/s while gathering"], rows)


def _bytes_by_epoch(reports: Sequence[EpochReport]) -> _Table:
    names = _tier_names(reports)
    rows: list[list[str | Bar]] = [
        [
            f"{report.epoch}",
            *(human_bytes(report.tier_bytes().get(name, 0)) for name in names),
            [(_tier_colour(name), report.tier_shares().get(name, 0.0)) for name in names],
        ]
        for report in reports
    ]
    colours = {name: _tier_colour(name) for name in names}
    return _Table(["epoch", *names, "share of rows"], rows, colours)


def _links(reports: Sequence[EpochReport], plan: Plan | None) -> _Table:
    # The bandwidth of shared memory is not measured.
    bandwidths = {} if plan is None or is_on_cpu(plan) else tier_bandwidths(plan)
    head = ["tier", "read over", "bytes", "bytes/s while gathering", "in all training"]
    if bandwidths:
        head += ["bandwidth in the plan", "use while gathering", "in all training"]
    rows: list[list[str | Bar]] = []
    for tier, link in LINKS.items():
        sizes = [report.tier_bytes().get(tier, 0) for report in reports]
        if not any(sizes):
            continue
        rates = [_rate(reports, sizes, seconds) for seconds in (_gathering, _training)]
        row: list[str | Bar] = [tier, link, human_bytes(sum(sizes)), *map(_per_second, rates)]
        if bandwidths:
            most = bandwidths.get(tier)
            row.append(_per_second(most))
            row += [
                "-" if rate is None or most is None else human_share(rate / most) for rate in rates
            ]
        rows.append(row)
    return _Table(head, rows)


def _step_stages(profile: StepProfile) -> _Table:
    columns = profile.host_seconds, profile.work_seconds
    where = "on the CPU" if profile.busy_share is None else "on the GPU"
    rows: list[list[str | Bar]] = [
        [
            stage or "no stage",
            *(human_seconds(times[stage]) if stage in times else "-" for times in columns),
        ]
        for stage in dict.fromkeys([*profile.host_seconds, *profile.work_seconds])
    ]
    return _Table(["stage, of a step", "on the host", where], rows)


def _gathering(report: EpochReport) -> float:
    return report.seconds.gather or 0.0


def _training(report: EpochReport) -> float:
    return report.training_seconds


def _rate(
    reports: Sequence[EpochReport],
    sizes: Sequence[int],
    seconds: Callable[[EpochReport], float],
) -> float | None:
    """Bytes per second of one rank, in the median epoch; None where no time was measured."""
    rates = [
        size / report.ranks / seconds(report)
        for report, size in zip(reports, sizes, strict=True)
        if seconds(report) > 0.0
    ]
    return statistics.median(rates) if rates else None


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{human_bytes(rate)}/s"


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _stage_colour(name: str) -> str:
    return STAGE_COLOURS.get(name, GREY)


def _tier_colour(name: str) -> str:
    return TIER_COLOURS.get(name, GREY)


def _picture(draw: Callable[[io.BytesIO], None]) -> str:
    file = io.BytesIO()
    draw(file)
    return _base64(file.getvalue())


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode("ascii")
