"""Where the non-zeros of a matrix are, and the checks of arguments that describe them."""

from __future__ import annotations

from functools import cached_property

import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.graph.relation import Compressed, Coo, Relation


def check_indices(action: str, **indices: torch.Tensor) -> None:
    """Raise unless all are 1-dimensional tensors of one index dtype on one device."""
    for name, index in indices.items():
        if not isinstance(index, torch.Tensor):
            found = f"{name} is of type {type(index).__name__}"
            raise InvalidInputError(action, found, "pass a tensor")
    dtypes = {index.dtype for index in indices.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.int32, torch.int64}:
        found = ", ".join(f"{name} has dtype {index.dtype}" for name, index in indices.items())
        raise InvalidInputError(action, found, "pass int64 tensors, or int32 tensors")
    for name, index in indices.items():
        if index.dim() != 1:
            found = f"{name} has shape {tuple(index.shape)}"
            raise InvalidInputError(action, found, "pass a tensor of one dimension")
    if len({index.device for index in indices.values()}) > 1:
        found = ", ".join(f"{name} is on {index.device}" for name, index in indices.items())
        raise InvalidInputError(action, found, "pass tensors on one device")


def any_outside(ids: torch.Tensor, bound: int) -> torch.Tensor:
    """Whether an id is not in ``[0, bound)``; a tensor, for which the host need not wait."""
    return ((ids < 0) | (ids >= bound)).any()


def check_range(action: str, *bounds: tuple[torch.Tensor, int]) -> None:
    """Raise unless all ids of each tensor are in ``[0, bound)``.  The host waits once."""
    if not bool(torch.stack([any_outside(*pair) for pair in bounds]).any()):
        return
    for ids, bound in bounds:
        outside = ids[(ids < 0) | (ids >= bound)]
        if outside.numel():
            found = f"there is no place for index {int(outside[0])}"
            raise IdOutOfRangeError(action, found, f"pass indices in [0, {bound})")


def check_value(action: str, value: torch.Tensor, nnz: int, device: torch.device) -> None:
    """Raise unless there is a value for each non-zero, on the device of the indices."""
    if value.dim() not in (1, 2) or value.shape[0] != nnz:
        raise InvalidInputError(
            action,
            f"the values have shape {tuple(value.shape)}, but there are {nnz} non-zeros",
            f"pass values of shape ({nnz},) or ({nnz}, D)",
        )
    if value.device != device:
        found = f"the values are on {value.device}, but the indices are on {device}"
        raise InvalidInputError(action, found, "move one to the other")


def check_dim(action: str, dim: int) -> None:
    """Raise unless `dim` is 0 or 1."""
    if dim not in (0, 1):
        raise InvalidInputError(action, f"there is no dim={dim}", "use 0 or 1")


def check_numbering(action: str, shape: tuple[int, int]) -> None:
    """Raise unless the places of a matrix can be numbered in 64 bits."""
    if shape[0] * shape[1] >= 1 << 63:
        found = f"the matrix has shape {shape}"
        raise InvalidInputError(action, found, "pass one of less than 2^63 places")


def check_same(action: str, **tensors: torch.Tensor) -> None:
    """Raise unless all have one dtype and are on one device."""
    for attribute in ("dtype", "device"):
        values = {name: getattr(tensor, attribute) for name, tensor in tensors.items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{name} has {attribute} {value}" for name, value in values.items())
            raise InvalidInputError(action, found, f"convert them to one {attribute}")


class SparsityPattern:
    """Rows and columns of the non-zeros, in the order of the values that go with them.

    The formats are those of a relation from rows to columns whose edges are the non-zeros: made on
    first use, kept, and shared with the transpose.  Nothing here is differentiable.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        relation: Relation,
        indices: torch.Tensor | None = None,  # int32 or int64, shape (2, nnz), if there is one
        is_diag: bool = False,  # non-zero i is known to be at (i, i), for all i < min(shape)
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
        """The inverse of `keys`."""
        row = keys.div(shape[1], rounding_mode="floor")
        return cls.from_coo(row, keys - row * shape[1], shape)

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
        """The place of each non-zero in the matrix laid out row by row; int64, shape (nnz,)."""
        check_numbering("find the places of non-zeros", self.shape)
        return self.row * self.shape[1] + self.col

    @cached_property
    def has_duplicate(self) -> bool:
        """Whether several non-zeros are at the same place."""
        if self.is_diag:
            return False
        keys = self.keys().sort().values
        return bool((keys[1:] == keys[:-1]).any())

    def transpose(self) -> SparsityPattern:
        """Rows and columns exchanged, with the non-zeros in the same order."""
        rows, cols = self.shape
        return SparsityPattern((cols, rows), self.relation.reverse(), is_diag=self.is_diag)
