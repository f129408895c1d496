"""Inference on a whole graph, against one call of the model on DGL's graph itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
import torch.distributed as dist
from dgl.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu
from dgl_mgpu.backend.ours import graphs_on_tensors
from dgl_mgpu.errors import (
    InvalidInputError,
    OutputError,
    RankFailedError,
    UnsupportedByPartitionError,
)
from dgl_mgpu.fullgraph.inference import ways
from dgl_mgpu.fullgraph.inference.rows import leaves
from dgl_mgpu.store import Ranks, cuda, exchange
from dgl_mgpu.training.config import ModelConfig
from dgl_mgpu.training.models import INV_SQRT_DEGREES, build_model
from tests.fullgraph.graphs import heterogeneous, homogeneous
from tests.fullgraph.ranks import on_gpus_too

WIDTH, HIDDEN, CLASSES = 5, 4, 3


class Stack(nn.Module):
    """Convolutions with normalisation and dropout between them, as many as there are blocks."""

    def __init__(self, *convolutions: nn.Module, width: int = HIDDEN) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in convolutions[1:])
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks, x):
        for layer, (convolution, block) in enumerate(zip(self.convolutions, blocks, strict=False)):
            x = convolution(block, x).flatten(1)
            if layer < len(self.norms):
                x = self.dropout(torch.relu(self.norms[layer](x)))
        return x


class Paired(nn.Module):
    """Convolutions that get destinations' rows by themselves, indexed by the number of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [SAGEConv(WIDTH, HIDDEN, "pool"), SAGEConv(HIDDEN, CLASSES, "gcn")]
        self.first, self.second = self.layers

    def forward(self, blocks, x):
        for layer, block in enumerate(blocks):
            x = self.layers[layer](block, (x, x[: block.num_dst_nodes()]))
        return x.log_softmax(1)


class Jumping(nn.Module):
    """Skip connections from the input and round convolutions, and a sum over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, HIDDEN)
        self.convolutions = nn.ModuleList(SAGEConv(HIDDEN, HIDDEN, "mean") for _ in range(3))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, blocks, x):
        states = [torch.relu_(self.embed(x))]
        for convolution, block in zip(self.convolutions, blocks, strict=False):
            own = states[-1][: block.num_dst_nodes()]
            skipped = torch.where(own > 0, own, 0) + states[0][: len(own)]
            states.append(convolution(block, states[-1]).relu_() + skipped)
        total = sum(rows[: len(states[-1])] for rows in states)
        return {"logits": self.head(total), "last": [states[-1]]}


class Rgcn(nn.Module):
    """Layers over all relations of a heterograph."""

    def __init__(self, etypes: list[str]) -> None:
        super().__init__()

        def relations(width_in: int, width_out: int) -> nn.Module:
            return HeteroGraphConv(
                {etype: GraphConv(width_in, width_out, norm="both") for etype in etypes}
            )

        self.first, self.second = relations(WIDTH, HIDDEN), relations(HIDDEN, CLASSES)
        self.own = nn.Linear(WIDTH, HIDDEN)

    def forward(self, blocks, x):
        hidden = self.first(blocks[0], x)
        hidden = {
            ntype: torch.relu(rows + self.own(x[ntype][: len(rows)]))
            for ntype, rows in hidden.items()
        }
        return self.second(blocks[1], hidden)


class Attention(nn.Module):
    """With residuals, in batches that have no nodes of some type."""

    def __init__(self, etypes: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HeteroGraphConv(
                {
                    etype: GATConv(
                        (WIDTH, WIDTH), WIDTH, 1, residual=True, allow_zero_in_degree=True
                    )
                    for etype in etypes
                }
            )
            for _ in range(2)
        )

    def forward(self, blocks, x):
        for number, layer in enumerate(self.layers):
            x = {ntype: rows.flatten(1) for ntype, rows in layer(blocks[number], x).items()}
        return x


class Slices(nn.Module):
    """Convolutions on single relations of blocks, and one type's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.follows = GraphConv(WIDTH, HIDDEN, norm="both", allow_zero_in_degree=True)
        self.buys = SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks, x):
        user = self.follows(blocks[0]["follows"], x["user"])
        item = user.new_zeros(blocks[1].num_dst_nodes("item"), HIDDEN)
        return self.buys(blocks[1]["buys"], (user, item))


