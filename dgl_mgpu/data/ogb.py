"""Node-classification data sets in the on-disk format of the Open Graph Benchmark (OGB).

Reads what ``ogb.nodeproppred.NodePropPredDataset`` reads, with the same result, but without its
pickled cache, its questions on standard input and its copies in memory.  On first use the edges are
sorted into CSC and what is compressed is unpacked, streaming, into .npy files beside the raw data;
from then on everything is memory-mapped, and all processes of a machine share one copy in the page
cache.

Hu et al., «Open Graph Benchmark: Datasets for Machine Learning on Graphs», 2020.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.csc import csc_from_chunks, csc_with_self_loops, in_edge_means, in_folder
from dgl_mgpu.data.dataset import Dataset, as_labels
from dgl_mgpu.data.files import (
    build_once,
    derived_once,
    download_zip,
    require_files,
    require_trusted,
    wrong_content,
)
from dgl_mgpu.data.npz import NpzReader
from dgl_mgpu.data.tables import read_table, unpack_table
from dgl_mgpu.errors import ConfigError, InvalidInputError, UnavailableError

#: To be changed when the content of the derived files changes.
_CACHE_VERSION = 1
_CHUNK_EDGES = 1 << 22


def load(
    name: str,
    root: Path,
    *,
    add_reverse: bool = False,
    self_loops: bool = False,
    mean_edge_features: bool = False,
    cache: Path | None = None,
) -> Dataset:
    """Load an official OGB data set, downloading it where it is not on disk.

    Parameters
    ----------
    name : str
        OGB's name, such as ``"ogbn-products"``.
    root : Path
        Folder that holds, or will hold, OGB's folder of the data set (``ogbn_products``).
    add_reverse, self_loops, mean_edge_features, cache
        See `load_folder`.
    """
    folder, meta = official_folder(name, root)
    return load_folder(
        folder, meta, add_reverse=add_reverse, self_loops=self_loops,
        mean_edge_features=mean_edge_features, cache=cache,
    )  # fmt: skip


def official_folder(name: str, root: Path) -> tuple[Path, dict[str, str]]:
    """Return the folder of an official data set, downloaded if need be, and its properties."""
    folder = root / name.replace("-", "_")
    meta = _official_meta(name)
    require_trusted(folder)
    if find_folder(name, root) is None:
        build_once(folder, lambda partial: _download(meta, folder, partial))
    return folder, meta


def find_folder(name: str, root: Path) -> Path | None:
    """Return the folder of an official data set's files, None if there is none."""
    folder = root / name.replace("-", "_")
    return folder if (folder / "raw").is_dir() else None


def _official_meta(name: str) -> dict[str, str]:
    """Return the properties of a data set from the table that the ogb package carries.

    The file is found without importing ogb, which would bring torch and scikit-learn with it.
    """
    package = importlib.util.find_spec("ogb")
    if package is None or not package.submodule_search_locations:
        raise UnavailableError(
            f"load {name}", "the package ogb is not installed", "pip install ogb"
        )
    table = Path(package.submodule_search_locations[0]) / "nodeproppred" / "master.csv"
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    column = rows[0].index(name)
    return {row[0]: row[column] for row in rows[1:]} | {"name": name}


def _download(meta: Mapping[str, str], folder: Path, partial: Path) -> None:
    top = meta["download_name"]
    instead = (
        f"on a machine with a network, download it, unpack it, and put the content of its folder "
        f"{top!r} (raw, split, …) into {folder}"
    )
    download_zip(meta["url"], partial, instead)
    for path in (partial / top).iterdir():
        path.rename(partial / path.name)
    (partial / top).rmdir()


