"""Graphs whose order of nodes has structure, dealt out in three ways."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import ordering_gpu
from benchmarks.fullgraph import Shape
from benchmarks.ordering_gpu import ORDERS, communities, hubs_first, splits

CPU = torch.device("cpu")
SHAPE = Shape(nodes=2000, edges=60_000, features=4, classes=3)


@pytest.mark.parametrize("order", ORDERS)
def test_graphs_have_their_shape(order):
    whole = ORDERS[order](SHAPE, CPU)
    indptr, indices = whole
    assert indptr[0] == 0 and indptr[-1] == len(indices) == SHAPE.edges and len(indptr) == 2001
    assert indptr.diff().min() >= 1 and 0 <= indices.min() <= indices.max() < SHAPE.nodes
    degrees = SHAPE.csc(CPU)[0].diff()
    assert torch.equal(indptr.diff().sort().values, degrees.sort().values)
    assert all(map(torch.equal, whole, ORDERS[order](SHAPE, CPU)))  # the same on every rank


def test_hubs_come_first_and_are_hubs_both_ways():
    indptr, indices = hubs_first(SHAPE, CPU)
    degrees = indptr.diff().double()
    assert (degrees.diff() <= 0).all() and degrees[0] > 20 * degrees.mean()
    reads = torch.bincount(indices, minlength=SHAPE.nodes).double()
    assert torch.corrcoef(torch.stack([degrees, reads]))[0, 1] > 0.9


def test_most_edges_stay_in_a_community(monkeypatch):
    monkeypatch.setattr(ordering_gpu, "_CHUNK", 7000)
    indptr, indices = communities(SHAPE, CPU)
    dst = torch.repeat_interleave(torch.arange(SHAPE.nodes), indptr.diff())
    size = SHAPE.nodes // 100
    inside = (indices // size == dst // size).double()
    assert inside.mean() == pytest.approx(0.8 + 0.2 / 100, abs=0.01)
    assert inside[-7000:].mean() == pytest.approx(0.8, abs=0.03)


def test_only_hubs_on_one_rank_are_uneven():
    indptr, _ = hubs_first(SHAPE, CPU)
    evenly, by_edges, at_random = splits(SHAPE.nodes, 4).values()
    assert torch.bincount(evenly).tolist() == [500] * 4 and (evenly.diff() >= 0).all()
    assert (by_edges, at_random) == ("order", "random")
    edges = [indptr[end] - indptr[end - 500] for end in (500, 1000, 1500, 2000)]
    assert edges[0] > 3 * edges[1] > 3 * edges[3]


def test_products_and_epochs_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(ordering_gpu, "WIDTH", 3)
    monkeypatch.setattr(ordering_gpu, "_WINDOW", 3)
    monkeypatch.setattr(ordering_gpu, "ORDERS", {"hubs first": hubs_first})
    monkeypatch.setitem(ordering_gpu.SHAPES, "reddit", SHAPE)
    out = tmp_path / "found.json"
    arguments = f"--ranks 1 --shapes reddit --scale 0.1 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *arguments.split()])
    ordering_gpu.main()
    found = json.loads(out.read_text())
    assert [(each["order"], each["what"]) for each in found["figures"]] == [
        ("hubs first", "product"), ("hubs first", "epoch"),
    ]  # fmt: skip
    parts = found["graphs"][0]["parts"]
    assert parts["at random"] == {"nodes": [200], "edges": [[6000]], "halo": [0]}
    for figure in found["figures"]:
        assert set(figure["slowest_ms"]) == {
            f"{split}, {way}" for split in parts for way in ("broadcast", "halo")
        }


def test_a_loss_of_its_own_is_refused():
    with pytest.raises(ValueError, match="graph: 'at random, halo' has a loss of 2"):
        ordering_gpu._require_same(
            "graph", {"at random, halo": 2.1, "GraphConv fp32": 2.0, "by edges": 2.00001}
        )
