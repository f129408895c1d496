from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from dgl_mgpu.data import SHAPES, GraphSpec, generate, load
from dgl_mgpu.data.blockmodel import NOISE, centroids, in_degrees, stream
from dgl_mgpu.errors import ConfigError, DataFormatError

# Every draw below follows from a fixed seed: a test that passes once passes always.

FROZEN_LABELS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 4]
FROZEN_SOURCES = [150, 57, 470, 296, 589, 589]
FROZEN_FEATURES = [0.557361, -0.162723, 2.568311, -0.807461]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("generated")


@pytest.fixture(scope="module")
def large(root):
    """Large enough for statistics: 50,000 nodes, 1,000,000 edges."""
    return load("generated", root, num_nodes=50_000, num_edges=1_000_000, num_features=16)


def ends(data):
    return np.asarray(data.indices), np.repeat(np.arange(data.num_nodes), np.diff(data.indptr))


def hill(degrees: np.ndarray, largest: int) -> float:
    """Hill's estimator of the exponent of the tail, from the `largest` degrees."""
    tail = np.sort(degrees)[-largest - 1 :].astype(float)
    return 1 / np.log(tail[1:] / tail[0]).mean()


def test_size_is_exact(large):
    assert (large.num_nodes, large.num_edges, large.num_classes) == (50_000, 1_000_000, 10)
    assert large.node_features["feat"].shape == (50_000, 16)
    assert np.bincount(large.labels).min() > 4500


@pytest.mark.parametrize("exponent", [1.3, 1.5, 2.5])
def test_degrees_follow_a_power_law(root, exponent):
    data = load(
        "generated",
        root,
        num_nodes=50_000,
        num_edges=1_000_000,
        num_features=1,
        exponent=exponent,
    )
    src, dst = ends(data)
    # 1,000 values: the estimator has a relative deviation of 1/sqrt(1000) = 3 %.
    assert hill(np.bincount(dst, minlength=50_000), 1000) == pytest.approx(exponent, rel=0.13)
    assert hill(np.bincount(src, minlength=50_000), 1000) == pytest.approx(exponent, rel=0.13)


def test_slope_of_the_distribution_function():
    slopes = []
    for seed in range(10):
        degrees = np.sort(np.diff(in_degrees(50_000, 1_000_000, 1.5, seed)))[::-1]
        ranks = np.unique(np.logspace(1, 4, 30).astype(int))
        slopes.append(np.polyfit(np.log(degrees[ranks]), np.log(ranks), 1)[0])
    assert np.mean(slopes) == pytest.approx(-1.5, abs=0.07)  # 4 standard errors


def test_in_and_out_degrees_go_together(large):
    src, _ = ends(large)
    hot_sources = np.argsort(np.bincount(src, minlength=50_000))[-500:]
    hot_destinations = np.argsort(np.diff(large.indptr))[-500:]
    assert len(np.intersect1d(hot_sources, hot_destinations)) > 400


@pytest.mark.parametrize("homophily", [0.0, 0.3, 0.8, 1.0])
def test_homophily_is_as_asked(root, homophily):
    data = load(
        "generated", root, num_nodes=5000, num_edges=200_000, num_features=1, homophily=homophily
    )
    src, dst = ends(data)
    same = (data.labels[src] == data.labels[dst]).mean()
    # Five standard deviations of 200,000 draws: a false alarm in 1.7 million seeds.
    assert abs(same - homophily) <= 5 * np.sqrt(homophily * (1 - homophily) / 200_000)


def test_other_classes_are_equally_likely(large):
    src, dst = ends(large)
    classes = np.stack([large.labels[dst], large.labels[src]])
    counts = np.zeros((10, 10))
    np.add.at(counts, tuple(classes), 1)
    np.fill_diagonal(counts, 0)
    expected = counts.sum(1, keepdims=True) / 9
    chi = ((counts - expected) ** 2 / expected)[~np.eye(10, dtype=bool)].sum()
    assert chi < 80 + 5 * np.sqrt(160)  # 80 degrees of freedom


def test_features_are_centroids_and_unit_noise(large):
    feat = np.asarray(large.node_features["feat"], np.float64)
    mean = np.stack([feat[large.labels == cls].mean(0) for cls in range(10)])
    noise = feat - mean[large.labels]
    assert np.abs(np.linalg.norm(mean, axis=1) - 0.8 * np.sqrt(2 * np.log(10))).max() < 0.08
    np.testing.assert_allclose(mean, centroids(10, 16, 0.8, 0), atol=0.08)
    np.testing.assert_allclose(noise.var(0), 1, atol=0.02)
    # Near a normal distribution: no skewness, excess kurtosis of -0.3 (four uniform summands).
    assert abs((noise**3).mean()) < 0.02
    assert (noise**4).mean() == pytest.approx(2.7, abs=0.05)
    correlation = np.corrcoef(noise.T) - np.eye(16)
    assert np.abs(correlation).max() < 5 / np.sqrt(50_000)
    assert abs((noise[1:] * noise[:-1]).mean()) < 5 / np.sqrt(50_000 * 16)


