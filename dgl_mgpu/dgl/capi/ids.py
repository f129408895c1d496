"""Ids with which DGL's C++ would read memory that is not the graph's: it does not look at them.

Nor does it look at fanouts, and ends the process with some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgl_mgpu.graph.arrays import as_tensor, is_null
from dgl_mgpu.graph.errors import InvalidCallError, UnknownIdError

_SAMPLE = "sample neighbors"
_MAKE = "make a graph of edges"


def _nodes_by_type(asked: str) -> Callable[..., None]:
    """A check of calls with a graph and nodes, of the only type or a list of those of each."""

    def check(graph: Any, nodes: Any, *_: Any) -> None:
        every = nodes if isinstance(nodes, list | tuple) else [nodes]
        for ntype, ids in enumerate(every):
            _check(ids, graph.number_of_nodes(ntype), asked, "node")

    return check


def _sampling(fanouts_at: int) -> Callable[..., None]:
    """A check of calls with a graph, nodes of each type, and fanouts among what follows."""
    check_nodes = _nodes_by_type(_SAMPLE)

    def check(graph: Any, nodes: Any, *more: Any) -> None:
        check_nodes(graph, nodes)
        given = more[fanouts_at]
        fanouts = [given] if isinstance(given, int) else as_tensor(given).tolist()
        if min(fanouts, default=0) < -1:
            raise InvalidCallError(
                _SAMPLE, f"a fanout is {min(fanouts)}", "pass 0 or more, or -1 for all neighbors"
            )

    return check


def _edges_by_type(graph: Any, edges: Any, *_: Any) -> None:
    for etype, ids in enumerate(edges):
        _check(ids, graph.number_of_edges(etype), "take edges of a graph", "edge")


def _destinations(asked: str) -> Callable[..., None]:
    """A check of calls with a graph, an edge type and destinations of its edges."""

    def check(graph: Any, etype: int, nodes: Any) -> None:
        _, ntype = graph.metagraph.find_edge(etype)
        _check(nodes, graph.number_of_nodes(ntype), asked, "node")

    return check


def _starts(graph: Any, nodes: Any, metapath: Any, *_: Any) -> None:
    if is_null(metapath):
        raise InvalidCallError(
            "walk at random", "the walk has no steps", "pass a length of 1 or more"
        )
    ntype, _ = graph.metagraph.find_edge(int(as_tensor(metapath)[0]))
    _check(nodes, graph.number_of_nodes(ntype), "walk at random", "node")


def _sources(graph: Any, nodes: Any, *_: Any) -> None:
    _check(nodes, graph.number_of_nodes(0), "traverse a graph", "node")


def _ends(_: Any, num_src: int, num_dst: int, sources: Any, destinations: Any, *__: Any) -> None:
    # DGL's Python looks for the highest ones alone.
    _check(sources, num_src, _MAKE, "node")
    _check(destinations, num_dst, _MAKE, "node")


def _indices(_: Any, num_src: int, num_dst: int, *matrix: Any) -> None:
    __, indices, ___, ____, is_csc = matrix
    _check(indices, num_src if is_csc else num_dst, _MAKE, "node")


def _check(ids: Any, count: int, asked: str, what: str) -> None:
    if is_null(ids):
        return
    low, high = (int(bound) for bound in as_tensor(ids).aminmax())
    if low < 0 or high >= count:
        raise UnknownIdError(
            asked,
            f"{what} {low if low < 0 else high} is not among the graph's {count} {what}s",
            f"pass ids in [0, {count})",
        )


#: By a C function's name, a check of what it is called with for a graph on the CPU.
CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(
        (
            "DGLSampleNeighbors",
            "DGLSampleNeighborsTopk",
            "DGLSampleNeighborsBiased",
            "DGLSampleLabors",
        ),
        _sampling(0),
    ),
    **dict.fromkeys(("DGLSampleNeighborsFused", "DGLSampleNeighborsEType"), _sampling(1)),
    **dict.fromkeys(
        (
            "DGLSamplingRandomWalk",
            "DGLSamplingRandomWalkWithRestart",
            "DGLSamplingRandomWalkWithStepwiseRestart",
        ),
        _starts,
    ),
    "DGLSamplingNode2vec": _nodes_by_type("walk at random"),
    **dict.fromkeys(
        ("DGLBFSNodes_v2", "DGLBFSEdges_v2", "DGLDFSEdges_v2", "DGLDFSLabeledEdges_v2"), _sources
    ),
    "DGLHeteroCreateUnitGraphFromCOO": _ends,
    "DGLHeteroCreateUnitGraphFromCSR": _indices,
    "DGLInSubgraph": _nodes_by_type("take the in-edges of nodes"),
    "DGLOutSubgraph": _nodes_by_type("take the out-edges of nodes"),
    "DGLHeteroEdgeSubgraph": _edges_by_type,
    # Of out-edges DGL's Python looks for the nodes.
    "DGLHeteroInDegrees": _destinations("count the in-edges of nodes"),
    "DGLHeteroInEdges_2": _destinations("list the in-edges of nodes"),
}
