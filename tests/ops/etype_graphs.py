"""A small heterogeneous graph for tests of sampling over edge types."""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.ops.view import GraphView
from tests.ops.views import LAYOUTS, Graph, power_law_graph, row_view

FOLLOWS, BUYS, BOUGHT = (
    ("user", "follows", "user"),
    ("user", "buys", "item"),
    ("item", "bought-by", "user"),
)
ETYPES = (FOLLOWS, BUYS, BOUGHT)
USERS, ITEMS = 60, 25


def _bipartite(num_rows: int, num_cols: int, num_edges: int, seed: int) -> Graph:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(num_rows, (num_edges,), generator=random)
    lists: list[list[int]] = [[] for _ in range(num_rows)]
    for row, col in zip(
        rows.tolist(), torch.randint(num_cols, (num_edges,), generator=random).tolist(), strict=True
    ):
        lists[row].append(col)
    return Graph.of_lists(lists, num_cols=num_cols)


GRAPHS = {
    FOLLOWS: power_law_graph(USERS, 500, seed=1),
    BUYS: _bipartite(ITEMS, USERS, 200, seed=2),
    BOUGHT: _bipartite(USERS, ITEMS, 200, seed=3),
}


def hetero_case(
    case: str, idtype: torch.dtype
) -> tuple[dict[tuple[str, str, str], GraphView], dict[str, torch.Tensor], dict[str, Any]]:
    """Views, seeds and options of a case: 'uniform', 'weighted' (some types) or 'timed'."""
    layouts = list(LAYOUTS.values())
    views = {
        etype: graph.view(layouts[number], idtype)
        for number, (etype, graph) in enumerate(GRAPHS.items())
    }
    seeds = {
        "user": torch.tensor([5, 0, 59, 5], dtype=idtype),
        "item": torch.tensor([24, 3, 11], dtype=idtype),
    }
    random = torch.Generator().manual_seed(4)
    if case == "weighted":
        weights = torch.rand(len(GRAPHS[BUYS].indices), generator=random) + 0.1
        return views, seeds, {"weights": {BUYS: row_view(weights)}}
    if case == "timed":
        times = {
            etype: row_view(torch.randint(100, (len(graph.indices),), generator=random))
            for etype, graph in GRAPHS.items()
        }
        until = {"user": torch.tensor([50, 20, 99, 70]), "item": torch.tensor([50, 70, 0])}
        return views, seeds, {"times": times, "until": until}
    return views, seeds, {}
