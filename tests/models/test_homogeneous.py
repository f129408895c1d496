"""Models on blocks against dgl.nn on the whole graph."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import MultiLayerFullNeighborSampler, NeighborSampler

from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES, build_model


def directed_graph() -> dgl.DGLGraph:
    rng = np.random.default_rng(0)
    g = dgl.graph((rng.zipf(1.8, 3000) % 200, rng.integers(0, 200, 3000)), num_nodes=200)
    g.ndata["feat"] = torch.randn(200, 8)
    degrees = torch.stack([g.out_degrees(), g.in_degrees()], 1).clamp(min=1)
    g.ndata[INV_SQRT_DEGREES] = degrees.float().rsqrt()
    return g


def inputs(g: dgl.DGLGraph, nodes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: g.ndata[name][nodes] for name in ("feat", INV_SQRT_DEGREES)}


def test_gcn_on_all_neighbours_is_gcn_on_the_graph():
    g = directed_graph()
    model = build_model(ModelConfig("gcn", 16), 8, 5, 2).eval()
    layers = [
        dgl.nn.GraphConv(i, o, norm="both", allow_zero_in_degree=True)
        for i, o in ((8, 16), (16, 5))
    ]
    for ours, theirs in zip(model.convolutions, layers, strict=True):
        theirs.load_state_dict(ours.state_dict())
    expected = layers[1](g, torch.relu(layers[0](g, g.ndata["feat"])))
    seeds = torch.arange(0, 200, 3)
    nodes, _, blocks = MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    torch.testing.assert_close(model(blocks, inputs(g, nodes)), expected[seeds])


def test_gcn_on_samples_is_right_on_average():
    g = directed_graph()
    model = build_model(ModelConfig("gcn", 16), 8, 5, 1).eval()
    seeds = torch.arange(200)

    def output(fanout: int) -> torch.Tensor:
        nodes, _, blocks = NeighborSampler([fanout]).sample_blocks(g, seeds)
        return model(blocks, inputs(g, nodes))

    with torch.no_grad():
        samples = torch.stack([output(3) for _ in range(400)])
        error = (samples.mean(0) - output(-1)).abs()
        deviation = samples.std(0) / 20
    assert (error <= 6 * deviation + 1e-5).all()


@pytest.mark.parametrize("name", ["graphsage", "gcn", "gat", "gin", "rgcn", "pinsage"])
def test_a_rank_without_a_batch_has_zero_gradients(name):
    model = build_model(ModelConfig(name, 4), 8, 5, 2)
    model([], {}).sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_unknown_model():
    with pytest.raises(ConfigError, match="graphsage"):
        build_model(ModelConfig("sage"), 8, 5, 2)
