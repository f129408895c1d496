from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.data.dataset import as_labels
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError


def test_accepts_arrays_maps_and_tensors(edges, build_dataset, tmp_path):
    np.save(tmp_path / "feat.npy", np.ones((40, 2), np.float32))
    mapped = np.load(tmp_path / "feat.npy", mmap_mode="r")
    for feature in (np.ones((40, 2), np.float16), mapped, torch.ones(40, 2, dtype=torch.bfloat16)):
        dataset = build_dataset(*edges, node_features={"feat": feature})
        assert dataset.node_features["feat"] is feature
    assert dataset.num_edges == 200
    assert "40 nodes, 200 edges" in repr(dataset)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"node_features": {"feat": np.ones((39, 2))}},
            r"'feat' has shape \(39, 2\), but there are 40 nodes",
        ),
        ({"node_features": {"feat": torch.ones(41)}}, "but there are 40 nodes"),
        ({"edge_features": {"w": np.ones(199)}}, "but there are 200 edges"),
        ({"labels": np.zeros(39, np.int64)}, "labels has dtype int64"),
        ({"labels": np.zeros(40)}, "labels has dtype float64"),
        ({"indptr": np.zeros(40, np.int64)}, "indptr has dtype"),
        ({"indptr": np.arange(41)}, "indptr runs from 0 to 40, but there are 200 indices"),
        ({"indices": np.zeros(200)}, "indices has dtype float64"),
        ({"eids": np.zeros(200, np.int64)}, "edge id 1 is missing"),
        ({"eids": np.zeros(3, np.int64)}, "eids has dtype"),
        ({"train": np.array([1.0])}, "float64"),
        ({"train": [0, 1]}, r"train ids is of type list; .*np\.asarray"),
        ({"labels": [0] * 40}, "labels is of type list"),
        ({"indptr": torch.zeros(41, dtype=torch.int64)}, "indptr is of type Tensor"),
        ({"indices": [0] * 200}, "indices is of type list"),
        ({"eids": list(range(200))}, "eids is of type list"),
        ({"eids": np.arange(200, dtype=">i8")}, "eids has dtype >i8"),
        ({"node_features": {"feat": [[1.0]] * 40}}, "node feature 'feat' is of type list"),
        ({"node_features": {"feat": np.array(["a"] * 40)}}, "'feat' has dtype <U1"),
        ({"node_features": {"feat": np.ones(40, ">f4")}}, r"dtype >f4; .*feature\.astype"),
        ({"node_features": {"feat": np.ones(40, np.longdouble)}}, "'feat' has dtype "),
        ({"edge_features": {"weight": np.ones(200, ">f4")}}, "edge feature 'weight' has dtype >f4"),
        ({"test": np.array([1], np.int32)}, "int32"),
        ({"num_nodes": "40"}, "num_nodes is '40'; pass a whole number"),
        ({"num_nodes": 40.0}, r"num_nodes is 40\.0"),
        ({"num_nodes": -1}, "num_nodes is -1"),
        ({"num_classes": "3"}, "num_classes is '3'"),
        ({"num_classes": True}, "num_classes is True"),
    ],
)
def test_malformed(edges, build_dataset, changes, found):
    with pytest.raises(InvalidInputError, match=found):
        build_dataset(*edges, **changes)


def test_decreasing_indptr(toy, build_dataset, edges):
    indptr = toy.indptr.copy()
    indptr[3] = indptr[5] + 1
    with pytest.raises(InvalidInputError, match="indptr decreases after place"):
        build_dataset(*edges, indptr=indptr)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("train", 40),
        ("valid", -1),
        ("test", 1000),
        ("indices", 40),
        ("indices", -1),
        ("eids", 200),
        ("labels", 3),
        ("labels", -2),
    ],
)
def test_out_of_range(toy, edges, build_dataset, part, value):
    array = getattr(toy, part).copy()
    array[4] = value
    with pytest.raises(IdOutOfRangeError, match=rf"{part}\[4\] is {value}"):
        build_dataset(*edges, **{part: array})


def test_unlabelled_nodes_are_allowed(edges, build_dataset):
    build_dataset(*edges, labels=np.full(40, -1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_bad_weight_is_named(edges, build_dataset, value):
    weight = np.ones(200)
    weight[17] = value
    with pytest.raises(InvalidWeightError, match=f"edge 17, an in-edge of node {edges[1][17]}"):
        build_dataset(*edges, edge_features={"weight": weight})


def test_all_zero_weights_at_a_node(edges, build_dataset):
    weight = np.ones(200)
    weight[edges[1] == 12] = 0
    with pytest.raises(InvalidWeightError, match="all in-edges of node 12 are zero"):
        build_dataset(*edges, edge_features={"weight": weight})
    weight[np.flatnonzero(edges[1] == 12)[0]] = 1  # isolated nodes do not count
    build_dataset(*edges, edge_features={"weight": weight})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.float32])
