"""Products of tall matrices: a row for each node or edge, and few columns.

A gradient of what multiplies them is a small matrix that sums over all rows.  Libraries compute it
with a few thread blocks, one after the other over the rows, and leave most of a GPU without work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Pieces of rows that are multiplied side by side: at most, and the rows of one at least.
_MAX_PIECES, _LEAST_PIECE = 64, 1024


def product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """``left.t() @ right`` of matrices with as many rows, or of each head's.

    Rows are multiplied in pieces, side by side, and those products added up.  Shapes are (n, k) and
    (n, width), or (n, heads, k) and (n, heads, width), which give (heads, k, width).
    """
    num_pieces = max(1, min(_MAX_PIECES, len(left) // _LEAST_PIECE))
    if left.dim() == 3:
        if num_pieces == 1:
            return torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1))
        pairs = zip(left.unbind(1), right.unbind(1), strict=True)
        return torch.stack([product_over_rows(*pair) for pair in pairs])
    if num_pieces == 1:
        return left.t() @ right
    size = len(left) // num_pieces
    whole = num_pieces * size
    products = torch.bmm(
        left[:whole].unflatten(0, (num_pieces, size)).transpose(1, 2),
        right[:whole].unflatten(0, (num_pieces, size)),
    )
    total = products.sum(0, dtype=products.dtype if products.dtype.itemsize > 2 else torch.float32)
    return total.add_(left[whole:].t() @ right[whole:]).to(left.dtype)


def tall_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows times a matrix, or those of each head times the head's.

    Parameters
    ----------
    rows : Tensor
        Shape (n, width_in) or (n, heads, width_in).
    matrix : Tensor
        Shape (width_in, width_out) or (heads, width_in, width_out), of the same dtype.
    """
    return _TallProduct.apply(rows, matrix)


class _TallProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return _multiply(rows, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, matrix = ctx.saved_tensors
        d_rows = d_matrix = None
        if ctx.needs_input_grad[0]:
            d_rows = _multiply(grad, matrix.transpose(-1, -2))
        if ctx.needs_input_grad[1]:
            d_matrix = product_over_rows(rows, grad)
        return d_rows, d_matrix


def _multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    if rows.dim() == 2:
        return rows @ matrix
    return torch.bmm(rows.transpose(0, 1), matrix).transpose(0, 1)
