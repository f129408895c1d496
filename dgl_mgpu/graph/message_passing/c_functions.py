"""C functions of DGL's ``sparse`` on graphs made of tensors.

Message passing with its results written into arguments, and sums and products of weighted adjacency
matrices.  DGL's autograd is above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dgl_mgpu.graph.distributed import Features
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.message_passing.operators import as_target, gsddmm_forward, gspmm_forward
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.graph.sparse.pattern import SparsityPattern
from dgl_mgpu.graph.sparse.products import multiply
from dgl_mgpu.ops import edge_softmax, sddmm, spmm


def _given(array: Any) -> Features:
    """A features argument; DGL passes an array of no elements where there is none."""
    return array if isinstance(array, torch.Tensor) and array.dim() > 1 else None


def spmm_into(
    index: TensorIndex, op: str, reduce: str, u: Any, e: Any, out: Any, arg_u: Any, arg_e: Any
) -> None:
    """`gspmm_forward`, written to ``out``, ``arg_u`` and ``arg_e``."""
    result, args = gspmm_forward(index, op, reduce, _given(u), _given(e))
    out.copy_(result.view_as(out))
    for target, arg in zip((arg_u, arg_e), args, strict=True):
        if arg is not None:
            target.copy_(arg.view_as(target))


def sddmm_into(
    index: TensorIndex, op: str, lhs: Any, rhs: Any, out: Any, lhs_target: int, rhs_target: int
) -> None:
    """`gsddmm_forward`, written to ``out``."""
    targets = as_target(lhs_target), as_target(rhs_target)
    out.copy_(gsddmm_forward(index, op, _given(lhs), _given(rhs), *targets).view_as(out))


def edge_softmax_into(index: TensorIndex, op: str, u: Any, scores: Any, out: Any) -> None:
    """Edge softmax of ``scores``, written to ``out``."""
    indptr, _, eids = index.relations[0].csc()
    out.copy_(edge_softmax(indptr, eids, scores))


def edge_softmax_backward_into(
    index: TensorIndex, op: str, out: Any, weighted: Any, gradient: Any, unused: Any
) -> None:
    """Gradient of edge softmax from its result and that times the gradient of it."""
    indptr, _, eids = index.relations[0].csc()
    total = spmm(indptr, None, eids, None, weighted, "copy_rhs", "sum")[0]
    src, dst = index.relations[0].coo()
    gradient.copy_(weighted - sddmm(src, dst, out, total, "mul", "e", "v"))


def spmm_hetero_into(
    index: TensorIndex,
    op: str,
    reduce: str,
    u: Sequence[Any],
    e: Sequence[Any],
    out: Sequence[Any],
    arg_u: Sequence[Any],
    arg_e: Sequence[Any],
    arg_u_ntype: Sequence[Any],
    arg_e_etype: Sequence[Any],
) -> None:
    """Messages over all relations, reduced at their destinations across relations.

    Outputs have one tensor a node type.  For max and min the arguments say which node and which
    edge an element is from, and of which node and edge type.
    """
    if reduce != "sum":
        worst = -torch.inf if reduce == "max" else torch.inf
        for dst in {dst for _, dst in index.schema.ends}:
            out[dst].fill_(worst)
    for etype, (src, dst) in enumerate(index.schema.ends):
        if index.num_edges(etype) == 0:
            continue
        reduced, (from_u, from_e) = gspmm_forward(
            index.get_relation_graph(etype), op, reduce, _given(u[src]), _given(e[etype])
        )
        if reduce == "sum":
            out[dst].add_(reduced)
            continue
        better = reduced > out[dst] if reduce == "max" else reduced < out[dst]
        out[dst].copy_(torch.where(better, reduced, out[dst]))
        for chosen, arg, types, number in (
            (from_u, arg_u, arg_u_ntype, src),
            (from_e, arg_e, arg_e_etype, etype),
        ):
            if chosen is not None:
                arg[dst].copy_(torch.where(better, chosen, arg[dst]))
                types[dst].masked_fill_(better, number)


def sddmm_hetero_into(
    index: TensorIndex,
    op: str,
    lhs: Sequence[Any],
    rhs: Sequence[Any],
    out: Sequence[Any],
    lhs_target: int,
    rhs_target: int,
) -> None:
    """`sddmm_into` for every relation; operands have one tensor a node type or an edge type."""
    for etype, (src, dst) in enumerate(index.schema.ends):
        if index.num_edges(etype) == 0:
            continue
        types = src, etype, dst
        sddmm_into(
            index.get_relation_graph(etype),
            op,
            lhs[types[lhs_target]] if lhs else None,
            rhs[types[rhs_target]] if rhs else None,
            out[etype],
            lhs_target,
            rhs_target,
        )


def update_grad_minmax_hetero(
    index: TensorIndex,
    op: str,
    gradients: Sequence[Any],
    args: Sequence[Any],
    types: Sequence[Any],
    out: Sequence[Any],
) -> None:
    """Gradients of max and min over relations, added to the rows that were chosen.

    ``index`` is reversed: its sources are where messages were reduced.  For each node type's
    results, ``args`` has the row and ``types`` the node type, or with copy_rhs the edge type, that
    each element is from.  ``out`` has zeros of each node type, or with copy_rhs edge type.
    """
    by_edge = op == "copy_rhs"
    done = set()
    for etype, (reduced, sent) in enumerate(index.schema.ends):
        number = etype if by_edge else sent
        if (reduced, number) in done:
            continue
        done.add((reduced, number))
        is_of_type = types[reduced] == number
        gradient = gradients[reduced] * is_of_type
        out[number].scatter_add_(0, args[reduced].long() * is_of_type, gradient)


# -- adjacency matrices with a floating-point weight for each edge -----------------------------


def csrmm(
    a: TensorIndex,
    a_weights: torch.Tensor,
    b: TensorIndex,
    b_weights: torch.Tensor,
    num_vtypes: int,
) -> tuple[TensorIndex, torch.Tensor]:
    """The product of two graphs' matrices, where parallel edges add up: ``_CAPI_DGLCSRMM``.

    The result, of 1 or 2 node types, has an edge wherever there is a path of an edge of ``a`` and
    one of ``b``, sorted.
    """
    action = "multiply the adjacency matrices of two graphs"
    _check_weights(action, [a, b], [a_weights, b_weights])
    left, right = a.relations[0], b.relations[0]
    if left.num_dst != right.num_src:
        raise InvalidCallError(
            action,
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
    """The sum of the matrices of graphs of the same nodes: ``_CAPI_DGLCSRSum``.

    The result has an edge wherever any of the graphs has one, sorted.
    """
    action = "add the adjacency matrices of graphs"
    _check_weights(action, indexes, weights)
    shapes = {(index.relations[0].num_src, index.relations[0].num_dst) for index in indexes}
    if len(shapes) > 1:
        raise InvalidCallError(
            action,
            f"they have the shapes {sorted(shapes)}",
            "pass graphs with the same numbers of nodes",
        )
    keys = torch.cat([_pattern(index.relations[0]).keys() for index in indexes])
    keys, place = keys.unique(return_inverse=True)
    terms = torch.cat(list(weights))
    total = terms.new_zeros(keys.numel()).index_add_(0, place, terms)
    first = indexes[0]
    return _from_keys(keys, shapes.pop(), first.idtype, first.schema.num_ntypes), total


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
    action: str, indexes: Sequence[TensorIndex], weights: Sequence[torch.Tensor]
) -> None:
    for index, of_edges in zip(indexes, weights, strict=True):
        if len(index.relations) != 1:
            raise InvalidCallError(
                action, f"one has {len(index.relations)} edge types", "pass graphs of one edge type"
            )
        if of_edges.shape != (index.relations[0].num_edges,) or not of_edges.is_floating_point():
            raise InvalidCallError(
                action,
                f"weights have dtype {of_edges.dtype} and shape {tuple(of_edges.shape)}, but their"
                f" graph has {index.relations[0].num_edges} edges",
                "pass a floating-point number for each edge",
            )
    id_dtypes = {index.idtype for index in indexes}
    weight_dtypes = {of_edges.dtype for of_edges in weights}
    if len(id_dtypes) > 1 or len(weight_dtypes) > 1:
        raise InvalidCallError(
            action,
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
    return TensorIndex.single(Relation(rows, cols, csr=matrix), num_ntypes)
