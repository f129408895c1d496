"""Classes of nodes, and edges, features and splits that are drawn by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Classes:
    """Classes of nodes, and what is drawn by them."""

    rng: np.random.Generator
    count: int
    homophily: float

    def labels(self, nodes: int) -> Ids:
        return self.rng.integers(self.count, size=nodes)

    def ends(self, src: Ids, sources: Ids, targets: Ids) -> Ids:
        """For each source a target, mostly of its class; the arguments are ids, and labels."""
        order = np.argsort(targets, kind="stable")
        counts = np.bincount(targets, minlength=self.count)
        starts = np.cumsum(counts) - counts
        wanted = sources[src]
        place = (self.rng.random(len(src)) * counts[wanted]).astype(np.int64)
        alike = order[np.minimum(starts[wanted] + place, len(targets) - 1)]
        any_ = self.rng.integers(len(targets), size=len(src))
        return np.where(self.rng.random(len(src)) < self.homophily, alike, any_)

    def edges(self, number: int, sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
        """Edges, at least one from each source and one to each target."""
        extra = self.rng.integers(len(sources), size=max(0, number - len(sources) - len(targets)))
        src = np.concatenate([np.arange(len(sources)), extra])
        dst = self.ends(src, sources, targets)
        back = self.ends(np.arange(len(targets)), targets, sources)
        return np.concatenate([src, back]), np.concatenate([dst, np.arange(len(targets))])

    def features(self, labels: Ids, width: int, signal: float) -> torch.Tensor:
        centroids = self.rng.standard_normal((self.count, width)) * signal
        noise = self.rng.standard_normal((len(labels), width))
        return torch.from_numpy(centroids[labels] + noise).float()

    def split(self, nodes: int, train: float, valid: float) -> list[torch.Tensor]:
        order = torch.from_numpy(self.rng.permutation(nodes))
        sizes = [int(train * nodes), int(valid * nodes)]
        return [*order.split([*sizes, nodes - sum(sizes)])]


def classes_of(count: int, homophily: float) -> Classes:
    return Classes(np.random.default_rng(0), count, homophily)


def undirected(classes: Classes, edges: int, labels: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of the edges are the first half's reverse ones."""
    src, dst = classes.edges(edges // 2, labels, labels)
    kept = src != dst
    src, dst = src[kept], dst[kept]
    both = np.concatenate([src, dst]), np.concatenate([dst, src])
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])
