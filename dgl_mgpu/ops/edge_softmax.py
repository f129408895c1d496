"""Softmax over the entries of each row; see ``kernels/edge_softmax.cu``.

With ``indptr`` and ``eids`` of a graph's CSC, a row is a node and its entries are its in-edges: the
attention of GAT (Veličković et al., ICLR 2018, section 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import DTYPES, ID_DTYPES, check_tensor
from dgl_mgpu.ops.cpu import AHEAD, kernel, load_id, prefetch_row
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import Operator, call
from dgl_mgpu.ops.spmm import address, matrix
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


def _check_offsets(indptr: Tensor, num_entries: int) -> None:
    first, last = int(indptr[0]), int(indptr[-1])
    if first != 0 or last != num_entries or (indptr.diff() < 0).any():
        raise InvalidInputError(
            "take the softmax of the edges of nodes",
            f"indptr from {first} to {last} does not rise from 0 to {num_entries}, the number"
            " of edges",
            f"pass an indptr that rises from 0 to {num_entries}",
        )


#: Rows that are worth waking a thread for.
_GRAIN = 64


@kernel
def _softmax_rows(
    begin: int, end: int, indptr: int, eids: int, id_width: int, scores: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Rows ``[begin, end)``; ids are addresses of arrays, 0 where an entry is its edge."""
    width = out.shape[1]
    largest, total = np.empty(width, out.dtype), np.empty(width, out.dtype)
    # The row's entries one after the other: they are read and written far apart only once.
    powers = np.empty((64, width), out.dtype)
    end_of_all = load_id(indptr, end, id_width)
    for row in range(begin, end):
        first, last = load_id(indptr, row, id_width), load_id(indptr, row + 1, id_width)
        if len(powers) < last - first:
            powers = np.empty((2 * (last - first), width), out.dtype)
        largest[:], total[:] = -np.inf, 0
        for entry in range(first, last):
            if eids != 0 and entry + AHEAD < end_of_all:
                prefetch_row(scores, load_id(eids, entry + AHEAD, id_width))
            given = scores[load_id(eids, entry, id_width) if eids != 0 else entry]
            power = powers[entry - first]
            for column in range(width):
                power[column] = given[column]
                largest[column] = max(largest[column], given[column])
        for entry in range(last - first):
            power = powers[entry]
            for column in range(width):
                power[column] = np.exp(power[column] - largest[column])
                total[column] += power[column]
        for entry in range(first, last):
            result = out[load_id(eids, entry, id_width) if eids != 0 else entry]
            power = powers[entry - first]
            for column in range(width):
                result[column] = power[column] / total[column]


@kernel
def _gradient_rows(
    begin: int, end: int, indptr: int, eids: int, id_width: int, weights: np.ndarray,
    grad: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """The gradient of the same."""
    total = np.empty(out.shape[1], out.dtype)
    for row in range(begin, end):
        first, last = load_id(indptr, row, id_width), load_id(indptr, row + 1, id_width)
        total[:] = 0
        for entry in range(first, last):
            edge = load_id(eids, entry, id_width) if eids != 0 else entry
            weight, given = weights[edge], grad[edge]
            for column in range(len(total)):
                total[column] += weight[column] * given[column]
        for entry in range(first, last):
            edge = load_id(eids, entry, id_width) if eids != 0 else entry
            weight, given, result = weights[edge], grad[edge], out[edge]
            for column in range(len(total)):
                result[column] = weight[column] * (given[column] - total[column])


def _over_rows(
    function: Callable[..., None], indptr: Tensor, eids: Tensor | None, *operands: Tensor
) -> Tensor:
    """What a kernel makes of edges' values, in float32 at least, as the operands' type."""
    example = operands[0]
    _check_offsets(indptr, len(example))
    number = torch.float64 if example.dtype == torch.float64 else torch.float32
    inputs = [matrix(operand, number).numpy() for operand in operands]
    out = torch.empty(inputs[0].shape, dtype=number)
    cpu.run(
        function, len(indptr) - 1, _GRAIN, indptr.data_ptr(), address(eids),
        indptr.element_size(), *inputs, out.numpy(),
    )  # fmt: skip
    return out.to(example.dtype).view(example.shape)


@edge_softmax_op.cpu
def _edge_softmax_cpu(indptr: Tensor, eids: Tensor | None, scores: Tensor) -> Tensor:
    if scores.numel() == 0:
        return torch.empty_like(scores)
    return _over_rows(_softmax_rows, indptr, eids, scores)


@edge_softmax_backward_op.cpu
def _edge_softmax_backward_cpu(
    indptr: Tensor, eids: Tensor | None, out: Tensor, grad: Tensor
) -> Tensor:
    if out.numel() == 0:
        return torch.empty_like(out)
    return _over_rows(_gradient_rows, indptr, eids, out, grad)


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
