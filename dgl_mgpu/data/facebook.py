"""The Facebook page-page graph.

22,470 pages of four categories, joined where both like one another, each with a bag of words
taken from its description.  Rozemberczki, Allen and Sarkar, «Multi-scale attributed node
embedding», 2021.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
from scipy import sparse

from dgl_mgpu.data.checksums import unchanged_since_first_read
from dgl_mgpu.data.csc import unique_edges
from dgl_mgpu.data.dataset import Dataset, from_edge_list
from dgl_mgpu.data.files import corrupt_file, reading, require_files, require_trusted
from dgl_mgpu.utils import safe_json

_EDGES, _TARGET, _FEATURES = "facebook_edges.csv", "facebook_target.csv", "facebook.json"
_SUMS = "facebook.checksums.json"
#: Far above the 4,714 words there are: an id beyond it is damage, and would cost memory.
_MAX_WORDS = 1 << 16


def load(
    name: str,
    root: Path,
    *,
    num_features: int = 128,
    tfidf: bool = False,
    self_loops: bool = False,
    seed: int = 0,
) -> Dataset:
    """Load the Facebook page-page graph.

    Every edge exists once in each direction; the 179 self-loops of the source are left out.  The
    4,714 distinct words are projected to `num_features` dimensions by fixed random signs
    (Achlioptas, «Database-friendly random projections», 2003), which approximately keeps the
    distances of a dense matrix of 424 MB; then each row is scaled to a mean square of 1.

    Parameters
    ----------
    name : str
        ``"facebook"``.
    root : Path
        Folder with ``facebook_edges.csv``, ``facebook_target.csv`` and ``facebook.json``, or with
        a folder ``facebook_pages`` of them.
    num_features : int
        Dimensions of the features.
    tfidf : bool
        Weigh each word by ``ln(pages / pages with the word)``.
    self_loops : bool
        Give every node exactly one self-loop.
    seed : int
        Seed of the split, 60 % training, 20 % validation and 20 % test nodes.
    """
    folder = find_folder(name, Path(root)) or Path(root)
    if folder != Path(root):  # which the user chose
        require_trusted(folder)
    require_files(folder, [_EDGES, _TARGET, _FEATURES], "the Facebook page-page graph")
    files = [folder / name for name in (_EDGES, _TARGET, _FEATURES)]
    with unchanged_since_first_read(folder / _SUMS, files):
        labels, categories = _read_labels(folder / _TARGET)
        num_nodes = len(labels)
        src, dst = _read_edges(folder / _EDGES, num_nodes)
        words = _read_words(folder / _FEATURES, num_nodes)
    different = src != dst
    src, dst = src[different], dst[different]
    src, dst = unique_edges(np.concatenate([src, dst]), np.concatenate([dst, src]), num_nodes)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_nodes)
    train, valid, test = np.split(order, [num_nodes * 6 // 10, num_nodes * 8 // 10])
    return from_edge_list(
        src,
        dst,
        self_loops,
        name=name,
        num_classes=len(categories),
        labels=labels,
        train=np.sort(train),
        valid=np.sort(valid),
        test=np.sort(test),
        node_features={"feat": _project(words, num_features, tfidf)},
        description=f"Facebook page-page graph, split 60/20/20 by seed {seed}, "
        f"words projected to {num_features} dimensions{' with TF-IDF' * tfidf}",
    )


def find_folder(name: str, root: Path) -> Path | None:
    """Return the folder of the files, None if there is none."""
    folder = root / "facebook_pages"
    return folder if folder.is_dir() else root if (root / _EDGES).is_file() else None


def _read_labels(path: Path) -> tuple[np.ndarray, list[str]]:
    """Return the class of every node and the names of the classes, in alphabetical order."""
    with reading(path), path.open(newline="", encoding="utf-8") as file:
        category_of = {int(row["id"]): row["page_type"] for row in csv.DictReader(file)}
        categories = sorted(set(category_of.values()))
        labels = [categories.index(category_of[node]) for node in range(len(category_of))]
    return np.array(labels, np.int64), categories


def _read_edges(path: Path, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    with reading(path):
        edges = np.loadtxt(path, np.int64, delimiter=",", skiprows=1, ndmin=2)
        src, dst = edges.T
    if edges.size and (edges.min() < 0 or edges.max() >= num_nodes):
        raise corrupt_file(path, f"ids from {edges.min()} to {edges.max()} of {num_nodes} nodes")
    return src, dst


def _read_words(path: Path, num_nodes: int) -> sparse.csr_matrix:
    """Return which words each page has, one row per page and one column per word id."""
    with reading(path):
        words_of = safe_json.loads(path.read_text(encoding="utf-8"))
        words = [words_of[str(node)] for node in range(num_nodes)]
        indptr = np.cumsum([0] + [len(page) for page in words])
        indices = np.array([word for page in words for word in page], np.int64)
        if len(words_of) != num_nodes:
            raise ValueError(f"{len(words_of)} pages instead of {num_nodes}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < _MAX_WORDS:
            raise ValueError(f"word ids from {indices.min()} to {indices.max()}")
        return sparse.csr_matrix((np.ones(len(indices), np.float32), indices, indptr))


def _project(words: sparse.csr_matrix, num_features: int, tfidf: bool) -> np.ndarray:
    words.sum_duplicates()
    words.data[:] = 1  # a word that is listed twice counts once
    if tfidf:
        pages_with = np.maximum(np.bincount(words.indices, minlength=words.shape[1]), 1)
        words = words.multiply(np.log(words.shape[0] / pages_with)).tocsr()
    # Raw bits, not a distribution: their stream is the same in every version of NumPy.
    bits = np.random.PCG64(0).random_raw(words.shape[1] * num_features) >> np.uint64(63)
    signs = (bits.astype(np.float32) * 2 - 1).reshape(words.shape[1], num_features)
    features = np.asarray(words.astype(np.float32) @ signs)
    length = np.linalg.norm(features, axis=1, keepdims=True) / math.sqrt(num_features)
    return features / np.maximum(length, np.float32(1e-12))
