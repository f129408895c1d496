"""What the mini-batches of a DataLoader depend on, and whether all of it is known."""

from __future__ import annotations

from types import NoneType
from typing import Any, Protocol

import torch
from dgl.dataloading.base import EdgePredictionSampler
from dgl.dataloading.dataloader import DDPTensorizedDataset, TensorizedDataset
from dgl.dataloading.negative_sampler import GlobalUniform, PerSourceUniform
from dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler
from dgl.dataloading.shadow import ShaDowKHopSampler
from dgl.storages.tensor import BaseTensorStorage

#: Samplers whose samples depend on their attributes, the graph and random numbers alone, and whose
#: state sampling does not change.
_PURE_SAMPLERS = NeighborSampler, MultiLayerFullNeighborSampler, ShaDowKHopSampler
_PURE_NEGATIVES = PerSourceUniform, GlobalUniform
#: Datasets whose seeds depend on nothing else.
PURE_DATASETS = TensorizedDataset, DDPTensorizedDataset
_ATTRIBUTES_COUNT = frozenset({*_PURE_SAMPLERS, *_PURE_NEGATIVES, EdgePredictionSampler})
#: Types that are compared by value.
_VALUES = frozenset({NoneType, bool, int, float, str, torch.device})


class VersionedTable(Protocol):
    """A table of a store; its version counts the writes to its rows."""

    version: int


def is_pure(sampler: Any) -> bool:
    """Whether samples depend on a sampler's attributes, the graph and random numbers alone."""
    if type(sampler) is EdgePredictionSampler:
        negative, exclude = sampler.negative_sampler, sampler.exclude
        return (
            _is_pure_of_nodes(sampler.sampler)
            and (
                negative is None
                or type(negative) in _PURE_NEGATIVES
                or declares_prefetch_safe(negative)
            )
            and (exclude is None or isinstance(exclude, str) or declares_prefetch_safe(exclude))
        )
    return _is_pure_of_nodes(sampler)


def _is_pure_of_nodes(sampler: Any) -> bool:
    return type(sampler) in _PURE_SAMPLERS or declares_prefetch_safe(sampler)


def declares_prefetch_safe(thing: Any) -> bool:
    """Whether a class declares ``prefetch_safe``; the declaration is not inherited."""
    return vars(type(thing)).get("prefetch_safe", False)


class DependencySnapshot:
    """A snapshot of objects; two are equal if no object was replaced or written to in between.

    It keeps the objects alive, so that a batch may still read what the script replaces.
    """

    def __init__(self, *things: object) -> None:
        self._held: list[object] = []
        self._key = self._key_of(things)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DependencySnapshot) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def _key_of(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _VALUES:
            return thing
        if kind is list or kind is tuple:
            return [it if type(it) in _VALUES else self._key_of(it) for it in thing]
        if kind is dict:
            return [
                (name, it if type(it) in _VALUES else self._key_of(it))
                for name, it in thing.items()
            ]
        if isinstance(thing, BaseTensorStorage):
            return self._key_of([thing.storage, getattr(thing, "index", None)])
        self._held.append(thing)
        if isinstance(thing, torch.Tensor):
            # Torch does not count what is written in inference mode, or by a fused optimizer.
            is_unknown = thing.is_inference() or thing.requires_grad
            return id(thing), object() if is_unknown else thing._version
        if kind in _ATTRIBUTES_COUNT or declares_prefetch_safe(thing):
            return id(thing), self._key_of(vars(thing))
        return id(thing)
