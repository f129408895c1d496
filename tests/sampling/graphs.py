"""Graphs to sample, and what every sample of them must fulfil."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import torch
from scipy import stats

#: Probability with which a statistical test fails although nothing is wrong.
FALSE_ALARM = 1e-6

USERS, ITEMS = 40, 25


def multigraph(device: torch.device, idtype: torch.dtype = torch.int64) -> dgl.DGLGraph:
    """A graph with hubs, parallel edges and nodes without any, whose edges are in no order."""
    random = np.random.default_rng(1)
    src = np.minimum(random.geometric(0.05, 500), 80) - 1
    dst = np.minimum(random.geometric(0.04, 500), 80) - 1
    g = dgl.graph((torch.tensor(src), torch.tensor(dst)), num_nodes=90).astype(idtype).to(device)
    g.edata["w"] = torch.tensor(random.random(500) * (random.random(500) < 0.7)).to(device)
    g.edata["mask"] = g.edata["w"] > 0.2
    g.edata["number"] = torch.arange(500, device=device)
    return g


def shop(device: torch.device, idtype: torch.dtype = torch.int64) -> dgl.DGLGraph:
    """A graph of two node types and three edge types."""
    random = np.random.default_rng(2)

    def edges(sources: int, targets: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.tensor(random.integers(0, n, count)) for n in (sources, targets))

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): edges(USERS, USERS, 200),
            ("user", "buys", "item"): edges(USERS, ITEMS, 150),
            ("item", "bought", "user"): edges(ITEMS, USERS, 120),
        },
        {"user": USERS, "item": ITEMS},
    )
    g = g.astype(idtype).to(device)
    for etype in g.canonical_etypes:
        weights = random.random(g.num_edges(etype)) * (random.random(g.num_edges(etype)) < 0.7)
        g.edges[etype].data["w"] = torch.tensor(weights, device=device)
    return g


def regular(device: torch.device, num_nodes: int, degree: int) -> dgl.DGLGraph:
    """Every node has an edge from each of nodes 0 to ``degree - 1``; edge ids are in that order."""
    dst = torch.arange(num_nodes).repeat_interleave(degree)
    src = torch.arange(degree).repeat(num_nodes)
    return dgl.graph((src, dst), num_nodes=max(num_nodes, degree)).to(device)


def on_cpp(make: Any, *arguments: Any) -> dgl.DGLGraph:
    """The same graph as DGL's C++ has it."""
    from dgl_mgpu.graph.dispatch import tensor_backed_graphs

    with tensor_backed_graphs(False):
        return make(torch.device("cpu"), *arguments)


def edges_of(g: dgl.DGLGraph, etype: Any = None) -> tuple[list[int], list[int], list[int]]:
    """Sources, destinations and the ids that edges had where they were sampled."""
    src, dst = g.edges(order="eid", etype=etype)
    return (
        src.tolist(),
        dst.tolist(),
        g.edges[etype or g.canonical_etypes[0]].data[dgl.EID].tolist(),
    )


def check_edges(sample: dgl.DGLGraph, g: dgl.DGLGraph) -> None:
    """Every sampled edge is one of the graph's, under its id, and carries its features."""
    assert sample.device == g.device and sample.idtype == g.idtype
    assert sample.ntypes == g.ntypes and sample.canonical_etypes == g.canonical_etypes
    for ntype in g.ntypes:
        assert sample.num_nodes(ntype) == g.num_nodes(ntype)
    for etype in g.canonical_etypes:
        eids = sample.edges[etype].data[dgl.EID]
        assert eids.dtype == g.idtype
        for found, expected in zip(
            sample.edges(etype=etype), g.find_edges(eids, etype=etype), strict=True
        ):
            assert torch.equal(found, expected)
        for name, values in g.edges[etype].data.items():
            assert torch.equal(sample.edges[etype].data[name], values[eids.long()])


def is_like(counts: Any, expected: Any) -> bool:
    """Whether counts may be those of the expected distribution, of any sum."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    possible = expected > 0
    if counts[~possible].any():
        return False
    if possible.sum() == 1:
        return True
    expected = expected[possible] / expected.sum() * counts.sum()
    return bool(stats.chisquare(counts[possible], expected).pvalue > FALSE_ALARM)
