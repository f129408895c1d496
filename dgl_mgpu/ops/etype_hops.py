"""All hops of a mini-batch over edge types: the operator that a CPU and a GPU implement.

With times it knows *a node at a time* by one id::

    id = node + moment * (number of nodes of its type)

where ``moment`` is the number of the time among the times of the seeds.

The CPU samples one hop after another with the operators for one hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops.edges import HopOptions, HopsOptions
from dgl_mgpu.ops.library import Operator, Sizes
from dgl_mgpu.ops.sample_weighted import Weighting
from dgl_mgpu.ops.view import TieredRows

# By node type: `seeds`, and `moments`, the number of each seed's time in `until`; without times
# both are left out. By edge type: `ends`, the numbers of its source and destination type; `graphs`,
# tiers, pointers and position; `weights` and `times`, the same and an empty tensor of their dtype,
# or four times None; `ordered_from`, which may be left out. By hop, and by edge type in it:
# `fanouts` and `keys`; `indptrs`, `sources` and `eids`. `nodes` are those of the last hop by type,
# as nodes at a time (int64) if there are times; those of other hops are beginnings of them, in
# `sizes`, (hops + 1, node types) on the CPU.
#: What the operator returns.
Hops = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor]


class EdgeTypeArguments(NamedTuple):
    """All edge types of a graph, as the operator takes them; see the comment above."""

    ends: Sequence[int]
    graphs: Sequence[Tensor]
    num_rows: Sizes
    num_cols: Sizes
    idtype: torch.dtype
    weights: Sequence[Tensor | None]
    times: Sequence[Tensor | None]


class TypedSeeds(NamedTuple):
    """Seeds by node type; see the comment above."""

    seeds: Sequence[Tensor]
    moments: Sequence[Tensor]
    until: Tensor | None


@Operator
def sample_etype_hops_op(
    of_types: TypedSeeds,
    etypes: EdgeTypeArguments,
    options: HopsOptions,
    ordered_from: Sequence[int] = (),
) -> Hops:
    context = torch.library.get_ctx()
    seeds, _, until = of_types
    num_types, idtype, fanouts = len(etypes.num_rows), etypes.idtype, options.fanouts
    indptrs, sources, eids = [], [], []
    for hop in range(len(fanouts) // num_types):
        for target in etypes.ends[1::2]:
            # A size has to be one of a tensor itself, not of one less.
            starts = context.new_dynamic_size() if hop else len(seeds[target]) + 1
            indptrs.append(seeds[0].new_empty(starts, dtype=torch.int64))
            sources.append(seeds[0].new_empty(context.new_dynamic_size(), dtype=idtype))
            eids.append(torch.empty_like(sources[-1]))
    dtype = idtype if until is None else torch.int64
    nodes = [seeds[0].new_empty(context.new_dynamic_size(), dtype=dtype) for _ in seeds]
    sizes = torch.empty(len(fanouts) // num_types + 1, len(seeds), dtype=torch.int64, device="cpu")
    return nodes, indptrs, sources, eids, sizes


@dataclass(frozen=True)
class EdgeType:
    """One edge type of the operator's arguments."""

    source: int  # number of its source nodes' type
    target: int
    rows: TieredRows
    num_sources: int
    weighting: Weighting  # without `until`, which all edge types share
    ordered_from: int = 0  # as many nodes a GPU takes in the order of addresses; 0 for never

    @property
    def is_uniform(self) -> bool:
        """Whether all edges are drawn alike."""
        return self.weighting.weight_dtype is None and self.weighting.time_dtype is None


def edge_types(arguments: EdgeTypeArguments, ordered_from: Sequence[int] = ()) -> list[EdgeType]:
    """The edge types of the operator's arguments."""
    ends, graphs, num_rows, num_cols, _, weights, times = arguments
    types = []
    for number, (rows, cols) in enumerate(zip(num_rows, num_cols, strict=True)):
        source, target = ends[2 * number : 2 * number + 2]
        tiers, pointers, position = graphs[3 * number : 3 * number + 3]
        types.append(
            EdgeType(
                source,
                target,
                TieredRows(tiers, pointers, position, rows),
                cols,
                Weighting(
                    *_values(weights[4 * number : 4 * number + 4]),
                    *_values(times[4 * number : 4 * number + 4]),
                    None,
                ),
                ordered_from[number] if ordered_from else 0,
            )
        )
    return types


