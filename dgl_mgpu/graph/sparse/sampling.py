"""Random non-zeros of each row or column."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.random import generator
from dgl_mgpu.graph.relation import Compressed
from dgl_mgpu.graph.sparse.check import check_dim
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.selection import index_select


def sample(
    pattern: SparsityPattern,
    value: torch.Tensor,
    dim: int,
    fanout: int,
    ids: torch.Tensor,
    *,
    replace: bool,
    bias: bool,
) -> tuple[SparsityPattern, torch.Tensor]:
    """Draw non-zeros from each of the rows (``dim=0``) or columns (``dim=1``) `ids`.

    ``dgl.seed`` repeats a sample.

    Parameters
    ----------
    fanout : int
        How many to draw from each; -1 for all.  Without replacement no more than there are, and
        with a bias no more than have a positive value.
    replace : bool
        Whether a non-zero may be drawn several times.
    bias : bool
        Whether values are the weights by which non-zeros are drawn.

    Raises
    ------
    InvalidInputError, InvalidWeightError, IdOutOfRangeError
        If there is no such dimension, `fanout` is below -1, weights are vectors, negative, infinite
        or NaN, or `ids` are not rows or columns of the matrix.
    """
    asked = "sample a sparse matrix"
    check_dim(asked, dim)
    if dim == 1:
        drawn, value = sample(
            pattern.transpose(), value, 0, fanout, ids, replace=replace, bias=bias
        )
        return drawn.transpose(), value
    if fanout < -1:
        raise InvalidInputError(
            asked, f"the fanout is {fanout}", "pass a number from 0 on, or -1 for all"
        )
    rows, value = index_select(pattern, value, 0, ids)
    csr = rows.relation.csr()
    weight = _weights(asked, csr, value) if bias else None
    if fanout == -1:
        picks = torch.arange(csr.indices.numel(), device=rows.device)
        if weight is not None:
            picks = picks[weight > 0]
    elif replace:
        picks = _with_replacement(csr, fanout, weight)
    else:
        picks = _without_replacement(csr, fanout, weight)
    drawn = SparsityPattern.from_coo(csr.owners()[picks], csr.indices[picks], rows.shape)
    return drawn, value.index_select(0, picks)


def _weights(asked: str, csr: Compressed, value: torch.Tensor) -> torch.Tensor:
    """Weights, in each row as parts of its largest: rows may be of very different magnitude."""
    weight = value.detach().double()
    if weight.dim() != 1:
        raise InvalidInputError(
            asked,
            f"the weights are vectors of {weight.shape[1]} numbers",
            "pass bias=False, or scalar values",
        )
    if not bool(((weight >= 0) & (weight < torch.inf)).all()):
        raise InvalidWeightError(
            asked, "a weight is negative, infinite or NaN", "make all weights finite and at least 0"
        )
    row = csr.owners().long()
    largest = weight.new_zeros(len(csr.indptr) - 1).scatter_reduce(0, row, weight, "amax")
    return torch.where(weight > 0, weight / largest[row], 0.0)


def _without_replacement(csr: Compressed, fanout: int, weight: torch.Tensor | None) -> torch.Tensor:
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


def _with_replacement(csr: Compressed, fanout: int, weight: torch.Tensor | None) -> torch.Tensor:
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
    return picks.clamp(start, _last_positive(end, weight)).flatten()


def _last_positive(end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last non-zero of each row whose weight is positive: rounding may lead beyond it."""
    place = torch.arange(weight.numel(), device=weight.device)
    last = torch.where(weight > 0, place, -1).cummax(0).values
    return last[end - 1]
