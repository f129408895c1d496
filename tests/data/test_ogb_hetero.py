"""ogbn-mag's format; the ogb package's own reader is the oracle."""

from __future__ import annotations

import shutil

import numpy as np
import pandas as pd
import pytest

from dgl_mgpu.data import load_hetero, ogb, ogb_hetero
from dgl_mgpu.errors import DataFormatError
from tests.data.test_ogb import META as OGB_META
from tests.data.test_ogb import read_with_ogb, write_table

NODES = {"paper": 30, "author": 20, "field": 7}
ETYPES = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "has_topic", "field"),
]
META = OGB_META | {
    "name": "ogbn-toy",
    "additional edge files": "edge_reltype",
    "is hetero": "True",
}


def write_set(folder, **changes) -> dict[str, str]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, NODES["paper"]).astype(float)
    labels[::7] = np.nan
    is_paper = pd.DataFrame([{ntype: ntype == "paper" for ntype in NODES}])
    headed = {
        "raw/num-node-dict": pd.DataFrame([NODES]),
        "raw/nodetype-has-label": is_paper,
        "split/time/nodetype-has-split": is_paper,
    }
    tables = {
        "raw/triplet-type-list": ETYPES,
        "raw/node-feat/paper/node-feat": generator.standard_normal((NODES["paper"], 5)),
        "raw/node-feat/paper/node_year": generator.integers(1990, 2020, NODES["paper"]),
        "raw/node-label/paper/node-label": labels,
        "split/time/paper/train": np.arange(0, 10),
        "split/time/paper/valid": np.arange(10, 20),
        "split/time/paper/test": np.arange(20, 30),
    }
    for number, (src, etype, dst) in enumerate(ETYPES):
        relation = f"raw/relations/{src}___{etype}___{dst}"
        ends = [generator.integers(0, NODES[each], 40 + number) for each in (src, dst)]
        tables[f"{relation}/edge"] = np.stack(ends, 1)
        tables[f"{relation}/num-edge-list"] = [40 + number]
        tables[f"{relation}/edge_reltype"] = np.full(40 + number, number)
    for name, rows in (headed | tables | changes).items():
        path = folder / f"{name}.csv.gz"
        if isinstance(rows, pd.DataFrame):
            path.parent.mkdir(parents=True, exist_ok=True)
            rows.to_csv(path, index=False, compression="gzip")
        else:
            write_table(path, rows)
    return META


def test_as_ogb_reads_it(tmp_path, monkeypatch):
    folder = tmp_path / "toy"
    meta = write_set(folder)
    data = ogb_hetero.load_folder(folder, meta, add_reverse=False)
    graph, labels, split = read_with_ogb(folder, meta, monkeypatch)
    assert dict(data.num_nodes) == graph["num_nodes_dict"]
    assert set(data.edges) == set(graph["edge_index_dict"]) == set(ETYPES)
    for etype, (src, dst) in graph["edge_index_dict"].items():
        csc, order = data.edges[etype], np.argsort(dst, kind="stable")
        np.testing.assert_array_equal(csc.indices, src[order])
        degrees = np.bincount(dst, minlength=NODES[etype[2]])
        np.testing.assert_array_equal(np.diff(csc.indptr), degrees)
    assert list(data.node_features) == ["paper"]
    for ours, theirs in (("feat", "node_feat_dict"), ("year", "node_year")):
        found = data.node_features["paper"][ours]
        np.testing.assert_array_equal(found, graph[theirs]["paper"])
        assert found.dtype == graph[theirs]["paper"].dtype and isinstance(found, np.memmap)
    expected = np.where(np.isnan(labels["paper"][:, 0]), -1, labels["paper"][:, 0])
    np.testing.assert_array_equal(data.labels, expected)
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(data, part), split[part]["paper"])
    assert (data.target, data.num_classes) == ("paper", 4)


def test_variants_and_reuse(tmp_path, monkeypatch):
    folder = tmp_path / "toy"
    meta = write_set(folder)
    plain = ogb_hetero.load_folder(folder, meta, add_reverse=False)
    both = ogb_hetero.load_folder(folder, meta)
    assert set(both.edges) == {
        *ETYPES,
        *((dst, f"rev_{etype}", src) for src, etype, dst in ETYPES),
    }
    assert both.num_edges == 2 * plain.num_edges == 2 * (40 + 41 + 42)
    # Nothing is read anew the second time.
    monkeypatch.setattr(ogb_hetero, "unpack_table", None)
    again = ogb_hetero.load_folder(folder, meta)
    for etype, csc in both.edges.items():
        np.testing.assert_array_equal(again.edges[etype].indices, csc.indices)


WRITES = "raw/relations/author___writes___paper/edge"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({WRITES: np.zeros((39, 2), int)}, r"shape \(39, 2\) for 40 edges"),
        ({WRITES: np.full((40, 2), 20)}, r"src\[0\] is 20"),
        ({"raw/triplet-type-list": [("author", "writes", "book")]}, "book"),
        ({"raw/num-node-dict": pd.DataFrame([NODES, NODES])}, "3 rows instead of"),
        ({"raw/num-node-dict": pd.DataFrame([NODES | {"paper": "x"}])}, "invalid literal"),
        ({"raw/nodetype-has-label": pd.DataFrame([dict.fromkeys(NODES, True)])}, "instead of one"),
        (
            {"raw/nodetype-has-label": pd.DataFrame([{n: n == "field" for n in NODES}])},
            "the labels are of field, but the split is of paper",
        ),
        ({"raw/node-feat/paper/node-feat": np.ones((29, 5))}, "29 rows instead of 30"),
        ({"raw/node-label/paper/node-label": np.full(30, 4)}, r"labels\[0\] is 4"),
        ({"split/time/paper/test": [30]}, r"test\[0\] is 30"),
    ],
)
def test_tables_that_contradict_one_another(tmp_path, changes, found):
    meta = write_set(tmp_path / "toy", **changes)
    with pytest.raises(DataFormatError, match=found):
        ogb_hetero.load_folder(tmp_path / "toy", meta)


def test_missing_and_truncated_files_are_named(tmp_path):
    folder = tmp_path / "toy"
    meta = write_set(folder)
    unread = {"edge_reltype.csv.gz"}
    for path in folder.rglob("*.gz"):
        if path.name in unread:
            continue
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataFormatError, match=path.name):
            ogb_hetero.load_folder(folder, meta)
        path.write_bytes(content)
    (folder / f"{WRITES}.csv.gz").unlink()
    with pytest.raises(DataFormatError, match=r"no file .*writes___paper/edge\.csv\.gz"):
        ogb_hetero.load_folder(folder, meta)


def test_official_set_from_a_download(tmp_path, monkeypatch):
    served = tmp_path / "served"
    write_set(served / "mag")
    archive = shutil.make_archive(str(tmp_path / "mag"), "zip", served, "mag")
    meta = ogb._official_meta("ogbn-mag")
    assert meta["num classes"] == "349" and meta["is hetero"] == "True"
    monkeypatch.setattr(ogb, "_official_meta", lambda _: meta | {"url": f"file://{archive}"})
    data = load_hetero("ogbn-mag", tmp_path / "root")
    assert (data.target, data.num_classes, len(data.edges)) == ("paper", 349, 6)