def _values(values: Sequence[Tensor | None]) -> tuple[list[Tensor], torch.dtype | None]:
    there = [value for value in values if value is not None]
    return (there[:-1], there[-1].dtype) if there else ([], None)


def by_hop(options: HopsOptions, num_types: int) -> list[list[HopOptions]]:
    """The options of each hop, by edge type."""
    hops = options.by_hop()
    return [hops[first : first + num_types] for first in range(0, len(hops), num_types)]


def num_nodes(types: Sequence[EdgeType]) -> dict[int, int]:
    """Nodes of each node type, by its number."""
    counts = {}
    for etype in types:
        counts[etype.source], counts[etype.target] = etype.num_sources, etype.rows.num_rows
    return counts


def at_moments(seeds: Tensor, moments: Tensor, num_nodes: int) -> Tensor:
    """Ids of nodes at times; -1 for a seed that is no node."""
    ids = seeds.to(torch.int64)
    return torch.where((ids < 0) | (ids >= num_nodes), -1, ids + moments * num_nodes)


@sample_etype_hops_op.cpu
def hop_by_hop(
    of_types: TypedSeeds,
    etypes: EdgeTypeArguments,
    options: HopsOptions,
    ordered_from: Sequence[int],
) -> Hops:
    """``sample_etype_hops`` on the device of the seeds, whatever it is."""
    seeds, moments, until = of_types
    types, idtype = edge_types(etypes), etypes.idtype
    counts = num_nodes(types)
    # Nodes by type and their times, and what they are numbered by.
    nodes, ids = seeds, seeds
    if until is not None:
        ids = [at_moments(of_type, moments[n], counts[n]) for n, of_type in enumerate(seeds)]
    indptrs, sources, eids = [], [], []
    sizes = [[len(of_type) for of_type in ids]]
    for hop in by_hop(options, len(types)):
        neighbors = []
        for etype, of_type in zip(types, hop, strict=True):
            at = None if until is None else moments[etype.target]
            sampled = _sample_hop(etype, nodes[etype.target], at, until, idtype, of_type)
            neighbors.append(sampled[1])
            indptrs.append(sampled[0])
            eids.append(sampled[2])
        numbered: dict[int, Tensor] = {}
        joined = list(ids)
        for ntype, known in enumerate(ids):
            mine = [n for n, etype in enumerate(types) if etype.source == ntype]
            if mine:
                new = [neighbors[n] for n in mine]
                all_new = new[0] if len(new) == 1 else torch.cat(new)
                joined[ntype], local = torch.ops.dgl_mgpu.append_unique.default(known, all_new)
                parts = local.to(idtype).split([len(part) for part in new])
                # What an operator returns must not share memory.
                parts = parts if len(new) == 1 else tuple(part.clone() for part in parts)
                numbered.update(zip(mine, parts, strict=True))
        sources += [numbered[n] for n in range(len(types))]
        nodes = ids = joined
        if until is not None:
            moments = [of_type // counts[n] for n, of_type in enumerate(ids)]
            nodes = [(of_type % counts[n]).to(idtype) for n, of_type in enumerate(ids)]
        sizes.append([len(of_type) for of_type in ids])
    # Nodes of a type that is no edge's source are the seeds themselves.
    ids = [
        of_type.clone() if any(of_type is seed for seed in seeds) else of_type for of_type in ids
    ]
    return ids, indptrs, sources, eids, torch.tensor(sizes, device="cpu")


def _sample_hop(
    of: EdgeType,
    nodes: Tensor,
    moments: Tensor | None,
    until: Tensor | None,
    idtype: torch.dtype,
    options: HopOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """One hop of an edge type; the neighbors are at the nodes' times."""
    if of.is_uniform:
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors.default(
            nodes, *of.rows, idtype, *options
        )
    else:
        weighting = of.weighting
        if until is not None and weighting.time_dtype is not None:
            weighting = weighting._replace(until=until[moments])
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors_weighted.default(
            nodes, *of.rows, idtype, *weighting, *options
        )
    if moments is not None:
        at = moments.repeat_interleave(indptr.diff(), output_size=len(neighbors))
        neighbors = neighbors + at * of.num_sources
    return indptr, neighbors, eids
