"""Cora, CiteSeer and PubMed from the raw files of Planetoid.

The files are pickles of Python 2, of NumPy arrays, SciPy matrices and a dictionary.  Unpickling
can run any code, so the unpickler here refuses all constructors but the few that these files need.

Yang, Cohen and Salakhutdinov, «Revisiting Semi-Supervised Learning with Graph Embeddings», 2016.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from dgl_mgpu.data.checks import UNLABELLED
from dgl_mgpu.data.checksums import unchanged_since_first_read
from dgl_mgpu.data.csc import unique_edges
from dgl_mgpu.data.dataset import Dataset, from_edge_list
from dgl_mgpu.data.files import (
    build_once,
    corrupt_file,
    download_zip,
    reading,
    require_files,
    require_trusted,
)
from dgl_mgpu.utils.safe_pickle import ARRAYS, with_arrays

_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
#: DGL's archives, and the name that the files have in them.
_DOWNLOADS = {"cora": "cora_v2", "citeseer": "citeseer", "pubmed": "pubmed"}
_DOWNLOAD_URL = "https://data.dgl.ai/dataset/{}.zip"
#: Values of a sparse matrix, zeros included, for each byte of its file: ten times CiteSeer's.
_DENSEST = 100
#: The validation nodes follow the training nodes.
_NUM_VALID = 500


def load(
    name: str, root: Path, *, normalize_features: bool = True, self_loops: bool = False
) -> Dataset:
    """Load a Planetoid data set with its standard split.

    Every edge exists once in each direction.  The 15 isolated test nodes that CiteSeer's files
    leave out have no label, zero features, and are in no part of the split.

    Parameters
    ----------
    name : str
        ``"cora"``, ``"citeseer"`` or ``"pubmed"``.
    root : Path
        Folder with the files ``ind.<name>.*``, or with a folder ``planetoid`` of them.  Where
        there are none, DGL's archive is downloaded into ``planetoid_<name>``.
    normalize_features : bool
        Let every node's features sum to 1, as Kipf and Welling do.
    self_loops : bool
        Give every node exactly one self-loop.
    """
    folder, prefix = _find(name, Path(root))
    paths = {part: folder / f"{prefix}.{part}" for part in _PARTS}
    with unchanged_since_first_read(folder / f"{prefix}.checksums.json", paths.values()):
        features, labels, test = _nodes(paths)
        num_train = len(_matrix(paths["y"]))
        num_nodes = len(labels)
        if num_train + _NUM_VALID > num_nodes:
            raise corrupt_file(paths["y"], f"{num_train} training labels for {num_nodes} nodes")
        src, dst = _edges(paths["graph"], num_nodes)
    if normalize_features:
        features /= np.maximum(features.sum(axis=1, keepdims=True), 1e-12)
    return from_edge_list(
        src,
        dst,
        self_loops,
        name=name,
        num_classes=int(labels.max()) + 1,
        labels=labels,
        train=np.arange(num_train),
        valid=np.arange(num_train, num_train + _NUM_VALID),
        test=np.sort(test),
        node_features={"feat": features},
        description=f"{name} (Planetoid), standard split, both directions of every edge",
    )


def _find(name: str, root: Path) -> tuple[Path, str]:
    """Return the folder of the files, downloaded if need be, and the beginning of their names."""
    folders = _folders(name, root)
    downloaded = folders[-1]
    if _most_complete(name, folders) is None:
        url = _DOWNLOAD_URL.format(_DOWNLOADS[name])
        instead = f"put the files ind.{name}.{{{','.join(_PARTS)}}} into {folders[0]}"
        build_once(downloaded, lambda partial: download_zip(url, partial, instead))
    folder, prefix = _most_complete(name, folders) or (downloaded, f"ind.{_DOWNLOADS[name]}")
    if folder != root:  # which the user chose
        require_trusted(folder)
    require_files(folder, [f"{prefix}.{part}" for part in _PARTS], name)
    return folder, prefix


def _folders(name: str, root: Path) -> tuple[Path, ...]:
    """Possible folders of the files; the last one is for downloads."""
    return root / "planetoid", root, root / f"planetoid_{name}"


def find_folder(name: str, root: Path) -> Path | None:
    """Return the folder of the files, None if there is none."""
    best = _most_complete(name, _folders(name, root))
    return best and best[0]


def _most_complete(name: str, folders: tuple[Path, ...]) -> tuple[Path, str] | None:
    """Return the folder and prefix of which most files exist, None if none does."""

    def count(candidate: tuple[Path, str]) -> int:
        folder, prefix = candidate
        return sum((folder / f"{prefix}.{part}").is_file() for part in _PARTS)

    candidates = [
        (folder, f"ind.{stem}") for folder in folders for stem in (name, _DOWNLOADS[name])
    ]
    best = max(candidates, key=count)
    return best if count(best) else None


def _nodes(paths: dict[str, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features float32 [N, F], labels int64 [N] and the test nodes int64."""
    known_features, test_features = _matrix(paths["allx"]), _matrix(paths["tx"])
    known_labels, test_labels = _matrix(paths["ally"]), _matrix(paths["ty"])
    with reading(paths["test.index"]):
        test = np.array(paths["test.index"].read_text().split(), np.int64)
    num_known = len(known_features)
    for part, rows, expected in (
        ("ally", len(known_labels), num_known),
        ("ty", len(test_labels), len(test_features)),
        ("test.index", len(test), len(test_features)),
    ):
        if rows != expected:
            raise corrupt_file(paths[part], f"{rows} rows instead of {expected}")
    for part, columns, expected in (
        ("tx", test_features.shape[1], known_features.shape[1]),
        ("ty", test_labels.shape[1], known_labels.shape[1]),
    ):
        if columns != expected:
            raise corrupt_file(paths[part], f"{columns} columns instead of {expected}")
    # The lines of tx and ty belong to the nodes that test.index names, in that order.  Numbers
    # that are missing between them are isolated nodes.
    if len(np.unique(test)) != len(test) or test.min(initial=num_known) < num_known:
        raise corrupt_file(paths["test.index"], "nodes that are named twice or are no test nodes")
    num_nodes = int(test.max(initial=num_known - 1)) + 1
    if num_nodes > num_known + 2 * len(test):
        raise corrupt_file(paths["test.index"], f"node {num_nodes - 1}, far beyond the others")
    features = np.zeros((num_nodes, known_features.shape[1]), np.float32)
    features[:num_known], features[test] = known_features, test_features
    labels = np.full(num_nodes, UNLABELLED, np.int64)
    labels[:num_known], labels[test] = known_labels.argmax(1), test_labels.argmax(1)
    return features, labels, test