def test_labels_of_any_dtype(dtype):
    np.testing.assert_array_equal(as_labels(np.array([[2], [0]], dtype)), [2, 0])
    assert as_labels(np.array([1], dtype)).dtype == np.int64


def test_labels_with_gaps():
    np.testing.assert_array_equal(as_labels(np.array([[1.0], [np.nan]])), [1, -1])
    for raw in (np.zeros((2, 2, 2)), np.array([0.5]), np.array(["a"])):
        with pytest.raises(InvalidInputError):
            as_labels(raw)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float32])
def test_several_labels_of_any_dtype(dtype):
    found = as_labels(np.array([[1, 0], [0, 0]], dtype))
    np.testing.assert_array_equal(found, [[1, 0], [0, 0]])
    assert found.dtype == np.int8


def test_several_labels_with_gaps():
    found = as_labels(np.array([[1.0, np.nan], [np.nan, 0.0]]))
    np.testing.assert_array_equal(found, [[1, -1], [-1, 0]])
    for raw in (np.full((2, 2), 0.5), np.full((2, 2), 300), np.full((2, 2), "a")):
        with pytest.raises(InvalidInputError):
            as_labels(raw)


def test_a_node_may_have_several_labels(edges, build_dataset):
    labels = np.ones((40, 3), np.int8)
    labels[5] = -1
    data = build_dataset(*edges, labels=labels)
    assert data.multi_label and not build_dataset(*edges).multi_label
    assert "3 labels" in repr(data)
    labels[7, 1] = 2
    with pytest.raises(IdOutOfRangeError, match=r"labels.reshape\(-1\)\[22\] is 2; .* \[-1, 2\)"):
        build_dataset(*edges, labels=labels)
    for wrong in (labels[:, :2], labels[1:], labels.astype(np.int64), labels[:, :, None]):
        with pytest.raises(InvalidInputError, match=r"int8 of shape \(40, 3\)"):
            build_dataset(*edges, labels=wrong)


def test_several_labels_to_dgl(edges, build_dataset):
    pytest.importorskip("dgl_mgpu.dgl")
    labels = np.random.default_rng(3).integers(-1, 2, (40, 3)).astype(np.int8)
    graph = build_dataset(*edges, labels=labels).to_dgl()
    np.testing.assert_array_equal(graph.ndata["label"].numpy(), labels)
    assert graph.ndata["label"].numpy().dtype == np.int8


def test_to_dgl(toy, edges):
    pytest.importorskip("dgl_mgpu.dgl")
    import dgl_mgpu  # noqa: F401  makes `import dgl` work

    pytest.importorskip("dgl")
    graph = toy.to_dgl()
    src, dst, _ = edges
    u, v = graph.edges(order="eid")
    np.testing.assert_array_equal(u, src)
    np.testing.assert_array_equal(v, dst)
    np.testing.assert_array_equal(graph.edata["pair"], np.stack([src, dst], 1))
    np.testing.assert_array_equal(graph.ndata["feat"], toy.node_features["feat"])
    np.testing.assert_array_equal(graph.ndata["label"], toy.labels)
    for part, ids in (("train", toy.train), ("val", toy.valid), ("test", toy.test)):
        np.testing.assert_array_equal(graph.ndata[f"{part}_mask"].nonzero()[:, 0], ids)


def test_features_of_edges_add_up_in_dgl(build_dataset, edges):
    """On CPUs DGL's C++ refuses to where a graph's edges have no ids of their own."""
    pytest.importorskip("dgl_mgpu.dgl")
    import dgl_mgpu  # noqa: F401

    dgl = pytest.importorskip("dgl")
    graph = build_dataset(*edges, eids=None, edge_features={}).to_dgl()
    graph.edata["w"] = torch.arange(graph.num_edges()).float()[:, None]
    graph.update_all(dgl.function.copy_e("w", "m"), dgl.function.sum("m", "w"))
    _, dst = graph.edges(order="eid")
    expected = torch.zeros(graph.num_nodes(), 1).index_add_(0, dst, graph.edata["w"])
    assert torch.equal(graph.ndata["w"], expected)


@pytest.mark.filterwarnings("error")
def test_memory_maps_go_to_dgl_without_a_warning(toy, edges, build_dataset, tmp_path):
    pytest.importorskip("dgl_mgpu.dgl")
    import dgl_mgpu  # noqa: F401

    pytest.importorskip("dgl")
    np.save(tmp_path / "feat.npy", np.ones((40, 2), np.float32))
    np.save(tmp_path / "indptr.npy", toy.indptr)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("feat", "indptr")}
    dataset = build_dataset(*edges, indptr=mapped["indptr"], node_features={"feat": mapped["feat"]})
    assert dataset.to_dgl().ndata["feat"].sum() == 80
