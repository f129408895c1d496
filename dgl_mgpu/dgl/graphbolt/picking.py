"""Picking edges of a GraphBolt graph: hops of operators, and edges that are there one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.stored_tensors import stored_on
from dgl_mgpu.ops import GraphView, SampledNeighbors, SampleKey, sample_neighbors
from dgl_mgpu.ops.gather import can_be_picked, pick_all, to_be_picked
from dgl_mgpu.ops.smallest import smallest_of_groups
from dgl_mgpu.sampling.labor import Variates
from dgl_mgpu.sampling.views import scalars_view


@dataclass(frozen=True)
class Edges:
    """Edges one by one: the place of the node among those asked for, the neighbor, the edge id."""

    rows: Tensor
    neighbors: Tensor
    eids: Tensor

    def where(self, mask: Tensor) -> Edges:
        """Those for which a mask says so."""
        return Edges(self.rows[mask], self.neighbors[mask], self.eids[mask])


def check_rows(ids: Tensor, count: int, action: str) -> None:
    """Raise IdOutOfRangeError unless ids are in [0, count)."""
    if not len(ids):
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    if low < 0 or high >= count:
        raise IdOutOfRangeError(
            action, f"there is no node {low if low < 0 else high}", f"pass ids in [0, {count})"
        )


def rows_of(sampled: SampledNeighbors) -> Tensor:
    """For each sampled edge, the place of its node among those that were sampled for."""
    indptr = sampled.indptr
    places = torch.arange(len(indptr) - 1, device=indptr.device)
    return places.repeat_interleave(indptr.diff(), output_size=len(sampled.eids))


def draws_of_32_bits(count: int) -> Tensor:
    """The numbers that so many calls of ``torch.randint`` would take modulo their bounds.

    torch tells them modulo a bound alone: here modulo 2^16 and 2^16 + 1.
    """
    bound = 1 << 16
    before = torch.get_rng_state()
    low = torch.randint(0, bound, (count,))
    torch.set_rng_state(before)
    other = torch.randint(0, bound + 1, (count,))
    return low + bound * ((low - other) % (bound + 1))


def sample(
    view: GraphView,
    seeds: Tensor,
    fanout: int,
    key: SampleKey,
    replace: bool,
    weights: Tensor | None,
) -> SampledNeighbors:
    """A hop; seeds whose edges all have weight 0 get none, as GraphBolt has it."""
    if weights is None:
        return sample_neighbors(view, seeds, fanout, key, replace=replace)
    rows = scalars_view(weights, seeds.device)
    try:
        return sample_neighbors(view, seeds, fanout, key, replace=replace, weights=rows)
    except InvalidWeightError:
        found = sample_neighbors(view, seeds, -1, key)
        own = index_select(weights, found.eids)
        if not bool(((own >= 0) & (own < float("inf"))).all()):
            raise
        counts = torch.bincount(rows_of(found)[own > 0], minlength=len(seeds))
        (places,) = counts.nonzero(as_tuple=True)
        sampled = sample_neighbors(view, seeds[places], fanout, key, replace=replace, weights=rows)
        return joined(len(seeds), [(places, sampled)])


def joined(count: int, samples: Sequence[tuple[Tensor, SampledNeighbors]]) -> SampledNeighbors:
    """Samples of some of ``count`` nodes, by their places: one after the other for each node."""
    if len(samples) == 1 and len(samples[0][0]) == count:
        return samples[0][1]
    device = samples[0][0].device
    lengths = torch.zeros(len(samples), count, dtype=torch.int64, device=device)
    for number, (places, sampled) in enumerate(samples):
        lengths[number, places] = sampled.indptr.diff()
    indptr = torch.nn.functional.pad(lengths.sum(0).cumsum(0), (1, 0))
    before = lengths.cumsum(0) - lengths + indptr[:-1]
    total = sum(len(sampled.neighbors) for _, sampled in samples)
    first = samples[0][1]
    neighbors, eids = first.neighbors.new_empty(total), first.eids.new_empty(total)
    for number, (places, sampled) in enumerate(samples):
        size = len(sampled.neighbors)
        shift = before[number, places] - sampled.indptr[:-1]
        to = torch.arange(size, device=device)
        to += shift.repeat_interleave(sampled.indptr.diff(), output_size=size)
        neighbors[to], eids[to] = sampled.neighbors, sampled.eids
    return SampledNeighbors(indptr, neighbors, eids)


def pick_by_layer(
    edges: Edges,
    counts: Tensor,
    groups: Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    replace: bool,
    weights: Tensor | None,
) -> Tensor:
    """Places of edges that layer-neighbor sampling picks, ascending.

    A neighbor has one random number for all nodes, and each node takes the neighbors whose numbers
    are the smallest: Balin and Çatalyürek, Layer-Neighbor Sampling, NeurIPS 2023, section 3.2, in
    its form with a fixed number of neighbors.  With replacement it does so once for each edge.
    """
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    most = groups.new_tensor(fanouts).repeat(len(counts) // len(fanouts))
    share = torch.ones(len(groups), device=groups.device, dtype=torch.float64)
    if weights is not None:
        share = weights.double()

    def arrivals(seed: int) -> Tensor:
        """What decides which edges of a group come first; never, without a share."""
        uniform = Variates([seed], 0.0).draw(edges.neighbors)
        return torch.where(share > 0, -torch.log1p(-uniform) / share, float("inf"))

    seed = key.fold()
    if not replace:
        return smallest_of_groups(arrivals(seed), bounds, most).nonzero()[:, 0]
    limit = most[groups]
    times = torch.where(limit < 0, share > 0, False).long()
    one = torch.ones_like(most)
    for number in range(max(fanouts)):
        is_first = smallest_of_groups(arrivals(seed + number), bounds, one)
        times += is_first & (limit > number)
    return torch.arange(len(groups), device=groups.device).repeat_interleave(times)


def index_select(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; of a pinned one, or one that a store has, on the device of the index."""
    stored: Any = stored_on(index.device, tensor)
    if stored is not None and index.dtype in (torch.int32, torch.int64):
        fetched: Tensor = stored.fetch(index)
        return fetched
    if tensor.device.type == "cpu" and index.is_cuda:
        from dgl.utils import gather_pinned_tensor_rows

        if not tensor.is_pinned():
            raise InvalidInputError(
                "select rows by an index on a GPU",
                "the tensor is on the CPU, and not pinned",
                "pin it, tensor.pin_memory(), or move one of them",
            )
        return gather_pinned_tensor_rows(tensor, index)
    if index.is_cuda and can_be_picked(index, tensor):
        pick = to_be_picked(index, tensor)
        pick_all([pick])
        return pick[0]
    return tensor[index.long()] if index.dtype != torch.int64 else tensor[index]
