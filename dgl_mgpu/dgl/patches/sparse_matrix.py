"""Torch's own sparse matrices, as DGL makes them."""

from __future__ import annotations

import torch

from dgl_mgpu.graph.originals import originals


def sparse_matrix(
    data: torch.Tensor,
    index: tuple[str, torch.Tensor],
    shape: tuple[int, int],
    force_format: bool = False,
) -> tuple[torch.Tensor, None]:
    """DGL's function of this name, with torch's check of the indices set to what it is.

    Torch warns where nobody has said whether it should check them.
    """
    original = originals["dgl.backend.pytorch.tensor:sparse_matrix"]
    checks = torch.sparse.check_sparse_tensor_invariants
    with checks(enable=checks.is_enabled()):
        return original(data, index, shape, force_format)
