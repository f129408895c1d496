"""Outlines are compared with OGB's own table, with sums that papers give, and with data as made."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dgl_mgpu.data import HETEROGENEOUS, check_options, load, load_hetero, names
from dgl_mgpu.data.outline import data_folder, outline
from dgl_mgpu.data.published import PUBLISHED, PUBLISHED_HETERO
from dgl_mgpu.errors import ConfigError


@pytest.fixture(scope="module")
def master() -> dict[str, dict[str, str]]:
    """What the ogb package says of its data sets."""
    package = importlib.util.find_spec("ogb")
    path = Path(package.submodule_search_locations[0]) / "nodeproppred" / "master.csv"
    with path.open(newline="") as file:
        (_, *columns), *rows = csv.reader(file)
    return {name: {row[0]: row[1 + at] for row in rows} for at, name in enumerate(columns)}


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("ogbn-")])
def test_what_ogb_says_of_its_data(name, master):
    sizes = {**PUBLISHED, **PUBLISHED_HETERO}[name]
    of = master[name]
    labels = int(of["num tasks"])
    assert sizes.classes == (labels if labels > 1 else int(of["num classes"]))
    others = of["additional node files"].replace("None", "").replace("node_", "")
    if name in PUBLISHED_HETERO:
        assert sizes.int_features == {sizes.target: tuple(others.split(","))}
        return
    assert sizes.multi_label == (labels > 1)
    assert bool(sizes.width) == (of["has_node_attr"] == "True")
    assert bool(sizes.edge_width) == (of["has_edge_attr"] == "True")
    assert sizes.directed == (of["add_inverse_edge"] == "False")
    assert ",".join(sizes.int_features) == others


def test_sums_that_ogbs_paper_gives_of_mag():
    sizes = PUBLISHED_HETERO["ogbn-mag"]
    assert sum(sizes.nodes.values()) == 1_939_743
    assert sum(sizes.edges.values()) == 21_111_007


def test_all_real_data_sets_have_published_sizes():
    real = {name for name in names() if not name.startswith("generated")}
    assert real == {*PUBLISHED, *PUBLISHED_HETERO}


@pytest.mark.parametrize("options", [{}, {"add_reverse": True}, {"self_loops": True}])
def test_an_outline_of_a_generated_graph_is_as_large_as_the_graph(tmp_path, options):
    sizes = {"num_nodes": 700, "num_edges": 6000, "num_features": 8, "exponent": 2.0}
    drawn, hotness = outline("generated", {**sizes, **options}).draw()
    made = load("generated", tmp_path, **sizes, **options)
    assert (drawn.num_nodes, drawn.num_classes) == (made.num_nodes, made.num_classes)
    # Self-loops that are there by chance are not there twice.
    assert drawn.num_edges == pytest.approx(made.num_edges, rel=0.03)
    for name, rows in made.node_features.items():
        assert drawn.node_features[name].shape == rows.shape
        assert drawn.node_features[name].dtype == rows.dtype
    assert (drawn.labels.dtype, drawn.id_dtype) == (made.labels.dtype, made.id_dtype)
    assert hotness["_N"].sum() == drawn.num_edges == drawn.indptr[-1]
    if not options:  # its in-degrees are the very same
        np.testing.assert_array_equal(np.sort(np.diff(drawn.indptr)), np.sort(np.diff(made.indptr)))
    assert (np.diff(hotness["_N"]) <= 0).all()


def test_an_outline_of_several_types_is_as_large_as_the_graph(tmp_path):
    options = {"scale": 1e-4, "num_features": 4}
    drawn, hotness = outline("generated-igbh", options).draw()
    made = load_hetero("generated-igbh", tmp_path, **options)
    assert dict(drawn.num_nodes) == dict(made.num_nodes)
    assert drawn.edges.keys() == made.edges.keys()
    for etype, csc in made.edges.items():
        assert len(drawn.edges[etype].indices) == pytest.approx(len(csc.indices), rel=0.05)
    for ntype, features in made.node_features.items():
        rows = drawn.node_features[ntype]["feat"]
        # torch's and NumPy's names of types differ
        assert rows.shape == tuple(features["feat"].shape)
        assert str(rows.dtype) in str(features["feat"].dtype)
    out = {ntype: 0 for ntype in drawn.num_nodes}
    for (src, _, _), csc in drawn.edges.items():
        out[src] += len(csc.indices)
    assert {ntype: int(hot.sum()) for ntype, hot in hotness.items()} == out


def test_relations_of_mag_come_with_their_reverse():
    both, one = (outline("ogbn-mag", {"add_reverse": each}).draw()[0] for each in (True, False))
    assert both.num_edges == 2 * one.num_edges == 2 * 21_111_007
    assert ("paper", "rev_writes", "author") in both.edges
    # A paper is as often written as it is in the reverse: the same degrees.
    np.testing.assert_array_equal(
        np.diff(both.edges["author", "writes", "paper"].indptr)[:9],
        np.diff(one.edges["author", "writes", "paper"].indptr)[:9],
    )


def test_edges_with_features_have_ids_until_nodes_have_their_means():
    raw, means = (
        outline("ogbn-proteins", {"mean_edge_features": each}).draw()[0] for each in (False, True)
    )
    assert raw.eids is not None and raw.edge_features["feat"].shape == (raw.num_edges, 8)
    assert "feat" not in raw.node_features
    assert means.eids is None and not means.edge_features
    assert means.node_features["feat"].shape == (means.num_nodes, 8)
    assert means.labels.shape == (means.num_nodes, 112)


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_HETERO])
def test_files_that_are_not_there(name, tmp_path):
    assert data_folder(name, tmp_path) is None
    assert data_folder(name, tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("name", "folder", "files"),
    [
        ("cora", "planetoid", ["ind.cora.graph"]),
        ("reddit", "reddit", []),
        ("facebook", "facebook_pages", []),
        ("facebook", ".", ["facebook_edges.csv"]),
        ("ogbn-arxiv", "ogbn_arxiv", ["raw/edge.csv.gz"]),
        ("ogbn-mag", "ogbn_mag", ["raw/num-node-dict.csv.gz"]),
    ],
)
def test_files_that_are_there(name, folder, files, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    for file in files:
        (tmp_path / folder / file).parent.mkdir(exist_ok=True)
        (tmp_path / folder / file).touch()
    assert data_folder(name, tmp_path) == tmp_path / folder


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("generated", {"num_nodes": "abc"}, "data.options.num_nodes"),
        ("generated", {"num_nodes": -5}, "num_nodes=-5"),
        ("generated-twitter", {"num_edges": 0.5}, "num_edges=0.5"),
        ("generated-twitter", {"scale": "abc"}, "data.options.scale"),
        ("generated-twitter", {"scale": 0}, "scale=0"),
        ("generated-igbh", {"scale": "abc"}, "data.options.scale"),
        ("generated-igbh", {"num_features": 0.5}, "whole number"),
        ("generated-igbh", {"size": 1}, "no such option"),
        ("generated-relations", {"degree": "abc"}, "data.options.degree"),
        ("cora", {"num_nodes": 5}, "no such option"),
        ("ogbn-arxiv", {"add_revers": True}, "did you mean 'add_reverse'"),
        ("ogbn-arxivv", {}, "did you mean 'ogbn-arxiv'"),
    ],
)
def test_options_are_checked_without_data(name, options, message):
    with pytest.raises(ConfigError, match=message):
        check_options(name, options)


@pytest.mark.parametrize("name", names())
def test_all_data_sets_take_no_options(name):
    check_options(name, {})
    assert (outline(name, {}) is None) == (name == "generated-relations")
    assert name in HETEROGENEOUS or name in {*PUBLISHED} or name.startswith("generated")


@pytest.mark.parametrize("name", ["generated-twitter", "ogbn-mag"])
def test_shuffled_nodes_are_the_same_nodes(name):
    options = {"scale": 0.001} if name == "generated-twitter" else {}
    sketch = outline(name, options)
    (ordered, hot), (shuffled, shuffled_hot) = sketch.draw(), sketch.draw(shuffled=True)

    def degrees(data, ntype):
        edges = data.edges if name in HETEROGENEOUS else {("", "", ntype): data}
        return [np.diff(csc.indptr) for (_, _, dst), csc in edges.items() if dst == ntype]

    for ntype, hotness in hot.items():
        # What belongs to a node, in-degrees and hotness, stays together.
        nodes = np.array([*degrees(ordered, ntype), hotness])
        others = np.array([*degrees(shuffled, ntype), shuffled_hot[ntype]])
        assert not np.array_equal(nodes, others)
        assert np.array_equal(nodes[:, np.lexsort(nodes)], others[:, np.lexsort(others)])
        half = len(hotness) // 2
        assert 0.3 < others[-1, :half].sum() / hotness.sum() < 0.7
