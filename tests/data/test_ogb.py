"""The ogb package's own reader is the oracle."""

from __future__ import annotations

import gzip
import shutil
import urllib.error

import numpy as np
import pandas as pd
import pytest
import torch

from dgl_mgpu.cli import main
from dgl_mgpu.data import load, ogb
from dgl_mgpu.errors import ConfigError, DataFormatError

NUM_NODES, NUM_EDGES = 50, 300
META = {
    "name": "ogbn-toy",
    "num tasks": "1",
    "num classes": "4",
    "eval metric": "acc",
    "task type": "multiclass classification",
    "download_name": "toy",
    "version": "1",
    "url": "",
    "add_inverse_edge": "False",
    "has_node_attr": "True",
    "has_edge_attr": "False",
    "split": "time",
    "additional node files": "node_year",
    "additional edge files": "None",
    "is hetero": "False",
    "binary": "False",
}


def write_table(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, header=False, index=False, compression="gzip")


def write_csv_set(folder, **changes) -> dict[str, str]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, NUM_NODES).astype(float)
    labels[::7] = np.nan
    tables = {
        "raw/edge": generator.integers(0, NUM_NODES, (NUM_EDGES, 2)),
        "raw/num-node-list": [NUM_NODES],
        "raw/num-edge-list": [NUM_EDGES],
        "raw/node-feat": generator.standard_normal((NUM_NODES, 5)),
        "raw/node_year": generator.integers(1990, 2020, NUM_NODES),
        "raw/node-label": labels,
        "split/time/train": np.arange(0, 20),
        "split/time/valid": np.arange(20, 30),
        "split/time/test": np.arange(30, 50),
    }
    for name, rows in (tables | changes).items():
        write_table(folder / f"{name}.csv.gz", rows)
    return META


def write_binary_set(folder, save=np.savez, **changes) -> dict[str, str]:
    generator = np.random.default_rng(0)
    arrays = {
        "edge_index": generator.integers(0, NUM_NODES, (2, NUM_EDGES)),
        "node_feat": generator.standard_normal((NUM_NODES, 5)).astype(np.float32),
        "node_year": generator.integers(1990, 2020, (NUM_NODES, 1)),
        "num_nodes_list": np.array([NUM_NODES]),
        "num_edges_list": np.array([NUM_EDGES]),
    } | changes
    (folder / "raw").mkdir(parents=True)
    save(folder / "raw" / "data.npz", **arrays)
    labels = generator.integers(0, 4, (NUM_NODES, 1)).astype(np.float32)
    labels[::7] = np.nan
    save(folder / "raw" / "node-label.npz", node_label=labels)
    for part, ids in (("train", range(20)), ("valid", range(20, 30)), ("test", range(30, 50))):
        write_table(folder / "split" / "time" / f"{part}.csv.gz", list(ids))
    return META | {"binary": "True"}


def read_with_ogb(folder, meta, monkeypatch):
    """Return (graph, labels, split) as the ogb package reads them."""
    package = pytest.importorskip("ogb.nodeproppred")
    (folder / "processed").mkdir(exist_ok=True)
    (folder / "RELEASE_v1.txt").touch()
    # ogb reads its own pickle back without saying so to torch 2.6 and newer.
    plain_load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: plain_load(*a, **k | {"weights_only": False})
    )
    dataset = package.NodePropPredDataset(
        name=meta["name"], root=str(folder.parent), meta_dict=meta | {"dir_path": str(folder)}
    )
    return *dataset[0], dataset.get_idx_split()


def assert_same_as_ogb(data, folder, meta, monkeypatch) -> None:
    graph, labels, split = read_with_ogb(folder, meta, monkeypatch)
    src, dst = graph["edge_index"]
    order = np.argsort(dst, kind="stable")
    np.testing.assert_array_equal(data.indices, src[order])
    np.testing.assert_array_equal(np.diff(data.indptr), np.bincount(dst, minlength=data.num_nodes))
    for ours, theirs in (("feat", "node_feat"), ("year", "node_year")):
        np.testing.assert_array_equal(data.node_features[ours], graph[theirs])
        assert data.node_features[ours].dtype == graph[theirs].dtype
    expected = np.where(np.isnan(labels[:, 0]), -1, labels[:, 0])
    np.testing.assert_array_equal(data.labels, expected)
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(data, part), split[part])
    if graph["edge_feat"] is not None:
        eids = np.arange(data.num_edges) if data.eids is None else data.eids
        np.testing.assert_array_equal(data.edge_features["feat"][eids], graph["edge_feat"][order])