def test_streams_differ_by_seed_and_purpose():
    keys = {int(stream(seed, purpose)) for seed in range(50) for purpose in range(NOISE + 1)}
    assert len(keys) == 50 * 7


@pytest.mark.parametrize(
    ("parameter", "step"),
    [("seed", 1), ("num_features", 1), ("exponent", 0.1), ("homophily", 0.1), ("signal", 0.1)],
)
def test_each_parameter_has_its_folder(tmp_path, parameter, step):
    spec = GraphSpec(num_nodes=50, num_edges=100)
    changed = dataclasses.replace(spec, **{parameter: getattr(spec, parameter) + step})
    folders = [generate.generate(each, tmp_path) for each in (spec, changed, spec)]
    assert folders[0] != folders[1]
    assert folders[0] == folders[2]


def files_of(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_same_bytes_for_any_chunk_size(tmp_path, monkeypatch):
    spec = GraphSpec(num_nodes=997, num_edges=9973, num_features=7)
    expected = files_of(generate.generate(spec, tmp_path / "a"))
    for rows, edges in ((1, 13), (100, 999), (997, 9973)):
        monkeypatch.setattr(generate, "_CHUNK_ROWS", rows)
        monkeypatch.setattr(generate, "_CHUNK_EDGES", edges)
        other = files_of(generate.generate(spec, tmp_path / f"b{rows}"))
        assert other == expected


def test_the_same_graph_on_every_machine(root):
    """Frozen: a change of these numbers means that seeds no longer mean the same graph."""
    data = load("generated", root, num_nodes=1000, num_edges=10_000, num_features=4, seed=7)
    assert data.labels[:12].tolist() == FROZEN_LABELS
    assert data.indices[5000:5006].tolist() == FROZEN_SOURCES
    np.testing.assert_allclose(data.node_features["feat"][500], FROZEN_FEATURES, rtol=1e-5)


def test_labels_are_those_of_classes(root):
    spec = {"num_nodes": 500, "num_edges": 1000, "num_classes": 7}
    one, several = (load("generated", root, num_labels=count, **spec) for count in (0, 20))
    assert several.labels.shape == (500, 20) and several.num_classes == 20
    of_class = np.stack([several.labels[one.labels == each][0] for each in range(7)])
    np.testing.assert_array_equal(several.labels, of_class[one.labels])
    assert (of_class.sum(0) == 3).all() and len(np.unique(of_class, axis=1).T) > 5
    np.testing.assert_array_equal(several.indices, one.indices)
    assert "7 planted classes of 20 labels" in several.description


def test_graphs_of_one_class_a_node_are_where_they_were(tmp_path):
    """Frozen: to look elsewhere would be to generate them, which may take hours, once more."""
    folder = generate.generate(GraphSpec(num_nodes=50, num_edges=100), tmp_path)
    assert folder.name == "generated_graph_50n_100e_1c0ba720d743"
    other = generate.generate(GraphSpec(num_nodes=50, num_edges=100, num_labels=2), tmp_path)
    assert other != folder


def test_ogb_reads_several_labels(root, monkeypatch):
    package = pytest.importorskip("ogb.nodeproppred")
    data = load("generated", root, num_nodes=300, num_edges=3000, num_labels=4)
    spec = GraphSpec(num_nodes=300, num_edges=3000, num_labels=4)
    plain_load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: plain_load(*a, **k | {"weights_only": False})
    )
    meta = generate.meta_dict(generate.generate(spec, root))
    theirs = package.NodePropPredDataset(name="generated", root=str(root), meta_dict=meta)
    np.testing.assert_array_equal(theirs[0][1], data.labels)
    assert (theirs.num_tasks, theirs.num_classes, theirs.eval_metric) == (4, 2, "rocauc")


