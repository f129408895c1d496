"""A graph's in-edges by their types, where nodes and edges of all types are together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError


class EdgesByType:
    """The in-edges of a node apart by edge type: rows of a CSC matrix over the same edges.

    A node has a row for each edge type that ends at nodes of its type.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        indptr, types = parts["csc_indptr"].long(), parts["type_per_edge"]
        offsets, ntypes, etypes = (
            parts[name] for name in ("node_type_offset", "node_type_to_id", "edge_type_to_id")
        )
        device = indptr.device
        #: More than the largest id of an edge type.
        self.num_types = num_types = 1 + max(etypes.values(), default=0)
        known = torch.zeros(num_types, dtype=torch.bool)
        known[[*etypes.values()]] = True
        self._known = known.tolist()
        #: The node type that each edge type ends at, and its number among those that do.
        self._ends = torch.zeros(num_types, dtype=torch.int64)
        self._numbers = torch.zeros(num_types, dtype=torch.int64)
        widths = torch.zeros(len(offsets) - 1, dtype=torch.int64)
        for etype, number in sorted(etypes.items(), key=lambda item: item[1]):
            end = ntypes[etype.split(":")[2]]
            self._ends[number], self._numbers[number] = end, widths[end]
            widths[end] += 1
        offsets = offsets.long().cpu()
        counts = offsets.diff()
        firsts = torch.nn.functional.pad((counts * widths).cumsum(0), (1, 0))
        self._offsets, self._widths, self._firsts = (
            offsets.tolist(), widths.tolist(), firsts.tolist()
        )  # fmt: skip
        node = torch.arange(len(indptr) - 1, device=device).repeat_interleave(indptr.diff())
        ends = torch.searchsorted(offsets.to(device), node, right=True) - 1
        kinds = types.long()
        inside = kinds.clamp(0, num_types - 1)
        fits = (
            (inside == kinds) & known.to(device)[inside] & (self._ends.to(device)[inside] == ends)
        )
        if not bool(fits.all()):
            raise InvalidInputError(
                "sample neighbors of each edge type",
                "an edge of the graph has an unknown type, or ends at a node of another type than"
                " its edge type does",
                "make type_per_edge, node_type_offset and edge_type_to_id agree",
            )
        rows = firsts.to(device)[ends] + self._numbers.to(device)[kinds]
        rows += (node - offsets.to(device)[ends]) * widths.to(device)[ends]
        if bool((rows.diff() < 0).any()):
            raise InvalidInputError(
                "sample neighbors of each edge type",
                "the in-edges of a node are not in the order of their types",
                "sort the edges of each node by type_per_edge",
            )
        lengths = torch.bincount(rows, minlength=int(firsts[-1]))
        self.indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    def rows_of(self, nodes: Tensor, etype: int) -> tuple[Tensor, Tensor]:
        """The places of nodes that an edge type may end at, and their rows of this type."""
        if etype >= len(self._known) or not self._known[etype]:
            return nodes.new_empty(0, dtype=torch.int64), nodes.new_empty(0)
        end, number = int(self._ends[etype]), int(self._numbers[etype])
        first, last = self._offsets[end], self._offsets[end + 1]
        (places,) = ((nodes >= first) & (nodes < last)).nonzero(as_tuple=True)
        local = nodes[places].long() - first
        return places, local * self._widths[end] + (self._firsts[end] + number)
