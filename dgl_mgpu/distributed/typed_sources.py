"""Pairs of a source and the type of an edge, over all ranks' edges, as sources of these."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.graph.relation import Compressed, Relation


class TypedPart(NamedTuple):
    """The part of a relation whose sources are pairs; a rank owns those of its own sources."""

    part: Part
    #: By type, in ascending order: how many pairs this rank owns, 0 of types that only others have.
    counts: dict[int, int]
    #: From own sources to own pairs: an edge to each.
    pairs: Relation


def typed_part(part: Part, etype: Tensor) -> TypedPart | None:
    """Have a part's edges, of types ``etype``, begin at pairs of their source and type.

    Collective.  None if any rank has a negative type.  A rank's pairs are ordered by type, then by
    source.
    """
    ranks, rank = Communicator.of_all_machines(), part.rank
    indptr, columns, _ = part.relation.csc()
    types, low = etype.long(), part.src.bounds[rank]
    smallest, largest = types.aminmax() if len(types) else (0, -1)
    everyones = ranks.all_gather((int(smallest), int(largest)))
    if min(first for first, _ in everyones) < 0:
        return None
    num_types, num_nodes = 1 + max(last for _, last in everyones), max(1, part.src.num_nodes)

    # Pairs that this rank's edges begin at: by owner, by type and by the source's position.
    own = torch.arange(low, low + part.num_own_src, device=types.device)
    positions = torch.cat([own, part.halo])[columns.long()]
    keys = (part.src.owners(positions) * num_types + types) * num_nodes + positions
    keys, pair = keys.unique(return_inverse=True)
    owners = keys.div(num_types * num_nodes, rounding_mode="floor")
    wanted = torch.bincount(owners, minlength=part.num_ranks).tolist()
    of_owners = list(keys.split(wanted))
    mine, of_owners[rank] = of_owners[rank], keys[:0]
    first, wanted[rank] = sum(wanted[:rank]), 0
    sending = [of_rank[rank] for of_rank in ranks.all_gather(wanted)]

    # Owners number what anybody asks for, and answer with positions.
    asked = _exchanged(torch.cat(of_owners), wanted, sending)
    known, places = torch.cat([mine, asked]).unique(return_inverse=True)
    of_mine, sent = places.split([len(mine), len(asked)])
    known -= rank * num_types * num_nodes
    types = known.div(num_nodes, rounding_mode="floor")
    sources = known - types * num_nodes - low
    found = torch.stack(types.unique_consecutive(return_counts=True)).tolist()
    mine_by_type = dict(zip(*found, strict=True))
    everyones_counts = ranks.all_gather(mine_by_type)
    every_type = sorted(set().union(*everyones_counts))
    counts = {etype: mine_by_type.get(etype, 0) for etype in every_type}
    bounds = (0, *accumulate(sum(of_rank.values()) for of_rank in everyones_counts))
    halo = _exchanged(bounds[rank] + sent, sending, wanted)

    remote = len(known) + torch.arange(len(halo), device=types.device)
    numbers = torch.cat([remote[:first], of_mine, remote[first:]]).to(indptr.dtype)
    num_own = len(known)
    starts = torch.arange(num_own + 1, dtype=indptr.dtype, device=indptr.device)
    pairs = Compressed(starts, sources.to(indptr.dtype), None)
    to_own = Compressed(indptr, numbers[pair], None)
    typed = Part(
        rank=rank,
        src=Ownership(None, bounds),
        dst=part.dst,
        relation=Relation(num_own + len(halo), part.num_own_dst, csc=to_own),
        edges=part.edges,
        halo=halo,
        wanted=wanted,
        sent=sent,
        sending=sending,
        out_degrees=indptr.new_zeros(num_own),  # which nobody reads
        num_whole_edges=part.num_whole_edges,
    )
    return TypedPart(typed, counts, Relation(part.num_own_src, num_own, csc=pairs))


def _exchanged(rows: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
    """What other ranks send to this one, given by rank how much goes there and comes from there."""
    out = rows.new_empty(sum(received))
    if len(sizes) > 1:
        dist.all_to_all_single(out, rows, list(received), list(sizes))
    return out
