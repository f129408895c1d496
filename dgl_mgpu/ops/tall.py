"""Products of tall matrices: a row for each node or edge, and few columns.

A gradient of what multiplies them is a small matrix that sums over all rows.  Libraries compute it
with a few thread blocks, one after the other over the rows, and leave most of a GPU without work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Pieces of rows that are multiplied side by side have so many rows at least; their products have
#: so many numbers in all, at most.
_LEAST_PIECE, _MOST_NUMBERS = 4096, 1 << 24
_PLAIN = {Tensor, torch.nn.Parameter}


def product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """``left.t() @ right`` of matrices with as many rows, or of each head's.

    Rows are multiplied in pieces, side by side, and those products added up.  Shapes are (n, k) and
    (n, width), or (n, heads, k) and (n, heads, width), which give (heads, k, width).
    """
    if left.dim() == 2:
        return product_over_rows(left.unsqueeze(1), right.unsqueeze(1)).squeeze(0)
    count, heads, k = left.shape
    num_pieces = min(count // _LEAST_PIECE, _MOST_NUMBERS // max(1, heads * k * right.shape[2]))
    by_head = left.permute(1, 2, 0), right.transpose(0, 1)
    if num_pieces < 2:
        return torch.bmm(*by_head)
    size = count // num_pieces
    whole = num_pieces * size
    pieces = [it[:whole].unflatten(0, (num_pieces, size)) for it in (left, right)]
    # Each head's by itself: as one batch of products they would have to be copied.
    pairs = zip(
        pieces[0].permute(2, 0, 3, 1).unbind(), pieces[1].movedim(2, 0).unbind(), strict=True
    )
    products = torch.stack([torch.bmm(*pair) for pair in pairs])
    total = products.sum(1, dtype=products.dtype if products.dtype.itemsize > 2 else torch.float32)
    if whole < count:
        total = total + torch.bmm(by_head[0][:, :, whole:], by_head[1][:, whole:])
    return total.to(left.dtype)


def tall_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows times a matrix, or those of each head times the head's; in their dtype, also within
    autocast.

    Parameters
    ----------
    rows : Tensor
        Shape (n, width_in) or (n, heads, width_in).
    matrix : Tensor
        Shape (width_in, width_out) or (heads, width_in, width_out), of the same dtype.
    """
    if not _PLAIN.issuperset((type(rows), type(matrix))):  # subclasses may add up rows elsewhere
        return rows @ matrix if rows.dim() == 2 else torch.einsum("nhk,hkw->nhw", rows, matrix)
    return _TallProduct.apply(rows, matrix)


class _TallProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        with torch.autocast(rows.device.type, enabled=False):
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
