"""`SparseMatrix`, which ``dgl.sparse.SparseMatrix`` wraps, and the functions that make one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.random import generator
from dgl_mgpu.graph.relation import Compressed
from dgl_mgpu.graph.sparse.pattern import (
    SparsityPattern,
    any_outside,
    check_dim,
    check_indices,
    check_range,
    check_value,
)


class DotScores(NamedTuple):
    """Products of rows, ``scale * sum(left[column] * right[row])`` for each non-zero and head."""

    #: Shape (columns, heads, width).
    left: torch.Tensor
    #: Shape (rows, heads, width).
    right: torch.Tensor
    scale: float
    #: 2 where values are scalars, 3 where they are vectors of a number for each head.
    dim: int
    #: Computes them, of scale 1, from matrices of so many dimensions: the right and the left one.
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pending:
    """Values that are computed when somebody reads them: scores, or their softmax in each row."""

    def __init__(
        self,
        scores: DotScores,
        softmax: Callable[[torch.Tensor], torch.Tensor] | None,
        compute: Callable[[], torch.Tensor],
    ) -> None:
        self.scores = scores
        #: Computes the softmax of scores; None where values are the scores themselves.
        self.softmax = softmax
        #: Whether gradients flow through them, which depends on when the script asked for them.
        self.is_recorded = torch.is_grad_enabled()
        self._compute = compute

    def value(self) -> torch.Tensor:
        with torch.inference_mode(False), torch.set_grad_enabled(self.is_recorded):
            return self._compute()


class SparseMatrix:
    """A pattern and a value for each of its non-zeros, which gradients flow through.

    Values have the shape (nnz,) or (nnz, D) and any dtype.  The methods are those of DGL's C++
    class, which ``dgl.sparse.SparseMatrix`` documents.
    """

    def __init__(self, pattern: SparsityPattern, value: torch.Tensor | Pending) -> None:
        self.pattern = pattern
        self._value = value
        #: The values' version, and what all of them are then, or None.
        self._constant: tuple[int, float | None] | None = None
        #: Those whose values are computed of these.
        self._waiting: list[weakref.ref[SparseMatrix]] = []

    def __getstate__(self) -> dict[str, Any]:
        self.val()
        return self.__dict__

    def val(self) -> torch.Tensor:
        if isinstance(self._value, Pending):
            self._value = self._value.value()
            # Before whoever asked for these can write to them.
            waiting, self._waiting = self._waiting, []
            for other in [reference() for reference in waiting]:
                if other is not None:
                    other.val()
        return self._value

    def followed_by(self, values: Pending) -> SparseMatrix:
        """A matrix of the same pattern, whose values are computed of these when they are read."""
        other = SparseMatrix(self.pattern, values)
        self._waiting.append(weakref.ref(other))
        return other

    @property
    def pending(self) -> Pending | None:
        """What values are that nobody has read."""
        return self._value if isinstance(self._value, Pending) else None

    def constant(self) -> float | None:
        """The number that all values are; None where they differ, or gradients flow through them.

        The host waits once for the device, and again when a script has written to the values.
        """
        value = self.val()
        if value.requires_grad or value.is_inference() or value.is_complex() or not value.numel():
            return None
        if self._constant is None or self._constant[0] != value._version:
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            low, high = torch.stack(value.aminmax()).tolist()
            number = float(low) if low == high and math.isfinite(low) else None
            self._constant = value._version, number
        return self._constant[1]

    def nnz(self) -> int:
        return self.pattern.relation.num_edges

    def device(self) -> torch.device:
        return self.pattern.relation.device

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
        return SparseMatrix(self.pattern.transpose(), self.val())

    def has_duplicate(self) -> bool:
        return self.pattern.has_duplicate

    def is_diag(self) -> bool:
        return self.pattern.is_diag

    def coalesce(self) -> SparseMatrix:
        """One non-zero a place, sorted by row and column, with the sum of the values there."""
        keys, place = self.pattern.keys().unique(return_inverse=True)
        terms = widen(self.val())
        total = terms.new_zeros(keys.numel(), *terms.shape[1:]).index_add(0, place, terms)
        pattern = SparsityPattern.from_keys(keys, self.shape())
        return SparseMatrix(pattern, total.to(self.val().dtype))

    def index_select(self, dim: int, index: torch.Tensor) -> SparseMatrix:
        """The rows (``dim=0``) or columns (``dim=1``) `index`, in this order."""
        action = "select rows or columns of a sparse matrix"
        check_indices(action, index=index)
        if index.device != self.device():
            raise InvalidInputError(
                action,
                f"the index is on {index.device}, but the matrix is on {self.device()}",
                "move one to the other",
            )
        check_range(action, (index, self.shape()[dim]))
        return self._select(dim, index)

    def range_select(self, dim: int, start: int, end: int | None) -> SparseMatrix:
        """The rows (``dim=0``) or columns (``dim=1``) from `start` up to `end`, or to the last."""
        size = self.shape()[dim]
        end = size if end is None else end
        if not 0 <= start <= end <= size:
            raise InvalidInputError(
                "select a range of rows or columns of a sparse matrix",
                f"the range [{start}, {end}) is not within [0, {size})",
                f"pass a range within [0, {size})",
            )
        return self._select(dim, torch.arange(start, end, device=self.device()))

    def _select(self, dim: int, ids: torch.Tensor) -> SparseMatrix:
        if dim == 1:
            return self.transpose()._select(0, ids).transpose()
        csr = self.pattern.relation.csr()
        entries, counts = csr.entries(ids)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(csr.indptr.dtype)
        shape = ids.numel(), self.shape()[1]
        pattern = SparsityPattern.from_csr(indptr, csr.indices[entries], shape)
        return SparseMatrix(pattern, self.val().index_select(0, csr.ids_at(entries).long()))

    def sample(
        self, dim: int, fanout: int, ids: torch.Tensor, replace: bool, bias: bool
    ) -> SparseMatrix:
        """Draw `fanout` non-zeros, or with -1 all, from each of the rows or columns `ids`.

        Without replacement no more are drawn than there are, and with a bias, for which values are
        the weights, no more than have a positive value.  ``dgl.seed`` repeats a sample.
        """
        action = "sample a sparse matrix"
        check_dim(action, dim)
        if dim == 1:
            return self.transpose().sample(0, fanout, ids, replace, bias).transpose()
        if fanout < -1:
            raise InvalidInputError(
                action, f"the fanout is {fanout}", "pass a number from 0 on, or -1 for all"
            )
        rows = self.index_select(0, ids)
        csr = rows.pattern.relation.csr()
        weight = _relative_weights(action, csr, rows.val()) if bias else None
        if fanout == -1:
            picks = torch.arange(csr.indices.numel(), device=self.device())
            if weight is not None:
                picks = picks[weight > 0]
        elif replace:
            picks = _pick_with_replacement(csr, fanout, weight)
        else:
            picks = _pick_without_replacement(csr, fanout, weight)
        drawn = SparsityPattern.from_coo(csr.owners()[picks], csr.indices[picks], rows.shape())
        return SparseMatrix(drawn, rows.val().index_select(0, picks))


def widen(value: torch.Tensor) -> torch.Tensor:
    """In the precision in which sums of its dtype are computed: at least float32."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _relative_weights(action: str, csr: Compressed, value: torch.Tensor) -> torch.Tensor:
    """Weights divided by the largest of their row: rows may be of very different magnitude."""
    weight = value.detach().double()
    if weight.dim() != 1:
        raise InvalidInputError(
            action,
            f"the weights are vectors of {weight.shape[1]} numbers",
            "pass bias=False, or scalar values",
        )
    if not bool(((weight >= 0) & (weight < torch.inf)).all()):
        raise InvalidWeightError(
            action,
            "a weight is negative, infinite or NaN",
            "make all weights finite and at least 0",
        )
    row = csr.owners().long()
    largest = weight.new_zeros(len(csr.indptr) - 1).scatter_reduce(0, row, weight, "amax")
    return torch.where(weight > 0, weight / largest[row], 0.0)


