"""Checks of ids, fanouts and sizes that DGL's C++ does not make.

With bad ids it reads memory that is not the graph's; some fanouts end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dgl_mgpu.graph.dispatch import as_tensor, is_null
from dgl_mgpu.graph.errors import InvalidCallError, UnknownIdError

_SAMPLE = "sample neighbors"
_MAKE = "make a graph of edges"
_WALK = "walk at random"
_MAX_INT64 = (1 << 63) - 1


def _check(action: str, ids: Any, count: int, kind: str = "node") -> None:
    if is_null(ids):
        return
    low, high = (int(bound) for bound in as_tensor(ids).aminmax())
    if low < 0 or high >= count:
        raise UnknownIdError(
            action,
            f"{kind} {low if low < 0 else high} is not among the graph's {count} {kind}s",
            f"pass ids in [0, {count})",
        )


def _nodes_by_type(action: str, graph: Any, nodes: Any, *_: Any) -> None:
    """Nodes of the only type, or a list of those of each."""
    for ntype, ids in enumerate(nodes if isinstance(nodes, list | tuple) else [nodes]):
        _check(action, ids, graph.number_of_nodes(ntype))


def _sampling(fanouts_at: int, graph: Any, nodes: Any, *more: Any) -> None:
    """Nodes of each type, and fanouts among what follows."""
    _nodes_by_type(_SAMPLE, graph, nodes)
    value = more[fanouts_at]
    fanouts = [value] if isinstance(value, int) else as_tensor(value).tolist()
    if min(fanouts, default=0) < -1:
        raise InvalidCallError(
            _SAMPLE, f"a fanout is {min(fanouts)}", "pass 0 or more, or -1 for all neighbors"
        )


def _edges_by_type(graph: Any, edges: Any, *_: Any) -> None:
    for etype, ids in enumerate(edges):
        _check("take edges of a graph", ids, graph.number_of_edges(etype), "edge")


def _destinations(action: str, graph: Any, etype: int, nodes: Any) -> None:
    _, ntype = graph.metagraph.find_edge(etype)
    _check(action, nodes, graph.number_of_nodes(ntype))


def _starts(graph: Any, nodes: Any, metapath: Any, *_: Any) -> None:
    if is_null(metapath):
        raise InvalidCallError(_WALK, "the walk has no steps", "pass a length of 1 or more")
    ntype, _ = graph.metagraph.find_edge(int(as_tensor(metapath)[0]))
    _check(_WALK, nodes, graph.number_of_nodes(ntype))


def _sources(graph: Any, nodes: Any, *_: Any) -> None:
    _check("traverse a graph", nodes, graph.number_of_nodes(0))


def _ends(_: Any, num_src: int, num_dst: int, sources: Any, destinations: Any, *__: Any) -> None:
    # DGL's Python looks for the highest ones alone.
    _check(_MAKE, sources, num_src)
    _check(_MAKE, destinations, num_dst)


def _indices(_: Any, num_src: int, num_dst: int, *matrix: Any) -> None:
    __, indices, ___, ____, is_csc = matrix
    _check(_MAKE, indices, num_src if is_csc else num_dst)


def _numbers(count: int, population: int, *_: Any) -> None:
    # All pairs of nodes, say, of which edges are to be.
    if population > _MAX_INT64:
        raise InvalidCallError(
            f"draw {count} of {population} numbers",
            "64 bits have fewer",
            "draw fewer; for edges at random between so many nodes, draw both ends by themselves: "
            "dgl.graph(tuple(torch.randint(num_nodes, (2, num_edges))), num_nodes=num_nodes)",
        )


#: By a C function's name, a check of what it is called with for a graph on the CPU.
CHECKS: dict[str, Callable[..., None]] = {
    "Choice": _numbers,
    "DGLSampleNeighbors": partial(_sampling, 0),
    "DGLSampleNeighborsTopk": partial(_sampling, 0),
    "DGLSampleNeighborsBiased": partial(_sampling, 0),
    "DGLSampleLabors": partial(_sampling, 0),
    "DGLSampleNeighborsFused": partial(_sampling, 1),
    "DGLSampleNeighborsEType": partial(_sampling, 1),
    "DGLSamplingRandomWalk": _starts,
    "DGLSamplingRandomWalkWithRestart": _starts,
    "DGLSamplingRandomWalkWithStepwiseRestart": _starts,
    "DGLSamplingNode2vec": partial(_nodes_by_type, _WALK),
    "DGLBFSNodes_v2": _sources,
    "DGLBFSEdges_v2": _sources,
    "DGLDFSEdges_v2": _sources,
    "DGLDFSLabeledEdges_v2": _sources,
    "DGLHeteroCreateUnitGraphFromCOO": _ends,
    "DGLHeteroCreateUnitGraphFromCSR": _indices,
    "DGLInSubgraph": partial(_nodes_by_type, "take the in-edges of nodes"),
    "DGLOutSubgraph": partial(_nodes_by_type, "take the out-edges of nodes"),
    "DGLHeteroEdgeSubgraph": _edges_by_type,
    # Of out-edges DGL's Python looks for the nodes.
    "DGLHeteroInDegrees": partial(_destinations, "count the in-edges of nodes"),
    "DGLHeteroInEdges_2": partial(_destinations, "list the in-edges of nodes"),
}
