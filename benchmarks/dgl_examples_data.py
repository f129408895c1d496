"""Generated data in the formats that DGL's examples read, where their downloads would be.

Nodes have a class each. Edges join nodes of one class more often than others, and features are
noisy centroids of the classes: a model that looks at neighbours tells classes better than one that
does not, and none tells all of them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.sparse
import torch

import dgl_mgpu  # noqa: F401  makes DGL import
from benchmarks.dgl_examples_classes import classes_of, undirected
from benchmarks.dgl_examples_graphbolt_data import GRAPHBOLT_WRITERS

import dgl  # isort: skip
from dgl.data import DGLBuiltinDataset, FraudDataset, RedditDataset  # isort: skip
from dgl.data.utils import _get_dgl_url, save_graphs, save_info  # isort: skip

#: By a data set's name: OGB's version of it.
_VERSIONS = {"ogbn-products": 1, "ogbn-mag": 2, "ogbl-citation2": 1}
_SPLITS = {"ogbn-products": "sales_ranking", "ogbn-mag": "time", "ogbl-citation2": "time"}


def write_all(names: Sequence[str], folder: Path) -> None:
    """Write data sets that are not in a folder yet.

    Parameters
    ----------
    names : sequence of str
        Of :data:`WRITERS`.
    folder : Path
        Its ``dataset`` gets what scripts read from there, its ``datasets`` what GraphBolt
        would download, and its ``dgl`` what DGL would.
    """
    for kind in ("dataset", "datasets", "dgl"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    before = os.environ.get("DGL_DOWNLOAD_DIR")
    os.environ["DGL_DOWNLOAD_DIR"] = str(folder / "dgl")
    try:
        for name in names:
            done = folder / f"{name}.done"
            if not done.exists():
                WRITERS[name](folder)
                done.touch()
    finally:
        del os.environ["DGL_DOWNLOAD_DIR"]
        if before is not None:
            os.environ["DGL_DOWNLOAD_DIR"] = before


def _mask(ids: torch.Tensor, nodes: int) -> torch.Tensor:
    mask = torch.zeros(nodes, dtype=torch.bool)
    mask[ids] = True
    return mask


def _ogb_folder(name: str, root: Path) -> Path:
    folder = root / "dataset" / name.replace("-", "_")
    (folder / "processed").mkdir(parents=True, exist_ok=True)
    (folder / "split" / _SPLITS[name]).mkdir(parents=True, exist_ok=True)
    (folder / f"RELEASE_v{_VERSIONS[name]}.txt").touch()
    return folder


def _write_ogb(
    name: str, root: Path, g: Any, labels: dict[str, torch.Tensor], split: Mapping[str, Any]
) -> None:
    folder = _ogb_folder(name, root)
    save_graphs(str(folder / "processed" / "dgl_data_processed"), [g], labels)
    torch.save(dict(split), folder / "split" / _SPLITS[name] / "split_dict.pt")


def _write_products(root: Path) -> None:
    classes = classes_of(20, 0.4)
    labels = classes.labels(30_000)
    g = dgl.graph(undirected(classes, 300_000, labels), num_nodes=len(labels))
    g.ndata["feat"] = classes.features(labels, 100, 0.2)
    train, valid, test = classes.split(len(labels), 0.6, 0.1)
    split = {"train": train, "valid": valid, "test": test}
    made = {"labels": torch.from_numpy(labels)[:, None]}
    _write_ogb("ogbn-products", root, g, made, split)


def _write_citation(root: Path) -> None:
    classes = classes_of(200, 0.9)
    labels = classes.labels(8_000)
    src, dst = classes.edges(28_000, labels, labels)
    kept = src != dst
    src, dst = src[kept], dst[kept]
    order = classes.rng.permutation(len(src))
    held, trained = order[:1_000], order[1_000:]
    kept_ends = torch.from_numpy(src[trained]), torch.from_numpy(dst[trained])
    g = dgl.graph(kept_ends, num_nodes=len(labels))
    g.ndata["feat"] = classes.features(labels, 128, 0.5)
    split: dict[str, Any] = {"train": {"source_node": src[trained], "target_node": dst[trained]}}
    for name, ids in (("valid", held[:500]), ("test", held[500:])):
        negative = classes.rng.integers(len(labels), size=(len(ids), 1_000))
        split[name] = {
            "source_node": src[ids], "target_node": dst[ids], "target_node_neg": negative,
        }  # fmt: skip
    tensors = {
        name: {key: torch.from_numpy(ids) for key, ids in part.items()}
        for name, part in split.items()
    }
    _write_ogb("ogbl-citation2", root, g, {}, tensors)


def _write_mag(root: Path) -> None:
    classes = classes_of(20, 0.6)
    sizes = {"author": 12_000, "field_of_study": 1_500, "institution": 500, "paper": 24_000}
    labels = {name: classes.labels(count) for name, count in sizes.items()}
    relations = {
        ("author", "affiliated_with", "institution"): 15_000,
        ("author", "writes", "paper"): 70_000,
        ("paper", "cites", "paper"): 100_000,
        ("paper", "has_topic", "field_of_study"): 70_000,
    }
    g = dgl.heterograph(
        {
            (src, name, dst): classes.edges(number, labels[src], labels[dst])
            for (src, name, dst), number in relations.items()
        },
        sizes,
    )
    g.nodes["paper"].data["feat"] = classes.features(labels["paper"], 128, 0.15)
    train, valid, test = classes.split(len(labels["paper"]), 0.7, 0.1)
    split = {"train": {"paper": train}, "valid": {"paper": valid}, "test": {"paper": test}}
    made = {"paper": torch.from_numpy(labels["paper"])[:, None]}
    _write_ogb("ogbn-mag", root, g, made, split)


def _write_aifb(root: Path) -> None:
    classes = classes_of(4, 0.7)
    sizes = {"Personen": 2_000, "Publikationen": 2_000, "Projekte": 300, "Themen": 100}
    labels = {name: classes.labels(count) for name, count in sizes.items()}
    relations = {
        ("Personen", "publication", "Publikationen"): 8_000,
        ("Personen", "worksAtProject", "Projekte"): 4_000,
        ("Personen", "isWorkedOnBy", "Themen"): 4_000,
        ("Publikationen", "isAbout", "Themen"): 4_000,
    }
    edges = {}
    for (src, name, dst), number in relations.items():
        one, other = classes.edges(number, labels[src], labels[dst])
        edges[src, name, dst] = one, other
        edges[dst, f"rev-{name}", src] = other, one
    g = dgl.heterograph(edges, sizes)
    persons = torch.from_numpy(labels["Personen"])
    train, _, test = classes.split(len(persons), 0.6, 0.0)
    data = g.nodes["Personen"].data
    data["train_mask"], data["test_mask"] = _mask(train, len(persons)), _mask(test, len(persons))
    data["labels"] = data["label"] = persons
    folder = _download_folder("aifb-hetero", "dataset/rdf/aifb-hetero.zip")
    save_graphs(str(folder / "aifb-hetero_dgl_graph.bin"), [g])
    info = {"num_classes": classes.count, "predict_category": "Personen"}
    save_info(str(folder / "aifb-hetero_dgl_graph.pkl"), info)


class _Folder(DGLBuiltinDataset):
    """Where DGL keeps a data set that it has downloaded."""

    def download(self) -> None:
        Path(self.save_path).mkdir(parents=True, exist_ok=True)

    def process(self) -> None:
        pass

    def __getitem__(self, idx: int) -> Any:
        raise IndexError(idx)

    def __len__(self) -> int:
        return 0


def _download_folder(name: str, url: str) -> Path:
    return Path(_Folder(name, _get_dgl_url(url)).save_path)


class _Reddit(RedditDataset):
    def download(self) -> None:
        Path(self.save_path).mkdir(parents=True, exist_ok=True)

    def process(self) -> None:
        classes = classes_of(20, 0.4)
        labels = classes.labels(15_000)
        g = dgl.graph(undirected(classes, 150_000, labels), num_nodes=len(labels))
        g = dgl.add_self_loop(g)
        g.ndata["feat"] = classes.features(labels, 100, 0.3)
        g.ndata["label"] = torch.from_numpy(labels)
        parts = classes.split(len(labels), 0.6, 0.2)
        for name, ids in zip(("train_mask", "val_mask", "test_mask"), parts, strict=True):
            g.ndata[name] = _mask(ids, len(labels))
        self._graph = g


def _write_reddit(root: Path) -> None:
    _Reddit(self_loop=True)


class _Fraud(FraudDataset):
    def download(self) -> None:
        Path(self.save_path).mkdir(parents=True, exist_ok=True)

    def process(self) -> None:
        # Of Amazon's nodes, the first 3,305 have no label.
        classes = classes_of(2, 0.8)
        labels = classes.labels(4_305)
        user = self.node_name["amazon"]
        self.graph = dgl.heterograph(
            {
                (user, name, user): classes.edges(20_000, labels, labels)
                for name in self.relations["amazon"]
            }
        )
        self.graph.ndata["feature"] = classes.features(labels, 25, 0.2)
        self.graph.ndata["label"] = torch.from_numpy(labels)
        self._random_split(self.graph.ndata["feature"], self.seed, self.train_size, self.val_size)


def _write_fraud(root: Path) -> None:
    _Fraud("amazon", train_size=0.4)


def _write_gas(root: Path) -> None:
    classes = classes_of(2, 0.9)
    users, news = classes.labels(2_000), classes.labels(300)
    src, dst = map(torch.from_numpy, classes.edges(6_000, users, news))
    g = dgl.heterograph(
        {("u", "forward", "v"): (src, dst), ("v", "backward", "u"): (dst, src)},
        {"u": len(users), "v": len(news)},
    )
    g.nodes["u"].data["feat"] = classes.features(users, 32, 0.2)
    g.nodes["v"].data["feat"] = classes.features(news, 32, 0.2)
    labels = torch.from_numpy(news)[dst].float()
    feats = classes.features(news[dst.numpy()], 16, 0.1)
    parts = classes.split(len(dst), 0.7, 0.1)
    for name in ("forward", "backward"):
        data = g.edges[name].data
        data["feat"], data["label"] = feats, labels
        for split, ids in zip(("train_mask", "val_mask", "test_mask"), parts, strict=True):
            data[split] = _mask(ids, len(dst))
    save_graphs(str(_download_folder("pol", "dataset/GASPOL.zip") / "pol_dgl_graph.bin"), [g])


def _write_movies(root: Path) -> None:
    """What PinSAGE's ``process_movielens1m.py`` makes."""
    classes = classes_of(8, 0.9)
    users, movies = classes.labels(600), classes.labels(400)
    src = np.repeat(np.arange(len(users)), 14)
    dst = classes.ends(src, users, movies)
    order = np.tile(np.arange(14), len(users))
    train = order < 12
    pairs = torch.from_numpy(src[train]), torch.from_numpy(dst[train])
    g = dgl.heterograph(
        {("user", "watched", "movie"): pairs, ("movie", "watched-by", "user"): pairs[::-1]},
        {"user": len(users), "movie": len(movies)},
    )
    for name in ("watched", "watched-by"):
        g.edges[name].data["timestamp"] = torch.from_numpy(order[train])
    g.nodes["movie"].data["genre"] = classes.features(movies, 18, 0.5)

    def matrix(at: int) -> scipy.sparse.coo_matrix:
        kept = order == at
        ends = src[kept], dst[kept]
        return scipy.sparse.coo_matrix((np.ones(len(ends[0])), ends), (len(users), len(movies)))

    folder = root / "dataset" / "movies"
    folder.mkdir(exist_ok=True)
    dgl.save_graphs(str(folder / "train_g.bin"), g)
    titles = np.array([f"part {movie % 7} of {label}" for movie, label in enumerate(movies)])
    contents = {
        "val-matrix": matrix(12), "test-matrix": matrix(13),
        "item-texts": {"title": titles}, "item-images": None,
        "user-type": "user", "item-type": "movie",
        "user-to-item-type": "watched", "item-to-user-type": "watched-by",
        "timestamp-edge-column": "timestamp",
    }  # fmt: skip
    with (folder / "data.pkl").open("wb") as file:
        pickle.dump(contents, file)