def _pick_without_replacement(
    csr: Compressed, fanout: int, weight: torch.Tensor | None
) -> torch.Tensor:
    """Positions of the non-zeros drawn, ascending.

    The smallest of exponential variables whose rates are the weights are a sample without
    replacement (Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006).
    """
    nnz = csr.indices.numel()
    time = torch.empty(nnz, device=csr.indices.device)
    time.exponential_(generator=generator(time.device))
    if weight is not None:
        time = (time / weight).float().masked_fill_(weight == 0, torch.inf)
    # Positive floats are in the order of their bits: one sort by row and time.
    order = (csr.owners().long() << 32 | time.view(torch.int32)).argsort()
    place = torch.arange(nnz, device=order.device)
    drawn = place - csr.indptr[:-1].repeat_interleave(csr.indptr.diff(), output_size=nnz) < fanout
    if weight is not None:
        drawn &= weight[order] > 0
    return order[drawn].sort().values


def _pick_with_replacement(
    csr: Compressed, fanout: int, weight: torch.Tensor | None
) -> torch.Tensor:
    """Positions of the non-zeros drawn, ``fanout`` for each row that has any to draw."""
    start, end = csr.indptr[:-1].long(), csr.indptr[1:].long()
    if weight is None:
        has_any = end > start
    else:
        total = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
        has_any = total[end] > total[start]
    start, end = (bound[has_any, None] for bound in (start, end))
    uniform = torch.rand(
        start.shape[0],
        fanout,
        generator=generator(start.device),
        dtype=torch.float64,
        device=start.device,
    )
    if weight is None:
        return (start + (uniform * (end - start)).long()).flatten()
    # The first place where the running sum is above the number: one whose weight is positive.
    number = total[start] + uniform * (total[end] - total[start])
    picks = torch.searchsorted(total[1:], number, right=True)
    # Rounding may lead beyond the last non-zero of a row whose weight is positive.
    place = torch.arange(weight.numel(), device=weight.device)
    last_positive = torch.where(weight > 0, place, -1).cummax(0).values
    return picks.clamp(start, last_positive[end - 1]).flatten()


