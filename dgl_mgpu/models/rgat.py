"""R-GAT: attention by relation on heterogeneous graphs (Busbridge et al., 2019).

As in MLPerf Training's GNN benchmark it is a stack of DGL's ``HeteroGraphConv`` over ``GATConv``,
summed over relations.  Its layers here, `RelationalAttention`, give the same numbers in other
steps, for all relations of a layer together.  With ``W`` a relation's matrix, ``a`` its attention
vectors and ``s`` the shares of a destination's edges after the softmax:

* Scores need no projected rows: ``a . (W h) = (a W) . h``, a few columns for each relation.
* ``sum_j s_j (W h_j) = W sum_j s_j h_j``: rows are summed up first, and projected then.  A
  destination of a sampled block has several sources, so that fewer rows are multiplied, and a
  relation projects no source that it has no edge of.
* Edges of all relations are one list, for one operator each: scores, softmax, sums.

Rows of all node types are one tensor, one type after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import torch
from dgl.nn import GATConv, HeteroGraphConv
from torch import nn

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.models.homogeneous import Dropout
from dgl_mgpu.ops import add_spmm, edge_softmax, edge_softmax_backward, sddmm, spmm
from dgl_mgpu.ops.autograd import differentiable_once
from dgl_mgpu.ops.tall import product_over_rows
from dgl_mgpu.utils.types import CanonicalEtype

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class _Group:
    """A relation that reaches nodes, among all of a graph."""

    relation: int
    groups: slice  # its destinations among the groups of edges
    targets: slice  # the same nodes among the rows of the result


@dataclass(frozen=True)
class RelationEdges:
    """The edges of all relations of a block or graph, in groups: one a relation and destination."""

    # Where the rows of each source node type begin, and the end of the last
    sources: tuple[int, ...]
    targets: tuple[int, ...]  # The same of destination node types, in the result
    groups: tuple[_Group, ...]  # Of relations whose destination type has nodes
    indptr: torch.Tensor  # shape (num_groups + 1,): where the edges of each group begin
    indices: torch.Tensor  # shape (num_edges,): row of each edge's source
    owners: torch.Tensor  # shape (num_edges,): group of each edge
    # Shape (num_edges,): where each edge's source has its score for the relation: cell ``(row,
    # relation, 0)`` of ``(rows, relations, 2)``
    source_cells: torch.Tensor
    # Shape (num_groups,): where each group's destination has its: cell ``(row, relation, 1)``
    target_cells: torch.Tensor

    @classmethod
    def from_graph(
        cls, graph: dgl.DGLGraph, ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEtype]
    ) -> RelationEdges:
        """Those of a block, or of a graph whose nodes are sources and destinations alike."""
        sources = _bounds(graph.num_src_nodes(ntype) for ntype in ntypes)
        targets = _bounds(graph.num_dst_nodes(ntype) for ntype in ntypes)
        number = {ntype: place for place, ntype in enumerate(ntypes)}
        width = 2 * len(canonical_etypes)
        groups: list[_Group] = []
        indptrs, indices = [], []
        first_edges, first_rows, first_source_cells, first_target_cells = [], [], [], []
        num_groups = num_edges = 0
        for relation, etype in enumerate(canonical_etypes):
            src, dst = number[etype[0]], number[etype[2]]
            begin, end = targets[dst], targets[dst + 1]
            if begin == end:
                continue
            indptr, ends = graph.adj_tensors("csc", etype)[:2]
            indptrs.append(indptr)
            indices.append(ends)
            first_edges.append(num_edges)
            first_rows.append(sources[src])
            first_source_cells.append(width * sources[src] + 2 * relation)
            # Of group number g: to be added to width * g.
            first_target_cells.append(width * (sources[dst] - num_groups) + 2 * relation + 1)
            stop = num_groups + end - begin
            groups.append(_Group(relation, slice(num_groups, stop), slice(begin, end)))
            num_groups, num_edges = stop, num_edges + ends.numel()
        if not groups:
            raise InvalidInputError(
                "attend to the neighbours of nodes",
                "no relation of the graph leads to any node",
                "pass a graph or block with destinations",
            )
        if max(width * sources[-1], num_edges) > _MAX_INT32:
            indptrs, indices = ([item.long() for item in part] for part in (indptrs, indices))
        device, dtype = indices[0].device, indices[0].dtype
        cells = torch._foreach_mul(indices, width)
        torch._foreach_add_(cells, first_source_cells)
        bounds = torch._foreach_add([item[:-1] for item in indptrs], first_edges)
        last = torch.full((1,), num_edges, dtype=dtype, device=device)
        indptr = torch.cat([*bounds, last])
        numbers = torch.arange(num_groups, dtype=dtype, device=device)
        target_cells = numbers * width
        sizes = [item.groups.stop - item.groups.start for item in groups]
        torch._foreach_add_(list(target_cells.split(sizes)), first_target_cells)
        return cls(
            sources,
            targets,
            tuple(groups),
            indptr,
            torch.cat(torch._foreach_add(indices, first_rows)),
            numbers.repeat_interleave(indptr.diff(), output_size=num_edges),
            torch.cat(cells),
            target_cells,
        )

    def sizes(self) -> list[int]:
        """Destinations of each node type."""
        return [end - begin for begin, end in itertools.pairwise(self.targets)]

    def parts_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of rows of groups, shape (num_groups, heads, width), those of each relation, by head."""
        sizes = [group.groups.stop - group.groups.start for group in self.groups]
        return rows.transpose(0, 1).split(sizes, dim=1)


