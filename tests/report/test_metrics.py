from __future__ import annotations

import json
import math
import os
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dgl_mgpu.errors import DataFormatError, InvalidInputError
from dgl_mgpu.report import MetricsLog, read_metrics
from dgl_mgpu.report.loggers import TensorBoardLogger


def _events(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def _write(folder, reports, **options):
    with MetricsLog(folder, **options) as log:
        for report in reports:
            log.append(report)


def test_lines_round_trip_and_hold_derived_figures(tmp_path, make_report):
    reports = [make_report(1), make_report(2, valid_accuracy=None, loss=math.nan)]
    folder = tmp_path / "run" / "7"  # created with its parents
    with MetricsLog(folder) as log:
        log.append(reports[0])
        # On disk at once: what a run killed here would leave.
        assert read_metrics(folder / "metrics.jsonl") == ([reports[0]], None)
        log.append(reports[1])
        log.summary({"best_epoch": 1, "final": {"loss": math.nan}})
    read, summary = read_metrics(folder / "metrics.jsonl")
    assert read[0] == reports[0]
    assert read[1].valid_accuracy is None and math.isnan(read[1].loss)
    assert summary == {"best_epoch": 1, "final": {"loss": None}}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["epoch", "epoch", "summary"]
    assert lines[0]["seeds_per_second"] == 125.0
    assert lines[0]["tier_shares"] == {"device": 0.8, "host": 0.2}
    assert os.listdir(folder) == ["metrics.jsonl"]


def test_tensorboard_events_read_back(tmp_path, make_report):
    reports = [make_report(1, test_accuracy=None), make_report(2)]
    with MetricsLog(tmp_path, [TensorBoardLogger(tmp_path, {})]) as log:
        log.append(reports[0])
        log.append(reports[1])
        events = _events(tmp_path)  # flushed at each epoch: readable before the end
    assert set(events.Tags()["scalars"]) == {
        "loss/train",
        "accuracy/train",
        "accuracy/valid",
        "accuracy/test",
        *(f"time/{s}_seconds" for s in ("sample", "gather", "compute", "evaluate", "total")),
        "time/seeds_per_second",
        *(f"tiers/{t}_{f}" for t in ("feat_device", "feat_host") for f in ("share", "bytes")),
        "tiers/topology_device_share",
        "tiers/topology_device_bytes",
    }

    def series(tag):
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert series("loss/train") == [(1, 2.0), (2, 1.0)]
    assert series("accuracy/test") == [(2, pytest.approx(0.3))]
    assert series("tiers/feat_device_share") == [(1, 0.75), (2, 0.75)]
    assert series("tiers/feat_host_bytes") == [(1, 80_000.0), (2, 80_000.0)]
    assert series("time/seeds_per_second") == [(1, 125.0), (2, 125.0)]


def test_resume_drops_later_epochs_from_both_files(tmp_path, make_report):
    with MetricsLog(tmp_path, [TensorBoardLogger(tmp_path, {})]) as log:
        for epoch in (1, 2, 3, 4):
            log.append(make_report(epoch, loss=float(epoch)))
        log.summary({"done": True})
    # TensorBoard's reader takes files in the order of their names, which begin with the second.
    time.sleep(1)
    with MetricsLog(tmp_path, [TensorBoardLogger(tmp_path, {})], resume_epoch=2) as log:
        assert [report.epoch for report in log.history] == [1, 2]
        log.append(make_report(3, loss=30.0))
        assert [report.epoch for report in log.history] == [1, 2, 3]
    reports, summary = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r.epoch, r.loss) for r in reports] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert summary is None
    losses = _events(tmp_path).Scalars("loss/train")
    assert [(event.step, event.value) for event in losses] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_resume_from_the_start_and_in_an_empty_folder(tmp_path, make_report):
    _write(tmp_path, [make_report(1)], resume_epoch=5)
    _write(tmp_path, [make_report(1, loss=9.0)], resume_epoch=0)
    reports, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert [report.loss for report in reports] == [9.0]


def test_a_half_written_last_line_is_dropped(tmp_path, make_report):
    reports = [make_report(1), make_report(2)]
    _write(tmp_path, reports)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first_end = whole.index(b"\n") + 1
    for cut in (first_end, first_end + 1, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_metrics(path) == (reports[:1], None)
        _write(tmp_path, [reports[1]], resume_epoch=1)
        assert path.read_bytes() == whole


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, make_report, monkeypatch):
    _write(tmp_path, [make_report(1), make_report(2)])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(tmp_path, resume_epoch=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("line", ['{"kind": "epoch"', "[1]", '{"epoch": 1}', '{"kind": "?"}', "3"])
def test_damage_before_the_last_line_is_an_error(tmp_path, make_report, line):
    _write(tmp_path, [make_report(1)])
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(DataFormatError, match="line 1"):
        MetricsLog(tmp_path, resume_epoch=1)


def test_another_runs_epochs_are_not_overwritten(tmp_path, make_report):
    _write(tmp_path, [make_report(1)])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InvalidInputError, match="1 epochs of another run"):
        MetricsLog(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_no_epoch_is_logged_twice(tmp_path, make_report):
    with MetricsLog(tmp_path) as log:
        log.append(make_report(2))
        with pytest.raises(InvalidInputError, match="epoch 2 is in"):
            log.append(make_report(2))
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 1
