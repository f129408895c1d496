"""DGL's arrays as tensors."""

from __future__ import annotations

from typing import Any

import torch

_SIGNED = {
    torch.uint8: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def is_null(array: Any) -> bool:
    """Whether an argument is what DGL passes for none: a vector of no elements."""
    return len(array.shape) == 1 and array.shape[0] == 0


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor, or an NDArray of the CPU as one; without a copy."""
    if isinstance(array, torch.Tensor):
        return array
    from dgl import backend as F  # modules of DGL import this one

    return F.zerocopy_from_dgl_ndarray(array)


def cast_to_signed(array: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers: ``_CAPI_DGLArrayCastToSigned``."""
    return array.view(_SIGNED.get(array.dtype, array.dtype))