def _write_multiplex(root: Path) -> None:
    """Edges of two types for GATNE, as lines of text."""
    classes = classes_of(10, 0.9)
    labels = classes.labels(400)
    folder = root / "dataset" / "multiplex"
    folder.mkdir(exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for kind in (1, 2):
        src, dst = classes.edges(2_400, labels, labels)
        order = classes.rng.permutation(len(src))
        for name, ids in (("train", order[400:]), ("valid", order[:200]), ("test", order[200:400])):
            known = "" if name == "train" else " 1"
            lines[name] += [f"{kind} {src[i]} {dst[i]}{known}" for i in ids]
            if name != "train":
                wrong = classes.rng.integers(len(labels), size=(len(ids), 2))
                lines[name] += [f"{kind} {one} {other} 0" for one, other in wrong]
    for name, text in lines.items():
        (folder / f"{name}.txt").write_text("\n".join(text) + "\n")


#: What writes a data set below a folder, by its name.
WRITERS = MappingProxyType(
    {
        "ogbn-products": _write_products,
        "ogbl-citation2": _write_citation,
        "ogbn-mag": _write_mag,
        "aifb": _write_aifb,
        "reddit": _write_reddit,
        "amazon": _write_fraud,
        "pol": _write_gas,
        "movies": _write_movies,
        "multiplex": _write_multiplex,
        **GRAPHBOLT_WRITERS,
    }
)
