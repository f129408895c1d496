"""Data sets of several types: what they must be, and what DGL gets of them."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch

from dgl_mgpu.data import CSC, HeteroDataset
from dgl_mgpu.data.hetero import relation, with_reverse, with_self_loops
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

NODES = {"author": 9, "paper": 14, "venue": 3}
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def ends(seed: int, src: str, dst: str, num: int = 40) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, NODES[src], num), draw.integers(0, NODES[dst], num)


EDGES = {WRITES: ends(0, "author", "paper"), CITES: ends(1, "paper", "paper")}


def build(**changes) -> HeteroDataset:
    csc = {
        (src, etype, dst): relation(*pairs, NODES[src], NODES[dst])
        for (src, etype, dst), pairs in EDGES.items()
    }
    fields = {
        "name": "toy",
        "num_nodes": NODES,
        "edges": csc,
        "target": "paper",
        "num_classes": 3,
        "labels": np.arange(14) % 3,
        "train": np.arange(0, 6),
        "valid": np.arange(6, 9),
        "test": np.arange(9, 14),
        "node_features": {
            "paper": {"feat": np.ones((14, 4), np.float32), "year": np.arange(14)},
            "author": {"feat": torch.ones(9, 2, dtype=torch.float16)},
        },
    }
    return HeteroDataset(**(fields | changes))


def pairs(src, dst) -> list[tuple[int, int]]:
    return sorted(zip(np.asarray(src).tolist(), np.asarray(dst).tolist(), strict=True))


def test_dgl_gets_every_edge_feature_and_label():
    data = build()
    graph = data.to_dgl()
    assert graph.idtype == torch.int32 and graph.ntypes == sorted(NODES)
    assert {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes} == NODES
    for etype, expected in EDGES.items():
        assert pairs(*graph.edges(etype=etype)) == pairs(*expected)
    assert graph.nodes["author"].data["feat"].dtype == torch.float16
    assert set(graph.nodes["venue"].data) == set()
    papers = graph.nodes["paper"].data
    np.testing.assert_array_equal(papers["label"], data.labels)
    np.testing.assert_array_equal(papers["year"], np.arange(14))
    for part, ids in (("train", data.train), ("val", data.valid), ("test", data.test)):
        np.testing.assert_array_equal(papers[f"{part}_mask"].nonzero()[:, 0], ids)
    assert data.widths == {"paper": 4, "author": 2} and data.num_edges == 80
    assert "80 edges of 2 types, 3 classes of paper" in repr(data)


def test_features_of_edges_add_up_in_dgl():
    """On CPUs DGL's C++ refuses to where a graph's edges have no ids of their own."""
    graph = build().to_dgl()
    for etype in EDGES:
        weights = torch.arange(graph.num_edges(etype)).float()[:, None]
        graph.edges[etype].data["w"] = weights
        graph.update_all(dgl.function.copy_e("w", "m"), dgl.function.sum("m", "w"), etype=etype)
        _, dst = graph.edges(etype=etype, order="eid")
        expected = torch.zeros(NODES[etype[2]], 1).index_add_(0, dst.long(), weights)
        assert torch.equal(graph.nodes[etype[2]].data["w"], expected)


@pytest.mark.parametrize("of", ["nodes", "edges"])
def test_ids_are_of_a_type_that_holds_all(of):
    assert build().id_dtype == np.int32
    many = np.broadcast_to(np.int32(0), 1 << 31)  # which takes no memory
    if of == "nodes":
        large = {"num_nodes": NODES | {"venue": len(many)}}
    else:
        large = {"edges": {CITES: CSC(np.array([0, *[len(many)] * 14]), many, None)}}
    assert build(**large, checked=True).id_dtype == np.int64


def test_reverse_relations_are_dgls():
    data = build()
    edges = with_reverse(data.edges, NODES)
    assert list(edges) == [
        *EDGES,
        ("paper", "rev_writes", "author"),
        ("paper", "rev_cites", "paper"),
    ]
    graph = build(edges=edges).to_dgl()
    for src, etype, dst in EDGES:
        forward = graph[src, etype, dst]
        turned = dgl.reverse(forward)
        assert pairs(*graph.edges(etype=f"rev_{etype}")) == pairs(*turned.edges())


def test_self_loops_are_relations():
    graph = with_self_loops(build()).to_dgl()
    assert len(graph.canonical_etypes) == 2 + 3
    for ntype, count in NODES.items():
        src, dst = graph.edges(etype=(ntype, f"self_{ntype}", ntype))
        assert src.tolist() == dst.tolist() == list(range(count))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"target": "book"}, r"node types \['book'\] have no number"),
        ({"node_features": {"book": {}}}, "book"),
        ({"edges": {("paper", "in", "book"): None}}, "book"),
        ({"edges": {}}, "no edges"),
        ({"labels": np.zeros(13, np.int64)}, "labels has dtype int64"),
        ({"node_features": {"author": {"feat": np.ones((8, 2))}}}, "there are 9 authors"),
        ({"node_features": {"author": {"feat": np.ones(9)}}}, "a row of numbers for each node"),
        ({"edges": {WRITES: relation(*EDGES[WRITES], 9, 15)}}, "author:writes:paper.*indptr"),
        ({"train": np.array([1.0])}, "float64"),
        (
            {"num_nodes": NODES | {"author": "9"}},
            "num_nodes of 'author' is '9'; pass a whole",
        ),
        ({"num_classes": 3.0}, r"num_classes is 3\.0"),
    ],
)
def test_malformed(changes, found):
    with pytest.raises(InvalidInputError, match=found):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"test": np.array([2, 14])}, r"test\[1\] is 14"),
        ({"labels": np.full(14, 3)}, r"labels\[0\] is 3"),
        ({"num_nodes": NODES | {"author": 5}, "node_features": {}}, r"writes.*indices\[\d+\] is"),
    ],
)
def test_out_of_range(changes, found):
    with pytest.raises(IdOutOfRangeError, match=found):
        build(**changes)


@pytest.mark.parametrize("which", ["src", "dst"])
def test_a_relation_has_nodes_of_its_types_alone(which):
    src, dst = ends(0, "paper", "author")
    assert relation(src, dst, 14, 9).indptr.shape == (10,)
    (src if which == "src" else dst)[7] = 14
    with pytest.raises(IdOutOfRangeError, match=rf"{which}\[7\] is 14"):
        relation(src, dst, 14, 9)