class Degrees(nn.Module):
    """Messages passed by the model itself, whose module has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks, x):
        with blocks[0].local_scope():
            blocks[0].srcdata["x"] = x
            blocks[0].update_all(fn.copy_u("x", "m"), fn.sum("m", "sum"))
            total = blocks[0].dstdata["sum"]
        hidden = self.first(blocks[0], x) + total[:, :HIDDEN]
        return self.second(blocks[1], hidden)


def _perceptron(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, 6), nn.ReLU(), nn.Linear(6, width_out))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "graphsage": lambda: Stack(
        SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, HIDDEN, "pool"),
        SAGEConv(HIDDEN, CLASSES, "lstm"),
    ),
    "gcn": lambda: Stack(
        GraphConv(WIDTH, HIDDEN, allow_zero_in_degree=True),
        GraphConv(HIDDEN, CLASSES, norm="left", allow_zero_in_degree=True),
    ),
    "gat": lambda: Stack(
        GATConv(WIDTH, 2, 3, residual=True, allow_zero_in_degree=True),
        GATConv(6, CLASSES, 2, allow_zero_in_degree=True), width=6,
    ),
    "gin": lambda: Stack(
        GINConv(_perceptron(WIDTH, HIDDEN), "max"), GINConv(_perceptron(HIDDEN, CLASSES), "sum")
    ),
    "one layer": lambda: Stack(SAGEConv(WIDTH, CLASSES, "mean")),
    "paired": Paired,
    "jumping": Jumping,
}  # fmt: skip


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of float64 in training mode, whose norms do something."""
    torch.manual_seed(2)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            for rows in (module.running_mean, module.weight.data, module.bias.data):
                nn.init.normal_(rows)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.train()


def _expected(model: nn.Module, g: dgl.DGLGraph, x: Any, num_layers: int) -> Any:
    """What the model gives if every layer is on the graph itself, by DGL's C++."""
    model.eval()
    with torch.no_grad():
        found = model([g] * num_layers, x)
    model.train()
    return found


def _assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["random", "isolated"])
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_what_the_model_gives_on_the_graph(name, kind):
    g = homogeneous(kind)
    model = _made(MODELS[name])
    expected = _expected(model, g, g.ndata["x"], 3 if name in ("graphsage", "jumping") else 2)
    for options in ({}, {"layerwise": False}, {"layerwise": True}, {"batch_size": 7}):
        _assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)
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
    model = _made(make)
    x = {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes}
    expected = _expected(model, g, x, 2)
    for each in (x, "x"):
        _assert_equal(dgl_mgpu.inference(model, g, each, batch_size=batch_size), expected)


@pytest.mark.parametrize("name", ["graphsage", "gcn", "gat", "gin"])
def test_models_of_this_package(name):
    g = homogeneous().astype(torch.int32)
    g.ndata["feat"] = g.ndata["x"]
    degrees = torch.stack([g.out_degrees(), g.in_degrees()], 1).double().clamp(min=1)
    g.ndata[INV_SQRT_DEGREES] = degrees.rsqrt()
    config = ModelConfig(name=name, hidden=HIDDEN)
    model = _made(lambda: build_model(config, WIDTH, CLASSES, 3))
    expected = _expected(model, g, {each: g.ndata[each] for each in model.inputs}, 3)
    _assert_equal(dgl_mgpu.inference(model, g), expected)
    _assert_equal(dgl_mgpu.inference(model, g, batch_size=9), expected)


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
    model = _made(Embedding)
    expected = _expected(model, g, g.nodes(), 2)
    for options in ({}, {"batch_size": 4}):
        _assert_equal(dgl_mgpu.inference(model, g, g.nodes(), **options), expected)


