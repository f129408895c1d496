"""Reductions and matrix products over segments of rows, as C functions of DGL's.

Each function takes the arguments of the C function that its docstring names, with tensors, and
writes into the output tensors it is given. Offsets have one element more than there are segments:
where each begins, and where the last one ends. Index tensors are int32 or int64, of shape (n,), and
null for ``i`` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import as_tensor, is_null
from dgl_mgpu.ops.spmm import spmm

_INF = float("inf")
#: Rows of a tile in products of gathered rows; fewer where segments are short.
_TILE_ROWS = 128


@torch.no_grad()
def segment_reduce(
    op: str, feat: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, arg: torch.Tensor
) -> None:
    """Reduce runs of rows by 'sum', 'max' or 'min': ``_CAPI_DGLKernelSegmentReduce``.

    'max' and 'min' of no rows are infinite, with the sign that never wins; ``arg`` has the first
    row that has the value, or -1.  On the CPU wrong offsets raise `InvalidInputError`; on a GPU,
    which would have to be waited for, such a segment has the rows that there are.
    """
    reduced, _, first = spmm(_within(offsets, len(feat)), None, None, None, feat, "copy_rhs", op)
    out.copy_(reduced)
    if first is not None:
        arg.copy_(first.masked_fill_(reduced == (-_INF if op == "max" else _INF), -1))


def _within(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    if offsets.is_cuda:
        return offsets.clamp(0, num_rows)
    if len(offsets) and (int(offsets[-1]) > num_rows or bool((offsets.diff() < 0).any())):
        raise InvalidInputError(
            f"reduce segments of {num_rows} rows",
            f"the shortest of {len(offsets) - 1} segments has {int(offsets.diff().min())} rows, and"
            f" all have {int(offsets[-1])} together",
            "pass lengths of 0 or more whose sum is the number of rows",
        )
    return offsets


@torch.no_grad()
def bwd_segment_cmp(feat: torch.Tensor, arg: torch.Tensor, out: torch.Tensor) -> None:
    """Add gradients of 'max' and 'min' to the rows that won: ``_CAPI_DGLKernelBwdSegmentCmp``."""
    if len(out):  # no two segments have the same row: nothing is rounded
        out.scatter_add_(0, arg.clamp(min=0).long(), feat.masked_fill(arg < 0, 0))


@torch.no_grad()
def scatter_add(x: torch.Tensor, idx: torch.Tensor, out: torch.Tensor) -> None:
    """``out[idx[i]] += x[i]``, 16-bit elements in float32: ``_CAPI_DGLKernelScatterAdd``."""
    wide = _wide(out.dtype)
    if wide == out.dtype:
        out.index_add_(0, idx, x)
    else:
        out.copy_(out.to(wide).index_add_(0, idx, x.to(wide)))


@torch.no_grad()
def segment_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    segment_lengths: Any,
    a_transposed: bool,
    b_transposed: bool,
) -> None:
    """Multiply each run of rows by a matrix of its own: ``_CAPI_DGLKernelSEGMENTMM``.

    ``b`` has shape (segments, k, m), or (segments, m, k) if ``b_transposed``; DGL has no use for
    ``a_transposed``.  Lengths are on the CPU, where no GPU has to be waited for.
    """
    bounds = _bounds(segment_lengths, len(a), len(b), "segment_mm")
    matrices = b.transpose(1, 2) if b_transposed else b
    for matrix, (start, stop) in zip(matrices, bounds, strict=True):
        if stop > start:
            torch.mm(a[start:stop], matrix, out=out[start:stop])


@torch.no_grad()
def segment_mm_backward_b(
    a: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, segment_lengths: Any
) -> None:
    """The gradient of `segment_mm` by its matrices: ``_CAPI_DGLKernelSEGMENTMMBackwardB``."""
    bounds = _bounds(segment_lengths, len(a), len(out), "segment_mm's backward")
    for place, (start, stop) in enumerate(bounds):
        if stop > start:
            torch.mm(a[start:stop].t(), gradient[start:stop], out=out[place])
        else:
            out[place].zero_()


@torch.no_grad()
def gather_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, idx_a: Any, idx_b: Any) -> None:
    """``out[i] = a[idx_a[i]] @ b[idx_b[i]]``: ``_CAPI_DGLKernelGATHERMM``."""
    if len(out):  # of no rows, indices are as null as those that are not given
        out.copy_(_gathered_products(a, b, idx_a, idx_b))


@torch.no_grad()
def gather_mm_scatter(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, idx_a: Any, idx_b: Any, idx_c: Any
) -> None:
    """Add products where they belong: ``_CAPI_DGLKernelGATHERMMSCATTER``.

    With matrices in ``b``, ``out[idx_c[i]] += a[idx_a[i]] @ b[idx_b[i]]``; with rows in it, the
    outer products ``out[idx_c[i]] += a[idx_a[i]].T @ b[idx_b[i]]``.
    """
    if not len(a) or not len(b):
        return
    if b.dim() == 3:
        products = _gathered_products(a, b, idx_a, idx_b)
    else:
        rows = _rows(a, idx_a), _rows(b, idx_b)
        if is_null(idx_c):
            out.add_(rows[0][:, :, None] * rows[1][:, None, :])
            return
        # A tile's outer products are one matrix product.
        tiles = _Tiles(idx_c, len(out))
        left, right = (tiles.pack(operand.to(_wide(operand.dtype))) for operand in rows)
        out.add_(tiles.sums(torch.bmm(left.transpose(1, 2), right)))
        return
    if is_null(idx_c):
        out.add_(products)
    else:
        scatter_add(products, idx_c, out)


class ProductsByType(torch.autograd.Function):
    """``a[i] @ b[types[i]]`` for each row ``i``, without waiting for a GPU.

    Shapes are (n, k) of ``a``, (types, k, m) of ``b``, and (n,) of ``types``.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        if not len(a):
            ctx.tiles = None
            ctx.save_for_backward(a, b)
            return a.new_zeros(0, b.shape[2])
        ctx.tiles = tiles = _Tiles(types, len(b))
        packed = tiles.pack(a)
        ctx.save_for_backward(packed, b)
        return tiles.unpack(torch.bmm(packed, b[tiles.owners]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tiles, (rows, b) = ctx.tiles, ctx.saved_tensors
        if tiles is None:
            return torch.zeros_like(rows), torch.zeros_like(b), None
        packed = tiles.pack(gradient)
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_a = tiles.unpack(torch.bmm(packed, b[tiles.owners].transpose(1, 2)))
        if ctx.needs_input_grad[1]:
            wide = _wide(b.dtype)
            products = torch.bmm(rows.to(wide).transpose(1, 2), packed.to(wide))
            of_b = tiles.sums(products).to(b.dtype)
        return of_a, of_b, None


class _Tiles:
    """Rows sorted by owner, in tiles of one owner each, the last ones filled up.

    The number of tiles depends on the number of rows alone, so that no GPU is waited for.
    """

    def __init__(self, owner: torch.Tensor, num_owners: int) -> None:
        count, where = len(owner), owner.device
        self.rows = min(_TILE_ROWS, max(1, count // max(1, num_owners)))
        num_tiles = min(count, count // self.rows + num_owners)
        sorted_owner, order = torch.sort(owner.long(), stable=True)
        first = torch.searchsorted(sorted_owner, torch.arange(num_owners + 1, device=where))
        first_tile = torch.zeros_like(first)
        torch.cumsum((first.diff() + self.rows - 1) // self.rows, 0, out=first_tile[1:])
        self._first_tile = first_tile
        within = torch.arange(count, device=where) - first[sorted_owner]
        #: Where in the tiles each row is.
        self.slots = torch.empty_like(order)
        self.slots[order] = first_tile[sorted_owner] * self.rows + within
        tiles = torch.arange(num_tiles, device=where)
        self.owners = torch.searchsorted(first_tile, tiles, right=True).sub_(1)
        self.owners.clamp_(max=max(0, num_owners - 1))

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in their tiles, shape (tiles, rows of a tile, k), with zeros in between."""
        packed = rows.new_zeros(len(self.owners) * self.rows, rows.shape[1])
        packed[self.slots] = rows
        return packed.view(len(self.owners), self.rows, rows.shape[1])

    def unpack(self, tiles: torch.Tensor) -> torch.Tensor:
        """The rows of :meth:`pack`."""
        return tiles.flatten(0, 1)[self.slots]

    def sums(self, tiles: torch.Tensor) -> torch.Tensor:
        """Each owner's tiles, added up in their order."""
        rows = tiles.flatten(1)
        sums, *_ = spmm(self._first_tile, None, None, None, rows, "copy_rhs", "sum")
        return sums.view(-1, *tiles.shape[1:])


def _gathered_products(a: torch.Tensor, b: torch.Tensor, idx_a: Any, idx_b: Any) -> torch.Tensor:
    rows = _rows(a, idx_a)
    if is_null(idx_b):
        return torch.bmm(rows[:, None, :], b)[:, 0]
    tiles = _Tiles(idx_b, len(b))
    return tiles.unpack(torch.bmm(tiles.pack(rows), b[tiles.owners]))


def _rows(x: torch.Tensor, index: Any) -> torch.Tensor:
    return x if is_null(index) else x[index.long()]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of many elements are computed."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _bounds(lengths: Any, num_rows: int, num_matrices: int, action: str) -> list[tuple[int, int]]:
    """First row of each segment, and the row after its last."""
    bounds, start = [], 0
    for length in as_tensor(lengths).tolist():
        bounds.append((start, start + length))
        start += length
    if len(bounds) != num_matrices or start != num_rows or any(a > b for a, b in bounds):
        raise InvalidInputError(
            action,
            f"{len(bounds)} segments have {start} rows together, but there are {num_matrices}"
            f" matrices and {num_rows} rows",
            "pass the length of each matrix's segment of rows",
        )
    return bounds