def from_coo(indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]) -> SparseMatrix:
    """A matrix with ``value[i]`` at row ``indices[0, i]`` and column ``indices[1, i]``."""
    action = "make a sparse matrix from COO"
    if indices.dim() != 2 or indices.shape[0] != 2:
        found = f"the indices have shape {tuple(indices.shape)}"
        raise InvalidInputError(action, found, "pass indices of shape (2, nnz)")
    rows, cols = _checked_shape(action, shape)
    check_indices(action, row=indices[0], col=indices[1])
    check_value(action, value, indices.shape[1], indices.device)
    check_range(action, (indices[0], rows), (indices[1], cols))
    return SparseMatrix(SparsityPattern.from_indices(indices, (rows, cols)), value)


def from_csr(
    indptr: torch.Tensor, indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]
) -> SparseMatrix:
    """A matrix whose row ``i`` has the columns ``indices[indptr[i]:indptr[i + 1]]``."""
    action = "make a sparse matrix from CSR"
    return _from_compressed(action, indptr, indices, value, _checked_shape(action, shape))


def from_csc(
    indptr: torch.Tensor, indices: torch.Tensor, value: torch.Tensor, shape: Sequence[int]
) -> SparseMatrix:
    """A matrix whose column ``i`` has the rows ``indices[indptr[i]:indptr[i + 1]]``."""
    action = "make a sparse matrix from CSC"
    rows, cols = _checked_shape(action, shape)
    return _from_compressed(action, indptr, indices, value, (cols, rows)).transpose()


