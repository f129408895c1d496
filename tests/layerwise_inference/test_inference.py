"""Inference on a whole graph, against one call of the model on DGL's graph itself."""

from __future__ import annotations

import importlib.util

import dgl
import pytest
import torch
from dgl.nn import GraphConv, SAGEConv
from torch import nn

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.errors import (
    OutputError,
)
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.layerwise_inference import strategies as ways
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES, build_model
from tests.distributed.graphs import heterogeneous, homogeneous
from tests.layerwise_inference.inference_models import (
    CLASSES,
    HIDDEN,
    MODELS,
    WIDTH,
    Attention,
    Paired,
    Rgcn,
    Slices,
    Stack,
    assert_equal,
    expected_of,
    made,
)


@pytest.mark.parametrize("kind", ["random", "isolated"])
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_what_the_model_gives_on_the_graph(name, kind):
    g = homogeneous(kind)
    model = made(MODELS[name])
    expected = expected_of(model, g, g.ndata["x"], 3 if name in ("graphsage", "jumping") else 2)
    for options in ({}, {"layerwise": False}, {"layerwise": True}, {"batch_size": 7}):
        assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.parametrize("batch_size", [None, 11])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Rgcn(["follows", "buys", "sees", "has", "marks"]),
        lambda: Attention(["follows", "buys", "sees", "has", "marks"]),
        Slices,
    ],
)
def test_heterographs(make, idtype, batch_size):
    g = heterogeneous().astype(idtype)
    model = made(make)
    x = {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes}
    expected = expected_of(model, g, x, 2)
    for each in (x, "x"):
        assert_equal(dgl_mgpu.inference(model, g, each, batch_size=batch_size), expected)


@pytest.mark.parametrize("name", ["graphsage", "gcn", "gat", "gin"])
def test_models_of_this_package(name):
    g = homogeneous().astype(torch.int32)
    g.ndata["feat"] = g.ndata["x"]
    degrees = torch.stack([g.out_degrees(), g.in_degrees()], 1).double().clamp(min=1)
    g.ndata[INV_SQRT_DEGREES] = degrees.rsqrt()
    config = ModelConfig(name=name, hidden=HIDDEN)
    model = made(lambda: build_model(config, WIDTH, CLASSES, 3))
    expected = expected_of(model, g, {each: g.ndata[each] for each in model.inputs}, 3)
    assert_equal(dgl_mgpu.inference(model, g), expected)
    assert_equal(dgl_mgpu.inference(model, g, batch_size=9), expected)


def test_features_of_blocks_and_ids_of_nodes():
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(23, WIDTH)
            self.first = GraphConv(WIDTH, HIDDEN, norm="none", allow_zero_in_degree=True)
            self.second = SAGEConv(HIDDEN, CLASSES, "mean")

        def forward(self, blocks, ids):
            hidden = self.rows(ids) + blocks[0].srcdata["x"]
            hidden = self.first(graph=blocks[0], feat=hidden, edge_weight=blocks[0].edata["w"])
            return self.second(blocks[1], hidden, edge_weight=blocks[1].edata["w"])

    g = homogeneous()
    model = made(Embedding)
    expected = expected_of(model, g, g.nodes(), 2)
    for options in ({}, {"batch_size": 4}):
        assert_equal(dgl_mgpu.inference(model, g, g.nodes(), **options), expected)


def test_every_convolution_runs_once_for_every_node_in_batches_that_fit():
    g = homogeneous()
    model = made(MODELS["graphsage"])
    rows = [0, 0, 0]
    sizes = set()
    for layer, convolution in enumerate(model.convolutions):

        def count(_, arguments, found, layer=layer):
            if int(arguments[0].dstdata[dgl.NID].max()) > 4:  # not when the model is looked at
                rows[layer] += len(found)
                sizes.add(len(found))

        convolution.register_forward_hook(count)
    dgl_mgpu.inference(model, g, g.ndata["x"], batch_size=10, num_layers=3)
    assert sizes == {10, 3}
    assert rows == [23, 23, 23]


