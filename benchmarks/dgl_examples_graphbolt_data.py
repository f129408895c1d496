"""Generated data in the place of what ``dgl.graphbolt.BuiltinDataset`` would download.

They have the node and edge types, and the names and shapes of features and sets, of DGL's own, and
lie in ``datasets/NAME`` as an ``OnDiskDataset``, whose graph and ids GraphBolt then preprocesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import yaml

import dgl_mgpu  # noqa: F401  makes DGL import
from benchmarks.dgl_examples_classes import Classes, Ids, classes_of, undirected

import dgl.graphbolt as gb  # isort: skip

_SETS = ("train_set", "validation_set", "test_set")


@dataclass
class _OnDisk:
    """A folder of files, and what ``metadata.yaml`` says of them."""

    folder: Path
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.metadata["dataset_name"] = self.folder.name
        self.metadata["graph"] = {"nodes": [], "edges": []}
        self.metadata["feature_data"] = []
        self.metadata["tasks"] = []

    def _file(self, name: str, values: Any) -> dict[str, Any]:
        path = f"{name.replace(':', '_')}.npy"
        np.save(self.folder / path, np.asarray(values))
        return {"format": "numpy", "path": path}

    def add_nodes(self, num: int, kind: str | None = None) -> None:
        """Nodes of a type, or of none."""
        self.metadata["graph"]["nodes"].append({"num": num, **_typed(kind)})

    def add_edges(self, src: Any, dst: Any, kind: str | None = None) -> None:
        """Edges of a type, or of none."""
        file = self._file(f"edges-{kind}", np.stack([src, dst]))
        self.metadata["graph"]["edges"].append({**file, **_typed(kind)})

    def add_features(self, values: Any, kind: str | None = None) -> None:
        """Features ``feat`` of nodes."""
        about = {"domain": "node", "name": "feat", "in_memory": True}
        file = self._file(f"feat-{kind}", values)
        self.metadata["feature_data"].append({**about, **file, **_typed(kind)})

    def add_task(
        self,
        name: str,
        sets: Mapping[str, Mapping[str, Any]],
        kind: str | None = None,
        **about: Any,
    ) -> None:
        """A task, by its sets' tensors."""
        task: dict[str, Any] = {"name": name, **about}
        for set_name, tensors in sets.items():
            data = [
                {"name": key, **self._file(f"{name}-{set_name}-{key}", values)}
                for key, values in tensors.items()
            ]
            task[set_name] = [{"data": data, **_typed(kind)}]
        self.metadata["tasks"].append(task)

    def finish(self) -> None:
        """Preprocess it, as DGL's own are when they are downloaded."""
        (self.folder / "metadata.yaml").write_text(yaml.safe_dump(self.metadata))
        gb.OnDiskDataset(str(self.folder), force_preprocess=True)


def _typed(kind: str | None) -> dict[str, str]:
    return {} if kind is None else {"type": kind}


def _labelled(ids: list[torch.Tensor], labels: Ids) -> dict[str, dict[str, Any]]:
    """Sets of nodes with their labels."""
    return {
        name: {"seed_nodes": it, "labels": labels[it.numpy()]}
        for name, it in zip(_SETS, ids, strict=True)
    }


def _unique(src: Ids, dst: Ids, nodes: int) -> tuple[Ids, Ids]:
    """Edges, each once."""
    keys = np.unique(src * nodes + dst)
    return keys // nodes, keys % nodes


def _write_nodes(
    name: str, root: Path, nodes: int, edges: int, width: int, train: float, signal: float = 0.2
) -> None:
    """A graph with reverse edges, and the classes of its nodes."""
    made, classes = _OnDisk(root / "datasets" / name), classes_of(20, 0.4)
    labels = classes.labels(nodes)
    made.add_nodes(nodes)
    made.add_edges(*undirected(classes, edges, labels))
    made.add_features(classes.features(labels, width, signal))
    ids = classes.split(nodes, train, 0.1)
    made.add_task("node_classification", _labelled(ids, labels), num_classes=classes.count)
    made.finish()


def _pairs(src: Ids, dst: Ids, negative: Ids | None = None) -> dict[str, Any]:
    pairs = {"node_pairs": np.stack([src, dst], 1)}
    return pairs if negative is None else {**pairs, "negative_dsts": negative}


def _write_citation(root: Path) -> None:
    made, classes = _OnDisk(root / "datasets" / "ogbl-citation2"), classes_of(200, 0.9)
    nodes = 8_000
    labels = classes.labels(nodes)
    src, dst = classes.edges(28_000, labels, labels)
    src, dst = src[src != dst], dst[src != dst]
    order = classes.rng.permutation(len(src))
    held, trained = order[:1_000], order[1_000:]
    ends = src[trained], dst[trained]
    made.add_nodes(nodes)
    made.add_edges(*_unique(np.concatenate(ends), np.concatenate(ends[::-1]), nodes))
    made.add_features(classes.features(labels, 128, 0.5))
    sets = {"train_set": _pairs(*ends)}
    for name, ids in (("validation_set", held[:500]), ("test_set", held[500:])):
        negative = classes.rng.integers(nodes, size=(len(ids), 1_000))
        sets[name] = _pairs(src[ids], dst[ids], negative)
    made.add_task("link_prediction", sets)
    made.finish()


