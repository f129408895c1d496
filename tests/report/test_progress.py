from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from dgl_mgpu.report import StageSeconds, TierTraffic, TrainProgress
from dgl_mgpu.report import progress as progress_module
from dgl_mgpu.report.progress import epoch_lines


class _Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return _Clock(monkeypatch)


def _console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, _environ={})


def test_epoch_lines_say_what_the_epoch_did(make_report):
    assert epoch_lines(make_report(2), 10) == [
        "epoch 2/10  loss 1.0000  train 50.0%  valid 40.0%  test 30.0%  125 seeds/s",
        "  12.0 s: sample 1.00 s, gather 2.00 s, forward/backward 3.00 s, eval 4.00 s",
        "  feat rows: device 75.0% (234 KiB), host 25.0% (78.1 KiB)",
        "  topology rows: device 100.0% (1.56 KiB)",
    ]


def test_a_figure_that_is_no_accuracy_is_named(make_report, clock):
    line = epoch_lines(make_report(2, metric_name="AUC"), 10)[0]
    assert line.startswith("epoch 2/10  loss 1.0000  train AUC 50.0%  valid AUC 40.0%")
    console = _console(terminal=False)
    with TrainProgress(1, 10, console, metric_name="AUC") as progress:
        clock.now += progress_module.PLAIN_INTERVAL_SECONDS
        progress.update(1, 0.5, 0.75, 10)
    assert "AUC 75.0%" in console.file.getvalue()


def test_stages_of_several_ranks_are_said_to_be_means(make_report):
    lines = epoch_lines(make_report(2, ranks=4), 10)
    assert lines[1].startswith("  12.0 s; mean of 4 ranks: sample 1.00 s, gather 2.00 s")


def test_what_other_stages_include_has_a_line_of_its_own(make_report):
    seconds = StageSeconds(
        forward=1.0, backward=2.0, exchange=1.5, waiting=0.25, update=0.5, evaluate=0.0, total=4.0
    )
    assert epoch_lines(make_report(1, seconds=seconds, tiers=()), 1)[1:] == [
        "  4.00 s: forward 1.00 s, backward 2.00 s, update 500 ms, eval 0.00 s",
        "  of which exchange 1.50 s, waiting 250 ms",
    ]


def test_without_evaluation_no_accuracy_is_invented(make_report):
    report = make_report(1, valid_accuracy=None, test_accuracy=None, tiers=())
    assert epoch_lines(report, 1) == [
        "epoch 1/1  loss 2.0000  train 50.0%  125 seeds/s",
        "  12.0 s: sample 1.00 s, gather 2.00 s, forward/backward 3.00 s",
    ]
    report = replace(report, seconds=StageSeconds(evaluate=0.0, total=1.0))
    assert epoch_lines(report, 1)[1:] == ["  1.00 s"]


def test_lines_fit_80_columns_and_break_between_parts(make_report):
    report = make_report(
        epoch=1000,
        seconds=StageSeconds(
            **dict.fromkeys(("sample", "gather", "compute", "evaluate", "total"), 3599.0)
        ),
        tiers=tuple(
            TierTraffic(tier, "node_features", 10**9, 999 * 2**30)
            for tier in ("device", "peer", "replica", "host", "disk")
        ),
    )
    lines = epoch_lines(report, 1000)
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    for tier in ("device", "peer", "replica", "host", "disk"):
        assert sum(f"{tier} 20.0% (999 GiB)" in line for line in lines) == 1
    assert "forward/backward 59 min 59 s, eval 59 min 59 s" in text


def test_many_tables_are_shown_together(make_report):
    tiers = tuple(TierTraffic("host", f"feat{i}", 10, 1024) for i in range(5))
    assert epoch_lines(make_report(tiers=tiers), 1)[-1] == "  all rows: host 100.0% (5.00 KiB)"


def test_a_log_gets_plain_lines_only(make_report, clock):
    console = _console(terminal=False)
    with TrainProgress(2, 10, console) as progress:
        for epoch in (1, 2):
            progress.update(1, 0.5, 0.5, 100)
            progress.epoch_done(make_report(epoch))
    lines = console.file.getvalue().splitlines()
    assert lines == epoch_lines(make_report(1), 2) + epoch_lines(make_report(2), 2)


def test_a_narrow_console_does_not_break_the_lines_of_a_log(make_report):
    console = Console(file=io.StringIO(), force_terminal=False, width=40, _environ={})
    with TrainProgress(1, 1, console) as progress:
        progress.epoch_done(make_report(1))
    assert console.file.getvalue().splitlines() == epoch_lines(make_report(1), 1)


def test_a_long_epoch_shows_in_a_log_that_it_lives(clock):
    console = _console(terminal=False)
    with TrainProgress(3, 1000, console, first_epoch=2) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, 1.0 / step, None if step < 50 else 0.25, 50 * step)
    assert console.file.getvalue().splitlines() == [
        "epoch 2/3  step 30/1000  loss 0.0333  50 seeds/s",
        "epoch 2/3  step 60/1000  loss 0.0167  acc 25.0%  50 seeds/s",
        "epoch 2/3  step 90/1000  loss 0.0111  acc 25.0%  50 seeds/s",
    ]


def test_a_terminal_gets_bars_below_the_lines(make_report, clock):
    console = _console(terminal=True)
    with TrainProgress(12, 400, console, first_epoch=11) as progress:
        clock.now += 2.0
        progress.update(400, 0.1234, 0.875, 2469)
        progress.epoch_done(make_report(11, valid_accuracy=0.625))
        clock.now += 0.5
        progress.update(123, 0.4321, 0.5, 617_250)
    screen = console.file.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert "\x1b[" in screen
    for line in epoch_lines(make_report(11, valid_accuracy=0.625), 12):
        assert line in text
    rows = re.split(r"[\r\n]+", text)
    assert max(map(len, rows)) <= 80
    (run, epoch) = [row for row in rows if row.strip()][-2:]
    assert run.startswith("run") and "11/12" in run and "best valid 62.5%" in run
    assert epoch.startswith("epoch 12/12")
    for part in ("123/400", "loss 0.4321", "acc 50.0%", "1.23M seeds/s"):
        assert part in epoch


def test_no_thread_writes_to_the_terminal():
    before = threading.active_count()
    with TrainProgress(2, 10, _console(terminal=True)):
        assert threading.active_count() == before


def test_the_terminal_is_restored_after_an_error(make_report):
    console = _console(terminal=True)
    with pytest.raises(ZeroDivisionError), TrainProgress(1, 1, console):
        1 / 0  # noqa: B018
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is shown again