@pytest.mark.parametrize("inverse", ["False", "True"])
@pytest.mark.parametrize("edge_features", [False, True])
def test_csv_as_ogb_reads_it(tmp_path, monkeypatch, inverse, edge_features):
    monkeypatch.setattr("dgl_mgpu.data.tables._CHUNK_ROWS", 17)
    monkeypatch.setattr(ogb, "_CHUNK_EDGES", 23)
    meta = write_csv_set(tmp_path / "toy") | {"add_inverse_edge": inverse}
    if edge_features:
        meta["has_edge_attr"] = "True"
        rows = np.random.default_rng(5).random((NUM_EDGES, 2))
        write_table(tmp_path / "toy" / "raw" / "edge-feat.csv.gz", rows)
    data = ogb.load_folder(tmp_path / "toy", meta)
    assert_same_as_ogb(data, tmp_path / "toy", meta, monkeypatch)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("edge_features", [False, True])
def test_binary_as_ogb_reads_it(tmp_path, monkeypatch, save, edge_features):
    rows = np.random.default_rng(5).random((NUM_EDGES, 2))
    changes = {"edge_feat": rows} if edge_features else {}
    meta = write_binary_set(tmp_path / "toy", save, **changes)
    data = ogb.load_folder(tmp_path / "toy", meta)
    assert isinstance(data.node_features["feat"], np.memmap)
    assert data.node_features["feat"].flags.aligned
    assert_same_as_ogb(data, tmp_path / "toy", meta, monkeypatch)


def write_proteins(folder, num_labels=3) -> dict[str, str]:
    """A small ogbn-proteins: edges have features, nodes have none, and several labels."""
    random = np.random.default_rng(8)
    labels = random.integers(0, 2, (NUM_NODES, num_labels)).astype(float)
    labels[4, 1] = np.nan
    species = random.integers(0, 9000, NUM_NODES)
    meta = write_csv_set(folder, **{"raw/node-label": labels, "raw/node_species": species})
    write_table(folder / "raw" / "edge-feat.csv.gz", random.random((NUM_EDGES, 2)))
    (folder / "raw" / "node-feat.csv.gz").unlink()
    changes = {"num tasks": str(num_labels), "num classes": "2", "add_inverse_edge": "True"}
    of_what = {"has_node_attr": "False", "has_edge_attr": "True"}
    return meta | changes | of_what | {"additional node files": "node_species"}


def test_several_labels_as_ogb_reads_them(tmp_path, monkeypatch):
    meta = write_proteins(tmp_path / "toy")
    data = ogb.load_folder(tmp_path / "toy", meta)
    _, labels, _ = read_with_ogb(tmp_path / "toy", meta, monkeypatch)
    np.testing.assert_array_equal(data.labels, np.where(np.isnan(labels), -1, labels))
    assert data.labels.dtype == np.int8 and data.num_classes == 3
    assert list(data.node_features) == ["species"] and list(data.edge_features) == ["feat"]


@pytest.mark.parametrize("mode", ["minibatch", "fullgraph"])
def test_ogbn_proteins_is_trained_on_where_ogb_puts_it(tmp_path, capsys, without_pictures, mode):
    write_proteins(tmp_path / "ogbn_proteins", 112)
    (tmp_path / "ogbn_proteins" / "split" / "time").rename(
        tmp_path / "ogbn_proteins" / "split" / "species"
    )
    words = ["data=ogbn-proteins", f"data.root={tmp_path}", f"mode={mode}", "trainer.epochs=1"]
    words += ["store.device=cpu", "model.hidden=8", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["train", *words]) == 0
    assert "test ROC AUC" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("inverse", ["False", "True"])
def test_means_of_edges_as_ogb_reads_them(tmp_path, monkeypatch, loops, inverse):
    monkeypatch.setattr(ogb, "_CHUNK_EDGES", 23)
    meta = write_proteins(tmp_path / "toy") | {"add_inverse_edge": inverse}
    for _ in range(2):  # the second time from the derived files
        data = ogb.load_folder(tmp_path / "toy", meta, mean_edge_features=True, self_loops=loops)
    graph, _, _ = read_with_ogb(tmp_path / "toy", meta, monkeypatch)
    sums = np.zeros((NUM_NODES, 2))
    np.add.at(sums, graph["edge_index"][1], graph["edge_feat"])
    degrees = np.bincount(graph["edge_index"][1], minlength=NUM_NODES)
    means = sums / np.maximum(degrees, 1)[:, None]
    np.testing.assert_allclose(data.node_features["feat"], means, rtol=1e-6)
    assert data.node_features["feat"].dtype == np.float32
    assert data.eids is None and not data.edge_features and "species" in data.node_features
    plain = ogb.load_folder(tmp_path / "toy", meta)
    kept = np.count_nonzero(plain.indices != np.repeat(np.arange(NUM_NODES), degrees))
    assert data.num_edges == (kept + NUM_NODES if loops else plain.num_edges)
    assert list(plain.edge_features) == ["feat"] and plain.eids is not None


