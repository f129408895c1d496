"""A small generated graph whose labels are told by relations, not by neighbours alone.

Items are liked by some users and disliked by others, and marked by tags:

* Users, tags and items have classes, uniformly at random; an item's is its label.
* Who likes an item is of its class, and who dislikes it of another one, the same for all who do,
  with probability ``homophily`` each, else of any.  There are as many of both: a model that does
  not tell the two relations apart sees two classes, and can but guess which is the item's.
* A tag that marks an item is of its class with a quarter of that probability, else of any.
* Features of users and items are of different width: a centroid of their class of length
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
from dgl_mgpu.data.hetero import HeteroDataset, relation, with_reverse
from dgl_mgpu.errors import ConfigError, nearest

NAME = "generated-relations"
_SPLIT = (0.5, 0.2, 0.3)
#: Purposes of random numbers.
_USER, _TAG, _ITEM, _DISLIKED, _LIKES, _DISLIKES, _MARKS, _NOISE = range(8)


@dataclass(frozen=True)
class RelationsSpec:
    """What a graph is made of; see this module.

    Attributes
    ----------
    num_items, num_users, num_tags, num_classes : int
    num_features : int
        Of a user; an item has half as many.
    degree : int
        Who likes an item, and who dislikes it; half as many tags mark it.
    homophily, signal : float
    seed : int

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    num_items: int = 4000
    num_users: int = 1000
    num_tags: int = 100
    num_classes: int = 8
    num_features: int = 32
    degree: int = 6
    homophily: float = 0.8
    signal: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        within = {
            "num_classes": (2, 1 << 16),
            **dict.fromkeys(("num_items", "num_users", "num_tags"), (self.num_classes, 1 << 28)),
            "num_features": (2, 1 << 20),
            "degree": (2, 1 << 16),
            "homophily": (0, 1),
            "signal": (0, 1000),
            "seed": (0, 2**63 - 1),
        }
        whole = {field.name for field in fields(self) if field.type == "int"}
        for name, (low, high) in within.items():
            value = getattr(self, name)
            kind = int if name in whole else int | float
            if not isinstance(value, kind) or not low <= value <= high:
                raise ConfigError(
                    asked=f"generate relations with {name}={value!r}",
                    found=f"{name} takes a{' whole' * (name in whole)} number from {low} to {high}",
                    fix=f"choose one for {name} (data.options.{name} on a command line)",
                )


def load(name: str, root: Path, **parameters: float) -> HeteroDataset:
    """Generate the graph, in memory, which takes less than a second at the default size.

    Parameters
    ----------
    name : str
        ``"generated-relations"``.
    root : Path
        Not used.
    **parameters
        Fields of `RelationsSpec` to change.

    Raises
    ------
    ConfigError
        A parameter is unknown or out of range.
    """
    return generate(named_spec(**parameters))


def named_spec(**parameters: float) -> RelationsSpec:
    """Return what `load` generates for its options.

    Raises
    ------
    ConfigError
        A parameter is unknown or out of range.
    """
    known = [field.name for field in fields(RelationsSpec)]
    for key in parameters:
        if key not in known:
            raise ConfigError(
                f"load {NAME} with option {key!r}", "there is no such option", nearest(key, known)
            )
    return RelationsSpec(**parameters)  # type: ignore[arg-type]


def generate(spec: RelationsSpec) -> HeteroDataset:
    """Generate the graph; the same parameters give the same one."""
    num_nodes = {"item": spec.num_items, "user": spec.num_users, "tag": spec.num_tags}
    users, tags, labels = (
        _random(spec, purpose).permutation(np.arange(count) % spec.num_classes)
        for purpose, count in (
            (_USER, spec.num_users),
            (_TAG, spec.num_tags),
            (_ITEM, spec.num_items),
        )
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
    spec: RelationsSpec,
    purpose: int,
    classes: np.ndarray,
    wanted: np.ndarray,
    degree: int,
    share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations: each item has `degree` sources, of the class `wanted` mostly."""
    random = _random(spec, purpose)
    dst = np.repeat(np.arange(spec.num_items), degree)
    of_class = wanted[dst]
    others = random.integers(0, spec.num_classes, len(dst))
    of_class = np.where(random.random(len(dst)) < share * spec.homophily, of_class, others)
    by_class = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[by_class], np.arange(spec.num_classes + 1))
    sizes = np.diff(first)[of_class]
    return by_class[first[of_class] + (random.random(len(dst)) * sizes).astype(np.int64)], dst


def _features(spec: RelationsSpec, classes: np.ndarray, width: int, signal: float) -> np.ndarray:
    """Float32 [nodes, width]."""
    random = np.random.default_rng([spec.seed, _NOISE, width])
    centroids = random.standard_normal((spec.num_classes, width))
    length = signal * math.sqrt(2 * math.log(spec.num_classes))
    centroids *= length / np.linalg.norm(centroids, axis=1, keepdims=True)
    noise = random.standard_normal((len(classes), width))
    return (centroids[classes] + noise).astype(np.float32)