def test_every_convolution_runs_once_for_every_node_in_batches_that_fit():
    g = homogeneous()
    model = _made(MODELS["graphsage"])
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
    model = _made(lambda: Stack(Limited(WIDTH, HIDDEN, "mean"), Limited(HIDDEN, CLASSES, "mean")))
    plain = _made(lambda: Stack(SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")))
    expected = _expected(plain, g, g.ndata["x"], 2)
    for options in ({}, {"layerwise": True}):  # without a choice, all at once is tried first
        _assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        dgl_mgpu.inference(model, g, g.ndata["x"], batch_size=7)


def test_what_does_not_fit_is_done_layer_by_layer(monkeypatch):
    monkeypatch.setattr(ways, "_free_memory", lambda device: 0)
    g = homogeneous()
    model = _made(MODELS["gin"])
    expected = _expected(model, g, g.ndata["x"], 2)
    sizes = set()
    model.convolutions[0].register_forward_hook(lambda *call: sizes.add(len(call[2])))
    _assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"]), expected)
    assert max(sizes) == 5  # all nodes of the graph on which the model is looked at


def test_results_of_layers_may_be_in_files(tmp_path):
    g = homogeneous()
    model = _made(MODELS["jumping"])
    expected = _expected(model, g, g.ndata["x"], 3)
    found = dgl_mgpu.inference(model, g, g.ndata["x"], batch_size=5, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    _assert_equal(found, expected)


def test_a_folder_that_cannot_be_written():
    with pytest.raises(OutputError, match=r"keep results in /proc: .*choose another folder"):
        dgl_mgpu.inference(_made(MODELS["gcn"]), homogeneous(), "x", layerwise=True, folder="/proc")


@pytest.mark.parametrize("num_nodes", [0, 1])
def test_hardly_any_nodes(num_nodes):
    g = dgl.graph(([], []), num_nodes=num_nodes)
    x = torch.ones(num_nodes, WIDTH, dtype=torch.float64)
    model = _made(MODELS["gcn"])
    expected = _expected(model, g, x, 2)
    _assert_equal(dgl_mgpu.inference(model, g, x, layerwise=True), expected)
    _assert_equal(dgl_mgpu.inference(model, g, x, layerwise=False), expected)


def test_graphs_of_tensors():
    model = _made(MODELS["gat"])
    g = homogeneous()
    expected = _expected(model, g, g.ndata["x"], 2)
    with graphs_on_tensors():
        g = homogeneous()
        for options in ({}, {"batch_size": 6}):
            _assert_equal(dgl_mgpu.inference(model, g, g.ndata["x"], **options), expected)


@pytest.mark.parametrize("hetero", [False, True])
def test_graphs_of_a_store(hetero, monkeypatch):
    monkeypatch.setattr(cuda, "find_runtime", lambda: None)
    g = heterogeneous() if hetero else homogeneous()
    if hetero:
        g.edges["marks"].data.clear()  # of no edge
    model = _made((lambda: Rgcn(["follows", "buys", "sees", "has", "marks"])) if hetero else Paired)
    x = {ntype: g.nodes[ntype].data["x"] for ntype in g.ntypes} if hetero else g.ndata["x"]
    expected = _expected(model, g, x, 2)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for options in ({}, {"batch_size": 8}):
            _assert_equal(dgl_mgpu.inference(model, store.graph, "x", **options), expected)


def test_input_is_read_for_the_layers_that_use_it_alone(monkeypatch):
    monkeypatch.setattr(cuda, "find_runtime", lambda: None)
    g = homogeneous("self-loops")
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for name, layers in (("gin", 1), ("jumping", 3)):
            model = _made(MODELS[name])
            store.graph.traffic.take()
            dgl_mgpu.inference(model, store.graph, "x", batch_size=3)
            rows = sum(store.graph.traffic.take().rows.values())
            assert rows == 10 * layers + 5  # five to look at the model


def _on_ranks() -> None:
    g = homogeneous()
    model = _made(MODELS["gat"])
    pg = dgl_mgpu.partition_graph(g, seed=4)
    found = dgl_mgpu.inference(model, pg, "x")
    _assert_equal(pg.gather(found), dgl_mgpu.inference(model, g, "x", layerwise=False))
    with pytest.raises(UnsupportedByPartitionError, match="layer by layer"):
        dgl_mgpu.inference(model, pg, "x", batch_size=2)
    parallel = DistributedDataParallel(model)  # this rank alone, as often as it likes
    found = dgl_mgpu.inference(parallel, g, "x", batch_size=5 + dist.get_rank())
    _assert_equal(found, dgl_mgpu.inference(model, g, "x", layerwise=False))
    g = heterogeneous()
    model = _made(lambda: Rgcn(["follows", "buys", "sees", "has", "marks"]))
    pg = dgl_mgpu.partition_graph(g, exchange="broadcast")
    found = dgl_mgpu.inference(model, pg, "x")
    expected = dgl_mgpu.inference(model, g, "x")
    for ntype, rows in found.items():
        _assert_equal(pg.gather(rows, ntype), expected[ntype])


def test_partitioned_graphs(ranks):
    ranks.run(_on_ranks)


class Counting(nn.Module):
    """A convolution that counts the nodes it is done for."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution
        self.nodes: list[torch.Tensor] = []

    def forward(self, block, x):
        self.nodes.append(block.dstdata[dgl.NID].clone())
        return self.convolution(block, x)


def _shared_out(machines: str, folder: Path) -> None:
    """With ranks on machines by these names, a letter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_groups", None)
        patch.setattr(exchange, "_machine_id", lambda: machines[dist.get_rank()])
        _assert_shared_out(folder)


def _assert_shared_out(folder: Path) -> None:
    ranks = Ranks.of_all_machines()
    for g, make, num_layers in (
        (homogeneous(), MODELS["graphsage"], 3),
        (homogeneous(), MODELS["jumping"], 3),
        (homogeneous(), MODELS["gat"], 2),
        (heterogeneous(), lambda: Rgcn(["follows", "buys", "sees", "has", "marks"]), 2),
    ):
        if len(g.ntypes) > 1:
            g.edges["marks"].data.clear()  # of no edge
        model = _made(make)
        x = g.ndata["x"]
        expected = _expected(model, g, x, num_layers)
        for module in model.modules():  # of other batches, as in training with DDP
            if isinstance(module, nn.BatchNorm1d) and ranks.rank:
                module.running_mean += ranks.rank
        with dgl_mgpu.GlobalStore.from_dgl(g) as store:
            model.to(store.device)
            before = [each.clone() for each in model.buffers()]
            for options in ({}, {"batch_size": 4 + ranks.rank}, {"folder": folder}):
                found = dgl_mgpu.inference(model, store.graph, "x", **options)
                _assert_equal(found, expected)
                for rows in leaves(found):
                    rows.fill_(ranks.rank)  # of which others see nothing
        assert all(map(torch.equal, before, model.buffers()))


@on_gpus_too
def test_ranks_share_a_stores_nodes_out(ranks, tmp_path):
    ranks.run(_assert_shared_out, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("machines", ["aab", "aba", "abc"])
def test_ranks_of_several_machines_share_a_stores_nodes_out(ranks, machines, tmp_path):
    ranks.run(_shared_out, machines, tmp_path)


def _each_node_once() -> None:
    ranks = Ranks.of_all_machines()
    model = Stack(
        Counting(SAGEConv(WIDTH, HIDDEN, "mean")), Counting(SAGEConv(HIDDEN, CLASSES, "mean"))
    ).double()
    g = homogeneous()
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for options, largest in (({"batch_size": 3}, 3), ({"layerwise": True}, 8)):
            for each in model.convolutions:
                each.nodes.clear()
            dgl_mgpu.inference(model, store.graph, "x", num_layers=2, **options)
            for each in model.convolutions:
                # Batches of the few nodes on which the model is looked at have other sizes or ids.
                mine = [ids for ids in each.nodes if ids.numel() and ids.max() > 4]
                everyones = [
                    n for of_rank in ranks.all_gather(mine) for ids in of_rank for n in ids
                ]
                assert sorted(map(int, everyones)) == list(range(5 - 5 % largest, 23))
                assert max(map(len, mine)) <= largest
                assert len(mine) >= 2 or largest > 3


def test_ranks_do_each_node_of_a_store_once(ranks):
    ranks.run(_each_node_once)


class _FailsOnOne(SAGEConv):
    """Of a rank's own batches of the graph it cannot do one."""

    def forward(self, graph, feat):
        if dist.get_rank() == 1 and graph.num_dst_nodes() and graph.dstdata[dgl.NID].max() > 4:
            raise ValueError("no batch for me")
        return super().forward(graph, feat)


def _one_fails() -> None:
    mine = Ranks.of_all_machines().rank == 1
    g = homogeneous()
    model = Stack(_FailsOnOne(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")).double()
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for x, error, reason in (
            ("x", ValueError, "no batch for me"),
            (None if mine else "x", InvalidInputError, "no node feature 'feat'"),
        ):
            told = error if mine else RankFailedError
            with pytest.raises(told, match=reason):
                dgl_mgpu.inference(model, store.graph, x, batch_size=4)
        # By itself, which nobody else takes part in.
        plain = Stack(SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, CLASSES, "mean")).double()
        expected = _expected(plain, g, g.ndata["x"], 2)
        if mine:
            found = dgl_mgpu.inference(plain.eval(), store.graph, "x", layerwise=False)
            _assert_equal(found, expected)


def test_what_fails_on_one_rank_ends_all(ranks):
    ranks.run(_one_fails)


def _no_room(folder: Path) -> None:
    model = _made(MODELS["gcn"])
    with dgl_mgpu.GlobalStore.from_dgl(homogeneous()) as store:
        told = OutputError if dist.get_rank() == 0 else RankFailedError
        with pytest.raises(told, match=r"keep results in /proc: .*another folder"):
            dgl_mgpu.inference(model, store.graph, "x", folder=folder)


def test_ranks_that_find_no_room(ranks):
    ranks.run(_no_room, "/proc")


# -- what cannot be done ------------------------------------------------------------------------


def test_message_passing_of_the_model_itself_is_done_at_once_alone():
    g = homogeneous()
    model = _made(Degrees)
    expected = _expected(model, g, g.ndata["x"], 2)
    _assert_equal(dgl_mgpu.inference(model, g, "x"), expected)
    with pytest.raises(InvalidInputError, match="layerwise=False"):
        dgl_mgpu.inference(model, g, "x", layerwise=True)


class _ByDegree(nn.Module):
    """Between its layers it reads the degrees of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN, 2, "mean")

    def forward(self, blocks, x):
        hidden = self.first(blocks[0], x)
        into = blocks[0].in_degrees()[:, None]
        hidden = torch.where(into > 5, 2 * hidden, hidden) / (1 + into)
        return self.second(blocks[1], hidden + blocks[1].out_degrees()[:, None])


@pytest.mark.parametrize("batch_size", [None, 5])
def test_degrees_between_layers_are_those_of_the_graph(batch_size):
    g = homogeneous()
    model = _made(_ByDegree)
    expected = _expected(model, g, g.ndata["x"], 2)
    for graph in (g, dgl_mgpu.GlobalStore.from_dgl(g).graph):
        for options in ({"layerwise": True, "batch_size": batch_size}, {"layerwise": False}):
            found = dgl_mgpu.inference(model, graph, g.ndata["x"], num_layers=2, **options)
            _assert_equal(found, expected)


class _Weighted(nn.Module):
    """A module that gives something of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.sums = dgl.nn.EdgeWeightNorm("right"), GraphConv(WIDTH, 2, norm="none")

    def forward(self, blocks, x):
        weights = self.weights(blocks[0], blocks[0].edata["w"].squeeze(1))
        return self.sums(blocks[0], x, edge_weight=weights)


class _Backward(nn.Module):
    """Blocks in another order than the layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, WIDTH, "mean"), SAGEConv(WIDTH, 2, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[0], self.first(blocks[1], x))


class _Changed(nn.Module):
    """A module that gets a graph which is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(WIDTH, 2, "mean")

    def forward(self, blocks, x):
        return self.first(dgl.graph(blocks[0].edges(), num_nodes=len(x)), x)


@pytest.mark.parametrize(
    "make, found",
    [(_Weighted, r"shape \(15,\)"), (_Backward, r"blocks \[1, 0\]"), (_Changed, r"\[None\]")],
)
def test_models_that_cannot_be_done_layer_by_layer(make, found):
    g = dgl.add_self_loop(homogeneous())
    model = _made(make)
    layers = 2 if make is _Backward else 1
    with pytest.raises(InvalidInputError, match=found):
        dgl_mgpu.inference(model, g, "x", batch_size=5, num_layers=layers)
    expected = _expected(model, g, g.ndata["x"], layers)
    found = dgl_mgpu.inference(model, g, "x", layerwise=False, num_layers=layers)
    _assert_equal(found, expected)


class _Shared(nn.Module):
    """One convolution, as often as there are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = SAGEConv(WIDTH, WIDTH, "mean")

    def forward(self, blocks, x):
        for block in blocks:
            x = self.only(block, x)
        return x


def test_layers_that_cannot_be_counted():
    g = homogeneous()
    model = _made(_Shared)
    with pytest.raises(InvalidInputError, match="num_layers"):
        dgl_mgpu.inference(model, g, "x")
    expected = _expected(model, g, g.ndata["x"], 4)
    found = dgl_mgpu.inference(model, g, "x", num_layers=4, batch_size=20)
    _assert_equal(found, expected)


class _Scored(nn.Module):
    """Beside its rows it gives a number."""

    def __init__(self) -> None:
        super().__init__()
        self.paired = Paired()

    def forward(self, blocks, x):
        rows = self.paired(blocks[:2], x)
        return rows, rows.sum()


def test_numbers_beside_rows_are_given_at_once_alone():
    g = homogeneous()
    model = _made(_Scored)
    for options in ({}, {"num_layers": 2}):
        _assert_equal(
            dgl_mgpu.inference(model, g, "x", **options), _expected(model, g, g.ndata["x"], 2)
        )
    with pytest.raises(InvalidInputError, match=r"the model gives a tensor of shape \(\)"):
        dgl_mgpu.inference(model, g, "x", layerwise=True)


class _Looking(nn.Module):
    """Takes something from the first block before, or in, its module."""

    def __init__(self, look: Callable[[dgl.DGLGraph], object], inside: bool) -> None:
        super().__init__()
        self.look, self.inside, self.first = look, inside, SAGEConv(WIDTH, 2, "mean")
        self.first.register_forward_pre_hook(self._before)

    def _before(self, module, given) -> None:
        if self.inside:
            self.look(given[0])

    def forward(self, blocks, x):
        if not self.inside:
            self.look(blocks[0])
        return self.first(blocks[0], x)


@pytest.mark.parametrize("options", [{}, {"num_layers": 1}, {"num_layers": 1, "layerwise": False}])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("look", [lambda block: block.srcdata["x"], lambda block: block.edata["w"]])
def test_features_that_a_stores_blocks_do_not_have(look, inside, options, monkeypatch):
    monkeypatch.setattr(cuda, "find_runtime", lambda: None)
    g = homogeneous()
    model = _made(lambda: _Looking(look, inside))
    with (
        dgl_mgpu.GlobalStore.from_dgl(g) as store,
        pytest.raises(InvalidInputError, match=r"asks for '[xw]', .*; pass the DGLGraph"),
    ):
        dgl_mgpu.inference(model, store.graph, "x", **options)
    _assert_equal(
        dgl_mgpu.inference(model, g, "x", **options), _expected(model, g, g.ndata["x"], 1)
    )


def test_a_key_error_of_the_models_own_over_a_store(monkeypatch):
    monkeypatch.setattr(cuda, "find_runtime", lambda: None)
    model = _made(lambda: _Looking(lambda block: {}["no feature"], inside=True))
    with dgl_mgpu.GlobalStore.from_dgl(homogeneous()) as store:
        for options in ({}, {"num_layers": 1}):
            with pytest.raises(KeyError, match="no feature"):
                dgl_mgpu.inference(model, store.graph, "x", **options)


def test_errors_of_the_model_itself_come_out_as_they_are():
    class Dividing(nn.Module):
        def forward(self, blocks, x):
            return x / (1 // 0)

    class Unpacking(Paired):
        def forward(self, blocks, x):
            first, second = blocks
            return super().forward([first, second], x)

    g = homogeneous()
    with pytest.raises(ZeroDivisionError):
        dgl_mgpu.inference(Dividing(), g, "x")
    with pytest.raises(InvalidInputError, match=r"too many values.*pass num_layers"):
        dgl_mgpu.inference(_made(Unpacking), g, "x")
    with pytest.raises(KeyError, match="nothing"):
        dgl_mgpu.inference(_made(lambda: _Looking(lambda b: b.edata["nothing"], False)), g, "x")


@pytest.mark.parametrize("layerwise", [None, False, True])
def test_too_few_layers(layerwise):
    model = _made(_Backward)
    with pytest.raises(InvalidInputError, match="asks for block 1 of 1; pass num_layers"):
        dgl_mgpu.inference(model, homogeneous(), "x", num_layers=1, layerwise=layerwise)


def test_modes_and_modules_are_restored_after_an_error():
    class Failing(SAGEConv):
        def forward(self, graph, feat):
            if graph.num_dst_nodes() == 7:
                raise RuntimeError("seven nodes")
            return super().forward(graph, feat)

    g = homogeneous()
    model = _made(lambda: Stack(Failing(WIDTH, HIDDEN, "mean"), Failing(HIDDEN, CLASSES, "mean")))
    model.dropout.eval()
    call = nn.Module.__call__
    with pytest.raises(RuntimeError, match="seven nodes"):
        dgl_mgpu.inference(model, g, "x", batch_size=7)
    assert nn.Module.__call__ is call
    assert model.training and model.norms[0].training and not model.dropout.training


def test_wrong_widths_are_told_before_all_nodes_are_read():
    g = homogeneous()
    with pytest.raises(InvalidInputError, match="raised"):
        dgl_mgpu.inference(_made(MODELS["gin"]), g, g.ndata["x"][:, :2])


@pytest.mark.parametrize(
    "options, found",
    [
        ({"x": torch.zeros(3, WIDTH)}, r"shape \(3, 5\) for 23 nodes"),
        ({"x": "y"}, "no node feature 'y'"),
        ({"x": None}, "no node feature 'feat'"),
        ({"x": 7}, "int as x"),
        ({"x": {}}, "dict as x"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_layers": 1.5}, "num_layers=1.5"),
        ({"layerwise": False, "batch_size": 3}, "leave one"),
        ({"folder": "/proc/nowhere"}, "no folder"),
        ({"device": "meta"}, "parameters are on 'cpu'"),
        ({"model": 3}, "int as model"),
        ({"g": 3}, "int as graph"),
    ],
)
def test_wrong_arguments(options, found):
    arguments = {"model": _made(Paired), "g": homogeneous(), "x": "x", **options}
    with pytest.raises(InvalidInputError, match=found):
        dgl_mgpu.inference(**arguments)


# -- on a GPU -----------------------------------------------------------------------------------


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
        model = _made(MODELS[name])
        expected = _expected(model, g, g.ndata["x"], 3 if name == "jumping" else 2)
        model = model.cuda()
        placed = g.to("cuda") if where == "gpu" else dgl.graph((src, dst), num_nodes=num_nodes)
        if where == "pinned":
            placed.create_formats_()
            placed.pin_memory_()
        for options in ({"layerwise": False}, {"layerwise": True}, {"batch_size": 7_000}):
            _assert_equal(dgl_mgpu.inference(model, placed, g.ndata["x"], **options), expected)
