"""Captured steps beside others in miniature, without a GPU, where none is captured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import train_gpu

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def run(monkeypatch, tmp_path):
    out = tmp_path / "found.json"
    few = f"--models gcn --nodes 600 --edges 3000 --batch 100 --repeats 2 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *few.split()])

    def run() -> dict:
        train_gpu.main()
        (figure,) = json.loads(out.read_text())["figures"]
        return figure

    return run


def test_an_epochs_time_is_without_its_validation(run, monkeypatch, capsys):
    reports, epochs = [], train_gpu.epochs

    def noted(*of):
        reports.append(epochs(*of))
        return reports[-1]

    monkeypatch.setattr(train_gpu, "epochs", noted)
    figure = run()
    for way, found in zip(("captured", "others"), reports, strict=True):
        assert len(found) == 3 and found[-1].seconds.evaluate > 0
        spent = [1e3 * (r.seconds.total - (r.seconds.evaluate or 0)) / r.steps for r in found[1:]]
        assert figure["more"]["ms"][way] == pytest.approx(spent)
        assert figure["more"]["losses"][way] == [report.loss for report in found]
    # Runs' own words are not among the figures.
    assert "epoch 1/3" not in capsys.readouterr().out


def test_other_losses_are_told(run, monkeypatch):
    epochs = train_gpu.epochs

    def wrong(options, root, model, graphs):
        found = epochs(options, root, model, graphs)
        return [replace(r, loss=1.01 * r.loss) for r in found] if graphs == "auto" else found

    monkeypatch.setattr(train_gpu, "epochs", wrong)
    with pytest.raises(ValueError, match=r"gcn: loss .* of captured steps"):
        run()


def test_a_run_that_fails_says_why(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--batch", "0"])
    with pytest.raises(ValueError, match="gcn: the run failed"):
        run()
