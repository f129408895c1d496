"""Bytes that models take on partitioned graphs, in buffers: the rows of one rank's nodes.

On graphs in which every rank's halo is nearly all of the others' nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import dgl
import pytest
import torch
import torch.distributed as dist
from dgl import nn

import dgl_mgpu
from dgl_mgpu.distributed import graph as graph_module
from dgl_mgpu.models.gcn import FullGraphGCN
from tests.distributed.exchange.windows import MappedWindow
from tests.distributed.live_bytes import LiveBytes, peak_bytes

_WIDTH, _OWN, _LAYERS = 64, 800, 3
_KINDS = 3  # of edges


def _graph() -> dgl.DGLGraph:
    """As many nodes and edges for each rank, however many there are."""
    draw = torch.Generator().manual_seed(1)
    count = _OWN * dist.get_world_size()
    src = torch.randint(count, (20 * count,), generator=draw).int()
    g = dgl.add_self_loop(dgl.graph((src, torch.arange(count).int().repeat(20))))
    g.edata["kind"] = torch.randint(_KINDS, (g.num_edges(),), generator=draw)
    return g


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(_WIDTH, _WIDTH)


Layer = Callable[[torch.nn.Module, dgl.DGLGraph, torch.Tensor], torch.Tensor]


def _plain(layer: torch.nn.Module, g: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    return layer(g, rows)


def _weighted(layer: torch.nn.Module, g: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(g.num_edges(), requires_grad=True)
    return layer(g, rows, edge_weight=weights)


def _with_edges(layer: torch.nn.Module, g: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    return layer(g, rows, torch.ones(g.num_edges(), 2, requires_grad=True))


def _typed(layer: torch.nn.Module, g: dgl.DGLGraph, rows: torch.Tensor) -> torch.Tensor:
    return layer(g, rows, torch.zeros(len(rows), dtype=torch.int64), g.edata["kind"])


_MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Layer]] = {
    "GraphConv": (lambda: nn.GraphConv(_WIDTH, _WIDTH), _plain),
    "GraphConv, learned weights": (lambda: nn.GraphConv(_WIDTH, _WIDTH), _weighted),
    "GINConv": (lambda: nn.GINConv(_linear(), "sum"), _plain),
    "GINConv max": (lambda: nn.GINConv(_linear(), "max"), _plain),
    "SAGEConv mean": (lambda: nn.SAGEConv(_WIDTH, _WIDTH, "mean"), _plain),
    "SAGEConv pool": (lambda: nn.SAGEConv(_WIDTH, _WIDTH, "pool"), _plain),
    "GATConv": (lambda: nn.GATConv(_WIDTH, _WIDTH // 4, 4), _plain),
    "GATv2Conv": (lambda: nn.GATv2Conv(_WIDTH, _WIDTH // 4, 4), _plain),
    "GATConv, learned weights": (lambda: nn.GATConv(_WIDTH, _WIDTH // 4, 4), _weighted),
    "EGATConv": (
        lambda: nn.EGATConv(_WIDTH, 2, _WIDTH // 4, 1, 4),
        lambda layer, g, rows: _with_edges(layer, g, rows)[0],
    ),
    "EdgeGATConv": (lambda: nn.EdgeGATConv(_WIDTH, 2, _WIDTH // 4, 4), _with_edges),
    "HGTConv": (lambda: nn.HGTConv(_WIDTH, _WIDTH // 4, 4, 1, _KINDS, 0.0), _typed),
    "EdgeConv": (lambda: nn.EdgeConv(_WIDTH, _WIDTH), _plain),
    "RelGraphConv": (
        lambda: nn.RelGraphConv(_WIDTH, _WIDTH, _KINDS, "basis", 2),
        lambda layer, g, rows: layer(g, rows, g.edata["kind"]),
    ),
}


def _of_layers(model: str) -> float:
    """The peak of a step of three layers, in buffers."""
    make, call = _MODELS[model]
    pg = dgl_mgpu.partition_graph(_graph())
    x = torch.rand(pg.num_nodes(), _WIDTH)
    layers = torch.nn.ModuleList(make() for _ in range(_LAYERS))

    def step() -> None:
        rows = x
        for layer in layers:
            rows = call(layer, pg, rows).flatten(1).relu()
        rows.sum().backward()

    step()  # makes tiles, and gradients
    return peak_bytes(step) / x.nbytes


@pytest.mark.parametrize("model", _MODELS)
def test_buffers_do_not_grow_with_the_ranks(ranks, five_ranks, model):
    # With two other ranks a gradient has no third round on its way when the first is added.  A halo
    # fetched at once would be two buffers more for each that is kept of it.
    three, five = (max(each.run(_of_layers, model)) for each in (ranks, five_ranks))
    assert five <= three + 1.3


def _largest(model: str) -> float:
    """The largest tensor of a layer's step, in rows of as many nodes as a rank has edges."""
    make, call = _MODELS[model]
    pg = dgl_mgpu.partition_graph(_graph())
    x, layer = torch.rand(pg.num_nodes(), _WIDTH, requires_grad=True), make()
    call(layer, pg, x).sum().backward()  # makes tiles
    with LiveBytes() as counted:
        call(layer, pg, x).sum().backward()
    return counted.largest / (pg.num_edges() * _WIDTH * x.itemsize)


@pytest.mark.parametrize(
    "model", ["GATConv, learned weights", "EGATConv", "EdgeGATConv", "HGTConv"]
)
def test_attention_writes_no_row_for_each_edge(ranks, model):
    """But numbers of heads, in float32 or as integers, and what typed sources have."""
    assert max(ranks.run(_largest, model)) <= 4 * 2 / _WIDTH + (0.25 if model == "HGTConv" else 0)


def _gcn(exchange: str, has_window: bool) -> float:
    """The peak of a step of a GCN whose layers are all as wide, without its input."""
    window = MappedWindow(dist.group.WORLD)
    before, graph_module._window = graph_module._window, lambda *_: window if has_window else None
    try:
        pg = dgl_mgpu.partition_graph(_graph(), exchange=exchange)
    finally:
        graph_module._window = before
    x = torch.rand(pg.num_nodes(), _WIDTH)
    model = FullGraphGCN([_WIDTH] * (_LAYERS + 1))

    def step() -> None:
        model(pg, x).sum().backward()

    step()
    lent = 2 * window.most if has_window else 0
    return (peak_bytes(step) + lent) / x.nbytes


@pytest.mark.parametrize(
    ("exchange", "has_window", "most"),
    [
        ("broadcast", False, _LAYERS + 3),
        ("halo", False, _LAYERS + 2.5),
        ("halo", True, _LAYERS + 3),
    ],
)
def test_buffers_of_a_gcn_on_five_ranks(five_ranks, exchange, has_window, most):
    """As `dgl_mgpu.models.gcn.passes` says; less than half a buffer is of parameters."""
    for buffers in five_ranks.run(_gcn, exchange, has_window):
        assert most <= buffers <= most + 0.5
