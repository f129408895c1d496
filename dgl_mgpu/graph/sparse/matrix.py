"""The class that `dgl.sparse.SparseMatrix` wraps."""

from __future__ import annotations

import torch

from dgl_mgpu.graph.sparse import selection
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.sampling import sample


class SparseMatrix:
    """A sparse matrix: a pattern and a value for each of its non-zeros.

    Parameters
    ----------
    pattern : Pattern
    value : Tensor, shape (nnz,) or (nnz, D)
        Any dtype; gradients flow through it.

    The methods are those of DGL's C++ class, which `dgl.sparse.SparseMatrix` documents.
    """

    def __init__(self, pattern: SparsityPattern, value: torch.Tensor) -> None:
        self.pattern = pattern
        self._value = value

    def val(self) -> torch.Tensor:
        return self._value

    def nnz(self) -> int:
        return self.pattern.nnz

    def device(self) -> torch.device:
        return self._value.device

    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        row, col = self.pattern.relation.coo()
        return row, col

    def indices(self) -> torch.Tensor:
        return self.pattern.indices()

    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        indptr, indices, places = self.pattern.relation.csr()
        return indptr, indices, places

    def csc(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        indptr, indices, places = self.pattern.relation.csc()
        return indptr, indices, places

    def transpose(self) -> SparseMatrix:
        return SparseMatrix(self.pattern.transpose(), self._value)

    def has_duplicate(self) -> bool:
        return self.pattern.has_duplicate

    def is_diag(self) -> bool:
        return self.pattern.is_diag

    def coalesce(self) -> SparseMatrix:
        return SparseMatrix(*selection.coalesce(self.pattern, self._value))

    def index_select(self, dim: int, index: torch.Tensor) -> SparseMatrix:
        return SparseMatrix(*selection.index_select(self.pattern, self._value, dim, index))

    def range_select(self, dim: int, start: int, end: int | None) -> SparseMatrix:
        return SparseMatrix(*selection.range_select(self.pattern, self._value, dim, start, end))

    def sample(
        self, dim: int, fanout: int, ids: torch.Tensor, replace: bool, bias: bool
    ) -> SparseMatrix:
        return SparseMatrix(
            *sample(self.pattern, self._value, dim, fanout, ids, replace=replace, bias=bias)
        )
