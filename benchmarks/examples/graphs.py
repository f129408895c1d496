"""Graphs, each of a class: those that GIN was tried on, or generated ones."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import torch

from benchmarks.examples.common import GENERATED, require, rewired


class Graphs(NamedTuple):
    """Graphs, whose nodes have ``attr``, and the class of each."""

    graphs: list[dgl.DGLGraph]
    labels: list[int]


def read(name: str, root: str) -> Graphs:
    if name == GENERATED:
        return rings(200)
    path = Path(root) / "GINDataset" / "dataset" / name / f"{name}.txt"
    require(path, name, f"unpack dataset.zip of weihua916/powerful-gnns into {path.parents[2]}")
    found = dgl.data.GINDataset(name, self_loop=True, raw_dir=root)
    return Graphs(list(found.graphs), found.labels.tolist())


def rings(count: int) -> Graphs:
    """Rings of two kinds of nodes, of two classes.

    In one like follows like, in the other the kinds are shuffled: how many nodes of each kind
    there are says nothing.
    """
    draw = torch.Generator().manual_seed(0)
    graphs, labels = [], []
    for number in range(count):
        half = int(torch.randint(6, 15, (), generator=draw))
        kinds = torch.arange(2).repeat_interleave(half)
        if number % 2:
            kinds = kinds[torch.randperm(2 * half, generator=draw)]
        nodes = torch.arange(2 * half)
        g = dgl.add_self_loop(dgl.to_bidirected(dgl.graph((nodes, nodes.roll(1)))))
        g.ndata["attr"] = torch.nn.functional.one_hot(kinds).float()
        graphs.append(g)
        labels.append(number % 2)
    return Graphs(graphs, labels)


def without_structure(data: Graphs) -> Graphs:
    return data._replace(graphs=[rewired(g) for g in data.graphs])