def load_folder(
    folder: Path,
    meta: Mapping[str, str],
    *,
    add_reverse: bool = False,
    self_loops: bool = False,
    mean_edge_features: bool = False,
    cache: Path | None = None,
) -> Dataset:
    """Load a data set from a folder in OGB's format, with ``raw`` and ``split``.

    ``node_feat`` becomes the feature ``"feat"``, ``node_year`` ``"year"``, and so on.

    Parameters
    ----------
    meta : mapping
        OGB's properties of the data set (the columns of its ``master.csv``), and ``name``.
    add_reverse : bool
        Add the reverse of every edge (ogbn-arxiv and ogbn-papers100M are directed).  OGB adds
        them to ogbn-products by itself.
    self_loops : bool
        Give every node exactly one self-loop.  Not for data sets with edge features.
    mean_edge_features : bool
        Give every node the mean of its in-edges' features as ``"feat"``, before there are
        self-loops, and drop those of the edges (ogbn-proteins has none of nodes).
    cache : Path, optional
        Folder for the derived files.  None: ``derived`` in `folder`.

    Raises
    ------
    DataFormatError
        A file is missing, truncated or corrupt, or the files contradict one another.
    ConfigError
        Self-loops for edges with features, or means of features that do not exist.
    """
    folder = Path(folder)
    binary = meta["binary"] == "True"
    both_directions = add_reverse or meta["add_inverse_edge"] == "True"
    files = _raw_files(folder, meta)
    key = digest(files)
    cache = folder / "derived" if cache is None else Path(cache) / folder.name
    require_trusted(cache)
    unpack = _unpack_binary if binary else _unpack_csv
    arrays_folder = derived_once(
        cache / f"arrays-{key}",
        lambda partial: unpack(folder, meta, partial),
        [folder / "raw" / "data.npz"] if binary else [],  # arrays of which are mapped
    )
    mapped: dict[str, np.ndarray] = {}
    if binary:
        raw = NpzReader(folder / "raw" / "data.npz")
        mapped = {name: raw.map(name) for name, member in raw.members.items() if member.is_mappable}
    arrays = open_arrays(arrays_folder) | mapped

    name = meta["name"]
    if mean_edge_features:
        _require_edges_alone(name, arrays)
    variant = "both" * both_directions + "loops" * self_loops + "means" * mean_edge_features
    used = dict(arrays)
    if mean_edge_features:
        del used["edge_feat"]  # the means lie beside the CSC

    def sort_edges(partial: Path) -> None:
        if self_loops and _has_edge_features(used):
            raise ConfigError(
                asked=f"add self-loops to {name}",
                found="its edges have features, and the new loops would have none",
                fix="leave self_loops off",
            )
        with content_of(folder / "raw" / "data.npz" if binary else folder):
            _write_csc(arrays, both_directions, self_loops, mean_edge_features, partial)
            _assemble(meta, used, open_arrays(partial), both_directions, checked=False)

    csc_folder = derived_once(cache / f"csc-{variant or 'plain'}-{key}", sort_edges)
    return _assemble(meta, used, open_arrays(csc_folder), both_directions, checked=True)


def _require_edges_alone(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ConfigError unless edges have one feature and nodes none."""
    edge_features = sorted(feature for kind, feature, _ in _features(arrays) if kind == "edge")
    problem = ""
    if not edge_features:
        problem = "it has no edge features"
    elif edge_features != ["feat"]:
        problem = f"it has the edge features {', '.join(edge_features)}"
    elif "node_feat" in arrays:
        problem = "its nodes have features already, which the means would replace"
    if problem:
        action = f"give nodes of {name} the means of their edges' features"
        raise ConfigError(action, problem, "set mean_edge_features=false")


def _assemble(
    meta: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    csc: Mapping[str, np.ndarray],
    both_directions: bool,
    checked: bool,
) -> Dataset:
    features: dict[str, dict[str, np.ndarray]] = {"node": {}, "edge": {}}
    for kind, feature, array in _features({**arrays, **csc}):
        if kind == "edge" and both_directions:
            array = np.repeat(array, 2, axis=0)  # an edge and its reverse share their features
        features[kind][feature] = array
    tasks = int(meta["num tasks"])
    return Dataset(
        name=meta["name"],
        num_nodes=int(arrays["num_nodes_list"][0]),
        num_classes=int(meta["num classes"]) if tasks == 1 else tasks,
        indptr=csc["indptr"],
        indices=csc["indices"],
        eids=csc.get("eids"),
        labels=arrays["labels"],
        **{part: arrays[part] for part in SPLITS},
        node_features=features["node"],
        edge_features=features["edge"],
        description=meta.get("description", f"{meta['name']} of the Open Graph Benchmark"),
        checked=checked,
    )


def _features(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield ("node" or "edge", name, array) of every feature."""
    for name, array in arrays.items():
        kind, _, feature = name.partition("_")
        if kind in ("node", "edge") and name != "edge_index":
            yield kind, feature, array


def _has_edge_features(arrays: Mapping[str, np.ndarray]) -> bool:
    return any(kind == "edge" for kind, _, _ in _features(arrays))


def open_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Map the derived files of a folder, by name."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Turn errors of arrays into errors of the file that they came from."""
    try:
        yield
    except InvalidInputError as error:
        raise wrong_content(path, error.found) from error


def _raw_files(folder: Path, meta: Mapping[str, str]) -> list[Path]:
    """Return the files that the data set needs, raise DataFormatError if one is missing."""
    if meta["binary"] == "True":
        names = ["raw/data.npz", "raw/node-label.npz"]
    else:
        tables = ["edge", "num-node-list", "num-edge-list", "node-label"]
        tables += ["node-feat"] * (meta["has_node_attr"] == "True")
        tables += ["edge-feat"] * (meta["has_edge_attr"] == "True")
        tables += additional(meta, "node") + additional(meta, "edge")
        names = [f"raw/{table}.csv.gz" for table in tables]
    names += [f"split/{meta['split']}/{part}.csv.gz" for part in SPLITS]
    require_files(folder, names, meta["name"])
    return [folder / name for name in names]


def additional(meta: Mapping[str, str], kind: str) -> list[str]:
    """Return the names of further features of nodes or edges."""
    names = meta[f"additional {kind} files"]
    return [] if names == "None" else names.split(",")


def digest(files: list[Path]) -> str:
    """Return a key that changes when one of the files does."""
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([_CACHE_VERSION, state]).encode()).hexdigest()[:12]