def test_ogb_reads_it(root, monkeypatch):
    package = pytest.importorskip("ogb.nodeproppred")
    data = load("generated", root, num_nodes=300, num_edges=3000)
    folder = generate.generate(GraphSpec(num_nodes=300, num_edges=3000), root)
    plain_load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: plain_load(*a, **k | {"weights_only": False})
    )
    meta = generate.meta_dict(folder)
    for _ in range(2):  # the second time from ogb's own cache
        theirs = package.NodePropPredDataset(name="generated", root=str(root), meta_dict=meta)
        graph, labels = theirs[0]
        src, dst = graph["edge_index"]
        np.testing.assert_array_equal(np.stack(ends(data)), np.stack([src, dst]))
        np.testing.assert_array_equal(graph["node_feat"], data.node_features["feat"])
        np.testing.assert_array_equal(labels[:, 0], data.labels)
        assert graph["num_nodes"] == 300
        for part, ids in theirs.get_idx_split().items():
            np.testing.assert_array_equal(ids, getattr(data, part))


def test_split(large):
    parts = np.concatenate([large.train, large.valid, large.test])
    np.testing.assert_array_equal(np.sort(parts), np.arange(50_000))
    assert len(large.train) == pytest.approx(30_000, abs=5 * np.sqrt(50_000 * 0.24))


def test_a_second_load_reuses_the_first(root, large, monkeypatch):
    monkeypatch.setattr(generate, "_write", None)
    again = load("generated", root, num_nodes=50_000, num_edges=1_000_000, num_features=16)
    np.testing.assert_array_equal(again.indptr, large.indptr)
    assert isinstance(again.indices, np.memmap)


@pytest.mark.parametrize("stage", ["_edges", "_features", "_write_texts"])
def test_interrupted_generation_is_not_taken_for_complete(tmp_path, monkeypatch, stage):
    def interrupted(*args):
        raise KeyboardInterrupt

    options = {"num_nodes": 100, "num_edges": 1000}
    with monkeypatch.context() as patch:
        patch.setattr(generate, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("generated", tmp_path, **options)
    assert os.listdir(tmp_path) == []
    assert load("generated", tmp_path, **options).num_edges == 1000


def test_damaged_graph(tmp_path):
    options = {"num_nodes": 100, "num_edges": 1000}
    load("generated", tmp_path, **options)
    (folder,) = tmp_path.iterdir()
    (folder / "meta.json").write_text("{")
    with pytest.raises(DataFormatError, match="generated again"):
        generate.meta_dict(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_named_shapes_scaled(root, shape):
    spec = SHAPES[shape]
    scale = 2000 / spec.num_nodes
    data = load(f"generated-{shape}", root, scale=scale)
    assert data.num_nodes == 2000
    assert data.num_edges == round(spec.num_edges * scale)
    assert data.num_classes == (spec.num_labels or spec.num_classes)
    assert data.node_features["feat"].shape == (2000, spec.num_features)
    assert data.name.startswith(f"generated-{shape} (scale")
    assert data.description.startswith("generated, not real data")


def test_sizes_of_the_named_shapes():
    sizes = {
        shape: (spec.num_nodes, spec.num_edges, spec.num_features, spec.num_classes)
        for shape, spec in SHAPES.items()
    }
    assert sizes["reddit"] == (232_965, 114_615_892, 602, 41)
    assert sizes["products"] == (2_449_029, 123_718_280, 100, 47)
    assert sizes["papers100M"] == (111_059_956, 1_615_685_872, 128, 172)


@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 1},
        {"num_nodes": 5, "num_classes": 10},
        {"num_edges": 0},
        {"num_labels": -1},
        {"exponent": 1.0},
        {"homophily": 1.1},
        {"homophily": float("nan")},
        {"train": 0.9},
        {"seed": -1},
        {"num_nodes": 1000.5},
        {"num_features": "8"},
        {"scale": 0},
        {"scale": -1},
        {"num_edges": 2**39, "num_features": 100},
    ],
)
def test_out_of_range(tmp_path, options):
    with pytest.raises(ConfigError):
        load("generated", tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_default_needs_the_graph(root):
    """One round of averaging in-neighbours, then the nearest centroid: features alone do worse.

    This is a bound from below on what a trained network reaches; neither side is trained.
    """
    data = load("generated", root)
    feat, centroid = data.node_features["feat"], centroids(10, 64, GraphSpec.signal, 0)
    src, dst = ends(data)
    total = np.zeros_like(feat)
    np.add.at(total, dst, feat[src])
    degree = np.maximum(np.diff(data.indptr), 1)[:, None]

    def accuracy(x):
        distance = ((x[:, None] - centroid[None]) ** 2).sum(2)
        return (distance.argmin(1) == data.labels)[data.test].mean()

    assert 0.5 < accuracy(feat) < 0.65
    assert accuracy(feat * 0.2 + total / degree) > 0.8
