"""Transposed sparse-dense product on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.ops.spmm.layout import expanded
from dgl_mgpu.ops.spmm_transposed.op import spmm_transposed_op

#: Entries at a time: what is made on the way stays small.
_ENTRIES = 1 << 16


@spmm_transposed_op.cpu
def _spmm_transposed(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    eids: torch.Tensor | None,
    v: torch.Tensor | None,
    e: torch.Tensor | None,
    num_cols: int,
    shape: Sequence[int],
) -> torch.Tensor:
    example: torch.Tensor = e if v is None else v  # type: ignore[assignment]
    number = torch.float64 if example.dtype == torch.float64 else torch.float32
    out = torch.zeros(num_cols, *shape, dtype=number)
    count = int(indptr[-1])
    for begin in range(0, count, _ENTRIES):
        entries = torch.arange(begin, min(begin + _ENTRIES, count))
        factors = []
        if v is not None:
            rows = torch.searchsorted(indptr.contiguous(), entries.to(indptr.dtype), right=True) - 1
            factors.append(expanded(v[rows].to(number), shape))
        if e is not None:
            edges = entries if eids is None else eids[entries]
            factors.append(expanded(e[edges].to(number), shape))
        out.index_add_(
            0, indices[entries], factors[0] if len(factors) == 1 else torch.mul(*factors)
        )
    return out.to(example.dtype)