# Unpacking: what cannot be mapped becomes a .npy file in `to`.


def _unpack_binary(folder: Path, meta: Mapping[str, str], to: Path) -> None:
    data, labels = (NpzReader(folder / "raw" / name) for name in ("data.npz", "node-label.npz"))
    data.verify()
    for name, member in data.members.items():
        if not member.is_mappable:
            data.unpack(name, to / f"{name}.npy")
    num_nodes, num_edges = (
        single(data.path, data.read(f"num_{kind}_list")) for kind in ("nodes", "edges")
    )
    edge_index = data.members.get("edge_index")
    if edge_index is None or edge_index.shape != (2, num_edges) or edge_index.fortran_order:
        content = "no edge_index" if edge_index is None else f"an edge_index {edge_index.shape}"
        problem = f"it holds {content} for {num_edges} edges in row-major order"
        raise wrong_content(data.path, problem)
    save_labels(labels.path, labels.read("node_label"), num_nodes, to)
    save_splits(folder / "split" / meta["split"], to)


def _unpack_csv(folder: Path, meta: Mapping[str, str], to: Path) -> None:
    raw = folder / "raw"
    rows = {}
    for kind in ("node", "edge"):
        path = raw / f"num-{kind}-list.csv.gz"
        rows[kind] = single(path, read_table(path))
        np.save(to / f"num_{kind}s_list.npy", np.array([rows[kind]]))
    edges = raw / "edge.csv.gz"
    unpack_table(edges, to / "edge_index.npy", rows["edge"], np.int64, transpose=True)
    for kind, count in rows.items():
        if meta[f"has_{kind}_attr"] == "True":
            unpack_table(raw / f"{kind}-feat.csv.gz", to / f"{kind}_feat.npy", count, np.float32)
        for name in additional(meta, kind):
            unpack_table(raw / f"{name}.csv.gz", to / f"{name}.npy", count)
    path = raw / "node-label.csv.gz"
    save_labels(path, read_table(path), rows["node"], to)
    save_splits(folder / "split" / meta["split"], to)


def save_labels(path: Path, raw: np.ndarray, num_nodes: int, to: Path) -> None:
    """Write the labels that `path` holds to ``labels.npy``."""
    if raw.shape[:1] != (num_nodes,):
        count = f"{len(raw)}" if raw.ndim else "one number, and no"
        raise wrong_content(path, f"it holds {count} labels for {num_nodes} nodes")
    with content_of(path):
        np.save(to / "labels.npy", as_labels(raw))


def save_splits(folder: Path, to: Path) -> None:
    """Write the node ids of each part of a split's folder to a file of its name."""
    for part in SPLITS:
        ids = read_table(folder / f"{part}.csv.gz", np.int64)
        np.save(to / f"{part}.npy", ids.reshape(-1))


def single(path: Path, counts: np.ndarray) -> int:
    """Return the one number in `counts`: these data sets are one graph each."""
    if counts.size != 1:
        raise wrong_content(path, f"it holds {counts.size} graphs instead of one")
    return int(counts.reshape(-1)[0])


def _write_csc(
    arrays: Mapping[str, np.ndarray],
    both_directions: bool,
    self_loops: bool,
    mean_edge_features: bool,
    to: Path,
) -> None:
    edge_index = arrays["edge_index"]
    num_nodes = int(arrays["num_nodes_list"][0])

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, edge_index.shape[1], _CHUNK_EDGES):
            src, dst = edge_index[:, start : start + _CHUNK_EDGES]
            yield src, dst

    allocate = in_folder(to)
    csc = csc_from_chunks(
        chunks, num_nodes, both_directions=both_directions, allocate=allocate,
        with_eids=_has_edge_features(arrays),
    )  # fmt: skip
    indptr = csc.indptr
    if mean_edge_features:
        assert csc.eids is not None  # there are edge features
        rows = arrays["edge_feat"]
        means = in_edge_means(indptr, csc.eids, rows, both_directions=both_directions)
        np.save(to / "node_feat.npy", means)
        (to / "eids.npy").unlink()
    if self_loops:
        # Unlinked, not overwritten: its map stays readable.
        (to / "indices.npy").unlink()
        indptr, _ = csc_with_self_loops(indptr, csc.indices, allocate)
    np.save(to / "indptr.npy", indptr)
