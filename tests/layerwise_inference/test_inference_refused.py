"""What inference cannot do layer by layer, or not at all, is told; the rest it does."""

from __future__ import annotations

from collections.abc import Callable

import dgl
import pytest
import torch
from dgl.nn import GraphConv, SAGEConv
from torch import nn

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.errors import (
    InvalidInputError,
)
from tests.distributed.graphs import homogeneous
from tests.layerwise_inference.inference_models import (
    CLASSES,
    HIDDEN,
    MODELS,
    WIDTH,
    Degrees,
    Paired,
    Stack,
    assert_equal,
    expected_of,
    made,
)


def test_message_passing_of_the_model_itself_is_done_at_once_alone():
    g = homogeneous()
    model = made(Degrees)
    expected = expected_of(model, g, g.ndata["x"], 2)
    assert_equal(dgl_mgpu.inference(model, g, "x"), expected)
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
    model = made(_ByDegree)
    expected = expected_of(model, g, g.ndata["x"], 2)
    for graph in (g, dgl_mgpu.GlobalStore.from_dgl(g).graph):
        for options in ({"layerwise": True, "batch_size": batch_size}, {"layerwise": False}):
            found = dgl_mgpu.inference(model, graph, g.ndata["x"], num_layers=2, **options)
            assert_equal(found, expected)


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
    model = made(make)
    layers = 2 if make is _Backward else 1
    with pytest.raises(InvalidInputError, match=found):
        dgl_mgpu.inference(model, g, "x", batch_size=5, num_layers=layers)
    expected = expected_of(model, g, g.ndata["x"], layers)
    found = dgl_mgpu.inference(model, g, "x", layerwise=False, num_layers=layers)
    assert_equal(found, expected)


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
    model = made(_Shared)
    with pytest.raises(InvalidInputError, match="num_layers"):
        dgl_mgpu.inference(model, g, "x")
    expected = expected_of(model, g, g.ndata["x"], 4)
    found = dgl_mgpu.inference(model, g, "x", num_layers=4, batch_size=20)
    assert_equal(found, expected)


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
    model = made(_Scored)
    for options in ({}, {"num_layers": 2}):
        assert_equal(
            dgl_mgpu.inference(model, g, "x", **options), expected_of(model, g, g.ndata["x"], 2)
        )
    with pytest.raises(InvalidInputError, match=r"the model returns a tensor of shape \(\)"):
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
def test_features_that_a_model_looks_for_on_blocks(look, inside, options, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    g = homogeneous()
    model = made(lambda: _Looking(look, inside))
    expected = expected_of(model, g, g.ndata["x"], 1)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        for graph in (store.graph, g):
            assert_equal(dgl_mgpu.inference(model, graph, "x", **options), expected)


class _Selecting(nn.Module):
    """Takes its input from the blocks, and weighs what comes along edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(WIDTH, HIDDEN, "mean")
        self.second = GraphConv(HIDDEN, 2, norm="none", allow_zero_in_degree=True)

    def forward(self, blocks, _):
        hidden = self.first(blocks[0], blocks[0].srcdata["x"])
        return self.second(blocks[1], hidden, edge_weight=blocks[1].edata["w"].squeeze(1))


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_model_that_reads_its_input_from_a_stores_blocks(layerwise, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    g = homogeneous()
    model = made(_Selecting)
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        found = dgl_mgpu.inference(model, store.graph, "x", layerwise=layerwise)
    assert_equal(found, expected_of(model, g, g.ndata["x"], 2))


class _OfOneGraph(nn.Module):
    """Takes a graph in place of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(WIDTH, 2, "mean")

    def forward(self, graph, x):
        return self.first(graph, x)


class _OfBoth(_OfOneGraph):
    """Takes a graph or blocks."""

    def forward(self, graph, x):
        return super().forward(graph if hasattr(graph, "local_scope") else graph[0], x)


@pytest.mark.parametrize("options", [{}, {"num_layers": 1}, {"layerwise": True}])
def test_a_model_that_takes_one_graph_is_told_so(options):
    g = homogeneous()
    with pytest.raises(
        InvalidInputError,
        match=r"'local_scope' as if .* one graph, .*\(blocks, x",
    ):
        dgl_mgpu.inference(made(_OfOneGraph), g, "x", **options)
    model = made(_OfBoth)
    assert_equal(dgl_mgpu.inference(model, g, "x"), model(g, g.ndata["x"]))


def test_a_key_error_of_the_models_own_over_a_store(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    model = made(lambda: _Looking(lambda block: {}["no feature"], inside=True))
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
    with pytest.raises(ValueError, match="too many values") as found:
        dgl_mgpu.inference(made(Unpacking), g, "x")
    assert "pass num_layers" in found.value.__notes__[0]
    with pytest.raises(KeyError, match="nothing"):
        dgl_mgpu.inference(made(lambda: _Looking(lambda b: b.edata["nothing"], False)), g, "x")


class _OfManyNodes(Paired):
    """Does not take few nodes, of which it says so itself."""

    def forward(self, blocks, x):
        if blocks[-1].num_dst_nodes() < 4:
            raise ValueError("too few nodes for statistics")
        return super().forward(blocks, x)


def test_what_a_model_raises_layer_by_layer_comes_out_as_it_is():
    """With its own traceback; what might be the matter is a note below it."""
    with pytest.raises(ValueError, match="too few nodes") as found:
        dgl_mgpu.inference(made(_OfManyNodes), homogeneous(), "x", batch_size=20, num_layers=2)
    assert not isinstance(found.value, InvalidInputError)
    assert found.traceback[-1].name == "forward"
    (note,) = found.value.__notes__
    assert "on a few nodes" in note and "pass layerwise=False" in note


@pytest.mark.parametrize("layerwise", [None, False, True])
def test_too_few_layers(layerwise):
    model = made(_Backward)
    with pytest.raises(InvalidInputError, match=r"reads blocks\[1\], but was given 1; pass"):
        dgl_mgpu.inference(model, homogeneous(), "x", num_layers=1, layerwise=layerwise)


def test_modes_and_modules_are_restored_after_an_error():
    class Failing(SAGEConv):
        def forward(self, graph, feat):
            if graph.num_dst_nodes() == 7:
                raise RuntimeError("seven nodes")
            return super().forward(graph, feat)

    g = homogeneous()
    model = made(lambda: Stack(Failing(WIDTH, HIDDEN, "mean"), Failing(HIDDEN, CLASSES, "mean")))
    model.dropout.eval()
    call = nn.Module.__call__
    with pytest.raises(RuntimeError, match="seven nodes"):
        dgl_mgpu.inference(model, g, "x", batch_size=7)
    assert nn.Module.__call__ is call
    assert model.training and model.norms[0].training and not model.dropout.training


def test_wrong_widths_are_told_before_all_nodes_are_read():
    g = homogeneous()
    model = made(MODELS["gin"])
    for columns in (g.ndata["x"][:, :2], torch.cat(2 * [g.ndata["x"]], 1)):
        with pytest.raises(RuntimeError, match="mat1 and mat2") as found:
            dgl_mgpu.inference(model, g, columns)
        # It is torch's error, and nothing is said of layers that are counted.
        assert type(found.value) is RuntimeError and found.value.__cause__ is None
        assert not getattr(found.value, "__notes__", [])


def test_wrong_widths_of_later_layers_may_be_blocks_too_many():
    model = made(lambda: Stack(SAGEConv(WIDTH, HIDDEN, "mean"), SAGEConv(HIDDEN + 1, 2, "mean")))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as found:
        dgl_mgpu.inference(model, homogeneous(), "x")
    assert "pass num_layers" in found.value.__notes__[0]


@pytest.mark.parametrize(
    "options, found",
    [
        ({"x": torch.zeros(3, WIDTH)}, r"x has shape \(3, 5\), but there are 23 nodes"),
        ({"x": "y"}, "no node feature 'y'"),
        ({"x": None}, "no node feature 'feat'"),
        ({"x": 7}, "x is of type int"),
        ({"x": {}}, "x is of type dict"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_layers": 1.5}, "num_layers is 1.5"),
        ({"layerwise": False, "batch_size": 3}, "leave one"),
        ({"folder": "/proc/nowhere"}, "no folder"),
        ({"device": "meta"}, "parameters are on 'cpu'"),
        ({"model": 3}, "model is of type int"),
        ({"g": 3}, "g is of type int"),
    ],
)
def test_wrong_arguments(options, found):
    arguments = {"model": made(Paired), "g": homogeneous(), "x": "x", **options}
    with pytest.raises(InvalidInputError, match=found):
        dgl_mgpu.inference(**arguments)
