"""Softmax over the entries of each row: the contract.

With ``indptr`` and ``eids`` of a graph's CSC, a row is a node and its entries are its in-edges: the
attention of GAT (Veličković et al., ICLR 2018, section 2.1).
"""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.check import ID_DTYPES
from dgl_mgpu.ops.library import Operator, call

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@Operator
def edge_softmax_op(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(scores)


@Operator
def edge_softmax_backward_op(
    indptr: torch.Tensor, eids: torch.Tensor | None, out: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(out)


def edge_softmax(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
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


def edge_softmax_backward(
    indptr: torch.Tensor, eids: torch.Tensor | None, out: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
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
    asked = "take the gradient of a softmax of the edges of nodes"
    indptr, eids = _checked_rows(indptr, eids, out, asked)
    if grad.shape != out.shape or grad.dtype != out.dtype or grad.device != out.device:
        raise InvalidInputError(
            asked,
            f"grad has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}",
            f"pass grad of shape {tuple(out.shape)} and dtype {out.dtype} on {out.device}",
        )
    tensors = (indptr, eids, out.contiguous(), grad.contiguous())
    return call("edge_softmax_backward", tensors)


def _checked_rows(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor, asked: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if indptr.dtype not in ID_DTYPES or indptr.dim() != 1 or len(indptr) == 0:
        raise InvalidInputError(
            asked,
            f"indptr has shape {tuple(indptr.shape)} and dtype {indptr.dtype}",
            "pass a vector of int32 or int64, one longer than there are rows",
        )
    if scores.dtype not in DTYPES or scores.dim() == 0:
        raise InvalidInputError(
            asked,
            f"scores has shape {tuple(scores.shape)} and dtype {scores.dtype}",
            "pass float32, float64, float16 or bfloat16 with a row for each edge",
        )
    if indptr.device != scores.device:
        raise InvalidInputError(
            asked,
            f"indptr is on {indptr.device}, but scores is on {scores.device}",
            "move one of them",
        )
    if eids is None:
        return indptr.contiguous(), None
    if (eids.dtype, eids.device) != (indptr.dtype, indptr.device) or eids.shape != scores.shape[:1]:
        raise InvalidInputError(
            asked,
            f"eids has shape {tuple(eids.shape)} and dtype {eids.dtype} on {eids.device}",
            f"pass eids of shape ({len(scores)},) and dtype {indptr.dtype} on {indptr.device}",
        )
    return indptr.contiguous(), eids.contiguous()
