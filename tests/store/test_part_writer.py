"""Data sets cut into parts: as DGL reads them, and as stores do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from dgl.distributed.partition import load_partition

import dgl_mgpu
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.csc import CSC, from_edges
from dgl_mgpu.data.hetero import relation
from dgl_mgpu.errors import ConfigError, DGLMGPUError, InvalidInputError, OutputError
from dgl_mgpu.graph.host.files import map_tensors, save_tensors
from dgl_mgpu.store import part_writer
from dgl_mgpu.store.part_files import read_part

NODES, EDGES = 300, 2_500


def _homogeneous() -> Dataset:
    draw = np.random.default_rng(0)
    sources = (NODES * draw.random(EDGES) ** 2).astype(np.int64)
    csc = from_edges(sources, draw.integers(0, NODES, EDGES), NODES, with_eids=True)
    return Dataset(
        name="one",
        num_nodes=NODES,
        num_classes=4,
        indptr=csc.indptr,
        indices=csc.indices,
        eids=csc.eids,
        labels=draw.integers(0, 4, NODES),
        train=np.arange(0, NODES, 3),
        valid=np.arange(1, NODES, 3),
        test=np.arange(2, NODES, 3),
        node_features={
            "feat": draw.random((NODES, 5), np.float32),
            "half": torch.randn(NODES, 3).half(),
            "id": np.arange(NODES),
        },
        edge_features={"number": np.arange(EDGES)},
    )


def _of_types() -> HeteroDataset:
    draw = np.random.default_rng(1)
    counts = {"user": 120, "item": 200, "tag": 4}

    def edges(source: str, target: str, count: int) -> CSC:
        ends = (draw.integers(0, counts[ntype], count) for ntype in (source, target))
        return relation(*ends, counts[source], counts[target])

    return HeteroDataset(
        name="several",
        num_nodes=counts,
        edges={
            ("user", "follows", "user"): edges("user", "user", 700),
            ("user", "buys", "item"): edges("user", "item", 900),
            ("tag", "of", "item"): edges("tag", "item", 150),
        },
        target="user",
        num_classes=3,
        labels=draw.integers(0, 3, 120),
        train=np.arange(60),
        valid=np.arange(60, 90),
        test=np.arange(90, 120),
        node_features={
            ntype: {"feat": draw.random((count, 3), np.float32), "id": np.arange(count)}
            for ntype, count in counts.items()
        },
    )


def _read_by_dgl(path: Path, num_parts: int) -> tuple[dgl.DGLGraph, dict[str, Any]]:
    """The graph that all parts make together, and each part's bounds by type."""
    nodes: dict[str, list[torch.Tensor]] = {}
    features: dict[str, list[torch.Tensor]] = {}
    edges: dict[tuple[str, str, str], list[torch.Tensor]] = {}
    for number in range(num_parts):
        part, node_feats, edge_feats, book, _, ntypes, etypes = load_partition(str(path), number)
        for name, rows in (*node_feats.items(), *edge_feats.items()):
            features.setdefault(name, []).append(rows)
        inner = part.edata["inner_edge"].bool()
        types, eids = book.map_to_per_etype(part.edata[dgl.EID][inner])
        ends = [part.ndata[dgl.NID][end[inner]] for end in part.edges()]
        (source_types, sources), (target_types, targets) = map(book.map_to_per_ntype, ends)
        for code, etype in enumerate(etypes):
            of_type = types == code
            assert (source_types[of_type] == ntypes.index(etype[0])).all()
            assert (target_types[of_type] == ntypes.index(etype[2])).all()
            columns = torch.stack([eids, sources, targets])[:, of_type]
            edges.setdefault(etype, []).append(columns)
        for ntype in ntypes:
            nodes.setdefault(ntype, []).append(book.partid2nids(number, ntype))
    ends = {}
    for etype, parts in edges.items():
        ids, sources, targets = torch.cat(parts, 1)
        assert torch.equal(ids.sort().values, torch.arange(len(ids)))
        ends[etype] = sources[ids.argsort()], targets[ids.argsort()]
    g = dgl.heterograph(ends, {ntype: sum(map(len, ids)) for ntype, ids in nodes.items()})
    for ntype in g.ntypes:
        assert torch.equal(torch.cat(nodes[ntype]), g.nodes(ntype))
    for name, parts in features.items():
        of, _, feature = name.rpartition("/")
        if ":" in of:
            g.edges[tuple(of.split(":"))].data[feature] = torch.cat(parts)
        else:
            g.nodes[of].data[feature] = torch.cat(parts)
    return g, {ntype: list(map(len, ids)) for ntype, ids in nodes.items()}


