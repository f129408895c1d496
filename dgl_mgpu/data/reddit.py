"""The Reddit post graph, from the raw files of DGL's ``RedditDataset``.

232,965 posts of 41 communities, joined where one person commented on both, with the split by
days.  Hamilton, Ying and Leskovec, «Inductive Representation Learning on Large Graphs», 2017.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from scipy import sparse

from dgl_mgpu.data.dataset import Dataset, as_labels, from_edge_list
from dgl_mgpu.data.files import (
    build_once,
    download_zip,
    reading,
    require_files,
    require_trusted,
)
from dgl_mgpu.errors import DataFormatError

_GRAPH, _DATA = "reddit_graph.npz", "reddit_data.npz"
_URL = "https://data.dgl.ai/dataset/reddit.zip"
#: The folder that DGL unpacks this archive into.
_DGLS_FOLDER = f"reddit_{hashlib.sha1(_URL.encode()).hexdigest()[:8]}"
#: Values of ``node_types`` for nodes of training, validation and test.
_PARTS = 1, 2, 3


def load(name: str, root: Path, *, self_loops: bool = False) -> Dataset:
    """Load the Reddit post graph.

    Parameters
    ----------
    name : str
        ``"reddit"``.
    root : Path
        Folder with a folder ``reddit`` of ``reddit_graph.npz`` and ``reddit_data.npz``, or with
        the one that DGL has unpacked them into.  Where there is none, DGL's archive is downloaded.
    self_loops : bool
        Give every node exactly one self-loop.
    """
    folder = find_folder(name, Path(root))
    if folder is None:
        folder = Path(root) / "reddit"
        instead = f"put {_GRAPH} and {_DATA} into {folder}"
        build_once(folder, lambda partial: download_zip(_URL, partial, instead))
    require_trusted(folder)
    require_files(folder, [_GRAPH, _DATA], "Reddit")
    with reading(folder / _GRAPH):
        graph = sparse.load_npz(folder / _GRAPH).tocoo()
    with reading(folder / _DATA), np.load(folder / _DATA) as arrays:
        features, labels, part_of = (arrays[array] for array in ("feature", "label", "node_types"))
        labels = as_labels(labels)
        num_nodes = len(labels)
    if graph.shape != (num_nodes, num_nodes) or part_of.shape != (num_nodes,):
        raise DataFormatError(
            f"read {folder / _GRAPH} and {_DATA}",
            f"the numbers of nodes differ: {num_nodes} labels, {part_of.size} parts of the split "
            f"and a graph of shape {graph.shape}",
            "fetch the files again",
        )
    train, valid, test = (np.flatnonzero(part_of == number) for number in _PARTS)
    with reading(folder / _DATA):
        return from_edge_list(
            graph.row,
            graph.col,
            self_loops,
            name=name,
            num_classes=int(labels.max(initial=0)) + 1,
            labels=labels,
            train=train,
            valid=valid,
            test=test,
            node_features={"feat": features.astype(np.float32)},
            description="Reddit post graph with the split by days",
        )


def find_folder(name: str, root: Path) -> Path | None:
    """Return the folder of the files, None if there is none."""
    folders = (root / _DGLS_FOLDER, root / "reddit")
    return next((folder for folder in folders if folder.is_dir()), None)
