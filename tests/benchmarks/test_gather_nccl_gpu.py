"""The gather by messages, over gloo."""

from __future__ import annotations

import json
import sys
from statistics import median

import pytest

from benchmarks import gather_nccl_gpu


def test_both_gathers_are_timed(monkeypatch, tmp_path):
    out = tmp_path / "found.json"
    few = f"--row-bytes 400 16 --ids 300 --gb-per-gpu 0.0002 --repeats 3 --window 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", "--ranks", "2", *few.split()])
    gather_nccl_gpu.main()
    figures = json.loads(out.read_text())["figures"]
    assert [each["case"] for each in figures] == ["uniform, 400 B", "uniform, 16 B"]
    for figure in figures:
        spent, samples = figure["more"]["each_rank_s"], figure["more"]["samples"]
        assert spent == {name: list(map(median, samples[name])) for name in samples}
        assert figure["peer"] == pytest.approx(500 * sum(spent["NCCL"]))
        assert figure["reached"] == (figure["peer"] >= 2 * figure["ours"])
        over_links = 300 * figure["more"]["row_bytes"] / 2 / 1e6  # half of them, in MB
        rate = figure["more"]["bus_gb_per_second"]["ours"]
        assert rate == pytest.approx(over_links / figure["ours"])


def test_one_rank_sends_no_messages(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--ranks", "1"])
    with pytest.raises(SystemExit):
        gather_nccl_gpu.main()
    assert "at least 2 ranks" in capsys.readouterr().err
