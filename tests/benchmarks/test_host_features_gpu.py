"""The benchmark of features in host memory, as far as small graphs on a CPU show."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import host_features_gpu
from benchmarks.host_features_gpu import COPIES, WAYS, Copied, CopiedRows
from benchmarks.mapped import host_rows
from benchmarks.timed_training import Training

import dgl  # isort: skip


def run(monkeypatch, tmp_path, arguments: str) -> dict:
    out = tmp_path / "found.json"
    few = f"--ranks 1 --scale 2e-4 --batch 10 --window 2 --repeats 2 --hidden 4 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *few.split(), *arguments.split()])
    host_features_gpu.main()
    return json.loads(out.read_text())


def test_every_width_is_measured_in_all_ways(monkeypatch, tmp_path, capsys):
    found = run(monkeypatch, tmp_path, "--shapes amazon products --widths 3 8 --threads 1 2")
    assert {"machine", "options"} <= set(found)
    widths = {"amazon, 578 features": 578, "products, 3 features": 3, "products, 8 features": 8}
    assert {each["case"]: each["row_bytes"] // 4 for each in found["figures"]} == widths
    for figure in found["figures"]:
        (spent,) = figure["each_rank_ms"]
        assert set(spent) == set(WAYS) and all(len(each) == 2 for each in spent.values())
        by_threads = figure["copies_ms_by_threads"]
        assert set(by_threads) == {"1", "2"}
        assert by_threads[str(figure["threads"])] == min(by_threads.values())
        assert figure["copies"] == pytest.approx(sum(spent[COPIES]) / 2)
        assert figure["ratio"] == pytest.approx(figure["copies"] / figure["zero_copy"])
        nbytes = figure["rows_a_step"][0] * figure["row_bytes"]
        assert figure["gb_per_s"][COPIES] == pytest.approx(nbytes / 1e6 / figure["copies"])
        assert figure["losses_have_the_same_bits"] and figure["ranks"] == 1
    assert capsys.readouterr().out.count(" features, 1 ranks") == 3


def test_wrong_rows_and_other_batches_are_refused(monkeypatch, tmp_path):
    few = "--shapes products --widths 3"
    with monkeypatch.context() as broken:
        broken.setattr(host_features_gpu, "host_rows", lambda view: host_rows(view).roll(1, 0))
        with pytest.raises(ValueError, match="products, 3 features, copies: wrong 'feat'"):
            run(broken, tmp_path, few)
    with monkeypatch.context() as broken:
        # Each pass goes on where the one before it has left the model.
        broken.setattr(Training, "restart", lambda self: None)
        with pytest.raises(ValueError, match=r"products, 3 features: losses .* of 'zero-copy'"):
            run(broken, tmp_path, few)
    with monkeypatch.context() as broken:
        begin = host_features_gpu.Case._begin
        turns = iter(range(100))
        broken.setattr(
            host_features_gpu.Case, "_begin", lambda self, turn: begin(self, next(turns))
        )
        with pytest.raises(ValueError, match="zero-copy: a batch of other nodes than with copies"):
            run(broken, tmp_path, few)


def test_too_few_nodes_are_told_of(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--shapes amazon --batch 1000")
    assert "amazon has 2940 nodes" in capsys.readouterr().err


def test_rows_of_the_next_batch_come_while_one_is_trained_on():
    rows = torch.arange(40.0).view(20, 2)
    nodes = [torch.tensor([3, 7, 3]), torch.tensor([19]), torch.tensor([0, 1])]
    handed_out, gathered = [], []

    def batches():
        for ids in nodes:
            block = dgl.create_block(([0], [0]), len(ids), 1)
            block.srcdata[dgl.NID] = ids
            handed_out.append(ids)
            yield [block]

    copied = CopiedRows(rows, torch.device("cpu"))
    copy = copied._copy
    copied._copy = lambda *given: gathered.append(given[0]) or copy(*given)
    for place, (block,) in enumerate(copied.added(batches())):
        assert torch.equal(block.srcdata["feat"], rows[nodes[place]])
        asked = min(place + 2, len(nodes))
        assert len(handed_out) == asked
        deadline = time.monotonic() + 10
        while len(gathered) < asked and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(gathered) == asked
    assert place == 2


def test_rows_are_gathered_by_as_many_threads_as_said(monkeypatch):
    used = []
    copied = CopiedRows(torch.arange(40.0).view(20, 2), torch.device("cpu"))
    copied._copy = lambda *given: (
        used.append(torch.get_num_threads()) or Copied(torch.ones(2), None)
    )
    for copied.threads in (1, 2):
        block = dgl.create_block(([0], [0]), 2, 1)
        block.srcdata[dgl.NID] = torch.tensor([0, 1])
        assert len(list(copied.added([[block]]))) == 1
    assert used == [1, 2]


def test_rows_elsewhere_are_not_taken_for_the_hosts():
    rows = torch.arange(12, dtype=torch.float32).view(6, 2)
    view = SimpleNamespace(
        pointers=torch.tensor([rows.data_ptr()]), position=torch.empty(0), num_rows=6,
        row_bytes=8, row_shape=(2,), dtype=torch.float32, host_start=-1,
    )  # fmt: skip
    assert host_rows(view).data_ptr() == rows.data_ptr() and torch.equal(host_rows(view), rows)
    two = torch.zeros(2, dtype=torch.int64)
    for change in ({"pointers": two}, {"position": two}):
        with pytest.raises(ValueError, match="6 rows are not in one piece of the host's memory"):
            host_rows(SimpleNamespace(**{**vars(view), **change}))
