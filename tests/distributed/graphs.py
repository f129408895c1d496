"""Small graphs with all that an exchange of rows may stumble over."""

from __future__ import annotations

import dgl
import torch

Edges = tuple[int, int, torch.Tensor, torch.Tensor]


def edges(kind: str) -> Edges:
    """Numbers of sources and destinations, and the two ends of every edge."""
    draw = torch.Generator().manual_seed(5)

    def any_of(count: int, size: int) -> torch.Tensor:
        return torch.randint(count, (size,), generator=draw)

    none = torch.empty(0, dtype=torch.int64)
    if kind == "random":  # 200 edges of 23 nodes: self-loops and parallel edges are among them
        return 23, 23, any_of(23, 200), any_of(23, 200)
    if kind == "skewed":  # one node has most in-edges, another one most out-edges
        src, dst = any_of(40, 300), any_of(40, 300)
        src[:150], dst[100:250] = 7, 31
        return 40, 40, src, dst
    if kind == "bipartite":
        return 31, 12, any_of(31, 150), any_of(12, 150)
    if kind == "isolated":  # edges between three nodes of twenty
        return 20, 20, any_of(3, 30), any_of(3, 30)
    if kind == "no edges":
        return 9, 9, none, none
    if kind == "self-loops":  # no rank reads another's rows
        return 10, 10, torch.arange(10), torch.arange(10)
    if kind == "one node":
        return 1, 1, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    if kind == "two nodes":  # fewer than there are ranks
        return 2, 2, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 0])
    if kind == "no sources":
        return 0, 6, none, none
    raise KeyError(kind)


KINDS = (
    "random", "skewed", "bipartite", "isolated", "no edges", "self-loops", "one node",
    "two nodes", "no sources",
)  # fmt: skip


def homogeneous(
    kind: str = "random", dtype: torch.dtype = torch.float64, width: int = 5
) -> dgl.DGLGraph:
    """A graph of one type with features ``x`` of nodes and ``w``, ``z`` of edges."""
    num_nodes, _, src, dst = edges(kind)
    g = dgl.graph((src, dst), num_nodes=num_nodes)
    draw = torch.Generator().manual_seed(3)
    g.ndata["x"] = torch.randn(num_nodes, width, generator=draw, dtype=torch.float64).to(dtype)
    g.edata["w"] = (torch.rand(len(src), 1, generator=draw, dtype=torch.float64) + 0.5).to(dtype)
    g.edata["z"] = torch.randn(len(src), width, generator=draw, dtype=torch.float64).to(dtype)
    return g


def heterogeneous(num_marks: int = 0) -> dgl.DGLGraph:
    """Five relations between three node types: one may be empty, two have the same ends."""
    draw = torch.Generator().manual_seed(11)
    count = {"user": 21, "item": 13, "tag": 4}

    def pairs(src: str, dst: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randint(count[src], (size,), generator=draw),
            torch.randint(count[dst], (size,), generator=draw),
        )

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): pairs("user", "user", 60),
            ("user", "buys", "item"): pairs("user", "item", 70),
            ("user", "sees", "item"): (torch.arange(20), torch.arange(20) % count["item"]),
            ("item", "has", "tag"): pairs("item", "tag", 30),
            ("tag", "marks", "user"): pairs("tag", "user", num_marks),
        },
        num_nodes_dict=count,
    )
    for ntype in g.ntypes:
        rows = torch.randn(count[ntype], 5, generator=draw, dtype=torch.float64)
        g.nodes[ntype].data["x"] = rows
    for etype in g.canonical_etypes:
        weights = torch.rand(g.num_edges(etype), 1, generator=draw, dtype=torch.float64)
        g.edges[etype].data["w"] = weights + 0.5
    return g