def _assert_is(g: dgl.DGLGraph, dataset: Dataset | HeteroDataset) -> None:
    """A graph is a data set's, whose nodes have other numbers, and edges at a node their order."""
    whole = dataset.to_dgl()
    for ntype in whole.ntypes:
        before = g.nodes[ntype].data["id"]
        for name, rows in whole.nodes[ntype].data.items():
            assert torch.equal(g.nodes[ntype].data[name].to(rows.dtype), rows[before]), name
    for etype in whole.canonical_etypes:
        assert g.num_edges(etype) == whole.num_edges(etype)
        before_source, before = (g.nodes[ntype].data["id"] for ntype in (etype[0], etype[2]))
        indptr, indices, eids = whole.adj_tensors("csc", etype=etype)
        new_indptr, new_indices, new_eids = g.adj_tensors("csc", etype=etype)
        for new, old in enumerate(before.tolist()):
            mine = slice(new_indptr[new], new_indptr[new + 1])
            its = slice(indptr[old], indptr[old + 1])
            assert torch.equal(before_source[new_indices[mine]], indices[its])
            for name, rows in whole.edges[etype].data.items():
                found = g.edges[etype].data[name][new_eids[mine]]
                assert torch.equal(found, rows[eids[its]]), name


DATASETS = pytest.mark.parametrize("make", [_homogeneous, _of_types])


@DATASETS
@pytest.mark.parametrize("by", ["random", "order", "metis"])
def test_dgl_reads_the_graph_in_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[], Any], by: str
) -> None:
    monkeypatch.setenv("DGL_DIST_DEBUG", "1")  # DGL checks what it reads
    dataset = make()
    path = dgl_mgpu.write_partition(dataset, tmp_path, 3, by=by)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {path.name, "part0", "part1", "part2"}
    g, counts = _read_by_dgl(path, 3)
    _assert_is(g, dataset)
    for ntype, of_parts in counts.items():
        if by == "order":
            assert torch.equal(g.nodes[ntype].data["id"], g.nodes(ntype))
        if len(g.nodes(ntype)) > 100:
            assert min(of_parts) > 0.15 * len(g.nodes(ntype))


