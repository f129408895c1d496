"""All hops of a mini-batch over edge types: the operator that a CPU and a GPU implement.

With times it knows *a node at a time* by one id::

    id = node + moment * (number of nodes of its type)

where ``moment`` is the number of the time among the times of the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dgl_mgpu.ops.library import library

# By node type: `seeds`, and `moments`, the number of each seed's time in `until`; without times
# both are left out. By edge type: `ends`, the numbers of its source and destination type; `graphs`,
# tiers, pointers and position; `weights` and `times`, the same and an empty tensor of their dtype,
# or four times None; `ordered_from`, which may be left out. By hop, and by edge type in it:
# `fanouts` and `keys`; `indptrs`, `sources` and `eids`. `nodes` are those of the last hop by type,
# as nodes at a time (int64) if there are times; those of other hops are beginnings of them, in
# `sizes`, (hops + 1, node types) on the CPU.
library.define(
    "sample_etype_hops(Tensor[] seeds, Tensor[] moments, Tensor? until, int[] ends,"
    " Tensor[] graphs, SymInt[] num_rows, SymInt[] num_cols, ScalarType idtype,"
    " Tensor?[] weights, Tensor?[] times, int[] fanouts, bool replace, int[] keys, int sms=0,"
    " int[] ordered_from=[])"
    " -> (Tensor[] nodes, Tensor[] indptrs, Tensor[] sources, Tensor[] eids, Tensor sizes)"
)

#: What the operator returns.
Hops = tuple[
    list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor
]


@torch.library.register_fake("dgl_mgpu::sample_etype_hops", lib=library)
def _sample_etype_hops_fake(
    seeds: list[torch.Tensor],
    moments: list[torch.Tensor],
    until: torch.Tensor | None,
    ends: list[int],
    graphs: list[torch.Tensor],
    num_rows: list[int],
    num_cols: list[int],
    idtype: torch.dtype,
    weights: list[torch.Tensor | None],
    times: list[torch.Tensor | None],
    fanouts: list[int],
    replace: bool,
    keys: list[int],
    sms: int = 0,
    ordered_from: Sequence[int] = (),
) -> Hops:
    context = torch.library.get_ctx()
    num_types = len(num_rows)
    indptrs, sources, eids = [], [], []
    for hop in range(len(fanouts) // num_types):
        for target in ends[1::2]:
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
    """One edge type of the operator's arguments.

    Attributes
    ----------
    source, target : int
        Numbers of its node types.
    graph : tuple
        Tiers, pointers, position and number of rows.
    num_sources : int
    weights, times : list of Tensor
        Tiers, pointers and position; empty where there are none.
    weight_dtype, time_dtype : torch.dtype, optional
    ordered_from : int
        So many nodes a GPU takes in the order of their edges' addresses; 0 for none.
    """

    source: int
    target: int
    graph: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
    num_sources: int
    weights: list[torch.Tensor]
    weight_dtype: torch.dtype | None
    times: list[torch.Tensor]
    time_dtype: torch.dtype | None
    ordered_from: int = 0

    @property
    def is_uniform(self) -> bool:
        """Whether all edges are drawn alike."""
        return self.weight_dtype is None and self.time_dtype is None


def edge_types(
    ends: Sequence[int],
    graphs: Sequence[torch.Tensor],
    num_rows: Sequence[int],
    num_cols: Sequence[int],
    weights: Sequence[torch.Tensor | None],
    times: Sequence[torch.Tensor | None],
    ordered_from: Sequence[int] = (),
) -> list[EdgeType]:
    """The edge types of the operator's arguments."""
    types = []
    for number, (rows, cols) in enumerate(zip(num_rows, num_cols, strict=True)):
        source, target = ends[2 * number : 2 * number + 2]
        tiers, pointers, position = graphs[3 * number : 3 * number + 3]
        types.append(
            EdgeType(
                source,
                target,
                (tiers, pointers, position, rows),
                cols,
                *_values(weights[4 * number : 4 * number + 4]),
                *_values(times[4 * number : 4 * number + 4]),
                ordered_from[number] if ordered_from else 0,
            )
        )
    return types


def _values(
    values: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.dtype | None]:
    there = [each for each in values if each is not None]
    return (there[:-1], there[-1].dtype) if there else ([], None)


def num_nodes(types: Sequence[EdgeType]) -> dict[int, int]:
    """Nodes of each node type, by its number."""
    found = {}
    for each in types:
        found[each.source], found[each.target] = each.num_sources, each.graph[3]
    return found


def at_moments(seeds: torch.Tensor, moments: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Ids of nodes at times; -1 for a seed that is no node."""
    ids = seeds.to(torch.int64)
    return torch.where((ids < 0) | (ids >= num_nodes), -1, ids + moments * num_nodes)
