"""Softmax over the entries of each row on the CPU."""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.edge_softmax.op import edge_softmax_backward_op, edge_softmax_op


class _Rows:
    """Values of edges as those of the rows' entries, in float32 at least, and back."""

    def __init__(
        self, indptr: torch.Tensor, eids: torch.Tensor | None, example: torch.Tensor
    ) -> None:
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

    def entries(self, edges: torch.Tensor) -> torch.Tensor:
        if edges.dtype.itemsize == 2:
            edges = edges.float()
        flat = edges.reshape(len(edges), -1)
        return flat if self._eids is None else flat[self._eids]

    def reduced(self, entries: torch.Tensor, reduction: str) -> torch.Tensor:
        """For each entry what its row is reduced to."""
        if len(entries) == 0:
            return entries
        rows = torch.segment_reduce(entries, reduction, offsets=self._indptr)
        return rows.repeat_interleave(self._degrees, 0)

    def edges(self, entries: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self._example)
        flat = out.view(len(out), -1)
        flat[slice(None) if self._eids is None else self._eids] = entries.to(out.dtype)
        return out


@edge_softmax_op.cpu
def _edge_softmax(
    indptr: torch.Tensor, eids: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    if scores.numel() == 0:
        return torch.empty_like(scores)
    rows = _Rows(indptr, eids, scores)
    entries = rows.entries(scores)
    powers = (entries - rows.reduced(entries, "max")).exp()
    return rows.edges(powers / rows.reduced(powers, "sum"))


@edge_softmax_backward_op.cpu
def _edge_softmax_backward(
    indptr: torch.Tensor, eids: torch.Tensor | None, out: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    if out.numel() == 0:
        return torch.empty_like(out)
    rows = _Rows(indptr, eids, out)
    weights, grads = rows.entries(out), rows.entries(grad)
    return rows.edges(weights * (grads - rows.reduced(weights * grads, "sum")))
