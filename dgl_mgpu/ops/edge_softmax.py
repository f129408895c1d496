"""Softmax over the entries of each row; see ``kernels/edge_softmax.cu``.

With ``indptr`` and ``eids`` of a graph's CSC, a row is a node and its entries are its in-edges: the
attention of GAT (Veličković et al., ICLR 2018, section 2.1).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import DTYPES, ID_DTYPES, check_tensor
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, call
from dgl_mgpu.ops.spmm_layout import ELEMENTS


@Operator
def edge_softmax_op(indptr: Tensor, eids: Tensor | None, scores: Tensor) -> Tensor:
    return torch.empty_like(scores)


@Operator
def edge_softmax_backward_op(
    indptr: Tensor, eids: Tensor | None, out: Tensor, grad: Tensor
) -> Tensor:
    return torch.empty_like(out)


def edge_softmax(indptr: Tensor, eids: Tensor | None, scores: Tensor) -> Tensor:
    """Softmax of the scores of each row's entries, for every head by itself.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_rows + 1,)
        Where each row's entries begin, from 0 to n; not checked, since that takes a wait.
    eids : Tensor or None, dtype of ``indptr``, shape (n,)
        Which edge each entry is, every edge once; None where entry ``i`` is edge ``i``.
    scores : Tensor, float32, float64, float16 or bfloat16, shape (n, *heads)
        Scores of the edges.  Half types are computed in float32.

    Returns
    -------
    Tensor, dtype and shape of ``scores``
        ``exp(score - largest) / sum``, where ``largest`` is the row's largest score.  Where that is
        minus infinity the whole row is NaN, as DGL's and torch's own softmax have it; minus
        infinity beside finite scores gives 0.  The same at every call on one device.

    Raises
    ------
    InvalidInputError
        If dtypes, shapes or devices do not fit.

    Notes
    -----
    On CUDA rows and entries together are dealt out in equal shares: the merge path of Merrill and
    Garland (SC'16, section 3).
    """
    indptr, eids = _checked_rows(indptr, eids, scores, "take the softmax of the edges of nodes")
    return call("edge_softmax", (indptr, eids, scores.contiguous()))


def edge_softmax_backward(indptr: Tensor, eids: Tensor | None, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the scores of :func:`edge_softmax`.

    Parameters
    ----------
    indptr, eids : Tensor
        As there, also in shape.
    out : Tensor, dtype of the scores, shape (n, *heads)
        What it returned.
    grad : Tensor, dtype and shape of ``out``
        Gradient of that.

    Returns
    -------
    Tensor, dtype and shape of ``out``
        ``out * (grad - sum)``, where ``sum`` is that of ``out * grad`` over the row.

    Raises
    ------
    InvalidInputError
        If dtypes, shapes or devices do not fit.
    """
    action = "take the gradient of a softmax of the edges of nodes"
    indptr, eids = _checked_rows(indptr, eids, out, action)
    check_tensor(grad, "grad", action, out.dtype, out.shape, out.device)
    tensors = (indptr, eids, out.contiguous(), grad.contiguous())
    return call("edge_softmax_backward", tensors)


def _checked_rows(
    indptr: Tensor, eids: Tensor | None, scores: Tensor, action: str
) -> tuple[Tensor, Tensor | None]:
    if indptr.dtype not in ID_DTYPES or indptr.dim() != 1 or len(indptr) == 0:
        raise InvalidInputError(
            action,
            f"indptr has shape {tuple(indptr.shape)} and dtype {indptr.dtype}",
            "pass a vector of int32 or int64, one longer than there are rows",
        )
    if scores.dtype not in DTYPES or scores.dim() == 0:
        raise InvalidInputError(
            action,
            f"scores has shape {tuple(scores.shape)} and dtype {scores.dtype}",
            "pass float32, float64, float16 or bfloat16 with a row for each edge",
        )
    if indptr.device != scores.device:
        raise InvalidInputError(
            action,
            f"indptr is on {indptr.device}, but scores is on {scores.device}",
            "move one of them",
        )
    if eids is None:
        return indptr.contiguous(), None
    check_tensor(eids, "eids", action, indptr.dtype, scores.shape[:1], indptr.device)
    return indptr.contiguous(), eids.contiguous()


class _Rows:
    """Values of edges as those of the rows' entries, in float32 at least, and back."""

    def __init__(self, indptr: Tensor, eids: Tensor | None, example: Tensor) -> None:
        self._indptr, self._eids, self._example = indptr.long(), eids, example
        self._degrees = self._indptr.diff()
        first, last = int(self._indptr[0]), int(self._indptr[-1])
        if first != 0 or last != len(example) or (self._degrees < 0).any():
            raise InvalidInputError(
                "take the softmax of the edges of nodes",
                f"indptr from {first} to {last} does not rise from 0 to {len(example)}, the number"
                " of edges",
                f"pass an indptr that rises from 0 to {len(example)}",
            )

    def entries(self, edges: Tensor) -> Tensor:
        if edges.dtype.itemsize == 2:
            edges = edges.float()
        flat = edges.reshape(len(edges), -1)
        return flat if self._eids is None else flat[self._eids]

    def reduced(self, entries: Tensor, reduction: str) -> Tensor:
        """For each entry what its row is reduced to."""
        if len(entries) == 0:
            return entries
        rows = torch.segment_reduce(entries, reduction, offsets=self._indptr)
        return rows.repeat_interleave(self._degrees, 0)

    def edges(self, entries: Tensor) -> Tensor:
        out = torch.empty_like(self._example)
        flat = out.view(len(out), -1)
        flat[slice(None) if self._eids is None else self._eids] = entries.to(out.dtype)
        return out


@edge_softmax_op.cpu
def _edge_softmax_cpu(indptr: Tensor, eids: Tensor | None, scores: Tensor) -> Tensor:
    if scores.numel() == 0:
        return torch.empty_like(scores)
    rows = _Rows(indptr, eids, scores)
    entries = rows.entries(scores)
    powers = (entries - rows.reduced(entries, "max")).exp()
    return rows.edges(powers / rows.reduced(powers, "sum"))


@edge_softmax_backward_op.cpu
def _edge_softmax_backward_cpu(
    indptr: Tensor, eids: Tensor | None, out: Tensor, grad: Tensor
) -> Tensor:
    if out.numel() == 0:
        return torch.empty_like(out)
    rows = _Rows(indptr, eids, out)
    weights, grads = rows.entries(out), rows.entries(grad)
    return rows.edges(weights * (grads - rows.reduced(weights * grads, "sum")))


_THREADS, _FINISH_THREADS = 256, 128
_WARPS = _THREADS // 32
#: Entries of a thread, and columns that a block takes at most.
_RUN, _MAX_COLUMNS = 17, 8


@functools.cache
def _kernels(
    ids: torch.dtype, scores: torch.dtype, columns: int, gradient: bool
) -> tuple[Kernel, Kernel, Kernel]:
    types = f"{c_type(ids)}, {ELEMENTS[scores]}, {columns}"
    both = f"{types}, {'true' if gradient else 'false'}"
    reduce, merge, finish = (
        Kernel("edge_softmax.cu", f"dgl_mgpu::{name}")
        for name in (f"reduce_shares<{both}>", f"merge_shares<{types}>", f"finish_shares<{both}>")
    )
    return reduce, merge, finish


@edge_softmax_op.cuda
def _edge_softmax_cuda(indptr: Tensor, eids: Tensor | None, scores: Tensor) -> Tensor:
    return _launch(indptr, eids, scores, None)


@edge_softmax_backward_op.cuda
def _edge_softmax_backward_cuda(
    indptr: Tensor, eids: Tensor | None, out: Tensor, grad: Tensor
) -> Tensor:
    return _launch(indptr, eids, out, grad)


def _launch(
    indptr: Tensor, eids: Tensor | None, scores: Tensor, gradients: Tensor | None
) -> Tensor:
    out = torch.empty_like(scores)
    if scores.numel() == 0:
        return out
    device, num_rows, num_entries = scores.device, indptr.numel() - 1, scores.shape[0]
    columns = scores.numel() // num_entries
    together = min(_MAX_COLUMNS, 1 << (columns - 1).bit_length())
    groups = -(-columns // together)
    share = _THREADS // together * _RUN
    shares = -(-(num_rows + num_entries) // share)
    # First rows of the shares, and two partial results for each share and column.
    words = shares + 1 + 2 * shares * columns * (2 if scores.dtype == torch.float64 else 1)
    scratch = torch.empty(words, dtype=torch.int64, device=device)
    request = gpu.struct(
        indptr, num_rows, eids, num_entries, scores, gradients, out, columns, share, shares,
        scratch, scratch.data_ptr() + 8 * (shares + 1),
    )  # fmt: skip
    reduce, merge, finish = _kernels(indptr.dtype, scores.dtype, together, gradients is not None)
    reduce(shares * groups, _THREADS, request, device=device)
    if shares > 1:
        merge(-(-shares * groups // _WARPS), _THREADS, request, device=device)
        finish(shares * groups, _FINISH_THREADS, request, device=device)
    return out
