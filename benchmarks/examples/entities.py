"""Entities of several types, joined by relations, one type of which is to be classified."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch

from benchmarks.examples.common import GENERATED, require, rewired
from dgl_mgpu.errors import UnavailableError

#: Each with the bases and the weight decay that the README of rgcn-hetero trains it with.
_SETS = {
    "aifb": (dgl.data.AIFBDataset, 1000, 0.0),
    "mutag": (dgl.data.MUTAGDataset, 30, 5e-4),
    "bgs": (dgl.data.BGSDataset, 40, 5e-4),
    "am": (dgl.data.AMDataset, 40, 5e-4),
}


class Entities(NamedTuple):
    """A heterogeneous graph without features.

    Attributes
    ----------
    g : DGLGraph
        Nodes of the category have ``label``, ``train_mask`` and ``test_mask``.
    category : str
        The type of nodes to be classified.
    num_classes : int
    num_bases, weight_decay : int, float
        What to train with: matrices of relations are combinations of so many, at most.
    """

    g: dgl.DGLGraph
    category: str
    num_classes: int
    num_bases: int
    weight_decay: float

    @property
    def labels(self) -> torch.Tensor:
        return self.g.nodes[self.category].data["label"]

    def part(self, name: str) -> torch.Tensor:
        """Ids, among their type, of the nodes to ``train`` or ``test`` with."""
        return self.g.nodes[self.category].data[f"{name}_mask"].nonzero().flatten()


def read(name: str, root: str) -> Entities:
    """One of DGL's sets from where it keeps them under `root`, or the generated one."""
    if name == GENERATED:
        return generate()
    dataset, *settings = _SETS[name]
    there = sorted(Path(root).glob(f"{name}-hetero*"))
    folder = there[0] if there else Path(root) / f"{name}-hetero"
    require(folder, name, f"dgl.data.{dataset.__name__}(raw_dir={root!r}) downloads it")
    try:
        import rdflib  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            asked=f"read {name}",
            found="no package rdflib, which DGL reads it with",
            fix="pip install rdflib",
        ) from error
    found = dataset(raw_dir=root, verbose=False)
    return Entities(found[0], found.predict_category, found.num_classes, *settings)


def generate(persons: int = 400, classes: int = 4) -> Entities:
    """Persons whose class shows in which projects they work on, and only there.

    A project belongs to a class; 9 of 10 persons who work on it are of that class.  Which
    projects they have read about says nothing, of five times as many.
    """
    draw = torch.Generator().manual_seed(0)
    projects = 20 * classes
    labels = torch.randint(classes, (persons,), generator=draw)
    who = torch.arange(persons).repeat(3)
    what = torch.randint(20, (3 * persons,), generator=draw) * classes + labels[who]
    stray = torch.rand(len(what), generator=draw) < 0.1
    what[stray] = torch.randint(projects, (int(stray.sum()),), generator=draw)
    reader = torch.arange(persons).repeat(15)
    topic = torch.randint(projects, (15 * persons,), generator=draw)
    g = dgl.heterograph(
        {
            ("person", "works-on", "project"): (who, what),
            ("project", "rev-works-on", "person"): (what, who),
            ("person", "reads-of", "project"): (reader, topic),
            ("project", "rev-reads-of", "person"): (topic, reader),
        },
        {"person": persons, "project": projects},
    )
    train = torch.rand(persons, generator=draw) < 0.5
    g.nodes["person"].data.update(label=labels, train_mask=train, test_mask=~train)
    return Entities(g, "person", classes, num_bases=3, weight_decay=0.0)


def without_structure(data: Entities) -> Entities:
    return data._replace(g=rewired(data.g))


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())
