from __future__ import annotations

import base64
import io
import json
import math
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from dgl_mgpu.errors import DataFormatError
from dgl_mgpu.machine import Topology, preset
from dgl_mgpu.placement import TableSpec, solve
from dgl_mgpu.report import MetricsLog, StageSeconds, TierTraffic, read_metrics, summary_table
from dgl_mgpu.report.html import environment, write_report
from dgl_mgpu.report.profile import StepProfile
from dgl_mgpu.report.timeline import draw_step, read_trace
from tests.report.traces import gpu_events, write_trace

_EMPTY = {"meta", "img", "br"}


class _Page(HTMLParser):
    """A page's tables, pictures and text; fails where elements do not nest."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.sources, self.tables, self.headings = [], [], [], [], []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in _EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if self.open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data
        elif self.open[-1:] == ["h2"]:
            self.headings.append(data)

    def table(self, column):
        """Rows, below the head, of the table whose first column is called so."""
        return next(rows[1:] for rows in self.tables if rows[0][0] == column)

    def pictures(self):
        start = "data:image/png;base64,"
        assert all(source.startswith(start) for source in self.sources)
        return [Image.open(io.BytesIO(base64.b64decode(s[len(start) :]))) for s in self.sources]


def _write(folder, reports, summary=None, **options):
    with MetricsLog(folder) as log:
        for report in reports:
            log.append(report)
        if summary is not None:
            log.summary(summary)
    return _Page(write_report(folder, **options))


def _profiled(folder):
    trace = read_trace(write_trace(folder / "trace.json.gz", gpu_events()))
    draw_step(trace, folder / "timeline.png")
    (folder / "profile.json").write_text(json.dumps(asdict(StepProfile.from_trace(trace))))


def test_one_file_without_scripts_that_needs_no_other(tmp_path, make_report):
    _profiled(tmp_path)
    reports = [make_report(1), make_report(2)]
    configuration = {"model.name": "<script>alert(1)</script>", "note": 'a "b" & c', "root": None}
    page = _write(
        tmp_path, reports, title="A & B <i>", configuration=configuration, machine={"GPU 0": "<b>"}
    )
    assert not {"script", "link", "iframe", "object", "i", "b"} & set(page.tags)
    assert [picture.size[0] for picture in page.pictures()] == [1500, 1500]
    assert "http" not in (tmp_path / "report.html").read_text()
    assert "A & B <i>" in page.text
    facts = {row[0]: row[1] for rows in page.tables for row in rows if len(row) == 2}
    assert facts["model.name"] == "<script>alert(1)</script>"
    assert (facts["note"], facts["root"], facts["GPU 0"]) == ('a "b" & c', "-", "<b>")


def test_without_matplotlib_a_page_says_how_to_get_pictures(tmp_path, make_report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = _write(tmp_path, [make_report(1)], plan=_plan(preset("dgx1")))
    assert page.pictures() == [] and "pip install 'dgl-mgpu[plots]'" in page.text
    assert page.table("epoch") and "Placement" not in page.headings


def test_epochs_and_the_summary(tmp_path, make_report):
    reports = [
        make_report(1, valid_accuracy=None, test_accuracy=None, loss=math.nan),
        make_report(2, valid_accuracy=0.6),
    ]
    page = _write(tmp_path, reports, {"test_accuracy": 0.8125})
    rows = page.table("epoch")
    assert [row[:6] for row in rows] == [
        ["1", "nan", "50.00%", "-", "-", "125"],
        ["2", "1.0000", "50.00%", "60.00%", "30.00%", "125"],
    ]
    assert rows[0][6:11] == ["1.00 s", "2.00 s", "3.00 s", "4.00 s", "12.0 s"]
    assert "81.25%" in page.text
    assert page.headings == [
        "Curves", "Epochs", "Stages", "Rows by tier", "Link use", "Bytes by tier and epoch"
    ]  # fmt: skip


def test_what_times_of_several_ranks_are_is_said(tmp_path, make_report):
    assert "several ranks" not in _write(tmp_path / "one", [make_report(1)]).text
    several = _write(tmp_path / "two", [make_report(1, ranks=2)]).text
    assert several.count("Of several ranks, stages show the mean") == 2


def test_stages_by_hand(tmp_path, make_report):
    compiled = StageSeconds(sample=60.0, gather=4.0, compute=3.0, evaluate=4.0, total=99.0)
    # 10 steps each; two epochs of 8 s of training.
    reports = [make_report(1, seconds=compiled), make_report(2), make_report(3)]
    page = _write(tmp_path, reports)
    assert [row[:4] for row in page.table("stage")] == [
        ["sample", "1.00 s", "100 ms", "12.5%"],
        ["gather", "2.00 s", "200 ms", "25.0%"],
        ["compute", "3.00 s", "300 ms", "37.5%"],
    ]


def _plan(topology):
    table = TableSpec.features("node/_N/feat", 1000, 512, 1 / np.arange(1, 1001), 100.0)
    return solve(topology, [table], gpu_budget_bytes=100_000)


def test_tiers_and_links_by_hand(tmp_path, make_report):
    tiers = (
        TierTraffic("host", "feat", rows=200, bytes=200 * 2**20),
        TierTraffic("device", "feat", rows=600, bytes=600 * 2**20),
        TierTraffic("host", "label", rows=100, bytes=800),
    )
    # 8 s of training each, 2 s of them gathering, on 2 ranks; the last of three compiled.
    compiled = StageSeconds(sample=60.0, gather=40.0, compute=3.0, evaluate=4.0, total=199.0)
    reports = [make_report(n, tiers=tiers, ranks=2) for n in (1, 2)]
    reports.append(make_report(3, tiers=tiers, ranks=2, seconds=compiled))
    machine = Topology("one", np.array([[2**30 / 1e9]]), 10**9, 2**30 / 1e10, 10**9)
    page = _write(tmp_path, reports, plan=_plan(machine))
    assert [[c for c in row if c] for row in page.table("table")] == [
        ["feat", "device", "1.80k", "75.0%", "1.76 GiB", "150 MiB/s"],
        ["feat", "host", "600", "25.0%", "600 MiB", "50.0 MiB/s"],
        ["label", "host", "300", "100.0%", "2.34 KiB", "200 B/s"],
    ]
    # 600 MiB of an epoch / 2 ranks / 2 s and / 8 s, of 1 GiB/s; the host's 102 MiB/s.
    device, host = page.table("tier")
    assert device[:5] == ["device", "own memory", "1.76 GiB", "150 MiB/s", "37.5 MiB/s"]
    assert device[5:] == ["1.00 GiB/s", "14.6%", "3.7%"]
    assert host[:5] == ["host", "way to host memory", "600 MiB", "50.0 MiB/s", "12.5 MiB/s"]
    assert host[5:] == ["102 MiB/s", "48.8%", "12.2%"]
    assert page.tables[-1][0][:3] == ["epoch", "device", "host"]
    assert [row[:3] for row in page.tables[-1][1:]] == [
        [f"{epoch}", "600 MiB", "200 MiB"] for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("plan", [None, _plan(preset("cpu", 2))])
def test_bandwidths_that_nobody_knows_are_left_out(tmp_path, make_report, plan):
    page = _write(tmp_path, [make_report(1)], plan=plan)
    device, host = page.table("tier")
    assert host == ["host", "way to host memory", "78.1 KiB", "39.1 KiB/s", "9.77 KiB/s"]
    assert device[0] == "device"


def test_the_placement_is_drawn_where_there_is_one(tmp_path, make_report):
    page = _write(tmp_path, [make_report(1)], plan=_plan(preset("quad-v100")))
    assert "Placement" in page.headings
    assert [picture.size for picture in page.pictures()] == [(1500, 1050), (1500, 1320)]


def test_the_profile_is_shown_where_there_is_one(tmp_path, make_report):
    assert "One step" not in _write(tmp_path / "without", [make_report(1)]).headings
    _profiled(tmp_path)
    page = _write(tmp_path, [make_report(1)])
    assert "One step" in page.headings
    assert page.text.count("58.3%") == 2  # (650 + 400) / 1800
    stages = {row[0]: row[1:] for row in page.table("stage, of a step")}
    assert stages["forward"] == ["200 us", "350 us"]
    assert stages["no stage"] == ["-", "25.0 us"]
    assert page.table("kernel, copy or operator")[0] == ["gemm", "1", "350 us"]
    shown = np.asarray(page.pictures()[1])
    assert (shown == np.asarray(Image.open(tmp_path / "timeline.png"))).all()


def test_a_run_of_an_earlier_version(tmp_path):
    # As the first version wrote it.
    line = {
        "kind": "epoch", "epoch": 1, "steps": 5, "seeds": 140, "loss": 1.9, "train_accuracy": 0.2,
        "valid_accuracy": 0.3, "test_accuracy": None,
        "seconds": {"sample": 0.1, "gather": 0.2, "compute": 0.3, "evaluate": 0.1, "total": 0.7},
        "tiers": [{"name": "device", "table": "feat", "rows": 10, "bytes": 80}], "ranks": 1,
        "seeds_per_second": 233.3, "tier_shares": {"device": 1.0},
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = _Page(write_report(tmp_path))
    assert page.table("epoch")[0][:4] == ["1", "1.9000", "20.00%", "30.00%"]


def test_stages_that_changed_when_a_run_was_resumed(tmp_path, make_report):
    other = StageSeconds(sample=1.0, forward=2.0, backward=4.0, evaluate=0.0, total=8.0)
    reports = [make_report(1), make_report(2, seconds=other)]
    page = _write(tmp_path, reports)
    head = next(rows[0] for rows in page.tables if rows[0][:2] == ["epoch", "loss"])
    assert head[6:-1] == [
        "sample", "gather", "compute", "forward", "backward", "evaluate", "total"
    ]  # fmt: skip
    assert [row[6:11] for row in page.table("epoch")] == [
        ["1.00 s", "2.00 s", "3.00 s", "-", "-"],
        ["1.00 s", "-", "-", "2.00 s", "4.00 s"],
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(reports))
    text = console.export_text()
    assert "feature gathering (median)" in text and "backward (median)" in text


def test_what_other_stages_include_is_not_added_to_them(tmp_path, make_report):
    alone = StageSeconds(forward=2.0, backward=4.0, evaluate=0.0, total=8.0)
    of_ranks = replace(alone, exchange=3.0, waiting=1.0)
    pages = [
        _write(tmp_path / f"{number}", [make_report(1, seconds=seconds, tiers=())])
        for number, seconds in enumerate((alone, of_ranks))
    ]
    head = next(rows[0] for rows in pages[1].tables if rows[0][:2] == ["epoch", "loss"])
    assert head[6:-1] == ["forward", "backward", "exchange", "waiting", "evaluate", "total"]
    assert pages[1].table("epoch")[0][6:10] == ["2.00 s", "4.00 s", "3.00 s", "1.00 s"]
    assert [row[3] for row in pages[1].table("stage")] == ["25.0%", "50.0%", "37.5%", "12.5%"]
    # A bar each in the table of stages; neither in the legend nor in the epoch's bar.
    assert pages[1].tags.count("span") == pages[0].tags.count("span") + 2
    assert ["exchange of rows" in page.text for page in pages] == [False, True]


def test_a_run_without_a_whole_epoch(tmp_path):
    page = _write(tmp_path, [])
    assert "No epoch was trained" in page.text and page.sources == []


def test_what_is_damaged_or_missing(tmp_path, make_report):
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path)
    _write(tmp_path, [make_report(1)])
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(DataFormatError):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == [make_report(1)]


def test_the_machine_and_its_versions():
    facts = environment()
    assert torch.__version__.startswith(facts["torch"].split("+")[0])
    assert {"CPU", "CPU cores", "host memory", "Python", "dgl"} <= set(facts)
    assert all(value and "\n" not in value for value in facts.values())
    assert ("GPU 0" in facts) == torch.cuda.is_available()
