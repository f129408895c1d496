"""Tensors that a store has as well: whoever reads them may read the store instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, device

_ATTRIBUTE = "_dgl_mgpu_stored"


@dataclass(frozen=True)
class _Stored:
    contents: Any
    device: device
    version: int


def remember_stored(tensor: Tensor, contents: Any, device: device) -> None:
    """Note that a store on ``device`` has a tensor in ``contents``, which is kept as long as it.

    Torch has to count what is written to the tensor: it is not learned, nor made in inference mode.
    """
    setattr(tensor, _ATTRIBUTE, _Stored(contents, device, tensor._version))


def stored_on(device: device, tensor: Tensor) -> Any:
    """What a store on ``device`` has of a tensor; None if none has it, or it was written to since.

    Writes of other processes go unnoticed.
    """
    stored: _Stored | None = getattr(tensor, _ATTRIBUTE, None)
    if stored is None or stored.device != device or stored.version != tensor._version:
        return None
    return stored.contents


def is_stored(tensor: Tensor) -> bool:
    """Whether a store has a tensor as it is now."""
    stored: _Stored | None = getattr(tensor, _ATTRIBUTE, None)
    return stored is not None and stored.version == tensor._version
