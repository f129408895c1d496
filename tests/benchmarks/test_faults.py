"""The program that runs tests of faults and keeps what they counted, and its page."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import faults

RESULT = {
    "machine": {"cores": 2, "gpus": [], "commit": "c0ffee"},
    "form": "short form",
    "seed": 3,
    "figures": [
        {
            "test": "test_a.py::test_it_is_killed[1]",
            "outcomes": {"resumed": 2},
            "longest_seconds": {"to its end": 0.25},
        },
        {
            "test": "test_a.py::test_it_is_killed[2]",
            "outcomes": {"resumed": 1000, "anew": 1},
            "longest_seconds": {"to its end": 2.0},
        },
        {"test": "test_b_gpu.py::test_it_stops", "outcomes": {"stopped": 1}, "longest_seconds": {}},
    ],
    "failed": {"test_a.py::test_it_waits[1]": "it waited on"},
    "skipped": {"test_b_gpu.py::test_it_goes_on[2]": "no GPU"},
}


def test_the_page_has_the_tables_of_the_kept_results():
    page = faults.PAGE.read_text()
    results = faults.kept()
    assert results
    assert faults.with_tables(page, results) == page, "run: python -m benchmarks.faults --page"


def test_the_table_adds_up_the_counts_of_a_tests_parameters():
    assert faults.table(RESULT).splitlines() == [
        "The short form, seed 3, on 2 cores, no GPU, commit c0ffee:",
        "",
        "| what was tried | what came of it, and how often | longest, s |",
        "| --- | --- | --- |",
        "| it is killed | anew: 1; resumed: 1,002 | to its end: 2.0 |",
        "| it stops (on GPUs) | stopped: 1 |  |",
        "",
        "Failed there, and mended since: it waits (it waited on).",
        "",
        "Left out on this machine: it goes on (on GPUs).",
    ]


def test_a_page_without_the_tables_place_is_refused():
    with pytest.raises(ValueError, match="lacks the lines"):
        faults.with_tables("# A page\n", [RESULT])


def options(only: str) -> argparse.Namespace:
    return argparse.Namespace(long=False, seed=3, jobs=1, only=only)


@pytest.mark.slow
def test_the_counts_of_tests_are_kept(monkeypatch):
    found = faults.tried(options("many_epochs and others2 or gpu and told"))
    (figure,) = found["figures"]
    assert figure["test"].startswith("test_soak.py::test_a_run_of_many_epochs[")
    assert figure["outcomes"] == {"epochs": 200} and figure["counted"] == 200
    assert figure["seed"] == found["seed"] == 3
    assert all(found["skipped"].values())


def test_nothing_is_kept_of_tests_that_fail():
    with pytest.raises(RuntimeError, match="failed"):
        faults.tried(options("--no-such-option"))