def _bounds(counts: Any) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts, initial=0))


class _Attention(torch.autograd.Function):
    """What a layer does with rows, matrices and what scores them."""

    @staticmethod
    def forward(
        ctx: Any,
        edges: RelationEdges,
        slope: float,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scorers: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Sums of rows, projected and weighted.

        ``rows`` are of shape (n, width_in); of their dtype are ``weight``, of shape (relations,
        heads, width_out, width_in), ``scorers`` of sources and of destinations, (relations, 2,
        heads, width_in), and ``bias``, (node types, heads, 1, width_out).  The result is of shape
        (num_dst, heads, width_out).
        """
        heads, width_in = scorers.shape[2:]
        scores = rows @ scorers.view(-1, width_in).t()
        scores = scores.view(-1, heads)
        at_targets = edges.target_cells[edges.owners]
        raw = sddmm(edges.source_cells, at_targets, scores, scores, "add", "u", "v")
        shares = edge_softmax(edges.indptr, None, torch.nn.functional.leaky_relu(raw, slope))
        sums, _, _ = spmm(
            edges.indptr, edges.indices, None, rows.unsqueeze(1), shares.unsqueeze(2), "mul", "sum"
        )
        out = rows.new_empty(edges.targets[-1], heads, weight.shape[2])
        of_heads = out.transpose(0, 1)
        for ntype, (begin, end) in enumerate(itertools.pairwise(edges.targets)):
            if begin < end:
                of_heads[:, begin:end].copy_(bias[ntype].expand(-1, end - begin, -1))
        matrices = weight.transpose(2, 3).unbind()
        for group, part in zip(edges.groups, edges.parts_of(sums), strict=True):
            of_heads[:, group.targets].baddbmm_(part, matrices[group.relation])
        ctx.edges, ctx.slope = edges, slope
        ctx.save_for_backward(rows, weight, scorers, raw, shares, sums)
        return out

    @staticmethod
    @differentiable_once("R-GAT", "use modules of dgl.nn, such as HeteroGraphConv")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        edges: RelationEdges = ctx.edges
        rows, weight, scorers, raw, shares, sums = ctx.saved_tensors
        heads, width_in = scorers.shape[2:]
        d_bias = torch.stack([part.sum(0) for part in grad.split(edges.sizes())])
        d_sums, d_weight = torch.empty_like(sums), torch.zeros_like(weight)
        of_heads, matrices, gradients = grad.transpose(0, 1), weight.unbind(), d_weight.unbind()
        parts = zip(edges.groups, edges.parts_of(sums), edges.parts_of(d_sums), strict=True)
        for group, part, d_part in parts:
            d_targets = of_heads[:, group.targets]
            torch.bmm(d_targets, matrices[group.relation], out=d_part)
            gradients[group.relation].copy_(
                product_over_rows(d_targets.transpose(0, 1), part.transpose(0, 1))
            )
        d_shares = sddmm(
            edges.indices, edges.owners, rows.unsqueeze(1), d_sums, "dot", "u", "v"
        ).squeeze(2)
        d_scores = edge_softmax_backward(edges.indptr, None, shares, d_shares)
        d_scores = torch.ops.aten.leaky_relu_backward(d_scores, raw, ctx.slope, False)

        # Edges by the cell of their source, and so by their source.
        ordered, order = torch.sort(edges.source_cells, stable=True)
        order = order.to(ordered.dtype)
        d_cells = _sums_by_cell(ordered, order, d_scores, len(rows) * 2 * len(weight))
        d_targets, _, _ = spmm(edges.indptr, None, None, None, d_scores, "copy_rhs", "sum")
        d_cells.index_copy_(0, edges.target_cells.long(), d_targets)
        d_cells = d_cells.view(len(rows), -1)
        d_scorers = product_over_rows(d_cells, rows).view_as(scorers)
        d_rows = None
        if ctx.needs_input_grad[2]:
            d_rows = d_cells @ scorers.view(-1, width_in)
            bounds = torch.arange(len(rows) + 1, dtype=ordered.dtype, device=ordered.device)
            row_indptr = torch.searchsorted(
                ordered, bounds * (2 * len(weight)), out_int32=ordered.dtype == torch.int32
            )
            # Each head of an edge is an entry: the gradient of the group's sum, of that head.
            if len(order) * heads > _MAX_INT32:
                order = order.long()
            lanes = torch.arange(heads, dtype=order.dtype, device=order.device)
            owners = edges.owners[order].to(order.dtype)
            add_spmm(
                d_rows,
                row_indptr.to(order.dtype) * heads,
                (owners * heads).unsqueeze(1).add(lanes).flatten(),
                (order * heads).unsqueeze(1).add(lanes).flatten(),
                d_sums.view(-1, width_in),
                shares.view(-1),
                "mul",
            )
        return None, None, d_rows, d_weight, d_scorers, d_bias.unsqueeze(2)


def _sums_by_cell(
    ordered: torch.Tensor, order: torch.Tensor, values: torch.Tensor, num_cells: int
) -> torch.Tensor:
    """Sums of edges' values by cell, of shape (num_cells, heads), where edge ``order[i]`` is of
    cell ``ordered[i]``.

    Nearly all cells are empty, so that sums are taken for those that have edges: as many as there
    are edges at most, so that the host does not wait for their number.
    """
    num_edges = len(ordered)
    sums = values.new_zeros(num_cells + 1, values.shape[1])  # and one for what is left over
    if num_edges:
        begins = torch.ones_like(ordered)
        torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
        number = begins.cumsum(0, dtype=ordered.dtype) - 1
        bounds = torch.arange(num_edges + 1, dtype=ordered.dtype, device=ordered.device)
        indptr = torch.searchsorted(number, bounds, out_int32=ordered.dtype == torch.int32)
        of_cells, _, _ = spmm(indptr, None, order, None, values, "copy_rhs", "sum")
        first = indptr[:-1]
        cells = torch.where(first < num_edges, ordered[first.clamp(max=num_edges - 1)], num_cells)
        sums.index_copy_(0, cells.long(), of_cells)
    return sums[:-1]


class RelationalAttention(nn.Module):
    """A layer of R-GAT: an attention over the in-edges of every relation, summed over relations.

    The same as ``HeteroGraphConv`` with ``GATConv(..., allow_zero_in_degree=True)`` for each
    relation and the aggregator ``"sum"``.  Types are in the graph's order, and every node type has
    to be a destination, else InvalidInputError.  ``width_out`` is that of a head's result, and
    ``negative_slope`` that of the leaky ReLU of scores.
    """

    def __init__(
        self,
        ntypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEtype],
        width_in: int,
        width_out: int,
        heads: int,
        negative_slope: float = 0.2,
    ) -> None:
        super().__init__()
        _check_types(ntypes, canonical_etypes)
        self.ntypes, self.canonical_etypes = tuple(ntypes), tuple(canonical_etypes)
        self._slope = negative_slope
        count = len(self.canonical_etypes)
        self.weight = nn.Parameter(torch.empty(count, heads, width_out, width_in))
        # Of sources and of destinations.
        self.attention = nn.Parameter(torch.empty(count, heads, 2, width_out))
        self.bias = nn.Parameter(torch.empty(count, heads, width_out))
        reached = torch.zeros(len(self.ntypes), count)
        for relation, (_, _, dst) in enumerate(self.canonical_etypes):
            reached[self.ntypes.index(dst), relation] = 1
        self._reached: torch.Tensor
        self.register_buffer("_reached", reached, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters as MLPerf's model does: uniformly, by Glorot and Bengio's rule."""
        _, heads, width_out, width_in = self.weight.shape
        most = math.sqrt(6 / (width_in + heads * width_out))
        nn.init.uniform_(self.weight, -most, most)
        most = math.sqrt(6 / (heads + width_out))
        nn.init.uniform_(self.attention, -most, most)
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def copy_from(self, convolutions: Mapping[CanonicalEtype, GATConv]) -> None:
        """Take the parameters of a ``GATConv`` for each relation."""
        for relation, etype in enumerate(self.canonical_etypes):
            theirs = convolutions[etype]
            self.weight[relation] = theirs.fc.weight.view_as(self.weight[relation])
            attention = torch.cat([theirs.attn_l, theirs.attn_r]).transpose(0, 1)
            self.attention[relation] = attention
            self.bias[relation] = theirs.bias.view_as(self.bias[relation])

    def forward(self, edges: RelationEdges, rows: torch.Tensor) -> torch.Tensor:
        """One row for each destination, shape (num_dst, heads * width_out).

        ``rows``, shape (num_src, width_in), are of all node types, in their order.  Under autocast
        all is computed in its dtype.
        """
        if len(rows) != edges.sources[-1]:
            raise InvalidInputError(
                "attend to the neighbours of nodes",
                f"there are {len(rows)} rows, but {edges.sources[-1]} source nodes",
                "pass a row for each source node of every type, in the order of types",
            )
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        with torch.autocast(kind, enabled=False):
            scorers = (self.attention @ self.weight).transpose(1, 2)
            bias = (self._reached @ self.bias.flatten(1)).view(-1, *self.bias.shape[1:])
            out = _Attention.apply(
                edges,
                self._slope,
                rows.to(dtype),
                self.weight.to(dtype),
                scorers.to(dtype).contiguous(),
                bias.unsqueeze(2).to(dtype),
            )
        return out.flatten(1)


class RGAT(nn.Module):
    """R-GAT for the classification of nodes of one type, as in MLPerf Training's GNN benchmark.

    Between layers are a leaky ReLU and dropout, and behind the last a linear map to classes. All
    node types have features of width ``width_in``; ``hidden`` is the width of all heads together.
    Raises InvalidInputError if heads do not divide it, a type is unknown or no relation's
    destination.
    """

    def __init__(
        self,
        ntypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEtype],
        target: str,
        width_in: int,
        num_classes: int,
        hidden: int = 512,
        num_layers: int = 3,
        heads: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise InvalidInputError(
                "build R-GAT",
                f"a hidden width of {hidden} cannot be shared among {heads} heads",
                "choose a width that is a multiple of the heads",
            )
        if target not in ntypes:
            raise InvalidInputError(
                "build R-GAT",
                f"there is no node type '{target}'",
                f"name one of {', '.join(ntypes)}",
            )
        _check_types(ntypes, canonical_etypes)
        widths = [width_in, *[hidden] * (num_layers - 1)]
        self.layers = nn.ModuleList(
            self._layer(ntypes, canonical_etypes, width, hidden // heads, heads) for width in widths
        )
        self.linear = nn.Linear(hidden, num_classes)
        self.dropout = Dropout(dropout)
        self._ntypes, self._etypes = tuple(ntypes), tuple(canonical_etypes)
        self._target = self._ntypes.index(target)

    def _layer(
        self,
        ntypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEtype],
        width_in: int,
        width_out: int,
        heads: int,
    ) -> nn.Module:
        return RelationalAttention(ntypes, canonical_etypes, width_in, width_out, heads)

    def forward(
        self,
        graphs: dgl.DGLGraph | Sequence[dgl.DGLGraph],
        rows: torch.Tensor | Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Logits of the target's nodes, shape (nodes, classes).

        ``graphs`` are one graph, or a block for each layer, and ``rows`` features of its nodes, or
        of the first block's source nodes.  One tensor, of all types in the graph's order, saves a
        copy.
        """
        if isinstance(graphs, dgl.DGLGraph):
            edges = [RelationEdges.from_graph(graphs, self._ntypes, self._etypes)] * len(
                self.layers
            )
        else:
            edges = [
                RelationEdges.from_graph(graph, self._ntypes, self._etypes) for graph in graphs
            ]
        hidden = (
            torch.cat([rows[ntype] for ntype in self._ntypes])
            if isinstance(rows, Mapping)
            else rows
        )
        for layer, of_layer in zip(self.layers, edges, strict=True):
            hidden = layer(of_layer, hidden)
            if layer is not self.layers[-1]:
                hidden = self.dropout(torch.nn.functional.leaky_relu(hidden))
        begin, end = edges[-1].targets[self._target : self._target + 2]
        return self.linear(hidden[begin:end])


class WholeGraphRGAT(RGAT):
    """R-GAT on a whole graph, of which a rank may have a part: a ``GATConv`` for each relation.

    No rank has the edges of all relations in one list.  The layers' numbers are the same, by other
    parameters.
    """

    def _layer(
        self,
        ntypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEtype],
        width_in: int,
        width_out: int,
        heads: int,
    ) -> nn.Module:
        return HeteroGraphConv(
            {
                etype: GATConv(width_in, width_out, heads, allow_zero_in_degree=True)
                for etype in canonical_etypes
            },
            aggregate="sum",
        )

    def forward(self, graph: dgl.DGLGraph, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Logits of the target's nodes here, shape (nodes, classes)."""
        for layer in self.layers:
            rows = {ntype: heads.flatten(1) for ntype, heads in layer(graph, rows).items()}
            if layer is not self.layers[-1]:
                rows = {
                    ntype: self.dropout(torch.nn.functional.leaky_relu(hidden))
                    for ntype, hidden in rows.items()
                }
        return self.linear(rows[self._ntypes[self._target]])


def _check_types(ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEtype]) -> None:
    ends = {end for src, _, dst in canonical_etypes for end in (src, dst)}
    unknown = ends - set(ntypes)
    missing = set(ntypes) - {dst for _, _, dst in canonical_etypes}
    if unknown or missing:
        raise InvalidInputError(
            "build an attention over relations",
            f"relations have the unknown node types {sorted(unknown)}"
            if unknown
            else f"no relation leads to {', '.join(sorted(missing))}",
            "name all node types, and add reverse relations: rows of a layer come from in-edges",
        )
