"""Generated graphs of any size, written in OGB's on-disk format and read back through its loader.

The model is described in `blockmodel`.  Everything is streamed: memory holds about 50 bytes per
node and a chunk of edges or features.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import numbers
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgl_mgpu.data import blockmodel, ogb
from dgl_mgpu.data.checks import SPLITS, require_options, require_ranges
from dgl_mgpu.data.dataset import Dataset
from dgl_mgpu.data.files import derived_once, require_space
from dgl_mgpu.data.npz import NpzWriter
from dgl_mgpu.data.published import PUBLISHED
from dgl_mgpu.errors import ConfigError, DataFormatError
from dgl_mgpu.utils import safe_json

log = logging.getLogger(__name__)

#: Part of the folders' names; to be changed when the same parameters give another graph.
_FORMAT_VERSION = 1
_CHUNK_EDGES = 1 << 22
_CHUNK_ROWS = 1 << 15
_SPLIT_TYPE = "random"
_META_FILE = "meta.json"


@dataclass(frozen=True)
class GraphSpec:
    """Parameters of a generated graph; see `blockmodel` for the meaning.

    Attributes
    ----------
    num_nodes, num_edges, num_features, num_classes : int
        Size.  Edges are directed.
    exponent : float
        Exponent of the tail of the degree distribution function, above 1.
    homophily : float
        Probability that an edge joins nodes of one class.
    signal : float
        Distance of the class centroids from the origin over ``sqrt(2 ln num_classes)``, where
        the noise has unit variance per dimension.
    train, valid, test : float
        Fractions of the nodes in the split; their sum may be below 1.
    seed : int
        Seed of everything random.
    shape : str
        Name of the real data set whose size this is, empty if none.
    scale : float
        What its size was multiplied with.
    num_labels : int
        Labels of which a node may have several, each that of half the classes; 0: its class alone.

    Raises
    ------
    ConfigError
        A value is out of its range.
    """

    num_nodes: int = 20_000
    num_edges: int = 200_000
    num_features: int = 64
    num_classes: int = 10
    exponent: float = 1.5
    homophily: float = 0.8
    signal: float = 0.8
    train: float = 0.6
    valid: float = 0.2
    test: float = 0.2
    seed: int = 0
    shape: str = ""
    scale: float = 1.0
    num_labels: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "num_nodes": (2, 2**40), "num_edges": (1, 2**40), "num_classes": (2, self.num_nodes),
            "num_features": (1, 2**20), "num_labels": (0, 2**16), "exponent": (1.01, 100),
            "homophily": (0, 1), "signal": (0, 1000), "train": (0, 1), "valid": (0, 1),
            "test": (0, 1), "seed": (0, 2**63 - 1),
        }  # fmt: skip
        require_ranges(self, "a graph", ranges)
        if self.train + self.valid + self.test > 1 + 1e-9:
            raise ConfigError(
                asked=f"split nodes into {self.train} + {self.valid} + {self.test}",
                found="the sum is above 1",
                fix="choose fractions that sum to at most 1",
            )

    @property
    def name(self) -> str:
        """Name that marks the graph as generated, and its model."""
        scale = "" if self.scale == 1 else f" (scale {self.scale:g})"
        return f"generated-{self.shape}{scale}" if self.shape else "generated"

    @property
    def description(self) -> str:
        """One sentence for logs and tables."""
        after = f" after the size of {self.shape} times {self.scale:g}" if self.shape else ""
        labels = f" of {self.num_labels} labels" if self.num_labels else ""
        return (
            f"generated, not real data{after}: {self.num_nodes:,} nodes, {self.num_edges:,} edges, "
            f"power-law degrees (exponent {self.exponent:g}), {self.num_classes} planted "
            f"classes{labels}, "
            f"homophily {self.homophily:g}, signal {self.signal:g}, seed {self.seed}"
        )

    def scaled(self, scale: float) -> GraphSpec:
        """Return the same graph with `scale` times the nodes and edges."""
        if not isinstance(scale, numbers.Real) or not 0 < scale < float("inf"):
            raise ConfigError(
                asked=f"generate a graph with scale={scale!r}",
                found="scale takes a positive number",
                fix="choose one, such as 0.01 (data.options.scale=0.01 on a command line)",
            )
        return dataclasses.replace(
            self,
            num_nodes=max(self.num_classes, round(self.num_nodes * scale)),
            num_edges=max(1, round(self.num_edges * scale)),
            scale=scale,
        )


def _published(name: str) -> tuple[int, int, int, int]:
    sizes = PUBLISHED[name]
    return sizes.nodes, sizes.edges, sizes.width or sizes.edge_width, sizes.classes


_RARELY_LABELLED = (0.01, 0.001, 0.002)
#: (nodes, edges, features, classes) and fractions of the split of graphs that papers measure on.
#: In reality the last three have no labels, and proteins' classes are 112 labels, its features
#: those of edges.
_SIZES = {
    "reddit": (_published("reddit"), (0.66, 0.10, 0.24)),
    "products": (_published("ogbn-products"), (0.08, 0.016, 0.904)),
    "papers100M": (_published("ogbn-papers100M"), (0.011, 0.0011, 0.0019)),
    "twitter": ((41_700_000, 1_500_000_000, 256, 64), _RARELY_LABELLED),
    "uk-2006": ((77_700_000, 3_000_000_000, 256, 64), _RARELY_LABELLED),
    "proteins": ((*_published("ogbn-proteins")[:3], 64), (0.653, 0.160, 0.187)),
    "friendster": ((65_600_000, 3_600_000_000, 140, 64), _RARELY_LABELLED),
}
SHAPES = {
    name: GraphSpec(
        *sizes, train=train, valid=valid, test=test, shape=name,
        num_labels=PUBLISHED["ogbn-proteins"].classes if name == "proteins" else 0,
    )
    for name, (sizes, (train, valid, test)) in _SIZES.items()
}  # fmt: skip


def load(
    name: str,
    root: Path,
    *,
    scale: float = 1.0,
    add_reverse: bool = False,
    self_loops: bool = False,
    **parameters: float,
) -> Dataset:
    """Load a generated graph, generating it if it is not on disk.

    Parameters
    ----------
    name : str
        ``"generated"``, or ``"generated-"`` and one of `SHAPES`.
    root : Path
        Folder in which each generated graph has a folder, named after all its parameters.
    scale : float
        Multiplies the numbers of nodes and edges.
    add_reverse, self_loops
        See `ogb.load_folder`.
    **parameters
        Fields of `GraphSpec` to change, before scaling.
    """
    folder = generate(named_spec(name, scale=scale, **parameters), root)
    meta = meta_dict(folder)
    return ogb.load_folder(folder, meta, add_reverse=add_reverse, self_loops=self_loops)


def named_spec(name: str, *, scale: float = 1.0, **parameters: float) -> GraphSpec:
    """Return what `load` generates for a name and its options, before edges are added to it."""
    parameters = {k: v for k, v in parameters.items() if k not in ("add_reverse", "self_loops")}
    spec = SHAPES.get(name.removeprefix("generated-"), GraphSpec())
    known = {field.name for field in dataclasses.fields(GraphSpec)} - {"shape"}
    require_options(name, parameters, [*known, "add_reverse", "self_loops"])
    spec = dataclasses.replace(spec, **parameters)  # type: ignore[arg-type]
    return spec if scale == 1 else spec.scaled(scale)


def generate(spec: GraphSpec, root: Path) -> Path:
    """Write the graph in OGB's format, unless it is on disk, and return its folder in `root`.

    The folder's name contains a digest of all parameters.
    """
    fields = dataclasses.asdict(spec)
    if not spec.num_labels:
        del fields["num_labels"]  # which digests of earlier versions lack
    parameters = json.dumps([_FORMAT_VERSION, fields], sort_keys=True)
    digest = hashlib.sha256(parameters.encode()).hexdigest()[:12]
    label = f"generated_{spec.shape or 'graph'}_{spec.num_nodes}n_{spec.num_edges}e_{digest}"
    return derived_once(Path(root) / label, lambda partial: _write(spec, partial))


def meta_dict(folder: Path) -> dict[str, str]:
    """Return what ``NodePropPredDataset(name=…, root=…, meta_dict=…)`` needs to read `folder`."""
    path = Path(folder) / _META_FILE
    try:
        meta = safe_json.loads(path.read_text())
        return {str(key): str(value) for key, value in meta.items()} | {"dir_path": str(folder)}
    except (OSError, ValueError, AttributeError) as error:
        raise DataFormatError(
            asked=f"read {path}",
            found=f"it does not describe a generated graph ({error})",
            fix="remove the folder, so that the graph is generated again",
        ) from error


def _write(spec: GraphSpec, folder: Path) -> None:
    num_numbers = spec.num_features + 2 * max(1, spec.num_labels)
    num_bytes = 16 * spec.num_edges + 4 * spec.num_nodes * num_numbers
    require_space(folder, num_bytes, spec.name)
    started = time.perf_counter()
    for name in ("raw", "mapping", "processed", f"split/{_SPLIT_TYPE}"):
        (folder / name).mkdir(parents=True)
    labels = blockmodel.classes(spec.num_nodes, spec.num_classes, spec.seed)
    indptr = blockmodel.in_degrees(spec.num_nodes, spec.num_edges, spec.exponent, spec.seed)

    with NpzWriter(folder / "raw" / "data.npz") as data:
        shape = (2, spec.num_edges)
        data.write("edge_index", shape, np.dtype(np.int64), _edges(spec, labels, indptr))
        shape = (spec.num_nodes, spec.num_features)
        data.write("node_feat", shape, np.dtype(np.float32), _features(spec, labels))
        for kind, count in (("nodes", spec.num_nodes), ("edges", spec.num_edges)):
            data.write(f"num_{kind}_list", (1,), np.dtype(np.int64), [np.array([count])])
    with NpzWriter(folder / "raw" / "node-label.npz") as data:
        shape = (spec.num_nodes, spec.num_labels or 1)
        data.write("node_label", shape, np.dtype(np.int64), _labels(spec, labels))
    parts = blockmodel.split(spec.num_nodes, (spec.train, spec.valid, spec.test), spec.seed)
    for name, ids in zip(SPLITS, parts, strict=True):
        _write_ids(folder / "split" / _SPLIT_TYPE / f"{name}.csv.gz", ids)
    _write_texts(spec, folder)
    seconds = time.perf_counter() - started
    log.info("%s: written in %.1f s", spec.description, seconds)


def _edges(spec: GraphSpec, labels: np.ndarray, indptr: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the row of sources, then the row of destinations."""
    members, first = blockmodel.members_by_rank(labels, indptr, spec.num_classes)
    class_key = blockmodel.stream(spec.seed, blockmodel.CLASS_OF_SOURCE)
    rank_key = blockmodel.stream(spec.seed, blockmodel.RANK_OF_SOURCE)
    for start, stop in _chunks(spec.num_edges, _CHUNK_EDGES):
        yield blockmodel.sources(
            start, stop, indptr, labels, members, first, float(spec.homophily),
            float(spec.exponent), class_key, rank_key,
        )  # fmt: skip
    for start, stop in _chunks(spec.num_edges, _CHUNK_EDGES):
        yield blockmodel.destinations(start, stop, indptr)


