"""GraphConv and SAGEConv on graphs of tensors, in their own way and in DGL's."""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import pytest
import torch
from dgl import DGLError
from dgl.nn.pytorch import GraphConv, SAGEConv

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex


def graph(kind: type[dgl.DGLGraph] = dgl.DGLGraph) -> dgl.DGLGraph:
    with tensor_backed_graphs():
        g = dgl.graph(([0, 1, 2, 2], [1, 2, 0, 1]))
    assert isinstance(g._graph, TensorIndex)
    g.__class__ = kind
    return g


def features(columns: int = 4) -> torch.Tensor:
    return torch.arange(3.0 * columns).view(3, columns) / 7


class Doubled(dgl.DGLGraph):
    """A graph whose messages count twice, and whose nodes have other degrees."""

    def update_all(self, message, reduce, *others):
        super().update_all(message, reduce, *others)
        self.dstdata.update({name: 2 * rows for name, rows in self.dstdata.items()})

    def out_degrees(self, *arguments, **options):
        return 4 * super().out_degrees(*arguments, **options)


def test_a_graphs_own_methods_are_called():
    torch.manual_seed(0)
    layer = SAGEConv(4, 2, "mean", bias=False)
    own = layer.fc_self(features())
    plain, doubled = layer(graph(), features()), layer(graph(Doubled), features())
    assert torch.allclose(doubled - own, 2 * (plain - own))
    layer = GraphConv(4, 2, norm="left", bias=False)
    # Half of each quarter of the messages.
    assert torch.allclose(layer(graph(Doubled), features()), layer(graph(), features()) / 2)


@pytest.mark.parametrize(
    "watch",
    [
        lambda drop: drop.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
        lambda drop: drop.register_forward_hook(lambda _, inputs, out: 2 * out),
        lambda drop: setattr(drop, "forward", lambda rows: 2 * rows),
    ],
    ids=["before", "after", "in place"],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_what_is_done_to_an_idle_dropout(watch, is_training):
    torch.manual_seed(0)
    layer = SAGEConv(4, 2, "mean", bias=False).train(is_training)
    expected = 2 * layer(graph(), features())
    watch(layer.feat_drop)
    assert torch.allclose(layer(graph(), features()), expected)


def test_a_dropouts_gradients_are_watched():
    layer = SAGEConv(4, 2, "mean")
    layer.feat_drop.register_full_backward_hook(lambda _, given, made: (2 * given[0],))
    gradients = []
    for module in (layer, SAGEConv(4, 2, "mean")):
        module.load_state_dict(layer.state_dict())
        rows = features().requires_grad_()
        module(graph(), rows).sum().backward()
        gradients.append(rows.grad)
    assert torch.allclose(gradients[0], 2 * gradients[1])


@pytest.mark.parametrize(("kept", "norm"), [("csr", "right"), ("csc", "both"), ("csc", "left")])
def test_degrees_that_a_graph_cannot_tell_are_dgls_error(kept, norm):
    layer = GraphConv(4, 2, norm=norm)
    with pytest.raises(DGLError, match="degrees"):
        layer(graph().formats([kept]), features())


def test_a_pair_may_be_longer():
    layer = SAGEConv(4, 2, "mean")
    pair = features(), features()
    assert torch.equal(layer(graph(), (*pair, None)), layer(graph(), pair))


@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_layers_on_one_graph(norm, dtype):
    """What is kept of a graph's degrees is that of the norm, the dtype and the direction."""
    here, on_cpu = graph(), dgl.graph(([0, 1, 2, 2], [1, 2, 0, 1]))
    assert not isinstance(on_cpu._graph, TensorIndex)
    with torch.inference_mode():  # keeps what a backward pass reads later
        GraphConv(4, 2, norm=norm)(here, features())
    for other in ("right", norm, "left", "both", norm):
        torch.manual_seed(0)
        layer = GraphConv(4, 2, norm=other).to(dtype)
        for pair in ((here, on_cpu), (here.reverse(), on_cpu.reverse())):
            results = []
            for g in pair:
                given = features().to(dtype).requires_grad_()
                rows = layer(g, given)
                rows.square().sum().backward()
                results.append((rows.detach(), given.grad))
            torch.testing.assert_close(*results)


def test_nodes_without_in_edges_are_refused_at_every_call():
    with tensor_backed_graphs():
        g = dgl.graph(([0, 1], [1, 2]))
    layer = GraphConv(4, 2)
    for _ in range(2):
        with pytest.raises(DGLError, match="0-in-degree"):
            layer(g, features())
    g.add_edges([2], [0])
    assert layer(g, features()).shape == (3, 2)
    g.remove_edges([2])
    with pytest.raises(DGLError, match="0-in-degree"):
        layer(g, features())


def test_features_on_another_device_spoil_no_later_call():
    layer, g = GraphConv(4, 2), graph()
    with pytest.raises(DGLError, match="meta"):
        GraphConv(4, 2).to("meta")(g, features().to("meta"))
    torch.testing.assert_close(layer(g, features()), layer(graph(), features()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_within_autocast_changes_none_outside(is_first):
    layer, g = GraphConv(2, 4).to("cuda", torch.float16), graph().to("cuda")
    rows = features(2).to("cuda", torch.float16)
    # Powers are float32 within, and so is what is multiplied by them.
    for is_on in (is_first, not is_first):
        with torch.autocast("cuda", enabled=is_on):
            found, expected = layer(g, rows), layer(graph().to("cuda"), rows)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
