"""Models on one graph: against themselves on blocks of all neighbours, and against arithmetic."""

from __future__ import annotations

from functools import partial

import dgl
import pytest
import torch
from dgl.dataloading import MultiLayerFullNeighborSampler

from dgl_mgpu.config.schema import FullGraphConfig, ModelConfig
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.models.full_graph import LeanGCN
from dgl_mgpu.models.full_graph import build_model as build_for_graph
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES, RGCN, build_model
from tests.distributed.graphs import heterogeneous, homogeneous


@pytest.mark.parametrize("name", ["gcn", "gin", "graphsage", "gat", "rgcn"])
@pytest.mark.parametrize("kind", ["skewed", "isolated"])
def test_a_graph_is_as_blocks_of_all_neighbours(name, kind):
    g = homogeneous(kind)
    degrees = torch.stack([g.out_degrees(), g.in_degrees()], 1).clamp(min=1)
    model = build_model(ModelConfig(name, 8, aggregator="mean"), 5, 3, 2).double().eval()
    inputs = {"feat": g.ndata["x"], INV_SQRT_DEGREES: degrees.double().rsqrt()}
    whole = model(g, {"feat": g.ndata["x"]})
    assert whole.dtype == torch.float64
    nodes, _, blocks = MultiLayerFullNeighborSampler(2).sample_blocks(g, g.nodes())
    on_blocks = model(blocks, {key: rows[nodes] for key, rows in inputs.items()})
    torch.testing.assert_close(whole, on_blocks)


def test_rgcn_sums_over_relations():
    g = heterogeneous()
    model = RGCN([5, 6, 3], ModelConfig("rgcn", 6), g.etypes, "item").double().eval()
    found = model(g, {"feat": g.ndata["x"]})
    hidden = g.ndata["x"]
    for layer, convolution in enumerate(model.convolutions):
        following = {
            ntype: rows @ convolution.own.weight.T + convolution.own.bias
            for ntype, rows in hidden.items()
        }
        for src, etype, dst in g.canonical_etypes:
            adjacency = torch.zeros(g.num_nodes(dst), g.num_nodes(src), dtype=torch.float64)
            sources, targets = g.edges(etype=etype)
            adjacency.index_put_(
                (targets, sources), torch.ones(len(sources), dtype=torch.float64), accumulate=True
            )
            mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
            weight = convolution.relations.mods[etype].weight
            following[dst] = following[dst] + mean @ hidden[src] @ weight
        hidden = {n: rows.relu() if layer == 0 else rows for n, rows in following.items()}
    torch.testing.assert_close(found, hidden["item"])


def test_dropout_draws_for_inputs_and_between_layers():
    g = dgl.add_self_loop(homogeneous())
    model = build_model(ModelConfig("gcn", 8, dropout=0.5), 5, 3, 2).double()
    torch.manual_seed(0)
    first = model(g, {"feat": g.ndata["x"]})
    assert not torch.equal(first, model(g, {"feat": g.ndata["x"]}))
    model.eval()
    assert torch.equal(model(g, {"feat": g.ndata["x"]}), model(g, {"feat": g.ndata["x"]}))


@pytest.mark.parametrize("keep_input_sums", [True, False])
def test_a_lean_gcn_is_the_gcn_of_mini_batches(keep_input_sums):
    g = homogeneous("isolated")
    inputs, config = {"feat": g.ndata["x"]}, ModelConfig("gcn", 8, dropout=0.0)
    found = []
    options = FullGraphConfig(keep_input_sums=keep_input_sums, keep_every=2)
    for build in (build_model, partial(build_for_graph, options=options)):
        torch.manual_seed(0)
        model = build(config, 5, 3, 3).double()
        logits = model(g, inputs)
        logits.square().sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    assert isinstance(model, LeanGCN) and model.gcn.keep_input_sums == keep_input_sums
    assert model.gcn.keep_every == 2 and model.gcn.activation_dtype is None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_lean_gcn_drops_of_its_input_and_between_layers():
    g = dgl.add_self_loop(homogeneous(width=200))
    model = build_for_graph(ModelConfig("gcn", 300, dropout=0.4), 200, 3, 2).double()
    assert not model.gcn.keep_input_sums  # of other rows in every epoch
    rows = []
    model.gcn.register_forward_pre_hook(lambda module, args: rows.append(args[1]))
    torch.manual_seed(0)
    first, second = (model(g, {"feat": torch.ones_like(g.ndata["x"])}) for _ in range(2))
    assert not torch.equal(first, second)
    for kept in rows:
        assert 0.5 < (kept != 0).double().mean() < 0.7
        assert kept.unique().tolist() == pytest.approx([0, 1 / 0.6], rel=2**-15)
    model.dropout.eval()
    third, fourth = (model(g, {"feat": g.ndata["x"]}) for _ in range(2))
    assert not torch.equal(third, fourth)  # between layers
    model.eval()
    assert torch.equal(model(g, {"feat": g.ndata["x"]}), model(g, {"feat": g.ndata["x"]}))


def test_a_lean_gcn_drops_of_features_in_host_memory():
    g = dgl.add_self_loop(homogeneous(width=200))
    model = build_for_graph(ModelConfig("gcn", 300, dropout=0.4), 200, 3, 2).double()
    rows = []
    model.gcn.register_forward_pre_hook(lambda module, args: rows.append(args[1].whole()))
    features = HostRows(torch.ones_like(g.ndata["x"]), "cpu", 64)
    model(g, {"feat": features})
    model.eval()
    model(g, {"feat": features})
    assert 0.5 < (rows[0] != 0).double().mean() < 0.7
    assert rows[0].unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert torch.equal(rows[1], features.whole())
