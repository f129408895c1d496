"""Maxima and minima of messages that come in several parts, and gradients of the rows that won.

On the CPU made of torch's functions; for CUDA see ``kernels/extremes.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, Written, call
from dgl_mgpu.ops.spmm_layout import ELEMENTS

_THREADS = 256


@Operator
def keep_extremes_op(
    values: Written,
    entries: Written,
    winners: Written,
    found: Tensor,
    chosen: Tensor,
    numbers: Tensor | None,
    indices: Tensor,
    begin: int,
    highest: bool,
) -> None:
    return None


@Operator
def scatter_to_winners_op(out: Written, elements: Tensor, winners: Tensor, begin: int) -> None:
    return None


def keep_extremes(
    values: Tensor,
    entries: Tensor,
    winners: Tensor,
    found: Tensor,
    chosen: Tensor,
    numbers: Tensor | None,
    indices: Tensor,
    begin: int,
    highest: bool,
) -> None:
    """Have a part's extremes take the place of those so far where they are more extreme.

    Of equal ones that of the edge with the smaller number stays.

    Parameters
    ----------
    values, entries, winners : Tensor, shape (num_dst, \\*shape)
        Written: the extremes of the parts before; the numbers of their edges, and ``begin`` and the
        places of their sources' rows, of one integer dtype, -1 where there is none.
    found, chosen : Tensor, shape (num_dst, \\*shape)
        The part's extremes, and the entries that they are of.
    numbers : Tensor or None, shape (nnz,)
        The number of each entry's edge; None where entry ``i`` is edge ``i``.
    indices : Tensor, shape (nnz,)
        The place of each entry's source.
    begin : int
        Where places of this part begin.
    highest : bool
        Whether they are maxima.
    """
    tensors = (values, entries, winners, found, chosen, numbers, indices)
    call("keep_extremes", tensors, begin, highest)


def scatter_to_winners(out: Tensor, elements: Tensor, winners: Tensor, begin: int) -> None:
    """Add elements to the rows that won.

    Parameters
    ----------
    out : Tensor, float32 or float64, shape (count, \\*shape)
        Written: rows at places ``begin`` to ``begin + count``; those at others are left out.
    elements : Tensor, shape (num_dst, \\*shape)
    winners : Tensor, shape (num_dst, \\*shape)
        As :func:`keep_extremes` has them.
    """
    call("scatter_to_winners", (out, elements, winners), begin)


@keep_extremes_op.cpu
def _keep_extremes_cpu(
    values: Tensor,
    entries: Tensor,
    winners: Tensor,
    found: Tensor,
    chosen: Tensor,
    numbers: Tensor | None,
    indices: Tensor,
    begin: int,
    highest: bool,
) -> None:
    edges = chosen if numbers is None else numbers[chosen]
    better = found > values if highest else found < values
    better |= (found == values) & (edges < entries)
    for of_all, of_part in (
        (values, found),
        (entries, edges),
        (winners, indices[chosen] + begin),
    ):
        torch.where(better, of_part, of_all, out=of_all)


@scatter_to_winners_op.cpu
def _scatter_to_winners_cpu(out: Tensor, elements: Tensor, winners: Tensor, begin: int) -> None:
    rows = winners.long() - begin
    is_here = (rows >= 0) & (rows < len(out))
    if not len(out):
        return
    zero = elements.new_zeros((), dtype=out.dtype)
    given = torch.where(is_here, elements.to(out.dtype), zero)
    out.scatter_add_(0, rows.clamp(0, len(out) - 1), given)


@keep_extremes_op.cuda
def _keep_extremes(
    values: Tensor,
    entries: Tensor,
    winners: Tensor,
    found: Tensor,
    chosen: Tensor,
    numbers: Tensor | None,
    indices: Tensor,
    begin: int,
    highest: bool,
) -> None:
    count = values.numel()
    if not count or not len(indices):
        return
    types = f"{c_type(entries.dtype)}, {ELEMENTS[values.dtype]}, {'true' if highest else 'false'}"
    kernel = Kernel("extremes.cu", f"dgl_mgpu::keep_extremes<{types}>")
    kernel(
        -(-count // _THREADS), _THREADS, values, entries, winners, found.contiguous(),
        chosen.contiguous(), numbers, indices.contiguous(), begin, count, device=values.device,
    )  # fmt: skip


@scatter_to_winners_op.cuda
def _scatter_to_winners(out: Tensor, elements: Tensor, winners: Tensor, begin: int) -> None:
    count = elements.numel()
    if not count or not out.numel():
        return
    types = f"{c_type(winners.dtype)}, {ELEMENTS[elements.dtype]}"
    kernel = Kernel("extremes.cu", f"dgl_mgpu::scatter_to_winners<{types}>")
    kernel(
        -(-count // _THREADS), _THREADS, out, elements.contiguous(), winners, begin,
        len(out), count, count // len(elements), device=out.device,
    )  # fmt: skip