def _features(spec: GraphSpec, labels: np.ndarray) -> Iterator[np.ndarray]:
    centroid = blockmodel.centroids(spec.num_classes, spec.num_features, spec.signal, spec.seed)
    key = blockmodel.stream(spec.seed, blockmodel.NOISE)
    for start, stop in _chunks(spec.num_nodes, _CHUNK_ROWS):
        yield blockmodel.features(start, stop, labels, centroid, key)


def _labels(spec: GraphSpec, labels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the classes, or the labels of the nodes' classes."""
    if not spec.num_labels:
        yield labels
        return
    labels_of = blockmodel.labels_of_classes(spec.num_classes, spec.num_labels, spec.seed)
    for start, stop in _chunks(spec.num_nodes, _CHUNK_ROWS):
        yield labels_of[labels[start:stop]]


def _chunks(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, total)) for start in range(0, total, step))


def _write_ids(path: Path, ids: np.ndarray) -> None:
    import pandas as pd

    compression = {"method": "gzip", "compresslevel": 1, "mtime": 1}
    pd.Series(ids).to_csv(path, header=False, index=False, compression=compression)


def _write_texts(spec: GraphSpec, folder: Path) -> None:
    version = 1
    meta = {
        "name": spec.name,
        "description": spec.description,
        "version": version,
        "download_name": folder.name,
        "url": "",
        "num tasks": spec.num_labels or 1,
        "num classes": 2 if spec.num_labels else spec.num_classes,
        "eval metric": "rocauc" if spec.num_labels else "acc",
        "task type": f"{'binary' if spec.num_labels else 'multiclass'} classification",
        "add_inverse_edge": False,
        "has_node_attr": True,
        "has_edge_attr": False,
        "split": _SPLIT_TYPE,
        "additional node files": "None",
        "additional edge files": "None",
        "is hetero": False,
        "binary": True,
        "parameters": dataclasses.asdict(spec),
    }
    (folder / _META_FILE).write_text(json.dumps(meta, indent=1))
    (folder / f"RELEASE_v{version}.txt").touch()
    (folder / "mapping" / "README.md").write_text(
        f"Node ids are those of the generator. {spec.description}\n"
    )
