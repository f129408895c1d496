"""Neighbour sampling by edge weight: the contract.

At a node whose largest weight is ``w_max``, an edge's float64 weight ``w`` becomes::

    W = max(1, floor(w / w_max * 2**32))   if w > 0, else 0

so that sums are exact and do not depend on their order; a positive weight below w_max / 2**32
counts as that much.  Draw ``j`` is draw ``j`` of the node's Philox stream ``SAMPLE_STREAM``.

With replacement, sample ``j`` is the first edge whose inclusive prefix sum of W exceeds the
high half of draw ``j`` times the sum of W.

Without replacement, edge ``j`` gets the key ``exponential(draw j) / W`` and the edges with the
smallest keys are taken, in the order of their keys, equal ones by place: the same
distribution as drawing one after another, each time in proportion to the weights that are
left (Efraimidis, Spirakis, «Weighted random sampling with a reservoir», 2006).  Where no more
than ``fanout`` edges have a positive weight, they are all taken as they are stored.
"""

from __future__ import annotations

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.view import GraphView, RowView

_MASK_DTYPES = (torch.bool, torch.uint8)
_WEIGHT_DTYPES = (torch.float32, torch.float64, *_MASK_DTYPES)

library.define(
    "sample_neighbors_weighted(Tensor seeds, Tensor tiers, Tensor pointers, Tensor position,"
    " SymInt num_rows, ScalarType idtype, Tensor weight_tiers, Tensor weight_pointers,"
    " Tensor weight_position, ScalarType weight_dtype, int fanout, bool replace, int key)"
    " -> (Tensor indptr, Tensor neighbors, Tensor eids)"
)
library.define(
    "check_weights(Tensor tiers, Tensor pointers, Tensor position, SymInt num_rows,"
    " ScalarType idtype, Tensor weight_tiers, Tensor weight_pointers, Tensor weight_position,"
    " ScalarType weight_dtype) -> ()"
)


@torch.library.register_fake("dgl_mgpu::sample_neighbors_weighted", lib=library)
def _sample_neighbors_weighted_fake(
    seeds: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    idtype: torch.dtype,
    weight_tiers: torch.Tensor,
    weight_pointers: torch.Tensor,
    weight_position: torch.Tensor,
    weight_dtype: torch.dtype,
    fanout: int,
    replace: bool,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(seeds.shape[0] + 1, dtype=torch.int64),
        seeds.new_empty(total, dtype=idtype),
        seeds.new_empty(total, dtype=idtype),
    )


def check_weight_view(view: GraphView, weights: RowView) -> None:
    """Raise InvalidInputError if ``weights`` cannot be weights of the edges of ``view``."""
    asked = "sample neighbors by weight"
    if weights.dtype not in _WEIGHT_DTYPES or weights.row_shape != ():
        raise InvalidInputError(
            asked,
            f"weights of dtype {weights.dtype} and shape (edges, *{weights.row_shape})",
            "pass one float32, float64, bool or uint8 for each edge",
        )
    if weights.num_rows != view.num_edges:
        raise InvalidInputError(
            asked,
            f"{weights.num_rows} weights for {view.num_edges} edges",
            "pass one weight for each edge id",
        )


def check_weights(view: GraphView, weights: RowView) -> None:
    """Check the weights of a whole graph, before any work starts.

    Parameters
    ----------
    view : GraphView
        The topology as this rank sees it.
    weights : RowView of scalars, float32, float64, bool or uint8
        Weight of each edge id.

    Raises
    ------
    InvalidInputError
        If the dtype, shape or number of weights is wrong.
    InvalidWeightError
        If a weight is NaN, infinite or negative, or if the float weights of a node with edges
        are all zero; it names the first such node.
    """
    check_weight_view(view, weights)
    torch.ops.dgl_mgpu.check_weights(
        view.tiers,
        view.pointers,
        view.position,
        view.num_rows,
        view.idtype,
        weights.tiers,
        weights.pointers,
        weights.position,
        weights.dtype,
    )