@DATASETS
def test_parts_do_not_depend_on_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[], Any]
) -> None:
    dataset, contents = make(), []
    for folder, each in (("much", 256), ("little", (64 << 20) // 7)):
        monkeypatch.setattr(part_writer, "_BYTES_EACH", each)  # seven nodes or edges at a time
        for by in "random", "order":
            dgl_mgpu.write_partition(dataset, tmp_path / folder / by, 2, by=by, memory="64MiB")
        files = sorted((tmp_path / folder).rglob("*.*"))
        contents.append([file.read_bytes() for file in files if file.is_file()])
    assert len(contents[0]) == 14 and contents[0] == contents[1]


def test_nodes_go_to_the_parts_that_are_given(tmp_path: Path) -> None:
    dataset = _of_types()
    by = {
        ntype: np.arange(count) % 2 * 3 for ntype, count in dataset.num_nodes.items()
    }  # parts 1 and 2 of 4 are empty
    g, counts = _read_by_dgl(dgl_mgpu.write_partition(dataset, tmp_path, 4, by=by), 4)
    _assert_is(g, dataset)
    assert counts == {"item": [100, 0, 0, 100], "tag": [2, 0, 0, 2], "user": [60, 0, 0, 60]}
    assert (g.nodes["item"].data["id"][:100] % 2 == 0).all()


def test_what_cannot_be_cut_is_told(tmp_path: Path) -> None:
    dataset = _homogeneous()
    for options, message in (
        ({"by": "hash"}, "by is 'hash'"),
        ({"by": np.zeros(7, np.int64)}, "no part for each of the 300 nodes"),
        ({"by": np.full(NODES, 2)}, "other values than parts"),
        ({"by": np.zeros(NODES)}, "other values than parts"),
        ({"memory": "1MiB"}, "pass 64.0 MiB or more"),
        ({"seed": -1}, "seed is -1"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            dgl_mgpu.write_partition(dataset, tmp_path, 2, **options)
    with pytest.raises(InvalidInputError, match="num_parts is 0"):
        dgl_mgpu.write_partition(dataset, tmp_path, 0)
    with pytest.raises(ConfigError, match="not a size"):
        dgl_mgpu.write_partition(dataset, tmp_path, 2, memory="much")
    with pytest.raises(InvalidInputError, match="type DGLGraph"):
        dgl_mgpu.write_partition(dataset.to_dgl(), tmp_path, 2)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        dgl_mgpu.write_partition(dataset, tmp_path / "file", 2)
    assert not list(tmp_path.glob("*.json"))


def test_parts_of_another_data_set_are_not_written_over(tmp_path):
    dataset = _homogeneous()
    path = dgl_mgpu.write_partition(dataset, tmp_path, 3)
    assert dgl_mgpu.write_partition(dataset, tmp_path, 2) == path  # of the same, they are
    before = path.read_text()
    with pytest.raises(InvalidInputError, match=f"parts of {path.name}; choose another folder"):
        dgl_mgpu.write_partition(dataclasses.replace(dataset, name="other"), tmp_path, 2)
    assert path.read_text() == before


def test_metis_is_told_what_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(part_writer, "_METIS_BYTES_EDGE", 1 << 20)
    with pytest.raises(InvalidInputError, match="all edges in memory"):
        dgl_mgpu.write_partition(_homogeneous(), tmp_path, 2, by="metis")


def test_files_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    path = dgl_mgpu.write_partition(_of_types(), tmp_path / "parts", 2)
    other = dgl_mgpu.write_partition(_of_types(), tmp_path / "others", 2, seed=1)
    metadata = path.read_text()
    for old, new, message in (
        ('"num_parts": 2', '"parts": 2', "cannot be read"),
        ('"part-0"', '"part-00"', "cannot be read"),
        ('"user:buys:item"', '"buys"', "cannot be read"),
        ('"node_feats"', '"nodes"', "lacks something"),
        ('"part0/graph.dgl"', "7", "cannot be read"),
        ('"user": [', '"user": [[0, 0],', "do not follow each other"),
        ("part0/node_feat.dgl", "../others/part0/node_feat.dgl", "rows for"),
        ("part0/graph.dgl", "part1/graph.dgl", "not all"),
        ("part0/graph.dgl", "../others/part0/graph.dgl", "not all|not of the type"),
    ):
        assert old in metadata
        path.write_text(metadata.replace(old, new))
        with pytest.raises(InvalidInputError, match=message):
            read_part(path, 0, 2)
    path.write_text(metadata.replace("part0/graph.dgl", "part0/node_feat.dgl"))
    with pytest.raises(dgl.DGLError, match="no file of graphs"):
        read_part(path, 0, 2)
    assert other.is_file()


def test_features_of_another_parts_edges_are_told(tmp_path: Path) -> None:
    path = dgl_mgpu.write_partition(_homogeneous(), tmp_path, 2, by="order")
    path.write_text(path.read_text().replace("part0/edge_feat.dgl", "part1/edge_feat.dgl"))
    with pytest.raises(InvalidInputError, match=r"'number' has [\d,]+ rows for [\d,]+ of type"):
        read_part(path, 0, 2)


def test_rows_that_parts_cannot_have_are_told(tmp_path: Path) -> None:
    data = _homogeneous()
    data.node_features["brain"] = torch.zeros(NODES, 2, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="'brain' is of"):
        dgl_mgpu.write_partition(data, tmp_path, 2)
    path = str(tmp_path / "t.dgl")
    save_tensors(path, {"brain": data.node_features["brain"]}, False)
    with pytest.raises(dgl.DGLError, match="bfloat16"):
        map_tensors(path)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    path = dgl_mgpu.write_partition(_homogeneous(), tmp_path, 2)
    draw = np.random.default_rng(0)
    for name in "graph.dgl", "node_feat.dgl":
        file = tmp_path / "part0" / name
        whole = file.read_bytes()
        for number in range(60):
            damaged = bytearray(whole)
            if number % 2:
                del damaged[int(draw.integers(len(whole))) :]
            else:  # where there are lengths and names
                at = int(draw.integers(4096 if name == "graph.dgl" else 0, 6000)) & ~3
                damaged[at : at + 8] = draw.choice([b"\xff" * 8, b"\0\0\0\0\0\1\0\0"])
            file.write_bytes(damaged)
            # What is damaged may be an element, which nobody can tell.
            with contextlib.suppress(DGLMGPUError):
                part = read_part(path, 0, 2)
                for edges in part.in_edges.values():
                    edges.summary()
        file.write_bytes(whole)
