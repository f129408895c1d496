"""Samplers of neighbors: what later versions' scripts pass them."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals

_HERE = "dgl.graphbolt.impl.neighbor_sampler"


def init_neighbor_sampler(
    self: Any,
    datapipe: Any,
    graph: Any,
    fanouts: Any,
    replace: bool = False,
    prob_name: str | None = None,
    deduplicate: bool = True,
    sampler: Any = None,
    *,
    overlap_fetch: bool = False,
    asynchronous: bool = False,
) -> None:
    """In place of ``NeighborSampler.__init__``; mini-batches are made ahead whether told or not."""
    arguments = datapipe, graph, fanouts, replace, prob_name, deduplicate, sampler
    originals[f"{_HERE}:NeighborSampler.__init__"](self, *arguments)


def init_layer_neighbor_sampler(
    self: Any,
    datapipe: Any,
    graph: Any,
    fanouts: Any,
    replace: bool = False,
    prob_name: str | None = None,
    deduplicate: bool = True,
    *,
    overlap_fetch: bool = False,
    asynchronous: bool = False,
) -> None:
    """In place of ``LayerNeighborSampler.__init__``, likewise."""
    arguments = datapipe, graph, fanouts, replace, prob_name, deduplicate
    originals[f"{_HERE}:LayerNeighborSampler.__init__"](self, *arguments)
