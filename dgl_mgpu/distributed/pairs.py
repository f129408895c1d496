"""Pairs of nodes, of which a rank owns the first: products of what they have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.index import PartitionedIndex
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.graph.index import single_schema
from dgl_mgpu.graph.relation import Compressed, Relation


class Pairs:
    """Some pairs of nodes of a partitioned graph of one node type, which each rank has of its own.

    Collective.  ``rows``, int64 of shape (pairs,), say which of this rank's nodes is the first of
    each; ``positions``, of the same shape, are the places of the second among all nodes
    (`Ownership`).
    """

    def __init__(
        self, graph: PartitionedGraph, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        (owned,) = graph.ownership.values()
        index = graph._graph
        rows, order = torch.sort(rows, stable=True)
        part = _part_of_pairs(index.parts[0].part.rank, owned, rows, positions[order], index.idtype)
        #: Where each pair is among the part's edges.
        self._places = torch.empty_like(order)
        self._places[order] = torch.arange(len(order), device=order.device)
        relation = index.parts[0].of(part)
        self._index = PartitionedIndex(single_schema(1), [owned], [relation])

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """The dot product of both nodes' rows, shape (pairs,), given those of own nodes.

        Collective and differentiable.
        """
        products = self._index.gsddmm("dot", rows, rows, "u", "v")
        return products.squeeze(1)[self._places]


def _part_of_pairs(
    rank: int, owned: Ownership, rows: torch.Tensor, positions: torch.Tensor, idtype: torch.dtype
) -> Part:
    """A part whose edges lead from nodes at some positions to own rows, in ascending order."""
    device = rows.device
    low, num_own = owned.bounds[rank], owned.count(rank)
    remote = (positions < low) | (positions >= low + num_own)
    halo, place = torch.unique(positions[remote], return_inverse=True)
    columns = positions - low
    columns[remote] = place + num_own
    indptr = torch.searchsorted(rows, torch.arange(num_own + 1, device=device))
    wanted = torch.bincount(owned.owners(halo), minlength=owned.num_ranks).tolist()
    ranks = Communicator.of_all_machines()
    everyones = ranks.all_gather((wanted, len(rows)))
    sending = [of_rank[rank] for of_rank, _ in everyones]
    sent = halo.new_empty(sum(sending))
    if ranks.size > 1:
        dist.all_to_all_single(sent, halo, sending, wanted)
    return Part(
        rank=rank,
        src=owned,
        dst=owned,
        relation=Relation(
            num_own + len(halo),
            num_own,
            csc=Compressed(indptr.to(idtype), columns.to(idtype), None),
        ),
        edges=torch.arange(len(rows), device=device),
        halo=halo,
        wanted=wanted,
        sent=sent - low,
        sending=sending,
        out_degrees=torch.zeros(num_own, dtype=idtype, device=device),  # which nobody reads
        num_whole_edges=sum(count for _, count in everyones),
    )