def test_batches_shrink_while_memory_is_too_small():
    class Limited(SAGEConv):
        def forward(self, graph, feat):
            if graph.num_dst_nodes() > 6:
                raise torch.cuda.OutOfMemoryError("too many")
            return super().forward(graph, feat)

    g = homogeneous()
    model = made(lambda: Stack(Limited(WIDTH, HIDDEN, "mean"), Limited(HIDDEN, CLASSES, "mean")))
    plain = made(lambda: Stack(SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")))
    expected = expected_of(plain, g, g.ndata["x"], 2)
    for options in ({}, {"layerwise": True}):  # without a choice, all at once is tried first
        assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        dgl_mgpu.inference(model, g, g.ndata["x"], batch_size=7)


def test_what_does_not_fit_is_done_layer_by_layer(monkeypatch):
    monkeypatch.setattr(ways, "_free_memory", lambda device: 0)
    g = homogeneous()
    model = made(MODELS["gin"])
    expected = expected_of(model, g, g.ndata["x"], 2)
    sizes = set()
    model.convolutions[0].register_forward_hook(lambda *call: sizes.add(len(call[2])))
    assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"]), expected)
    assert max(sizes) == 5  # all nodes of the graph on which the model is looked at


def test_results_of_layers_may_be_in_files(tmp_path):
    g = homogeneous()
    model = made(MODELS["jumping"])
    expected = expected_of(model, g, g.ndata["x"], 3)
    found = dgl_mgpu.inference(model, g, g.ndata["x"], batch_size=5, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert_equal(found, expected)


def test_a_folder_that_cannot_be_written():
    with pytest.raises(OutputError, match=r"keep results in /proc: .*choose another folder"):
        dgl_mgpu.inference(made(MODELS["gcn"]), homogeneous(), "x", layerwise=True, folder="/proc")


@pytest.mark.parametrize("num_nodes", [0, 1])
def test_hardly_any_nodes(num_nodes):
    g = dgl.graph(([], []), num_nodes=num_nodes)
    x = torch.ones(num_nodes, WIDTH, dtype=torch.float64)
    model = made(MODELS["gcn"])
    expected = expected_of(model, g, x, 2)
    assert_equal(dgl_mgpu.inference(model, g, x, layerwise=True), expected)
    assert_equal(dgl_mgpu.inference(model, g, x, layerwise=False), expected)


@pytest.mark.parametrize("name", ["gat", "gcn", "graphsage"])
def test_graphs_of_tensors(name):
    model = made(MODELS[name])
    g = homogeneous()
    expected = expected_of(model, g, g.ndata["x"], 3 if name == "graphsage" else 2)
    with tensor_backed_graphs():
        g = homogeneous()
        for options in ({}, {"batch_size": 6}):
            assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)


@pytest.mark.parametrize("hetero", [False, True])
def test_graphs_of_a_store(hetero, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    g = heterogeneous() if hetero else homogeneous()
    if hetero:
        g.edges["marks"].data.clear()  # of no edge
    model = made((lambda: Rgcn(["follows", "buys", "sees", "has", "marks"])) if hetero else Paired)
    x = {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes} if hetero else g.ndata["x"]
    expected = expected_of(model, g, x, 2)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for options in ({}, {"batch_size": 8}):
            assert_equal(dgl_mgpu.inference(model, store.graph, "x", **options), expected)


def test_input_is_read_for_the_layers_that_use_it_alone(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    g = homogeneous("self-loops")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for name, layers in (("gin", 1), ("jumping", 3)):
            model = made(MODELS[name])
            store.graph.traffic.take()
            dgl_mgpu.inference(model, store.graph, "x", batch_size=3)
            read = store.graph.traffic.take().rows
            rows = sum(count for (table, _), count in read.items() if table == "x")
            # Five to look at the model, as its input and as its blocks' feature.
            assert rows == 10 * layers + 10


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)
@pytest.mark.parametrize("where", ["gpu", "cpu", "pinned"])
def test_inference_on_a_gpu(where):
    draw = torch.Generator().manual_seed(1)
    num_nodes = 50_000  # what layers give is large enough to be pinned
    src, dst = torch.randint(num_nodes, (2, 300_000), generator=draw)
    g = dgl.graph((src, dst), num_nodes=num_nodes)
    g.ndata["x"] = torch.randn(num_nodes, WIDTH, generator=draw, dtype=torch.float64)
    for name in ("gcn", "gat", "jumping"):
        model = made(MODELS[name])
        expected = expected_of(model, g, g.ndata["x"], 3 if name == "jumping" else 2)
        model = model.cuda()
        placed = g.to("cuda") if where == "gpu" else dgl.graph((src, dst), num_nodes=num_nodes)
        if where == "pinned":
            placed.create_formats_()
            placed.pin_memory_()
        for options in ({"layerwise": False}, {"layerwise": True}, {"batch_size": 7_000}):
            assert_equal(dgl_mgpu.inference(model, placed, g.ndata["x"], **options), expected)
