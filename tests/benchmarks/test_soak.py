"""The soak in miniature: it tells what grows from what does not."""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks import soak
from benchmarks.timed_training import Network

MB = 1_000_000


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs a short soak, and gives what it found."""
    monkeypatch.setattr(soak, "NETWORK", Network("graphsage", (3, 2), {}))
    for name, value in (("FEATURES", 8), ("CLASSES", 5), ("HIDDEN", 8)):
        monkeypatch.setattr(soak, name, value)
    # Other tests use it at the same time.
    monkeypatch.setattr(soak, "shared_memory", lambda: 0)
    out = tmp_path / "found.json"
    few = f"--ranks 1 --every 50 --batch 4 --nodes 500 --edges 2000 --limit 5 --out {out}"

    def run(batches: int, *more: str) -> dict:
        options = [*few.split(), "--batches", str(batches), *more]
        monkeypatch.setattr(sys, "argv", ["program", *options])
        soak.main()
        (figure,) = json.loads(out.read_text())["figures"]
        return figure

    return run


@pytest.mark.parametrize("more", [(), pytest.param(("--captured",), marks=pytest.mark.slow)])
def test_500_batches_leave_nothing(small, capsys, more):
    figure = small(500, *more)
    assert figure["reached"] is True and figure["grows"] == [{}]
    assert figure["batches"] == list(range(50, 501, 50))
    (series,) = figure["each_rank"]
    assert len(series["own memory"]) == 10 and min(series["own memory"]) > 10 * MB
    assert min(series[soak.FILES]) >= 3
    assert "    500 batches, loss " in capsys.readouterr().out


def test_what_is_kept_grows(small, monkeypatch):
    one_pass, kept = soak._one_pass, []

    def leaking(training, loader, captured) -> float:
        kept.append((bytearray(b"x" * MB), os.open("/dev/null", os.O_RDONLY)))
        return one_pass(training, loader, captured)

    monkeypatch.setattr(soak, "_one_pass", leaking)
    with pytest.raises(ValueError, match=r"grows in 1,000 batches.*own memory.*open files"):
        small(batches=300)
    for _, file in kept:
        os.close(file)


def test_only_the_second_half_counts():
    batches = [100, 200, 300, 400, 500, 600]
    assert soak.rise(batches, [0, 50, 90, 100, 100, 100]) == pytest.approx(0, abs=1e-9)
    assert soak.rise(batches, [0, 0, 0, 100, 120, 140]) == pytest.approx(200)


def test_each_has_its_limit():
    rises = {"own memory": 0.9 * MB, "GPU": 1.1 * MB, soak.FILES: 1.5, "/dev/shm": -5.0 * MB}
    assert soak.growing(rises, 1.0) == {"GPU": 1.1 * MB, soak.FILES: 1.5}
    assert soak.growing(rises, 2.0) == {soak.FILES: 1.5}


def test_too_short_a_soak_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--batches", "1000", "--ranks", "1"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "3 times --every" in capsys.readouterr().err
