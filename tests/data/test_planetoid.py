from __future__ import annotations

import collections
import pickle
import shutil
import urllib.error

import numpy as np
import pytest
from scipy import sparse

from dgl_mgpu.data import load, planetoid
from dgl_mgpu.errors import DataFormatError

SUMS = "ind.citeseer.checksums.json"
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@pytest.fixture
def cora_files(shared_data, tmp_path):
    """A copy of Cora's files that may be damaged."""
    folder = tmp_path / "planetoid"
    shutil.copytree(shared_data / "planetoid", folder)
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def write_citeseer(folder):
    """A data set in Planetoid's format with two isolated test nodes left out, as in CiteSeer.

    600 known nodes, 20 of them for training; of the test nodes 600 to 609, 603 and 607 are missing.
    """
    generator = np.random.default_rng(0)
    test = np.setdiff1d(np.arange(600, 610), [603, 607])
    shuffled = generator.permutation(test)
    features = generator.integers(0, 2, (610, 12)).astype(np.float32)
    labels = np.eye(3, dtype=np.int32)[generator.integers(0, 3, 610)]
    graph = collections.defaultdict(list)
    for node in range(610):
        graph[node] = [] if node in (603, 607) else [int(n) for n in generator.integers(0, 600, 3)]
    graph[5].append(5)
    contents = {
        "x": sparse.csr_matrix(features[:20]),
        "allx": sparse.csr_matrix(features[:600]),
        "tx": sparse.csr_matrix(features[shuffled]),
        "y": labels[:20],
        "ally": labels[:600],
        "ty": labels[shuffled],
        "graph": graph,
    }
    for part, content in contents.items():
        (folder / f"ind.citeseer.{part}").write_bytes(pickle.dumps(content, protocol=2))
    (folder / "ind.citeseer.test.index").write_text("\n".join(map(str, shuffled)))
    return folder, features, labels, graph, test


@pytest.fixture
def small_citeseer(tmp_path):
    return write_citeseer(tmp_path)


def test_cora(shared_data):
    cora = load("cora", shared_data)
    # Figures of Kipf and Welling's table 1, and DGL's count of directed edges.
    assert (cora.num_nodes, cora.num_edges, cora.num_classes) == (2708, 10556, 7)
    assert cora.node_features["feat"].shape == (2708, 1433)
    assert (len(cora.train), len(cora.valid), len(cora.test)) == (140, 500, 1000)
    np.testing.assert_array_equal(np.bincount(cora.labels[cora.train]), [20] * 7)
    np.testing.assert_array_equal(np.unique(cora.test), np.arange(1708, 2708))
    np.testing.assert_allclose(cora.node_features["feat"].sum(1), 1, rtol=1e-5)
    matrix = sparse.csc_matrix((np.ones(10556), cora.indices, cora.indptr))
    assert (matrix != matrix.T).nnz == 0
    assert matrix.max() == 1
    # Cited papers share a field: a permutation gone wrong would bring this to about 0.18.
    dst = np.repeat(np.arange(2708), np.diff(cora.indptr))
    assert (cora.labels[cora.indices] == cora.labels[dst]).mean() == pytest.approx(0.81, abs=0.005)


@pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")
def test_cora_equals_an_unrestricted_reading(shared_data):
    """Oracle: Python's own unpickler and SciPy, on the same files."""
    folder = shared_data / "planetoid"
    raw = {}
    for part in PARTS[:-1]:
        raw[part] = pickle.loads((folder / f"ind.cora.{part}").read_bytes(), encoding="latin1")
    test = np.loadtxt(folder / "ind.cora.test.index", int)
    cora = load("cora", shared_data, normalize_features=False)
    feat = cora.node_features["feat"]
    np.testing.assert_array_equal(feat[:1708], raw["allx"].toarray())
    np.testing.assert_array_equal(feat[test], raw["tx"].toarray())
    np.testing.assert_array_equal(cora.labels[test], raw["ty"].argmax(1))
    for node in (0, 1000, 2707):
        neighbours = cora.indices[cora.indptr[node] : cora.indptr[node + 1]]
        assert set(neighbours.tolist()) == set(raw["graph"][node])


def test_self_loops(shared_data):
    cora = load("cora", shared_data, self_loops=True)
    assert cora.num_edges == 10556 + 2708


