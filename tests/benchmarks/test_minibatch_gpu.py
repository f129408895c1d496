"""The benchmark of mini-batches, as far as a small graph shows: every part runs and is kept."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from benchmarks import minibatch_gpu
from benchmarks.minibatch_gpu import Bench, Case
from dgl_mgpu.graph.dispatch import tensor_backed_graphs


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Options for a graph and cases that take no time."""
    monkeypatch.setattr(minibatch_gpu, "SAMPLING", (Case(20, (3, 2), aim=0.0),) * 3)
    monkeypatch.setattr(minibatch_gpu, "PINNED", (Case(20, (3, 2)),))
    monkeypatch.setattr(minibatch_gpu, "STEP", (Case(20, (3, 2, 2), aim=1e9, dgl=6.6),))
    return Namespace(
        sms=[8],
        nodes=2000,
        edges=20_000,
        idtype="int32",
        repeats=1,
        window=2,
        steps=3,
        out=tmp_path / "found.json",
    )


def test_every_part_is_measured_and_kept(small):
    with tensor_backed_graphs():
        assert Bench(small).run()
    figures = {each["case"]: each for each in json.loads(small.out.read_text())["figures"]}
    sampled, step = figures["sample 20 at 3,2"], figures["step 20 at 3,2,2"]
    assert sampled["reached"] is False and step["reached"] is True
    assert sampled["ours"] > 0 and sampled["operator_ms"] > 0
    assert sampled["sampled_edges"] <= 20 * 3 + 80 * 2
    assert step["ours"] > 0 and step["model_ms"] > 0 and step["dgl"] == 6.6
    assert step["one_by_one_ms"] > 0
    assert figures["one block"]["unit"] == "us"


def test_a_part_that_fails_is_told_and_others_are_measured(small, monkeypatch):
    def no_model():
        raise RuntimeError("no model today")

    monkeypatch.setattr(minibatch_gpu, "GraphSAGE", no_model)
    with tensor_backed_graphs():
        assert not Bench(small).run()
    figures = json.loads(small.out.read_text())["figures"]
    assert figures[0]["ours"] > 0
    assert figures[-1] == {
        "case": "step 20 at 3,2,2",
        "failed": "RuntimeError: no model today",
        "reached": False,
    }
