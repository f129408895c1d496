"""Where the non-zeros of a matrix are."""

from __future__ import annotations

from functools import cached_property

import torch

from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.graph.sparse.check import check_places


class SparsityPattern:
    """Rows and columns of the non-zeros, in the order of the values that go with them.

    The formats are those of a relation from rows to columns whose edges are the non-zeros: made
    when first asked for, kept, and shared with the transpose.  Nothing here is differentiable.

    Parameters
    ----------
    shape : tuple of int
        Numbers of rows and columns.
    relation : Relation
    indices : Tensor or None, int32 or int64, shape (2, nnz)
        Rows and columns in one tensor, where there is one.
    is_diag : bool
        Whether non-zero ``i`` is known to be at ``(i, i)``, for all ``i < min(shape)``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        relation: Relation,
        indices: torch.Tensor | None = None,
        is_diag: bool = False,
    ) -> None:
        self.shape = shape
        self.relation = relation
        self.is_diag = is_diag
        self._indices = indices

    @classmethod
    def from_coo(
        cls, row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]
    ) -> SparsityPattern:
        return cls(shape, Relation(*shape, coo=Coo(row, col)))

    @classmethod
    def from_indices(cls, indices: torch.Tensor, shape: tuple[int, int]) -> SparsityPattern:
        row, col = (ids.contiguous() for ids in indices)
        return cls(shape, Relation(*shape, coo=Coo(row, col)), indices)

    @classmethod
    def from_csr(
        cls, indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]
    ) -> SparsityPattern:
        csr = Compressed(indptr.contiguous(), indices.contiguous(), None)
        return cls(shape, Relation(*shape, csr=csr))

    @classmethod
    def from_diag(cls, shape: tuple[int, int], device: torch.device) -> SparsityPattern:
        numbers = torch.arange(min(shape), device=device)
        return cls(shape, Relation(*shape, coo=Coo(numbers, numbers)), is_diag=True)

    @classmethod
    def from_keys(cls, keys: torch.Tensor, shape: tuple[int, int]) -> SparsityPattern:
        """Non-zeros at the places that `keys` gave."""
        row = keys.div(shape[1], rounding_mode="floor")
        return cls.from_coo(row, keys - row * shape[1], shape)

    @property
    def nnz(self) -> int:
        return self.relation.num_edges

    @property
    def device(self) -> torch.device:
        return self.relation.device

    @property
    def row(self) -> torch.Tensor:
        """Row of each non-zero, int64, shape (nnz,)."""
        return self.relation.coo().row.long()

    @property
    def col(self) -> torch.Tensor:
        """Column of each non-zero, int64, shape (nnz,)."""
        return self.relation.coo().col.long()

    def indices(self) -> torch.Tensor:
        """Rows and columns in one tensor, shape (2, nnz)."""
        if self._indices is None:
            with torch.inference_mode(False):  # kept, and may be saved for a backward pass
                self._indices = torch.stack(self.relation.coo())
        return self._indices

    def keys(self) -> torch.Tensor:
        """A number for each non-zero, int64: its place where the matrix is laid out row by row.

        Raises
        ------
        InvalidInputError
            If there are more places than int64 counts.
        """
        check_places("find the places of non-zeros", self.shape)
        return self.row * self.shape[1] + self.col

    @cached_property
    def has_duplicate(self) -> bool:
        """Whether several non-zeros are at the same place."""
        if self.is_diag:
            return False
        keys = self.keys().sort().values
        return bool((keys[1:] == keys[:-1]).any())

    def transpose(self) -> SparsityPattern:
        """The pattern with rows and columns exchanged, and the non-zeros in the same order."""
        rows, cols = self.shape
        return SparsityPattern((cols, rows), self.relation.reverse(), is_diag=self.is_diag)