def test_isolated_test_nodes(small_citeseer):
    root, features, labels, graph, test = small_citeseer
    data = load("citeseer", root, normalize_features=False)
    assert data.num_nodes == 610
    np.testing.assert_array_equal(data.test, test)
    for node in (603, 607):
        assert data.labels[node] == -1
        assert not data.node_features["feat"][node].any()
        assert data.indptr[node] == data.indptr[node + 1]
    np.testing.assert_array_equal(data.node_features["feat"][test], features[test])
    np.testing.assert_array_equal(data.labels[test], labels[test].argmax(1))
    expected = np.zeros((610, 610))
    for node, neighbours in graph.items():
        expected[node, neighbours] = expected[neighbours, node] = 1
    ours = sparse.csc_matrix((np.ones(data.num_edges), data.indices, data.indptr), (610, 610))
    np.testing.assert_array_equal(ours.toarray(), expected)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_today_are_read_too(small_citeseer, protocol):
    root = small_citeseer[0]
    expected = load("citeseer", root)
    (root / SUMS).unlink()
    for part in PARTS[:-1]:
        path = root / f"ind.citeseer.{part}"
        content = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps(content, protocol=protocol))
    again = load("citeseer", root)
    np.testing.assert_array_equal(again.indices, expected.indices)
    np.testing.assert_array_equal(again.node_features["feat"], expected.node_features["feat"])


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import pathlib

        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("part", PARTS[:-1])
def test_nothing_is_executed(small_citeseer, tmp_path, part):
    root = small_citeseer[0]
    trace = tmp_path / "executed"
    (root / f"ind.citeseer.{part}").write_bytes(pickle.dumps(Payload(trace)))
    if part == "x":  # never opened: allx has its content
        load("citeseer", root)
    else:
        with pytest.raises(DataFormatError, match=f"ind.citeseer.{part}.*not allowed"):
            load("citeseer", root)
    assert not trace.exists()


@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("x", "test.index")])
def test_every_truncation_is_noticed(cora_files, part):
    path = cora_files / f"ind.cora.{part}"
    content = path.read_bytes()
    for length in np.linspace(0, len(content) - 1, 12).astype(int):
        path.write_bytes(content[:length])
        with pytest.raises(DataFormatError, match=path.name):
            load("cora", cora_files.parent)


def test_damage_raises_nothing_else(small_citeseer):
    """Flipped bits are noticed or change numbers; no other error and no crash comes of them."""
    root = small_citeseer[0]
    generator = np.random.default_rng(0)
    noticed = 0
    for part in PARTS:
        path = root / f"ind.citeseer.{part}"
        content = path.read_bytes()
        for place in generator.integers(0, min(len(content), 600), 60):
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(generator.integers(8))
            path.write_bytes(damaged)
            (root / SUMS).unlink(missing_ok=True)
            try:
                load("citeseer", root)
            except DataFormatError as error:
                assert "ind.citeseer" in str(error)
                noticed += 1
        path.write_bytes(content)
    assert noticed > 100


@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_has_changed_since_it_was_first_read(small_citeseer, part):
    """Though it may be as good a pickle as it was."""
    root = small_citeseer[0]
    expected = load("citeseer", root)
    path = root / f"ind.citeseer.{part}"
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(
        DataFormatError, match=rf"ind\.citeseer\.{part}: it is not as it was.*{SUMS}"
    ):
        load("citeseer", root)
    path.write_bytes(content)
    assert load("citeseer", root).num_edges == expected.num_edges


@pytest.mark.parametrize("damage", ["", "[]", '{"files": {}}', "{", "not a file"])
def test_damaged_sums_are_kept_anew(small_citeseer, damage, caplog):
    root = small_citeseer[0]
    record = root / SUMS
    load("citeseer", root)
    before = record.read_bytes()
    if damage == "not a file":
        record.unlink()
        record.mkdir()
    else:
        record.write_text(damage)
    load("citeseer", root)
    assert f"{SUMS}: it is" in caplog.text and "made again" in caplog.text
    assert record.is_dir() or record.read_bytes() == before


def test_rows_that_do_not_match(small_citeseer):
    root = small_citeseer[0]
    path = root / "ind.citeseer.ty"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())[:-1]))
    with pytest.raises(DataFormatError, match=r"ty.*7 rows instead of 8"):
        load("citeseer", root)


def test_missing_files_are_named(cora_files):
    (cora_files / "ind.cora.ally").unlink()
    with pytest.raises(DataFormatError, match=r"no file ind\.cora\.ally in"):
        load("cora", cora_files.parent)


def test_offline(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("offline")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(DataFormatError, match=r"put the files ind\.pubmed\.\{x,tx,allx"):
        load("pubmed", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_download(shared_data, tmp_path, monkeypatch):
    archive = shutil.make_archive(str(tmp_path / "cora"), "zip", shared_data / "planetoid")
    monkeypatch.setattr(planetoid, "_DOWNLOAD_URL", f"file://{archive}")
    root = tmp_path / "root"
    for _ in range(2):
        assert load("cora", root).num_edges == 10556
