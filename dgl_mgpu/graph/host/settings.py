"""Settings of the process, and questions about metagraphs."""

from __future__ import annotations

import torch
from dgl.graph_index import GraphIndex

_uses_libxsmm = True


def set_libxsmm(flag: bool) -> None:
    """Nothing but kept: no sum here takes libxsmm."""
    global _uses_libxsmm
    _uses_libxsmm = bool(flag)


def get_libxsmm() -> bool:
    return _uses_libxsmm


def set_num_threads(count: int) -> None:
    """Operators run on torch's threads."""
    torch.set_num_threads(count)


def get_num_threads() -> int:
    return torch.get_num_threads()


def find_src_dst_ntypes(metagraph: GraphIndex) -> tuple[list[int], list[int]] | None:
    """Node types that edges leave and those that they enter; none if some are both.

    A type without edges is one that they leave.
    """
    ends = [metagraph.find_edge(etype) for etype in range(metagraph.num_edges())]
    sources, destinations = {src for src, _ in ends}, {dst for _, dst in ends}
    if sources & destinations:
        return None
    others = [ntype for ntype in range(metagraph.num_nodes()) if ntype not in destinations]
    return others, sorted(destinations)
