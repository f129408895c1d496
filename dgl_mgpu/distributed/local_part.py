"""One rank's part of one relation: the in-edges of its nodes, and whose rows they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.graph.relation import Compressed, Relation


@dataclass(frozen=True)
class Part:
    """The in-edges of a rank's own destination nodes.

    Sources are numbered: first the rank's own, by position, then its *halo*, the other ranks' nodes
    that its edges come from, by position, hence rank after rank.  Edges are numbered destination by
    destination.
    """

    rank: int
    src: Ownership
    dst: Ownership
    relation: Relation  # from own and halo rows to own rows
    edges: torch.Tensor  # int64, shape (num_edges,): their ids in the whole graph
    halo: torch.Tensor  # int64, shape (num_halo,): positions of its nodes
    wanted: list[int]  # by rank, how many of the halo's nodes it owns; 0 of its own
    sent: torch.Tensor  # int64, shape (sum of sending,): own rows in halos, rank after rank
    sending: list[int]  # by rank, how many of `sent` it gets
    out_degrees: torch.Tensor  # dtype of ids, shape (num_own_src,): in the whole graph
    num_whole_edges: int  # of the whole graph; or more, where edges were dropped

    @property
    def num_own_src(self) -> int:
        return self.src.count(self.rank)

    @property
    def num_own_dst(self) -> int:
        return self.dst.count(self.rank)

    @property
    def num_ranks(self) -> int:
        return self.src.num_ranks


def cut(
    src: torch.Tensor, dst: torch.Tensor, of_src: Ownership, of_dst: Ownership, rank: int
) -> Part:
    """A rank's part of a relation, from all of its edges, by edge id, on the part's device."""
    idtype, device = src.dtype, src.device
    src_position = of_src.positions(idtype, device)
    dst_position = src_position if of_dst is of_src else of_dst.positions(idtype, device)
    src_low, src_high = of_src.bounds[rank], of_src.bounds[rank + 1]
    dst_low, dst_high = of_dst.bounds[rank], of_dst.bounds[rank + 1]
    # Of all edges of the graph nothing is made but what one byte holds.
    from_here = _within(src_position, src_low, src_high).index_select(0, src)
    to_here = _within(dst_position, dst_low, dst_high).index_select(0, dst)

    edges = to_here.nonzero().squeeze(1)
    own_row, order = torch.sort(dst_position[dst[edges]] - dst_low, stable=True)
    edges = edges[order]
    del order
    columns = src_position[src[edges]]
    remote = ~from_here[edges]
    halo, place = torch.unique(columns[remote], return_inverse=True)
    columns -= src_low
    columns[remote] = (place + (src_high - src_low)).to(idtype)
    rows = torch.arange(dst_high - dst_low + 1, dtype=idtype, device=device)
    indptr = torch.searchsorted(own_row, rows, out_int32=idtype == torch.int32)
    relation = Relation(
        src_high - src_low + len(halo),
        dst_high - dst_low,
        csc=Compressed(indptr, columns, None),
    )
    halo = halo.long()
    del own_row, columns, remote, place

    own_src = src_position[src[from_here]] - src_low
    out_degrees = torch.bincount(own_src, minlength=src_high - src_low).to(idtype)
    # Who reads which of the rank's own rows, each pair once, by reader and then by row.
    leaving = ~to_here[from_here]
    readers = of_dst.owners(dst_position[dst[from_here & ~to_here]])
    num_own = max(src_high - src_low, 1)
    pairs = torch.unique(readers * num_own + own_src[leaving])
    return Part(
        rank=rank,
        src=of_src,
        dst=of_dst,
        relation=relation,
        edges=edges,
        halo=halo,
        wanted=_counts(of_src.owners(halo), of_src.num_ranks),
        sent=pairs % num_own,
        sending=_counts(pairs // num_own, of_src.num_ranks),
        out_degrees=out_degrees,
        num_whole_edges=len(src),
    )


def loops(part: Part) -> torch.Tensor:
    """Which edges lead from a node to itself; bool, shape (num_edges,).

    Of a relation between nodes of one type, which have the same places as both ends.
    """
    source, destination = part.relation.coo()
    return source == destination


def remove_self_loops(part: Part, of_all: torch.Tensor) -> tuple[Part, torch.Tensor]:
    """The part without its loops, of the whole graph without any, and the old number of each edge.

    ``of_all`` has the ids in the whole graph of all ranks' loops, sorted.
    """
    gone = loops(part)
    relation, remaining = _without(part.relation, gone)
    edges = part.edges[remaining]
    indices = part.relation.csc()[1]
    lost = torch.bincount(indices[gone], minlength=part.num_own_src).to(indices.dtype)
    left = replace(
        part,
        relation=relation,
        edges=edges - torch.searchsorted(of_all, edges),
        out_degrees=part.out_degrees - lost,
        num_whole_edges=part.num_whole_edges - len(of_all),
    )
    return left, remaining


def remove_edges(
    part: Part, gone: torch.Tensor, count: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Part, torch.Tensor]:
    """The part without some edges, and the old number of each that is left.

    Edges keep their ids in the whole graph.  Of numbers for each own and halo row ``count`` gives
    the sums over all ranks for each own row.
    """
    relation, remaining = _without(part.relation, gone)
    leaving = torch.bincount(relation.csc()[1], minlength=relation.num_src)
    out_degrees = count(leaving).to(part.out_degrees.dtype)
    left = replace(part, relation=relation, edges=part.edges[remaining], out_degrees=out_degrees)
    return left, remaining


def _without(relation: Relation, gone: torch.Tensor) -> tuple[Relation, torch.Tensor]:
    """A relation without some edges, and the old number of each that is left."""
    remaining = (~gone).nonzero().squeeze(1)
    indptr, indices, _ = relation.csc()
    before = torch.cat([gone.new_zeros(1, dtype=torch.int64), gone.cumsum(0)])
    indptr = indptr - before[indptr.long()].to(indptr.dtype)
    return _with_edges(relation, indptr, indices[remaining]), remaining


def add_self_loops(part: Part) -> tuple[Part, torch.Tensor]:
    """The part with a loop more at each node, and the old number of each of its edges.

    Ids of loops follow on all others.  Old numbers from ``num_edges`` on are the loops of own
    nodes.
    """
    indptr, indices, _ = part.relation.csc()
    nodes = torch.arange(part.num_own_dst, dtype=indptr.dtype, device=indptr.device)
    # The last of a node's edges: those of each node before it have moved those behind by one.
    places = (indptr[1:] + nodes).long()
    order = torch.empty(len(indices) + len(nodes), dtype=torch.int64, device=indptr.device)
    is_loop = torch.zeros_like(order, dtype=torch.bool)
    is_loop[places] = True
    order[~is_loop] = torch.arange(len(indices), device=indptr.device)
    order[places] = len(indices) + nodes.long()
    added = torch.arange(len(indptr), dtype=indptr.dtype, device=indptr.device)
    ids = part.num_whole_edges + part.dst.nodes(part.rank, indptr.device)
    more = replace(
        part,
        relation=_with_edges(part.relation, indptr + added, torch.cat([indices, nodes])[order]),
        edges=torch.cat([part.edges, ids])[order],
        out_degrees=part.out_degrees + 1,
        num_whole_edges=part.num_whole_edges + part.dst.num_nodes,
    )
    return more, order


def _with_edges(relation: Relation, indptr: torch.Tensor, indices: torch.Tensor) -> Relation:
    """A relation between the same nodes."""
    return Relation(relation.num_src, relation.num_dst, csc=Compressed(indptr, indices, None))


def _within(positions: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (positions >= low) & (positions < high)


def _counts(ranks: torch.Tensor, num_ranks: int) -> list[int]:
    return torch.bincount(ranks, minlength=num_ranks).tolist()
