"""A small generated graph whose labels follow from relations, not from neighbours alone.

Items are liked by some users and disliked by others, and marked by tags:

* Users, tags and items have classes, uniformly at random; an item's class is its label.
* Each user that likes an item is of its class with probability ``homophily``, else of any; each
  that dislikes it is of another class, the same one for all of them, likewise.  Both are equally
  many: a model that does not distinguish the two relations sees two classes and can only guess.
* A tag that marks an item is of its class with a quarter of that probability, else of any.
* Features of users and items differ in width: a centroid of their class of length
  ``signal * sqrt(2 ln classes)``, a quarter of it for items, plus noise of unit variance per
  dimension.  Tags have none.
* Every relation has its reverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from dgl_mgpu.data import blockmodel
from dgl_mgpu.data.checks import require_options, require_ranges
from dgl_mgpu.data.hetero import HeteroDataset, relation, with_reverse

NAME = "generated-relations"
_SPLIT = (0.5, 0.2, 0.3)
#: Purposes of random numbers.
_USER, _TAG, _ITEM, _DISLIKED, _LIKES, _DISLIKES, _MARKS, _NOISE = range(8)


@dataclass(frozen=True)
class RelationsSpec:
    """Parameters of a graph; ConfigError if one is out of its range."""

    num_items: int = 4000
    num_users: int = 1000
    num_tags: int = 100
    num_classes: int = 8
    num_features: int = 32  # of a user; an item has half as many
    degree: int = 6  # users that like an item, and that dislike it; half as many tags mark it
    homophily: float = 0.8
    signal: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "num_classes": (2, 1 << 16),
            **dict.fromkeys(("num_items", "num_users", "num_tags"), (self.num_classes, 1 << 28)),
            "num_features": (2, 1 << 20), "degree": (2, 1 << 16), "homophily": (0, 1),
            "signal": (0, 1000), "seed": (0, 2**63 - 1),
        }  # fmt: skip
        require_ranges(self, "relations", ranges)


def load(name: str, root: Path, **parameters: float) -> HeteroDataset:
    """Generate the graph in memory, with fields of `RelationsSpec` to change; `root` is not used.

    It takes less than a second at the default size.
    """
    return generate(named_spec(**parameters))


def named_spec(**parameters: float) -> RelationsSpec:
    """Return what `load` generates for its options."""
    require_options(NAME, parameters, [field.name for field in fields(RelationsSpec)])
    return RelationsSpec(**parameters)  # type: ignore[arg-type]


def generate(spec: RelationsSpec) -> HeteroDataset:
    """Generate the graph; the same parameters give the same one."""
    num_nodes = {"item": spec.num_items, "user": spec.num_users, "tag": spec.num_tags}
    counts = {_USER: spec.num_users, _TAG: spec.num_tags, _ITEM: spec.num_items}
    users, tags, labels = (
        _random(spec, purpose).permutation(np.arange(count) % spec.num_classes)
        for purpose, count in counts.items()
    )
    shift = _random(spec, _DISLIKED).integers(1, spec.num_classes, spec.num_items)
    disliked = (labels + shift) % spec.num_classes
    edges = {
        ("user", "likes", "item"): _edges(spec, _LIKES, users, labels, spec.degree, 1.0),
        ("user", "dislikes", "item"): _edges(spec, _DISLIKES, users, disliked, spec.degree, 1.0),
        ("tag", "marks", "item"): _edges(spec, _MARKS, tags, labels, spec.degree // 2, 0.25),
    }
    csc = {
        (src, etype, dst): relation(*ends, num_nodes[src], num_nodes[dst])
        for (src, etype, dst), ends in edges.items()
    }
    train, valid, test = blockmodel.split(spec.num_items, _SPLIT, spec.seed)
    return HeteroDataset(
        name=NAME,
        num_nodes=num_nodes,
        edges=with_reverse(csc, num_nodes),
        target="item",
        num_classes=spec.num_classes,
        labels=labels,
        train=train,
        valid=valid,
        test=test,
        node_features={
            "item": {"feat": _features(spec, labels, spec.num_features // 2, spec.signal / 4)},
            "user": {"feat": _features(spec, users, spec.num_features, spec.signal)},
        },
        description=f"generated, not real data: {spec}",
    )


def _random(spec: RelationsSpec, purpose: int) -> np.random.Generator:
    return np.random.default_rng([spec.seed, purpose])


def _edges(
    spec: RelationsSpec, purpose: int, classes: np.ndarray, wanted: np.ndarray, degree: int,
    share: float,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Sources, with `classes`, and destinations: each item has `degree` sources.

    They are of the item's class in `wanted` with `share` of the probability ``homophily``.
    """
    random = _random(spec, purpose)
    dst = np.repeat(np.arange(spec.num_items), degree)
    any_class = random.integers(0, spec.num_classes, len(dst))
    is_wanted = random.random(len(dst)) < share * spec.homophily
    drawn = np.where(is_wanted, wanted[dst], any_class)
    by_class = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[by_class], np.arange(spec.num_classes + 1))
    sizes = np.diff(first)[drawn]
    return by_class[first[drawn] + (random.random(len(dst)) * sizes).astype(np.int64)], dst


def _features(spec: RelationsSpec, classes: np.ndarray, width: int, signal: float) -> np.ndarray:
    """Float32 [nodes, width]."""
    random = np.random.default_rng([spec.seed, _NOISE, width])
    centroids = random.standard_normal((spec.num_classes, width))
    length = signal * math.sqrt(2 * math.log(spec.num_classes))
    centroids *= length / np.linalg.norm(centroids, axis=1, keepdims=True)
    noise = random.standard_normal((len(classes), width))
    return (centroids[classes] + noise).astype(np.float32)
