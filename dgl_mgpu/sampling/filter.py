"""Telling ids of a set from others: what is behind ``dgl.utils.Filter``.

Each function takes the arguments of the C function that its docstring names, with tensors.
"""

from __future__ import annotations

import torch

from dgl_mgpu.graph.dispatch import TensorBacked


class IdFilter(TensorBacked):
    """A set of ids.

    ``ids``: int32 or int64, shape (n,).
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.sort().values

    def holds(self, test: torch.Tensor) -> torch.Tensor:
        """Whether each id is in the set, bool, shape (m,)."""
        if not len(self._ids):
            return torch.zeros_like(test, dtype=torch.bool)
        place = torch.searchsorted(self._ids, test.to(self._ids.dtype))
        return self._ids[place.clamp_(max=len(self._ids) - 1)] == test


def create_from_set(ids: torch.Tensor) -> IdFilter:
    """A filter of ids, int32 or int64, shape (n,): ``_CAPI_DGLFilterCreateFromSet``."""
    return IdFilter(ids)


def find_included(ids: IdFilter, test: torch.Tensor) -> torch.Tensor:
    """Places in ``test`` of ids in the set, ascending: ``_CAPI_DGLFilterFindIncludedIndices``."""
    return ids.holds(test).nonzero()[:, 0].to(test.dtype)


def find_excluded(ids: IdFilter, test: torch.Tensor) -> torch.Tensor:
    """Places in ``test`` of other ids, ascending: ``_CAPI_DGLFilterFindExcludedIndices``."""
    return ids.holds(test).logical_not_().nonzero()[:, 0].to(test.dtype)
