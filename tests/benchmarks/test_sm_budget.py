"""The benchmark of SM budgets as far as a machine without a GPU shows."""

from __future__ import annotations

import argparse
import json

import pytest
from matplotlib.image import imread

from benchmarks import sm_budget
from benchmarks.sm_budget import overlapping


def test_only_what_is_done_while_all_work_counts() -> None:
    # Ten calls a second from 0 to 4; five a second from 1 to 3.
    quick = [i / 10 for i in range(41)]
    slow = [1 + i / 5 for i in range(11)]
    assert overlapping([quick, slow]) == pytest.approx([10, 5])
    # From 2 on the second stream's call is under way: a part of it counts.
    assert overlapping([[0, 2, 4], [0, 1]]) == pytest.approx([0.5, 1])
    assert overlapping([[0, 1, 3]]) == pytest.approx([2 / 3])
    with pytest.raises(ValueError, match="before another began"):
        overlapping([[0, 1], [2, 3]])


def test_the_program_runs_and_draws(tmp_path, monkeypatch, capsys) -> None:
    """With rates of a machine that is not there: a link that 4 of 16 multiprocessors fill."""
    monkeypatch.setattr(sm_budget, "multiprocessors", lambda: 16)
    monkeypatch.setattr(sm_budget, "SIDE", 8)

    def rates(*works: sm_budget.Work) -> list[float]:
        for work in works:
            work.call()
        sms = next((getattr(work.call, "args", ())[0] for work in works if work.priority), 0)
        both = {0: 700.0 - 10 * sms, -1: 100.0 * min(sms, 4)}
        return [both[work.priority] * (1 if len(works) == 1 else 0.5) for work in works]

    monkeypatch.setattr(sm_budget, "rates", rates)
    monkeypatch.setattr(sm_budget, "calibrated", lambda *args: 0.25)
    options = argparse.Namespace(
        ranks=1, subjects=sm_budget.SUBJECTS, ids=300, gb_per_gpu=1e-3, host_gb=1e-3,
        nodes=20_000, edges=60_000, out=tmp_path / "found.json", plot=tmp_path / "found.png",
    )  # fmt: skip
    sm_budget.work(options)
    found = json.loads(options.out.read_text())["subjects"]
    assert set(found) == {"gpus", "host", "sampling"}
    for subject in found.values():
        assert [p["sms"] for p in subject["points"]] == [1, 2, 3, 4, 6, 8, 12, 16]
    # What is in no table that was calibrated: all multiprocessors, and 4 for the host's link.
    assert [found[name]["calibrated"] for name in ("gpus", "host", "sampling")] == [16, 4, 16]
    full = found["gpus"]["points"][3]
    assert full["alone"] == pytest.approx(400 * 300 * 512 / 1e9)
    assert full["each_rank"] == [{key: full[key] for key in full if key != "each_rank"}]
    assert full["beside_gemm"] == pytest.approx(full["alone"] / 2)
    assert full["gemm_beside"] == pytest.approx(330 * 2 * 8**3 / 1e12)
    printed = capsys.readouterr().out
    assert printed.count("*") == 3 and "batches/s" in printed
    assert imread(options.plot).std() > 0.05  # something is drawn
