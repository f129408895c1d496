"""Sums and products of weighted adjacency matrices: C functions of DGL's ``sparse``.

DGL's autograd is above them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import TensorIndex, single_schema
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.spspmm import multiply


def csrmm(
    a: TensorIndex,
    a_weights: torch.Tensor,
    b: TensorIndex,
    b_weights: torch.Tensor,
    num_vtypes: int,
) -> tuple[TensorIndex, torch.Tensor]:
    """The product of two graphs' adjacency matrices: ``_CAPI_DGLCSRMM``.

    Parameters
    ----------
    a, b : TensorIndex
        Of one edge type each.
    a_weights, b_weights : Tensor, floating point, shape (num_edges,)
        Parallel edges add up.
    num_vtypes : int
        Node types of the result, 1 or 2.

    Returns
    -------
    TensorIndex
        An edge wherever there is a path of an edge of ``a`` and one of ``b``, sorted.
    weights : Tensor, same dtype, shape (num_edges of the result,)

    Raises
    ------
    InvalidCallError
        If the graphs or weights do not fit together.
    """
    asked = "multiply the adjacency matrices of two graphs"
    _check_weights(asked, [a, b], [a_weights, b_weights])
    left, right = a.relations[0], b.relations[0]
    if left.num_dst != right.num_src:
        raise InvalidCallError(
            asked,
            f"the first has {left.num_dst} destination nodes, but the second has {right.num_src}"
            " source nodes",
            "pass a second graph whose source nodes are the first's destination nodes",
        )
    shape = left.num_src, right.num_dst
    keys, weights = multiply(_pattern(left), _pattern(right), a_weights, b_weights)
    return _from_keys(keys, shape, a.idtype, num_vtypes), weights


def csrsum(
    indexes: Sequence[TensorIndex], weights: Sequence[torch.Tensor]
) -> tuple[TensorIndex, torch.Tensor]:
    """The sum of graphs' adjacency matrices: ``_CAPI_DGLCSRSum``.

    Parameters
    ----------
    indexes : list of TensorIndex
        Of one edge type each, and of the same nodes.
    weights : list of Tensor, floating point, shape (num_edges,)
        Of each.

    Returns
    -------
    TensorIndex
        An edge wherever any of the graphs has one, sorted.
    weights : Tensor, same dtype, shape (num_edges of the result,)

    Raises
    ------
    InvalidCallError
        If the graphs or weights do not fit together.
    """
    asked = "add the adjacency matrices of graphs"
    _check_weights(asked, indexes, weights)
    shapes = {(index.relations[0].num_src, index.relations[0].num_dst) for index in indexes}
    if len(shapes) > 1:
        raise InvalidCallError(
            asked,
            f"they have the shapes {sorted(shapes)}",
            "pass graphs with the same numbers of nodes",
        )
    keys = torch.cat([_pattern(index.relations[0]).keys() for index in indexes])
    found, place = keys.unique(return_inverse=True)
    total = torch.cat(list(weights))
    total = total.new_zeros(found.numel()).index_add_(0, place, total)
    first = indexes[0]
    return _from_keys(found, shapes.pop(), first.idtype, first.schema.num_ntypes), total


def csrmask(a: TensorIndex, a_weights: torch.Tensor, b: TensorIndex) -> torch.Tensor:
    """Weights of ``a`` at the edges of ``b``, 0 where it has none: ``_CAPI_DGLCSRMask``.

    Where ``a`` has parallel edges, the first one's weight.
    """
    _check_weights("look edges of a graph up in another", [a], [a_weights])
    start, counts, eids = a.relations[0].edges_between(*b.relations[0].coo())
    if eids.numel() == 0:
        return a_weights.new_zeros(start.numel())
    weights = a_weights[eids.long()[start.clamp(max=eids.numel() - 1)]]
    return torch.where(counts > 0, weights, 0)


def _check_weights(
    asked: str, indexes: Sequence[TensorIndex], weights: Sequence[torch.Tensor]
) -> None:
    for index, given in zip(indexes, weights, strict=True):
        if len(index.relations) != 1:
            raise InvalidCallError(
                asked, f"one has {len(index.relations)} edge types", "pass graphs of one edge type"
            )
        if given.shape != (index.relations[0].num_edges,) or not given.is_floating_point():
            raise InvalidCallError(
                asked,
                f"weights have dtype {given.dtype} and shape {tuple(given.shape)}, but their graph"
                f" has {index.relations[0].num_edges} edges",
                "pass a floating-point number for each edge",
            )
    id_dtypes = {index.idtype for index in indexes}
    weight_dtypes = {given.dtype for given in weights}
    if len(id_dtypes) > 1 or len(weight_dtypes) > 1:
        raise InvalidCallError(
            asked,
            f"ids have the dtypes {', '.join(sorted(map(str, id_dtypes)))}, and weights have the"
            f" dtypes {', '.join(sorted(map(str, weight_dtypes)))}",
            "pass graphs with ids of one dtype, and weights of one dtype",
        )


def _pattern(relation: Relation) -> SparsityPattern:
    return SparsityPattern((relation.num_src, relation.num_dst), relation)


def _from_keys(
    keys: torch.Tensor, shape: tuple[int, int], idtype: torch.dtype, num_ntypes: int
) -> TensorIndex:
    """The index of the edges at ascending places of a matrix, see `SparsityPattern.keys`."""
    rows, cols = shape
    starts = torch.arange(rows + 1, device=keys.device) * cols
    indptr = torch.searchsorted(keys, starts).to(idtype)
    matrix = Compressed(indptr, keys.remainder(max(cols, 1)).to(idtype), None)
    nodes = [rows] if num_ntypes == 1 else [rows, cols]
    return TensorIndex(single_schema(num_ntypes), nodes, [Relation(rows, cols, csr=matrix)])