def _edges(path: Path, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the undirected graph as an edge list with each direction once."""
    graph = _read_pickle(path)
    if not isinstance(graph, dict):
        raise corrupt_file(path, f"a {type(graph).__name__} instead of a dictionary of neighbours")
    with reading(path):
        degrees = [len(neighbours) for neighbours in graph.values()]
        nodes = np.repeat(np.array(list(graph), np.int64), degrees)
        neighbours = np.array([node for nodes in graph.values() for node in nodes], np.int64)
    ids = np.concatenate([nodes, neighbours])
    if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
        raise corrupt_file(path, f"node ids from {ids.min()} to {ids.max()} of {num_nodes} nodes")
    return unique_edges(ids, np.concatenate([neighbours, nodes]), num_nodes)


class _SparseParts:
    """Takes the state of a pickled SciPy matrix, whatever version of SciPy wrote it."""


_CONSTRUCTORS: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): collections.defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
    # The module has been renamed.
    ("scipy.sparse.csr", "csr_matrix"): _SparseParts,
    ("scipy.sparse._csr", "csr_matrix"): _SparseParts,
    **ARRAYS,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CONSTRUCTORS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return _CONSTRUCTORS[module, name]


def _read_pickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _RestrictedUnpickler(file, encoding="latin1").load()
    # Damaged bytes may raise anything; no other code runs here.
    except Exception as error:
        raise corrupt_file(path, f"{type(error).__name__}: {error}") from error


def _matrix(path: Path) -> np.ndarray:
    """Return the pickled matrix, sparse or dense, as a dense one of floats or whole numbers."""
    content = with_arrays(_read_pickle(path))
    if isinstance(content, _SparseParts):
        state = content.__dict__
        with reading(path):
            parts = [np.asarray(state[part]) for part in ("data", "indices", "indptr")]
            matrix = sparse.csr_matrix(tuple(parts), shape=state["_shape"])
            matrix.check_format(full_check=True)
            rows, columns = matrix.shape
            if rows * columns > _DENSEST * path.stat().st_size:
                raise ValueError(f"{rows} x {columns} values in {path.stat().st_size} bytes")
            content = matrix.toarray()
    if not isinstance(content, np.ndarray) or content.ndim != 2 or content.dtype.kind not in "iuf":
        raise corrupt_file(path, "no numeric matrix")
    return content