def from_diag(value: torch.Tensor, shape: Sequence[int]) -> SparseMatrix:
    """A matrix with ``value`` on its diagonal."""
    action = "make a diagonal sparse matrix"
    rows, cols = _checked_shape(action, shape)
    check_value(action, value, min(rows, cols), value.device)
    return SparseMatrix(SparsityPattern.from_diag((rows, cols), value.device), value)


def val_like(mat: SparseMatrix, value: torch.Tensor) -> SparseMatrix:
    """A matrix with other values at the places of `mat`."""
    check_value("give a sparse matrix new values", value, mat.nnz(), mat.device())
    return SparseMatrix(mat.pattern, value)


def _checked_shape(action: str, shape: Sequence[int]) -> tuple[int, int]:
    sizes = [int(size) for size in shape]  # where DGL takes them from the indices, tensors
    if len(sizes) != 2 or min(sizes) < 0:
        raise InvalidInputError(action, f"the shape is {tuple(sizes)}", "pass (rows, columns)")
    return sizes[0], sizes[1]


def _from_compressed(
    action: str,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    value: torch.Tensor,
    shape: tuple[int, int],
) -> SparseMatrix:
    check_indices(action, indptr=indptr, indices=indices)
    check_value(action, value, indices.numel(), indices.device)
    if indptr.numel() != shape[0] + 1:
        raise InvalidInputError(
            action,
            f"indptr has {indptr.numel()} entries, but there are {shape[0]} compressed rows or "
            "columns",
            "pass an indptr with one entry more than that",
        )
    steps_down = (indptr.diff() < 0).any()
    is_bad = steps_down | (indptr[0] != 0) | (indptr[-1] != indices.numel())
    if bool(is_bad | any_outside(indices, shape[1])):
        check_range(action, (indices, shape[1]))
        raise InvalidInputError(
            action,
            "indptr does not rise from 0 to the number of non-zeros",
            "pass the running sum of how many non-zeros each row or column has",
        )
    return SparseMatrix(SparsityPattern.from_csr(indptr, indices, shape), value)


def compact(
    mat: SparseMatrix, dim: int, leading_indices: torch.Tensor | Sequence[int] | None
) -> tuple[SparseMatrix, torch.Tensor]:
    """Renumber rows (``dim=0``) or columns (``dim=1``), without those that are empty.

    Leading indices come first, in this order, also if they are empty; the others keep their order.
    Also returns the old number of each, shape (new size,).
    """
    action = "compact a sparse matrix"
    check_dim(action, dim)
    row, col = mat.coo()
    ids = (row, col)[dim]
    size = mat.shape()[dim]
    occupied = torch.zeros(size, dtype=torch.bool, device=ids.device)
    occupied.index_fill_(0, ids.long(), True)
    leading = ids.new_empty(0)
    if leading_indices is not None:
        dtype = None if isinstance(leading_indices, torch.Tensor) else ids.dtype
        leading = torch.as_tensor(leading_indices, dtype=dtype, device=ids.device)
        check_indices(action, leading_indices=leading)
        check_range(action, (leading, size))
        ordered, place = leading.sort(stable=True)
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        leading = leading[place[is_first].sort().values].to(ids.dtype)
        occupied.index_fill_(0, leading.long(), False)
    old = torch.cat([leading, occupied.nonzero().flatten().to(ids.dtype)])
    new = ids.new_empty(size)
    new[old.long()] = torch.arange(old.numel(), dtype=ids.dtype, device=ids.device)
    renumbered = new[ids.long()]
    if dim == 0:
        pattern = SparsityPattern.from_coo(renumbered, col, (old.numel(), mat.shape()[1]))
    else:
        pattern = SparsityPattern.from_coo(row, renumbered, (mat.shape()[0], old.numel()))
    return SparseMatrix(pattern, mat.val()), old
