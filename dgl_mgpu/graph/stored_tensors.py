"""Tensors that a store has as well: whoever reads them may read the store instead.

That is not noted in the tensors, which would be pickled with the store.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device


class StoredContents(Protocol):
    """What a store has of tensors; it keeps the store."""

    @property
    def is_open(self) -> bool:
        """Whether the store can still be read."""


class Snapshot:
    """A tensor as it is now; it does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this tensor, and not written to since."""
        return self._tensor() is tensor and is_watched(tensor) and tensor._version == self._version


def is_watched(tensor: Tensor) -> bool:
    """Whether torch counts writes to a tensor: not if it is learned, or made in inference mode."""
    return not (tensor.is_inference() or tensor.requires_grad)


@dataclass(frozen=True)
class _Stored:
    contents: StoredContents
    device: device
    snapshots: tuple[Snapshot, ...]

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether it is of these tensors as they are now."""
        return (
            len(tensors) == len(self.snapshots)
            and all(map(Snapshot.is_of, self.snapshots, tensors))
            and self.contents.is_open
        )


#: By the identity of the first tensor.
_stored: dict[int, _Stored] = {}


def remember_stored(contents: StoredContents, device: device, *tensors: Tensor) -> None:
    """Note that a store on ``device`` has tensors, writes to which torch counts.

    The contents live as long as the first tensor.
    """
    key = id(tensors[0])
    _stored[key] = _Stored(contents, device, tuple(map(Snapshot, tensors)))
    # At the process's end stores go in an order of their own.
    weakref.finalize(tensors[0], _stored.pop, key, None).atexit = False


def stored_on(device: device, *tensors: Tensor) -> StoredContents | None:
    """What a store on ``device`` has of tensors.

    None if none has them, or one was written to since, or the store was closed.  Writes that torch
    does not count, by NumPy, through ``.data`` or by other processes, go unnoticed.
    """
    stored = _stored.get(id(tensors[0]))
    if stored is None or stored.device != device or not stored.is_of(tensors):
        return None
    return stored.contents


def is_stored(*tensors: Tensor) -> bool:
    """Whether a store has tensors as they are now."""
    stored = _stored.get(id(tensors[0]))
    return stored is not None and stored.is_of(tensors)
