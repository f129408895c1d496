"""All hops of a mini-batch over edge types: the operator that a CPU and a GPU implement.

With times it knows *a node at a time* by one id::

    id = node + moment * (number of nodes of its type)

where ``moment`` is the number of the time among the times of the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dgl_mgpu.ops.library import Operator, Sizes
from dgl_mgpu.ops.sample_weighted.op import Weighting
from dgl_mgpu.ops.view import TieredRows

# By node type: `seeds`, and `moments`, the number of each seed's time in `until`; without times
# both are left out. By edge type: `ends`, the numbers of its source and destination type; `graphs`,
# tiers, pointers and position; `weights` and `times`, the same and an empty tensor of their dtype,
# or four times None; `ordered_from`, which may be left out. By hop, and by edge type in it:
# `fanouts` and `keys`; `indptrs`, `sources` and `eids`. `nodes` are those of the last hop by type,
# as nodes at a time (int64) if there are times; those of other hops are beginnings of them, in
# `sizes`, (hops + 1, node types) on the CPU.
#: What the operator returns.
Hops = tuple[
    list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor
]


class EdgeTypeArguments(NamedTuple):
    """All edge types of a graph, as the operator takes them; see the comment above."""

    ends: Sequence[int]
    graphs: Sequence[torch.Tensor]
    num_rows: Sizes
    num_cols: Sizes
    idtype: torch.dtype
    weights: Sequence[torch.Tensor | None]
    times: Sequence[torch.Tensor | None]


@Operator
def sample_etype_hops_op(
    seeds: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    until: torch.Tensor | None,
    etypes: EdgeTypeArguments,
    fanouts: Sequence[int],
    replace: bool,
    keys: Sequence[int],
    sms: int = 0,
    ordered_from: Sequence[int] = (),
) -> Hops:
    context = torch.library.get_ctx()
    num_types, idtype = len(etypes.num_rows), etypes.idtype
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
    """One edge type of the operator's arguments.

    Attributes
    ----------
    source, target : int
        Numbers of its node types.
    rows : TieredRows
    num_sources : int
    weighting : Weighting
        Without ``until``, which all edge types share.
    ordered_from : int
        Number of nodes from which a GPU takes them in the order of addresses; 0 for never.
    """

    source: int
    target: int
    rows: TieredRows
    num_sources: int
    weighting: Weighting
    ordered_from: int = 0

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


def _values(
    values: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.dtype | None]:
    there = [each for each in values if each is not None]
    return (there[:-1], there[-1].dtype) if there else ([], None)


def num_nodes(types: Sequence[EdgeType]) -> dict[int, int]:
    """Nodes of each node type, by its number."""
    found = {}
    for each in types:
        found[each.source], found[each.target] = each.num_sources, each.rows.num_rows
    return found


def at_moments(seeds: torch.Tensor, moments: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Ids of nodes at times; -1 for a seed that is no node."""
    ids = seeds.to(torch.int64)
    return torch.where((ids < 0) | (ids >= num_nodes), -1, ids + moments * num_nodes)
