"""DGL's own tests as a benchmark: what is run, and how outcomes are counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import dgl_tests
from benchmarks.datasets import NO_FILES
from benchmarks.dgl_tests import FAILED, NOT_REACHED, PASSED, SKIPPED, compared, files_of

TEST = """
import os, time, pytest, backend

def test_device():
    assert os.environ["DGLTESTDEV"] == "cpu" and backend.NAME == "pytorch"

def test_wrong():
    assert False

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Tests laid out as DGL's are."""
    root = tmp_path / "dgl"
    tests = {
        "backend/__init__.py": "NAME = 'pytorch'",
        "python/common/test_some.py": TEST,
        "python/distributed/test_others.py": TEST,
        "python/pytorch/test_slow.py": "import time\ntime.sleep(100)\n",
    }
    for name, text in tests.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *words])
    dgl_tests.main()


def test_outcomes_are_counted_by_file(checkout, tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    words = ["--dgl", str(checkout), "--devices", "cpu", "--parts", "common", "--out", str(out)]
    run(monkeypatch, *words)
    tests = json.loads(out.read_text())["tests"]
    counts = {PASSED: 1, FAILED: 1, SKIPPED: 1}
    assert tests["totals"] == {"cpu": counts}
    assert tests["files"] == {"common/test_some.py": {"cpu": counts}}
    assert tests["failed_on_cpu"] == ["tests.python.common.test_some::test_wrong"]


def test_a_file_that_takes_too_long_is_not_reached(checkout):
    file = "pytorch/test_slow.py"
    found = dgl_tests.outcomes_of(file, "cpu", checkout, limit=1.0, each=60.0)
    assert found == {file: NOT_REACHED}


def test_what_is_no_part_of_this_package_is_left_out(checkout):
    tests = checkout / "tests" / "python"
    files = ["common/test_some.py", "pytorch/test_slow.py"]
    assert files_of(tests, ["common", "pytorch"]) == files
    assert files_of(tests, files[:1]) == files[:1]


def test_gpus_are_compared_with_the_cpu():
    cpu = {"a": PASSED, "b": PASSED, "c": SKIPPED, "d": PASSED, "e": FAILED}
    gpu = {"a": PASSED, "b": FAILED, "c": PASSED, "d": SKIPPED, "e": PASSED}
    found = compared({"cpu": {"x.py": cpu}, "gpu": {"x.py": gpu}})
    assert (found["passed_on_cpu_and_run_on_gpu"], found["of_these_passed_on_gpu"]) == (2, 1)
    assert found["skipped_on_cpu_passed_on_gpu"] == 1
    assert (found["failed_on_cpu"], found["failed_on_gpu"]) == (["e"], ["b"])
    assert found["totals"]["gpu"] == {PASSED: 3, FAILED: 1, SKIPPED: 1}


def test_without_a_checkout_it_says_what_it_needs(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=str(NO_FILES)):
        run(monkeypatch, "--dgl", str(tmp_path))
    assert capsys.readouterr().out.startswith("needs the files of DGL's tests: no ")
