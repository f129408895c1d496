from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dgl_mgpu.report import StageSeconds, TierTraffic, plan_table, summary_table


def _plan_cells(rows):
    """The body of a plan as printed; cells stand at least two blanks apart."""
    console = Console(file=io.StringIO(), width=160, _environ={})
    console.print(plan_table(rows, "Plan"))
    lines = console.file.getvalue().splitlines()
    rule = next(i for i, line in enumerate(lines) if "───" in line)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 :]]


def _cells(table):
    """The body of a summary as printed: a list of rows, each a list of stripped cells."""
    console = Console(file=io.StringIO(), width=160, _environ={})
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if "│" in line]


def test_summary_of_a_run(make_report):
    def seconds(total, evaluate=0.0):
        return StageSeconds(sample=0.1, gather=0.2, compute=0.3, evaluate=evaluate, total=total)

    reports = [
        make_report(1, valid_accuracy=0.5, seconds=seconds(1.0, 0.5)),
        make_report(2, valid_accuracy=0.61239, test_accuracy=0.6, seconds=seconds(4.0, 0.7)),
        make_report(3, valid_accuracy=None, test_accuracy=None, seconds=seconds(2.0)),
    ]
    assert _cells(summary_table(reports, "A run [1]")) == [
        ["epochs", "3"],
        ["ranks", "1"],
        ["best epoch", "2"],
        ["loss", "1.0000"],
        ["train accuracy", "50.00%"],
        ["valid accuracy", "61.24%"],
        ["test accuracy", "60.00%"],
        ["seeds/s (median)", "500"],
        ["sampling (median)", "100 ms"],
        ["feature gathering (median)", "200 ms"],
        ["forward/backward (median)", "300 ms"],
        ["evaluation (median)", "600 ms"],  # of the epochs that were
        ["whole epoch (median)", "2.00 s"],
        ["feat rows from device", "75.0%, 1.80k, 703 KiB"],
        ["feat rows from host", "25.0%, 600, 234 KiB"],
        ["topology rows from device", "100.0%, 600, 4.69 KiB"],
    ]


def test_summary_says_what_times_of_several_ranks_are(make_report):
    assert summary_table([make_report()]).caption is None
    assert "mean of the ranks" in summary_table([make_report(ranks=2)]).caption


def test_summary_adds_tiers_up_over_epochs(make_report):
    reports = [
        make_report(1, tiers=(TierTraffic("host", "feat", 30, 300),)),
        make_report(2, tiers=(TierTraffic("disk", "feat", 10, 100),)),
    ]
    assert _cells(summary_table(reports))[-2:] == [
        ["feat rows from host", "75.0%, 30, 300 B"],
        ["feat rows from disk", "25.0%, 10, 100 B"],
    ]


def test_summary_of_nothing():
    assert _cells(summary_table([])) == [["epochs", "0"]]


def test_plan_table_chooses_units_by_key():
    rows = [
        {
            "table": "feat[user]",
            "tier": "replica",
            "rows": 1234567,
            "bytes_per_gpu": 3 * 2**30,
            "row_share": 0.125,
            "modelled_seconds": 0.0012345,
            "ranks": (0, 1),
            "bandwidth": 1234.5678,
        },
        {"table": "topology", "tier": "host", "rows": 7, "pinned": True, "bytes_per_gpu": None},
    ]
    header = Console(file=io.StringIO(), width=160, _environ={})
    header.print(plan_table(rows, "Plan"))
    text = header.file.getvalue()
    assert "Plan" in text
    for name in ("bytes per gpu", "row share", "modelled ms", "pinned"):
        assert name in text
    assert _plan_cells(rows) == [
        ["feat[user]", "replica", "1,234,567", "3.00 GiB", "12.5%", "1.234", "0, 1", "1,235", "-"],
        ["topology", "host", "7", "-", "-", "-", "-", "-", "yes"],
    ]


def test_plan_table_counts_equal_neighbours_in_a_list():
    rows = [{"seconds": (0.001, 0.001, 0.002), "gpus": [0, 1], "accesses": 0.25, "copies": []}]
    assert _plan_cells(rows) == [["2 x 1.000, 2.000", "0, 1", "25.0%", "-"]]


def test_summary_takes_the_test_accuracy_of_the_best_model(make_report):
    def tested(**options):
        return _cells(summary_table([make_report(test_accuracy=0.3)], **options))[6]

    assert tested() == ["test accuracy", "30.00%"]
    assert tested(test_accuracy=0.0) == ["test accuracy", "0.00%"]


def test_a_narrow_terminal_cuts_no_number_off():
    row = {"text": "word " * 20 + "x" * 60, "rows": 11_000_000, "bytes": 2**30}
    console = Console(file=io.StringIO(), width=50, _environ={})
    console.print(plan_table([row | {f"count{i}": 123_456 for i in range(2)}]))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 50
    assert "11,000,000" in text and "1.00 GiB" in text and text.count("123,456") == 2
    assert text.count("x") == 60 + 1  # one is in the header


def test_plan_table_without_rows():
    console = Console(file=io.StringIO(), width=80, _environ={})
    console.print(plan_table([]))
    assert not re.search(r"\w", console.file.getvalue().replace("Placement plan", ""))


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(make_report, width):
    console = Console(file=io.StringIO(), width=width, _environ={})
    console.print(summary_table([make_report()]))
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_a_figure_that_is_no_accuracy_is_named_and_said(make_report):
    table = summary_table([make_report(metric_name="AUC", ranks=2)])
    names = [name for name, *_ in _cells(table)]
    assert "valid AUC" in names and not any("accuracy" in name for name in names)
    assert "mean of the ranks" in table.caption and "AUC: how often" in table.caption
