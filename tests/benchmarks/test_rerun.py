"""Kept results are replaced as a set, or not at all."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import rerun, runs
from benchmarks.claims.kept import read_pages
from benchmarks.runs import Bench, Config, Run, configured
from dgl_mgpu.errors import ConfigError

GPUS = (1, 2)


@pytest.fixture
def small_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two runs whose results are kept, and what they are to write."""
    kept, out = tmp_path / "kept", tmp_path / "out"
    kept.mkdir()
    for name in ("first.json", "second.json", "other.json"):
        (kept / name).write_text("old")
    written = {"first": {"machine": {"commit": "a"}}, "second": {"machine": {"commit": "a"}}}
    limits = {"first": 60.0, "second": 60.0}

    def command(self: Run, file: Path) -> list[str]:
        found = written[self.program]
        code = found if isinstance(found, str) else f"print({json.dumps(found)!r}, file=out)"
        return [sys.executable, "-c", f"out = open({str(file)!r}, 'w'); {code}"]

    def config(words: list[str]) -> Config:
        programs = {
            name: Run(name, limit_s=limits[name], keeps={1: f"{name}.json"}) for name in written
        }
        return Config(Bench("auto", 1, [], str(out)), {**programs, "other": Run("other")})

    monkeypatch.setattr(Run, "command", command)
    monkeypatch.setattr(rerun, "configured", config)
    monkeypatch.setattr(rerun, "gpus_here", lambda: 1)
    monkeypatch.setattr(rerun, "KEPT", kept)
    pages = []
    monkeypatch.setattr(rerun, "page", lambda results: pages.append(results))
    monkeypatch.setattr(rerun, "kept_pages", lambda folder: pages.append(_contents(folder)))
    monkeypatch.setattr(rerun, "report_kept", lambda: pages.append("reported"))
    return kept, written, limits, pages


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in folder.iterdir()}


def test_a_set_is_replaced(small_set, capsys) -> None:
    kept, written, _, pages = small_set
    assert program.main(["rerun", "gpus=1"]) == 0
    new = json.dumps(written["first"])
    there = {"first.json": new, "second.json": new, "other.json": "old"}
    # The pages were made of the results before any was replaced.
    assert _contents(kept) == there == pages[1] and pages[2] == "reported"
    assert "all results were replaced" in capsys.readouterr().out


def _raising(error: Exception):
    def raises(*_) -> None:
        raise error

    return raises


@pytest.mark.parametrize("what", ["fails", "is of another commit", "makes no page"])
def test_nothing_is_replaced_where_one_run(what: str, small_set, monkeypatch, capsys) -> None:
    kept, written, _, _ = small_set
    if what == "fails":
        written["second"] = "raise SystemExit(3)"
    elif what == "is of another commit":
        written["second"] = {"machine": {"commit": "b"}}
    else:
        monkeypatch.setattr(rerun, "page", _raising(ConfigError("show it", "no figure", "look")))
    assert program.main(["rerun", "gpus=1"]) > 0
    assert set(_contents(kept).values()) == {"old"}
    told = capsys.readouterr()
    assert "no result was replaced" in told.out or "Error" in told.err


def test_a_run_is_ended_at_its_limit_and_its_processes_with_it(small_set, tmp_path) -> None:
    kept, written, limits, _ = small_set
    limits["second"] = 2.0
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'w').close(); time.sleep(0.05)"
    written["second"] = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert program.main(["rerun", "gpus=1"]) == 1
    assert set(_contents(kept).values()) == {"old"}
    outcomes = json.loads((tmp_path / "out" / "runs.json").read_text())["outcomes"]
    assert outcomes[1]["what"] == "failed" and "longer than 2 s" in outcomes[1]["why"]
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


def test_programs_see_as_many_gpus_as_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(rerun, "gpus_here", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rerun._only_gpus(2)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in rerun._only_gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    assert rerun._only_gpus(2)["CUDA_VISIBLE_DEVICES"] == "3,1"


@pytest.mark.parametrize("gpus", GPUS)
def test_a_set_fits_an_hour_and_is_on_the_page(gpus: int, monkeypatch) -> None:
    monkeypatch.setattr(runs, "gpus_here", lambda: 8)
    found = {name: run for name, run in configured([]).runs.items() if gpus in run.keeps}
    assert sum(run.limit_s for run in found.values()) <= 3600
    files = [run.keeps[gpus] for run in found.values()]
    assert len(set(files)) == len(files) and all(run.gpus <= gpus for run in found.values())
    every = [kept for page in read_pages().values() for kept in page.results]
    assert set(files) <= {name for kept in every for name in (*kept.files, *kept.awaited)}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["gpus=3"], "rerun what is kept on 3 GPUs"),
        (["gpus=1", "bench.only=[gather_gpu]"], "rerun gather_gpu on 1 GPUs"),
        (["gpus=9"], "8 GPUs that CuPy can use"),
    ],
)
def test_what_is_not_kept_is_said_before_anything_runs(words, found: str, monkeypatch) -> None:
    monkeypatch.setattr(runs, "gpus_here", lambda: 8)
    with pytest.raises(ConfigError, match=found):
        rerun.rerun(words)