def _write_cora(root: Path) -> None:
    """Edges of its test set are in the graph, as in DGL's."""
    made, classes = _OnDisk(root / "datasets" / "cora"), classes_of(7, 0.8)
    nodes = 2_708
    labels = classes.labels(nodes)
    src, dst = (it.numpy() for it in undirected(classes, 10_556, labels))
    made.add_nodes(nodes)
    made.add_edges(src, dst)
    made.add_features(classes.features(labels, 200, 0.3))
    ids = [*classes.split(nodes, 0.3, 0.2)]
    made.add_task("node_classification", _labelled(ids, labels), num_classes=classes.count)
    order = classes.rng.permutation(len(src))
    sets = {"train_set": _pairs(src[order[1_000:]], dst[order[1_000:]])}
    for name, held in (("validation_set", order[:500]), ("test_set", order[500:1_000])):
        negative = classes.rng.integers(nodes, size=(len(held), 1))
        sets[name] = _pairs(src[held], dst[held], negative)
    made.add_task("link_prediction", sets)
    made.finish()


#: Nodes of each type, and edges of each type that has no reverse one as its source.
_MAG_NODES = {"author": 12_000, "field_of_study": 1_500, "institution": 500, "paper": 24_000}
_MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 15_000,
    ("author", "writes", "paper"): 70_000,
    ("paper", "cites", "paper"): 100_000,
    ("paper", "has_topic", "field_of_study"): 70_000,
}


def _add_mag_graph(made: _OnDisk, classes: Classes, kinds: set[str]) -> dict[str, Ids]:
    """Nodes of some types with edges both ways; the result is their classes."""
    sizes = {kind: num for kind, num in _MAG_NODES.items() if kind in kinds}
    labels = {kind: classes.labels(num) for kind, num in sizes.items()}
    for kind, num in sizes.items():
        made.add_nodes(num, kind)
    for (source, name, target), number in _MAG_EDGES.items():
        if not {source, target} <= kinds:
            continue
        src, dst = classes.edges(number, labels[source], labels[target])
        if source == target:
            ends = np.concatenate([src, dst]), np.concatenate([dst, src])
            made.add_edges(*_unique(*ends, sizes[source]), f"{source}:{name}:{target}")
        else:
            made.add_edges(src, dst, f"{source}:{name}:{target}")
            made.add_edges(dst, src, f"{target}:rev_{name}:{source}")
    return labels


def _add_papers(made: _OnDisk, classes: Classes, labels: Ids) -> None:
    ids = classes.split(len(labels), 0.7, 0.1)
    sets = _labelled(ids, labels)
    made.add_task("node_classification", sets, "paper", num_classes=classes.count)


def _write_mag(root: Path) -> None:
    made, classes = _OnDisk(root / "datasets" / "ogbn-mag"), classes_of(20, 0.6)
    labels = _add_mag_graph(made, classes, set(_MAG_NODES))
    made.add_features(classes.features(labels["paper"], 128, 0.15), "paper")
    _add_papers(made, classes, labels["paper"])
    made.finish()


def _write_mag240m(root: Path) -> None:
    """All types have features, of 16 bits, which stay on the disk."""
    made, classes = _OnDisk(root / "datasets" / "ogb-lsc-mag240m"), classes_of(20, 0.6)
    labels = _add_mag_graph(made, classes, set(_MAG_NODES) - {"field_of_study"})
    for kind, own in labels.items():
        made.add_features(classes.features(own, 768, 0.05).half(), kind)
    _add_papers(made, classes, labels["paper"])
    made.finish()


#: What writes a data set below a folder, by its name: before GraphBolt's own it has ``gb-``.
GRAPHBOLT_WRITERS = MappingProxyType(
    {
        "gb-ogbn-products": partial(
            _write_nodes, "ogbn-products", nodes=30_000, edges=300_000, width=100, train=0.6
        ),
        "gb-ogbn-arxiv": partial(
            _write_nodes,
            "ogbn-arxiv",
            nodes=15_000,
            edges=150_000,
            width=128,
            train=0.5,
            signal=0.3,
        ),
        "gb-ogbl-citation2": _write_citation,
        "gb-cora": _write_cora,
        "gb-ogbn-mag": _write_mag,
        "gb-ogb-lsc-mag240m": _write_mag240m,
    }
)
