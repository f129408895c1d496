"""One rank's part of one relation: the in-edges of its nodes, and whose rows they read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dgl_mgpu.backend.structure.relation import Compressed, Relation
from dgl_mgpu.fullgraph.ownership import Ownership


@dataclass(frozen=True)
class Part:
    """The in-edges of a rank's own destination nodes.

    Sources are numbered: first the rank's own, by position, then its *halo*, the other ranks'
    nodes that its edges come from, by position, hence rank after rank.  Edges are numbered
    destination by destination.

    Attributes
    ----------
    rank : int
    src, dst : Ownership
        Of the source and the destination type.
    relation : Relation
        From own and halo rows to own rows.
    edges : Tensor, int64, shape (num_edges,)
        Ids of the edges in the whole graph.
    halo : Tensor, int64, shape (num_halo,)
        Positions of the halo's nodes.
    wanted : list of int, length ranks
        How many of the halo's nodes each rank owns; 0 of its own.
    sent : Tensor, int64, shape (sum of ``sending``,)
        Own source rows in the halos of the other ranks, rank after rank.
    sending : list of int, length ranks
        How many of ``sent`` each rank gets.
    out_degrees : Tensor, dtype of ids, shape (num_own_src,)
        In the whole graph.
    num_whole_edges : int
        Of the whole graph.
    """

    rank: int
    src: Ownership
    dst: Ownership
    relation: Relation
    edges: torch.Tensor
    halo: torch.Tensor
    wanted: list[int]
    sent: torch.Tensor
    sending: list[int]
    out_degrees: torch.Tensor
    num_whole_edges: int

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
    """A rank's part of a relation, from all of its edges.

    Parameters
    ----------
    src, dst : Tensor, int32 or int64, shape (num_edges,)
        Ends of every edge of the whole graph, by edge id, on the device that the part is to be on.
    of_src, of_dst : Ownership
    rank : int
    """
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


def _within(positions: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (positions >= low) & (positions < high)


def _counts(ranks: torch.Tensor, num_ranks: int) -> list[int]:
    return torch.bincount(ranks, minlength=num_ranks).tolist()
