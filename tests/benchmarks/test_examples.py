"""The reproductions of DGL's examples: they learn from structure, and read what they say."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import pytest
import torch
from dgl.data.utils import _get_dgl_url, save_info

from benchmarks.examples import (
    choices,
    common,
    entities,
    gat,
    gcn,
    gin,
    graphs,
    link_prediction,
    node_classification,
    pinsage,
    rgcn,
    rgcn_hetero,
    sage,
)
from benchmarks.examples.common import Example
from dgl_mgpu.data import load
from dgl_mgpu.errors import DataFormatError, UnavailableError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs

ROOT = Path(__file__).parents[2]
NODES = {"num_nodes": 400, "num_edges": 4000, "num_classes": 4, "train": 0.2, "test": 0.6}
MODULES = (gcn, gat, sage, node_classification, gin, rgcn, rgcn_hetero, pinsage)
EXAMPLES = {e.name: e for module in MODULES for e in module.EXAMPLES}
#: Enough for chance not to decide: DGL draws in threads, which differs from run to run.
EPOCHS = {"gat": 120, "rgcn-sampled": 200, "pinsage": 3, "pinsage-store": 3}
WITHOUT_SAMPLES = ("gcn", "gat", "sage", "gin", "rgcn", "rgcn-hetero")


def small_data(example: Example, root: Path) -> Any:
    if example.read is graphs.read:
        return graphs.rings(200)
    if example.read is entities.read:
        return entities.generate(persons=100)
    if example.read is choices.read:
        return choices.generate(users=100, tastes=4)._replace(batches=60)
    return load("generated", root, **NODES).to_dgl()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be a process for each rank is one rank, here."""
    monkeypatch.setattr(node_classification, "RANKS", 1)
    monkeypatch.setattr(node_classification.mp, "spawn", lambda f, args, nprocs: f(0, *args))