def test_means_of_what_is_not_there(tmp_path):
    meta = write_csv_set(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"ogbn-toy the means .*: it has no edge features"):
        ogb.load_folder(tmp_path / "a", meta, mean_edge_features=True)
    meta = meta | {"has_edge_attr": "True"}
    write_table(tmp_path / "a" / "raw" / "edge-feat.csv.gz", np.ones((NUM_EDGES, 2)))
    with pytest.raises(
        ConfigError, match="its nodes have features already, which the means would replace"
    ):
        ogb.load_folder(tmp_path / "a", meta, mean_edge_features=True)
    meta = write_proteins(tmp_path / "b") | {"additional edge files": "edge_kind"}
    write_table(tmp_path / "b" / "raw" / "edge_kind.csv.gz", np.ones(NUM_EDGES))
    with pytest.raises(ConfigError, match="edge features feat, kind; set mean_edge_features=false"):
        ogb.load_folder(tmp_path / "b", meta, mean_edge_features=True)


def test_variants_and_reuse(tmp_path, monkeypatch):
    folder = tmp_path / "toy"
    meta = write_binary_set(folder)
    edge_index = np.load(folder / "raw" / "data.npz")["edge_index"]
    plain = ogb.load_folder(folder, meta)
    both = ogb.load_folder(folder, meta, add_reverse=True)
    loops = ogb.load_folder(folder, meta, add_reverse=True, self_loops=True)
    num_loops = (edge_index[0] == edge_index[1]).sum()
    assert (plain.num_edges, both.num_edges) == (NUM_EDGES, 2 * NUM_EDGES)
    assert loops.num_edges == 2 * (NUM_EDGES - num_loops) + NUM_NODES
    # Nothing is read anew the second time.
    monkeypatch.setattr(ogb, "_write_csc", None)
    monkeypatch.setattr(ogb, "_unpack_binary", None)
    again = ogb.load_folder(folder, meta, add_reverse=True, self_loops=True)
    np.testing.assert_array_equal(again.indices, loops.indices)


def test_changed_raw_files_are_read_anew(tmp_path):
    folder = tmp_path / "toy"
    meta = write_binary_set(folder)
    first = ogb.load_folder(folder, meta)
    size = (folder / "raw" / "data.npz").stat().st_size
    shutil.rmtree(folder / "raw")
    write_binary_set(folder, edge_index=np.zeros((2, NUM_EDGES), int))
    assert (folder / "raw" / "data.npz").stat().st_size == size
    second = ogb.load_folder(folder, meta)
    assert first.indptr[1] != NUM_EDGES
    assert second.indptr[1] == NUM_EDGES


