"""Heterogeneous node-classification data sets in OGB's on-disk format: ogbn-mag.

As `ogb` does for graphs of one type: what ``ogb.nodeproppred.NodePropPredDataset`` reads, with the
same result, unpacked once into .npy files beside the raw data and memory-mapped from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dgl_mgpu.data import ogb
from dgl_mgpu.data.checks import SPLITS
from dgl_mgpu.data.csc import CSC
from dgl_mgpu.data.files import (
    FIX,
    derived_once,
    reading,
    require_files,
    require_trusted,
    wrong_content,
)
from dgl_mgpu.data.hetero import CanonicalEtype, HeteroDataset, relation, with_reverse
from dgl_mgpu.data.tables import read_table, read_texts, unpack_table
from dgl_mgpu.errors import DataFormatError


def load(
    name: str, root: Path, *, add_reverse: bool = True, cache: Path | None = None
) -> HeteroDataset:
    """Load an official heterogeneous OGB data set, downloading it where it is not on disk.

    Parameters
    ----------
    name : str
        ``"ogbn-mag"``.
    root : Path
        Folder that holds, or will hold, OGB's folder of the data set (``ogbn_mag``).
    add_reverse, cache
        See `load_folder`.
    """
    folder, meta = ogb.official_folder(name, root)
    return load_folder(folder, meta, add_reverse=add_reverse, cache=cache)


def load_folder(
    folder: Path, meta: Mapping[str, str], *, add_reverse: bool = True, cache: Path | None = None
) -> HeteroDataset:
    """Load a data set from a folder in OGB's format for several types, with ``raw`` and ``split``.

    ``node-feat`` becomes the feature ``"feat"``, ``node_year`` ``"year"``, and so on, of the types
    that have them.

    Parameters
    ----------
    meta : mapping
        OGB's properties of the data set (the columns of its ``master.csv``), and ``name``.
    add_reverse : bool
        Add the reverse of every relation, under its name with ``rev_`` before it, so that types
        that are only sources have in-edges, too.
    cache : Path, optional
        Folder for the derived files.  None: ``derived`` in `folder`.

    Raises
    ------
    DataFormatError
        A file is missing, truncated or corrupt, or the files contradict one another.
    """
    folder = Path(folder)
    raw = _Raw(folder, meta)
    files = raw.files()
    require_files(folder, files, meta["name"])
    key = ogb.digest([folder / name for name in files])
    cache = folder / "derived" if cache is None else Path(cache) / folder.name
    require_trusted(cache)
    variant = "both" if add_reverse else "plain"

    def unpack(partial: Path) -> None:
        with ogb.content_of(folder):
            raw.unpack(partial, add_reverse)
            raw.assemble(ogb.open_arrays(partial), checked=False)

    arrays_folder = derived_once(cache / f"hetero-{variant}-{key}", unpack)
    return raw.assemble(ogb.open_arrays(arrays_folder), checked=True)


def _by_ntype(path: Path) -> dict[str, str]:
    """The one row of a table with a header of node types, by these."""
    rows = read_texts(path)
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise wrong_content(path, f"it has {len(rows)} rows instead of a header and one row")
    return dict(zip(*rows, strict=True))


def _target(path: Path) -> str:
    """The one node type that a table marks as True."""
    marked = [ntype for ntype, has in _by_ntype(path).items() if has == "True"]
    if len(marked) != 1:
        raise wrong_content(path, f"it names the node types {marked} instead of one")
    return marked[0]


class _Raw:
    """The files of a data set, and its types."""

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        self._folder, self._meta = folder, meta
        #: Files that name the types.
        counts, etypes, has_label, has_split = self._overviews = (
            "raw/num-node-dict.csv.gz",
            "raw/triplet-type-list.csv.gz",
            "raw/nodetype-has-label.csv.gz",
            f"split/{meta['split']}/nodetype-has-split.csv.gz",
        )
        require_files(folder, list(self._overviews), meta["name"])
        with reading(folder / counts, FIX):
            nodes = {ntype: int(count) for ntype, count in _by_ntype(folder / counts).items()}
        self._num_nodes = dict(sorted(nodes.items()))
        self._etypes: list[CanonicalEtype] = []
        for row in sorted(read_texts(folder / etypes)):
            if len(row) != 3 or not {row[0], row[2]} <= nodes.keys():
                raise wrong_content(folder / etypes, f"{row} does not name the types of an edge")
            self._etypes.append((row[0], row[1], row[2]))
        labelled, self._target = _target(folder / has_label), _target(folder / has_split)
        if labelled != self._target or labelled not in nodes:
            raise DataFormatError(
                f"read {meta['name']}",
                f"the labels are of {labelled}, but the split is of {self._target}",
                FIX,
            )
        self._label = f"raw/node-label/{labelled}/node-label.csv.gz"
        self._split = f"split/{meta['split']}/{labelled}"

    def _features(self) -> dict[tuple[str, str], str]:
        """Files of node features, by node type and name; OGB lists none of them."""
        named = {"feat": "node-feat"} if self._meta["has_node_attr"] == "True" else {}
        named |= {name.removeprefix("node_"): name for name in ogb.additional(self._meta, "node")}
        files = {
            (ntype, feature): f"raw/node-feat/{ntype}/{name}.csv.gz"
            for ntype in self._num_nodes
            for feature, name in named.items()
        }
        return {key: name for key, name in files.items() if (self._folder / name).is_file()}

    def _relation(self, etype: CanonicalEtype, name: str) -> str:
        return f"raw/relations/{'___'.join(etype)}/{name}.csv.gz"

    def files(self) -> list[str]:
        """All files of the data set."""
        names = [*self._overviews, self._label]
        names += [f"{self._split}/{part}.csv.gz" for part in SPLITS]
        for etype in self._etypes:
            names += [self._relation(etype, name) for name in ("edge", "num-edge-list")]
        return names + list(self._features().values())

    def unpack(self, to: Path, add_reverse: bool) -> None:
        """Write the content of all files as .npy files."""
        edges = {}
        for etype in self._etypes:
            src, dst = self._ends(etype)
            edges[etype] = relation(src, dst, self._num_nodes[etype[0]], self._num_nodes[etype[2]])
        if add_reverse:
            edges = with_reverse(edges, self._num_nodes)
        for etype, csc in edges.items():
            for name, array in (("indptr", csc.indptr), ("indices", csc.indices)):
                np.save(to / f"{_stem(name, *etype)}.npy", array)
        for (ntype, feature), name in self._features().items():
            path = to / f"{_stem('node', ntype, feature)}.npy"
            dtype = np.float32 if feature == "feat" else None
            unpack_table(self._folder / name, path, self._num_nodes[ntype], dtype)
        path = self._folder / self._label
        ogb.save_labels(path, read_table(path), self._num_nodes[self._target], to)
        ogb.save_splits(self._folder / self._split, to)

    def _ends(self, etype: CanonicalEtype) -> np.ndarray:
        """Sources and destinations of a relation's edges, int64 [2, num_edges]."""
        path, count = (
            self._folder / self._relation(etype, name) for name in ("edge", "num-edge-list")
        )
        ends = read_table(path, np.int64)
        num_edges = ogb.single(count, read_table(count))
        if ends.shape != (num_edges, 2):
            problem = f"it holds a table of shape {ends.shape} for {num_edges} edges"
            raise wrong_content(path, problem)
        return ends.T

    def assemble(self, arrays: Mapping[str, np.ndarray], checked: bool) -> HeteroDataset:
        """The data set of the arrays that `unpack` wrote."""
        edges: dict[CanonicalEtype, CSC] = {}
        features: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            match name.split("___"):
                case "indptr", src, etype, dst:
                    indices = arrays[_stem("indices", src, etype, dst)]
                    edges[src, etype, dst] = CSC(array, indices, None)
                case "node", ntype, feature:
                    features.setdefault(ntype, {})[feature] = array
        return HeteroDataset(
            name=self._meta["name"],
            num_nodes=self._num_nodes,
            edges=dict(sorted(edges.items())),
            target=self._target,
            num_classes=int(self._meta["num classes"]),
            labels=arrays["labels"],
            **{part: arrays[part] for part in SPLITS},
            node_features=features,
            description=f"{self._meta['name']} of the Open Graph Benchmark",
            checked=checked,
        )


def _stem(*parts: str) -> str:
    """The stem of a derived file: its content and types."""
    return "___".join(parts)