@pytest.mark.parametrize(
    "name",
    # Through the store there is more to go wrong.
    [pytest.param(n, marks=pytest.mark.slow) if n == "pinsage" else n for n in EXAMPLES],
)
def test_what_is_learned_is_in_the_edges(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank(monkeypatch)
    example, epochs = EXAMPLES[name], EPOCHS.get(name, 20)
    data = small_data(example, root)
    assert example.run(data, epochs, seed=0) > example.run(example.rewire(data), epochs, 0) + 0.2


@pytest.mark.parametrize("name", WITHOUT_SAMPLES)
def test_graphs_on_tensors_learn_the_same(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = EXAMPLES[name]
    expected = example.run(small_data(example, root), 10, seed=0)
    # To the CPU means to DGL's own graphs, which the tensors are compared with here.
    monkeypatch.setattr(dgl.DGLGraph, "to", lambda g, device: g)
    with tensor_backed_graphs():
        assert example.run(small_data(example, root), 10, seed=0) == pytest.approx(
            expected, abs=0.02
        )


def test_links_are_found_on_a_graph_and_on_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out edges of a ring of cliques rank far above the mean of random ranks."""
    monkeypatch.setattr(link_prediction, "CANDIDATES", 20)
    monkeypatch.setattr(link_prediction, "WIDTH", 32)
    monkeypatch.setattr(link_prediction, "read_nodes", lambda name, root: cliques(12, 8))
    links = link_prediction.read("cliques", "")
    assert (
        not cliques(12, 8)
        .has_edges_between(links.edges[0].repeat_interleave(20), links.others.flatten())
        .any()
    )
    for example in link_prediction.EXAMPLES:
        assert example.run(links, 30, seed=0) > 0.5


def cliques(count: int, size: int) -> dgl.DGLGraph:
    nodes = torch.arange(count * size)
    same = (nodes[:, None] // size == nodes // size) & (nodes[:, None] != nodes)
    g = dgl.graph(tuple(same.nonzero().T))
    g.ndata["feat"] = torch.eye(count * size)
    return g


@pytest.fixture
def one_thread() -> Iterator[None]:
    """DGL's own sampler draws other numbers on each thread, which take what comes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_seed_repeats_samples_and_their_order(root: Path) -> None:
    data = small_data(EXAMPLES["sage-sampled"], root)
    for name in ("sage-sampled", "sage-store"):
        first, again, other = (EXAMPLES[name].run(data, 2, seed) for seed in (0, 0, 1))
        assert first == again != other


@pytest.mark.parametrize(
    ("example", "data"),
    [(e, name) for e in EXAMPLES.values() if e.read is not common.read_nodes for name in e.stated],
)
def test_absent_data_says_where_it_belongs(example: Example, data: str, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=rf"read {data}: no {tmp_path}.*; .*{tmp_path}"):
        example.read(data, str(tmp_path))


def test_graphs_are_read_from_the_file_of_gin(tmp_path: Path) -> None:
    folder = tmp_path / "GINDataset" / "dataset" / "PTC"
    folder.mkdir(parents=True)
    # Two graphs: nodes and class; then for each node its kind, how many neighbours, and these.
    (folder / "PTC.txt").write_text("2\n2 1\n0 1 1\n1 1 0\n1 0\n1 0\n")
    found = graphs.read("PTC", str(tmp_path))
    assert [g.num_nodes() for g in found.graphs] == [2, 1]
    assert [g.num_edges() for g in found.graphs] == [4, 1]  # with loops
    assert found.labels == [0, 1] and found.graphs[0].ndata["attr"].tolist() == [[1, 0], [0, 1]]


def test_entities_are_read_from_where_dgl_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = entities.generate(persons=30)
    url = _get_dgl_url("dataset/rdf/aifb-hetero.zip")
    folder = tmp_path / f"aifb-hetero_{hashlib.sha1(url.encode()).hexdigest()[:8]}"
    folder.mkdir()
    made.g.nodes["person"].data["labels"] = made.labels
    dgl.save_graphs(str(folder / "aifb-hetero_dgl_graph.bin"), made.g)
    save_info(
        str(folder / "aifb-hetero_dgl_graph.pkl"), {"num_classes": 4, "predict_category": "person"}
    )
    monkeypatch.setitem(sys.modules, "rdflib", None)  # as where it is not installed
    with pytest.raises(UnavailableError, match="rdflib"):
        entities.read("aifb", str(tmp_path))
    # DGL names two relations by it, and reads them only where it has not kept the graph.
    monkeypatch.setitem(sys.modules, "rdflib", SimpleNamespace(term=SimpleNamespace(URIRef=str)))
    found = entities.read("aifb", str(tmp_path))
    assert found.labels.tolist() == made.labels.tolist()
    assert found.part("test").tolist() == made.part("test").tolist()
    assert found[1:] == ("person", 4, 1000, 0.0)


def test_choices_are_read_from_movielens(tmp_path: Path) -> None:
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    movies = ["10::A (1990)::Drama|War", "11::Unseen (1991)::Drama", "12::B (1995)::Crime",
              "13::C (1999)::War", "14::D (2000)::War"]  # fmt: skip
    ratings = [(7, 14, 40), (7, 10, 10), (7, 12, 20), (7, 13, 30),
               (3, 13, 1), (3, 12, 3), (3, 10, 2)]  # fmt: skip
    (folder / "movies.dat").write_text("\n".join(movies))
    (folder / "ratings.dat").write_text("\n".join(f"{u}::{i}::5::{t}" for u, i, t in ratings))
    found = choices.read("ml-1m", str(tmp_path))
    items = found.g.nodes["item"].data
    assert items["year"].tolist() == [1990, 1995, 1999, 2000]
    assert items["genre"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert [each.tolist() for each in found.chosen] == [[0, 0, 1], [0, 1, 2]]
    assert (found.latest.tolist(), found.held_out.tolist()) == ([1, 2], [2, 0])


def test_results_are_told_from_data_that_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, root: str) -> str:
        if name == "there":
            return name
        raise DataFormatError("read gone", f"no {root}", "fetch it")

    example = dataclasses.replace(
        EXAMPLES["gcn"], stated={"there": 0.5, "gone": 0.7}, others=(), read=read,
        learn=lambda data, epochs, device: torch.initial_seed() / 4,
    )  # fmt: skip
    command = ["examples", "--root", "data", "--seeds", "2", "--out", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", command)
    common.main([example])
    report = json.loads((tmp_path / "found").read_text())
    why = "cannot read gone: no data; fetch it"
    assert report["absent"] == [{"example": "gcn", "data": "gone", "why": why}]
    row = "| gcn | there | accuracy | 0.5 | 0.125 ± 0.177 |  | 2 |"
    assert common.table(report).splitlines()[2:] == [row]
    assert report["runs"][0]["values"] == [0, 0.25] and report["runs"][0]["epochs"] == 200


def test_the_documentation_has_the_results_kept() -> None:
    report = json.loads((ROOT / "docs" / "benchmarks" / "examples.json").read_text())
    assert common.table(report) in (ROOT / "docs" / "examples.md").read_text()