def test_a_flipped_bit_is_noticed(tmp_path):
    folder = tmp_path / "toy"
    meta = write_binary_set(folder)
    content = bytearray((folder / "raw" / "data.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "raw" / "data.npz").write_bytes(content)
    with pytest.raises(DataFormatError, match=r"data\.npz.*CRC"):
        ogb.load_folder(folder, meta)


def test_cache_elsewhere(tmp_path):
    folder = tmp_path / "toy"
    meta = write_csv_set(folder)
    ogb.load_folder(folder, meta, cache=tmp_path / "cache")
    assert not (folder / "derived").exists()
    assert len(list((tmp_path / "cache" / "toy").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"raw/node-feat": np.ones((NUM_NODES - 1, 5))},
            r"node-feat.*: it has 49 rows instead of 50",
        ),
        ({"raw/node-feat": np.ones((NUM_NODES + 1, 5))}, r"node-feat.*: it has more than 50 rows"),
        ({"raw/edge": np.zeros((NUM_EDGES - 1, 2), int)}, r"edge\.csv.*: it has 299 rows"),
        ({"raw/edge": np.full((NUM_EDGES, 2), NUM_NODES)}, r"edge 0 is \(50, 50\)"),
        ({"raw/edge": np.full((NUM_EDGES, 2), 0.5)}, "not whole"),
        ({"raw/node-label": np.zeros(NUM_NODES - 1)}, "49 labels for 50 nodes"),
        ({"raw/node-label": np.full(NUM_NODES, 4)}, r"labels\[0\] is 4"),
        ({"raw/node-label": np.full(NUM_NODES, 0.5)}, "not whole"),
        (
            {"raw/node-label": np.zeros((NUM_NODES, 2))},
            r"labels has dtype int8 and shape \(50, 2\)",
        ),
        ({"raw/node-label": np.full((NUM_NODES, 2), 0.5)}, "neither 0 nor 1"),
        ({"raw/num-node-list": [20, 30]}, "2 graphs instead of one"),
        ({"split/time/test": [NUM_NODES]}, r"test\[0\] is 50"),
        ({"split/time/train": [-1]}, r"train\[0\] is -1"),
        ({"raw/node-feat": [["a"] * 5] * NUM_NODES}, "not a number"),
    ],
)
def test_tables_that_contradict_one_another(tmp_path, changes, found):
    meta = write_csv_set(tmp_path / "toy", **changes)
    with pytest.raises(DataFormatError, match=found):
        ogb.load_folder(tmp_path / "toy", meta)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"node_feat": np.ones((NUM_NODES + 1, 5))}, "'feat' has shape"),
        ({"edge_index": np.zeros((2, NUM_EDGES - 1), int)}, r"edge_index \(2, 299\)"),
        ({"edge_index": np.full((2, NUM_EDGES), -1)}, "edge 0 is"),
        ({"edge_index": np.zeros((2, NUM_EDGES))}, "float64"),
        ({"num_nodes_list": np.array([1, 2])}, "2 graphs"),
    ],
)
def test_arrays_that_contradict_one_another(tmp_path, changes, found):
    meta = write_binary_set(tmp_path / "toy", **changes)
    with pytest.raises(DataFormatError, match=found):
        ogb.load_folder(tmp_path / "toy", meta)


@pytest.mark.parametrize("write", [write_csv_set, write_binary_set])
def test_every_truncated_file_is_named(tmp_path, write):
    folder = tmp_path / "toy"
    meta = write(folder)
    for path in [*folder.rglob("*.gz"), *folder.rglob("*.npz")]:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(DataFormatError, match=path.name):
            ogb.load_folder(folder, meta)
        path.write_bytes(content)
    ogb.load_folder(folder, meta)


def test_no_table_at_all(tmp_path):
    folder = tmp_path / "toy"
    meta = write_csv_set(folder)
    with gzip.open(folder / "raw" / "edge.csv.gz", "wb"):
        pass
    with pytest.raises(DataFormatError, match="0 rows instead of 300"):
        ogb.load_folder(folder, meta)
    (folder / "raw" / "node-feat.csv.gz").unlink()
    with pytest.raises(DataFormatError, match=r"no file raw/node-feat\.csv\.gz"):
        ogb.load_folder(folder, meta)


def test_no_self_loops_with_edge_features(tmp_path):
    meta = write_binary_set(tmp_path / "toy", edge_feat=np.ones((NUM_EDGES, 1)))
    with pytest.raises(ConfigError, match="leave self_loops off"):
        ogb.load_folder(tmp_path / "toy", meta, self_loops=True)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products", "ogbn-papers100M"])
def test_offline_says_what_to_put_where(tmp_path, monkeypatch, name):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("offline")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    with pytest.raises(DataFormatError, match="offline") as error:
        load(name, tmp_path)
    assert str(tmp_path / name.replace("-", "_")) in error.value.fix
    assert not list(tmp_path.iterdir())


def test_official_set_from_a_download_and_from_disk(tmp_path, monkeypatch):
    served = tmp_path / "served"
    write_csv_set(served / "arxiv")
    archive = shutil.make_archive(str(tmp_path / "arxiv"), "zip", served, "arxiv")
    meta = ogb._official_meta("ogbn-arxiv")
    assert meta["num classes"] == "40"
    monkeypatch.setattr(ogb, "_official_meta", lambda _: meta | {"url": f"file://{archive}"})
    root = tmp_path / "root"
    data = load("ogbn-arxiv", root)
    assert (data.num_nodes, data.num_edges, data.num_classes) == (NUM_NODES, NUM_EDGES, 40)
    monkeypatch.setattr(ogb, "_official_meta", lambda _: meta | {"url": "file:///nowhere"})
    np.testing.assert_array_equal(load("ogbn-arxiv", root).indices, data.indices)
