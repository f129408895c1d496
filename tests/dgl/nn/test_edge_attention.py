"""Attention layers in one pass with what edges have of their own, against DGL's C++ on the CPU."""

from __future__ import annotations

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from dgl.base import DGLError
from dgl.nn import EdgeGATConv, EGATConv, GATConv, HeteroGraphConv, HGTConv
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.relation import Coo, Relation
from tests.dgl.nn.devices import DEVICES, on_tensors
from tests.distributed.live_bytes import LiveBytes

WIDTH, HEADS = 10, 3
#: Sources and destinations of edges; the last nodes of a graph have no in-edges.
SIZES = {"graph": (40, 40), "block": (40, 15), "bipartite": (40, 15), "no nodes": (0, 0)}


def ends_of(shape: str) -> tuple[Tensor, Tensor]:
    """Both ends of edges, some of which there are twice; each destination has one."""
    num_src, num_dst = SIZES[shape]
    if num_src == 0:
        return torch.empty(0).long(), torch.empty(0).long()
    u = torch.cat([torch.randint(num_src, (200,)), torch.arange(num_dst)])
    v = torch.cat([torch.randint(num_dst, (200,)), torch.arange(num_dst)])
    order = torch.randperm(len(u))
    return u[order], v[order]


def make(shape: str, ends: tuple[Tensor, Tensor], device: str = "cpu") -> dgl.DGLGraph:
    num_src, num_dst = SIZES[shape]
    u, v = (end.to(device) for end in ends)
    if shape == "block":
        return dgl.create_block((u, v), num_src_nodes=num_src, num_dst_nodes=num_dst)
    if shape == "bipartite":
        return dgl.heterograph({("a", "to", "b"): (u, v)}, {"a": num_src, "b": num_dst})
    return dgl.graph((u, v), num_nodes=num_src)


def results_of(
    run: Callable[..., Any], graph: dgl.DGLGraph, layer: nn.Module, inputs: tuple[Tensor, ...]
) -> list[Tensor]:
    """Outputs, and the gradients of inputs and parameters, on the CPU."""
    leaves = [it.detach().to(graph.device).requires_grad_() for it in inputs]
    layer.to(graph.device).zero_grad()
    outs = run(layer, graph, *leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum(
        # In float64: devices' cosines of float32 differ.
        (out * torch.arange(out.numel(), device=out.device).double().cos().view(out.shape)).sum()
        for out in outs
    )
    loss.backward()
    # Copies: the layer is moved to another device, with its gradients.
    gradients = [it.grad for it in (*leaves, *layer.parameters())]
    results = [*(out.detach() for out in outs), *(it for it in gradients if it is not None)]
    return [it.to("cpu", copy=True) for it in results]


def same_on_both(
    run: Callable[..., Any], shape: str, device: str, layer: nn.Module, make_inputs: Callable
) -> None:
    """A layer's results in one pass are those of DGL's layer on DGL's own graph."""
    ends = ends_of(shape)
    theirs = make(shape, ends)
    inputs = make_inputs(theirs)
    expected = results_of(run, theirs, layer, inputs)
    with on_tensors(device):
        found = results_of(run, make(shape, ends, device), layer, inputs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def rows(count: int, *width: int) -> Tensor:
    return torch.randn(count, *width, dtype=torch.float64)


# -- GATConv with weights of edges -----------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SIZES)
def test_gat_with_edge_weights(shape, device, passes):
    torch.manual_seed(0)
    layer = GATConv((WIDTH, 7) if shape == "bipartite" else WIDTH, 4, HEADS).double()

    def run(layer: nn.Module, g: dgl.DGLGraph, weights: Tensor, *feat: Tensor) -> Tensor:
        return layer(g, feat if len(feat) == 2 else feat[0], edge_weight=weights)

    def inputs(g: dgl.DGLGraph) -> tuple[Tensor, ...]:
        ends = [rows(g.num_dst_nodes(), 7)] if shape == "bipartite" else []
        return rows(g.num_edges()), rows(g.num_src_nodes(), WIDTH), *ends

    same_on_both(run, shape, device, layer, inputs)
    assert passes == ["additive"]


def test_gat_uses_edge_weights_twice(passes):
    """Two layers, residuals, and a loss that the weights are also in by themselves."""
    torch.manual_seed(0)
    layer = nn.ModuleList(
        [GATConv(WIDTH, 4, HEADS, residual=True), GATConv(12, 4, HEADS, bias=False)]
    ).double()

    def run(layer: Any, g: dgl.DGLGraph, feat: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        hidden = layer[0](g, feat, edge_weight=weights).relu_().flatten(1)
        return layer[1](g, hidden, edge_weight=weights), hidden, weights.square()

    def inputs(g: dgl.DGLGraph) -> tuple[Tensor, ...]:
        return rows(g.num_nodes(), WIDTH), rows(g.num_edges())

    same_on_both(run, "graph", "cpu", layer, inputs)
    assert passes == ["additive"] * 2


def test_gat_in_relations_with_edge_weights(passes):
    torch.manual_seed(0)
    ends = {("a", name, "a"): ends_of("graph") for name in ("one", "two")}
    layer = HeteroGraphConv({it: GATConv(WIDTH, 4, HEADS) for it in ("one", "two")}).double()

    def run(layer: nn.Module, g: dgl.DGLGraph, feat: Tensor, *weights: Tensor) -> Tensor:
        options = {it[1]: {"edge_weight": w} for it, w in zip(ends, weights, strict=True)}
        return layer(g, {"a": feat}, mod_kwargs=options)["a"]

    theirs = dgl.heterograph(ends, {"a": 40})
    inputs = rows(40, WIDTH), *(rows(len(u)) for u, _ in ends.values())
    expected = results_of(run, theirs, layer, inputs)
    with on_tensors("cpu"):
        found = results_of(run, dgl.heterograph(ends, {"a": 40}), layer, inputs)
    assert passes == ["additive"] * 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gat_drops_weights_before_it_multiplies_them(passes):
    """On average the sum is that without dropout; what is kept is doubled."""
    torch.manual_seed(0)
    u, v = torch.arange(1, 4001), torch.zeros(4000, dtype=torch.long)
    with on_tensors("cpu"):
        g = dgl.graph((u, v), num_nodes=4001)
        layer = GATConv(1, 1, 1, attn_drop=0.5, allow_zero_in_degree=True).double()
        weights = torch.rand(4000, dtype=torch.float64).requires_grad_()
        layer(g, torch.ones(4001, 1).double(), edge_weight=weights)[0].sum().backward()
        value = layer.fc.weight.detach().flatten()
    assert passes == ["additive"]
    shares = weights.grad / value * 4000
    kept = shares > 0.5
    assert 0.45 < kept.double().mean() < 0.55
    torch.testing.assert_close(shares, 2 * kept.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gat_with_edge_weights_and_autocast(dtype, device, passes):
    torch.manual_seed(0)
    ends = ends_of("graph")
    layer, feat = GATConv(WIDTH, 4, HEADS), torch.randn(40, WIDTH)
    weights = torch.rand(len(ends[0])).to(dtype)
    expected = layer(make("graph", ends), feat, edge_weight=weights.float())
    layer = layer.to(device)
    with on_tensors(device), torch.autocast(device, torch.bfloat16):
        weights = weights.to(device).requires_grad_()
        found = layer(make("graph", ends, device), feat.to(device), edge_weight=weights)
        found.float().sum().backward()
    assert passes == ["additive"]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=5e-2)
    assert weights.grad.dtype == dtype


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights[:-1],
        lambda weights: torch.cat([weights, weights[:1]]),
        lambda weights: weights[:, None],
    ],
    ids=["too few", "too many", "of two dimensions"],
)
def test_gat_refuses_weights_of_other_edges(change, passes):
    """By DGL's own check: kernels do not look for rows that are not there."""
    torch.manual_seed(0)
    ends = ends_of("graph")
    with on_tensors("cpu"):
        weights = change(torch.rand(len(ends[0])))
        with pytest.raises((DGLError, RuntimeError)):
            GATConv(WIDTH, 4, HEADS)(
                make("graph", ends), torch.randn(40, WIDTH), edge_weight=weights
            )
    assert not passes


def test_gat_with_weights_that_are_integers_is_composed(passes):
    torch.manual_seed(0)
    ends = ends_of("graph")
    layer, feat, weights = GATConv(WIDTH, 4, HEADS), torch.randn(40, WIDTH), torch.arange(240)
    expected = layer(make("graph", ends), feat, edge_weight=weights)
    with on_tensors("cpu"):
        torch.testing.assert_close(layer(make("graph", ends), feat, edge_weight=weights), expected)
    assert not passes


# -- EGATConv --------------------------------------------------------------------------------------


def egat(shape: str) -> EGATConv:
    return EGATConv((WIDTH, 7) if shape in ("block", "bipartite") else WIDTH, 6, 4, 5, HEADS)


def egat_inputs(g: dgl.DGLGraph) -> tuple[Tensor, ...]:
    is_pair = g.is_block or len(g.ntypes) == 2
    ends = [rows(g.num_dst_nodes(), 7)] if is_pair else []
    return rows(g.num_edges(), 6), rows(g.num_edges()), rows(g.num_src_nodes(), WIDTH), *ends


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "with weights"])
@pytest.mark.parametrize("shape", SIZES)
def test_egat(shape, is_weighted, device, passes):
    """Both of its outputs are in the loss."""
    torch.manual_seed(0)

    def run(
        layer: nn.Module, g: dgl.DGLGraph, edges: Tensor, weights: Tensor, *feat: Tensor
    ) -> tuple[Tensor, Tensor]:
        nodes = feat if len(feat) == 2 else feat[0]
        return layer(g, nodes, edges, edge_weight=weights if is_weighted else None)

    layer = egat(shape).double()
    nn.init.normal_(layer.bias)
    same_on_both(run, shape, device, layer, egat_inputs)
    assert passes == ["of_logits"]


def test_egat_whose_outputs_are_written_to(passes):
    torch.manual_seed(0)

    def run(
        layer: nn.Module, g: dgl.DGLGraph, edges: Tensor, weights: Tensor, feat: Tensor
    ) -> tuple[Tensor, ...]:
        nodes, edges = layer(g, feat, edges)
        return nodes.relu_(), 2 * edges

    same_on_both(run, "graph", "cpu", egat("graph").double(), egat_inputs)
    assert passes == ["of_logits"]


@pytest.mark.parametrize("device", DEVICES)
def test_egat_with_autocast(device, passes):
    torch.manual_seed(0)
    ends, layer = ends_of("graph"), egat("graph")
    edges, _, feat = (it.float() for it in egat_inputs(make("graph", ends)))
    expected = layer(make("graph", ends), feat, edges)
    layer = layer.to(device)
    with on_tensors(device), torch.autocast(device, torch.bfloat16):
        found = layer(make("graph", ends, device), feat.to(device), edges.to(device))
        sum(it.float().sum() for it in found).backward()
    assert passes == ["of_logits"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=5e-2, atol=5e-2)
    assert all(it.grad.dtype == torch.float32 for it in layer.parameters())


def test_egat_gives_its_attention_composed(passes):
    torch.manual_seed(0)
    ends, layer = ends_of("graph"), egat("graph")
    edges, _, feat = (it.float() for it in egat_inputs(make("graph", ends)))
    expected = layer(make("graph", ends), feat, edges, get_attention=True)
    with on_tensors("cpu"):
        found = layer(make("graph", ends), feat, edges, get_attention=True)
    assert not passes
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", ["no in-edges", "edges", "nodes", "a block"])
def test_egat_refuses_what_dgl_refuses(case, passes):
    torch.manual_seed(0)
    shape = "block" if case == "a block" else "graph"
    ends, layer = ends_of(shape), egat("graph")
    num_edges = len(ends[0]) - (case == "edges")
    with on_tensors("cpu"):
        g = dgl.graph(ends, num_nodes=41) if case == "no in-edges" else make(shape, ends)
        feat = torch.randn(g.num_src_nodes() + (case == "nodes"), WIDTH)
        with pytest.raises((DGLError, RuntimeError)):
            layer(g, feat, torch.randn(num_edges, 6))
    assert not passes


# -- EdgeGATConv -----------------------------------------------------------------------------------


def edge_gat(shape: str, **options: Any) -> EdgeGATConv:
    return EdgeGATConv((WIDTH, 7) if shape == "bipartite" else WIDTH, 6, 4, HEADS, **options)


def edge_gat_inputs(g: dgl.DGLGraph) -> tuple[Tensor, ...]:
    ends = [] if g.is_block or len(g.ntypes) == 1 else [rows(g.num_dst_nodes(), 7)]
    return rows(g.num_edges(), 6), rows(g.num_src_nodes(), WIDTH), *ends


def with_edges(layer: nn.Module, g: dgl.DGLGraph, edges: Tensor, *feat: Tensor) -> Tensor:
    return layer(g, feat if len(feat) == 2 else feat[0], edges)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("shape", SIZES)
def test_edge_gat(shape, residual, device, passes):
    torch.manual_seed(0)
    layer = edge_gat(shape, residual=residual, activation=torch.tanh).double()
    nn.init.normal_(layer.bias)
    same_on_both(with_edges, shape, device, layer, edge_gat_inputs)
    assert passes == ["sums_of_edges"]


def test_edge_gat_writes_no_row_for_each_edge_and_head():
    torch.manual_seed(0)
    ends = tuple(torch.randint(50, (2, 4000)))
    heads, width = 8, 16
    layer = EdgeGATConv(5, 2, width, heads, allow_zero_in_degree=True)
    with on_tensors("cpu"):
        g = dgl.graph(ends, num_nodes=50)
        feat, edges = torch.rand(50, 5, requires_grad=True), torch.rand(4000, 2, requires_grad=True)
        layer(g, feat, edges).sum().backward()  # makes formats

        with LiveBytes() as counted:
            layer(g, feat, edges).sum().backward()
    # An integer for each edge and head.
    assert counted.largest <= 8 * 4000 * heads < 4 * 4000 * heads * width


@pytest.mark.parametrize("device", DEVICES)
def test_edge_gat_with_autocast(device, passes):
    torch.manual_seed(0)
    ends, layer = ends_of("graph"), edge_gat("graph")
    inputs = [it.float() for it in edge_gat_inputs(make("graph", ends))]
    expected = with_edges(layer, make("graph", ends), *inputs)
    layer = layer.to(device)
    with on_tensors(device), torch.autocast(device, torch.bfloat16):
        inputs = [it.to(device).requires_grad_() for it in inputs]
        found = with_edges(layer, make("graph", ends, device), *inputs)
        found.float().sum().backward()
    assert passes == ["sums_of_edges"]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=5e-2)
    assert all(it.grad.dtype == torch.float32 for it in (*inputs, *layer.parameters()))


def test_edge_gat_drops_weights(passes):
    """Both of what they multiply: on average the sums are those without dropout."""
    torch.manual_seed(0)
    u, v = torch.arange(1, 4001), torch.zeros(4000, dtype=torch.long)
    with on_tensors("cpu"):
        g = dgl.graph((u, v), num_nodes=4001)
        layer = EdgeGATConv(1, 1, 1, 1, attn_drop=0.5, residual=False, allow_zero_in_degree=True)
        nodes, edges = torch.ones(4001, 1), torch.ones(4000, 1)
        found = layer(g, nodes, edges)[0].item()
        expected = layer.eval()(g, nodes, edges)[0].item()
    assert passes == ["sums_of_edges"] * 2
    assert abs(found / expected - 1) < 0.1 and found != expected


@pytest.mark.parametrize("case", ["attention", "a hook", "rows of three dimensions"])
def test_edge_gat_is_composed(case, passes):
    torch.manual_seed(0)
    ends, layer = ends_of("graph"), edge_gat("graph").double()
    edges, feat = edge_gat_inputs(make("graph", ends))
    if case == "a hook":
        layer.fc_edge.register_forward_hook(lambda module, inputs, out: 2 * out)
    if case == "rows of three dimensions":
        feat, edges = (it.unsqueeze(1).expand(-1, 2, -1) for it in (feat, edges))

    def run(g: dgl.DGLGraph) -> list[Tensor]:
        return tree_leaves(layer(g, feat, edges, get_attention=case == "attention"))

    expected = run(make("graph", ends))
    with on_tensors("cpu"):
        found = run(make("graph", ends))
    assert not passes
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", ["no in-edges", "too few", "too many", "another width"])
def test_edge_gat_refuses_what_dgl_refuses(case, passes):
    torch.manual_seed(0)
    ends, layer = ends_of("graph"), edge_gat("graph")
    count = len(ends[0]) + {"too few": -1, "too many": 1}.get(case, 0)
    with on_tensors("cpu"):
        g = dgl.graph(ends, num_nodes=41) if case == "no in-edges" else make("graph", ends)
        edges = torch.randn(count, 7 if case == "another width" else 6)
        with pytest.raises((DGLError, RuntimeError)):
            layer(g, torch.randn(g.num_nodes(), WIDTH), edges)
    assert not passes


def test_edge_gat_has_no_second_derivative(passes):
    torch.manual_seed(0)
    layer = edge_gat("graph").double()
    with on_tensors("cpu"):
        g = make("graph", ends_of("graph"))
        edges, feat = (it.requires_grad_() for it in edge_gat_inputs(g))
        (gradient,) = torch.autograd.grad(
            layer(g, feat, edges).square().sum(), edges, create_graph=True
        )
        with pytest.raises(InvalidInputError, match="differentiate sums of edges twice"):
            gradient.sum().backward()


# -- HGTConv ---------------------------------------------------------------------------------------

NODE_TYPES, EDGE_TYPES = 3, 4
HGT: dict[str, Callable[[], HGTConv]] = {
    "plain": lambda: HGTConv(HEADS * 4, 4, HEADS, NODE_TYPES, EDGE_TYPES, dropout=0.0),
    "of another width": lambda: HGTConv(WIDTH, 4, HEADS, NODE_TYPES, EDGE_TYPES, dropout=0.0),
    "with a norm": lambda: HGTConv(WIDTH, 4, HEADS, NODE_TYPES, EDGE_TYPES, 0.0, use_norm=True),
}


def hgt(name: str) -> HGTConv:
    layer = HGT[name]().double()
    for parameter in (*layer.relation_pri, layer.skip):
        nn.init.normal_(parameter)
    return layer


def types_of(g: dgl.DGLGraph, is_sorted: bool = False) -> tuple[Tensor, Tensor]:
    """Of nodes and of edges; the first and the third of edges' types have no edges."""
    ntype = torch.randint(NODE_TYPES, (g.num_nodes(),))
    etype = 1 + 2 * torch.randint(2, (g.num_edges(),))
    return (ntype.sort()[0], etype.sort()[0]) if is_sorted else (ntype, etype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_sorted", [False, True], ids=["", "presorted"])
@pytest.mark.parametrize("name", HGT)
def test_hgt(name, is_sorted, device, passes):
    """Two passes with one layer; some nodes have no in-edges."""
    torch.manual_seed(0)
    u, v = torch.randint(20, (2, 200))
    theirs = dgl.graph((u, v), num_nodes=23)
    layer, types = hgt(name), types_of(theirs, is_sorted)
    inputs = (rows(23, layer.in_size),)

    def run(layer: nn.Module, g: dgl.DGLGraph, x: Tensor) -> Tensor:
        ntype, etype = (it.to(g.device) for it in types)
        out = layer(g, x, ntype, etype, presorted=is_sorted)
        return out + layer(g, 2 * x, ntype, etype, presorted=is_sorted)

    expected = results_of(run, theirs, layer, inputs)
    with on_tensors(device):
        ours = dgl.graph((u.to(device), v.to(device)), num_nodes=23)
        found = results_of(run, ours, layer, inputs)
    assert passes == ["of_rows"] * 2
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_hgt_looks_for_types_that_changed(passes):
    torch.manual_seed(0)
    ends, layer, x = ends_of("graph"), hgt("of another width"), rows(40, WIDTH)
    theirs = make("graph", ends)
    with on_tensors("cpu"):
        ours = make("graph", ends)
        ntype, etype = types_of(theirs)
        for _ in range(3):
            with tensor_backed_graphs(on=False):
                expected = layer(theirs, x, ntype, etype)
            torch.testing.assert_close(layer(ours, x, ntype, etype), expected)
            with torch.inference_mode():
                torch.testing.assert_close(layer(ours, x, ntype, etype + 0), expected)
                torch.testing.assert_close(layer(ours, x, ntype, etype), expected)
            etype.add_(1).remainder_(EDGE_TYPES)
        found = layer(dgl.reverse(ours), x, ntype, etype)
    torch.testing.assert_close(found, layer(dgl.reverse(theirs), x, ntype, etype))
    assert passes == ["of_rows"] * 10


@pytest.mark.parametrize(
    "case", ["a block", "more pairs than edges", "many types", "no edges", "a hook", "a subclass"]
)
def test_hgt_is_composed(case, passes):
    torch.manual_seed(0)
    layer = hgt("of another width")
    if case == "a hook":
        layer.relation_att[1].register_forward_hook(lambda module, inputs, out: 2 * out)
    if case == "a subclass":
        layer.message = lambda edges: {
            name: 2 * value for name, value in HGTConv.message(layer, edges).items()
        }
    shape = "block" if case == "a block" else "graph"
    ends = ends_of(shape)
    if case == "more pairs than edges":
        ends = torch.arange(40), torch.arange(40)
    if case == "many types":
        layer = HGTConv(WIDTH, 4, HEADS, NODE_TYPES, 100, 0.0).double()
        ends = tuple(end.repeat_interleave(3) for end in ends)
    if case == "no edges":
        ends = torch.arange(0), torch.arange(0)
    theirs = make(shape, ends)
    ntype = torch.randint(NODE_TYPES, (40,))
    etype, x = torch.randint(EDGE_TYPES, (len(ends[0]),)), rows(40, WIDTH)
    if case == "many types":
        etype = torch.arange(len(ends[0])) // 3 % 100
    expected = layer(theirs, x, ntype, etype)
    with on_tensors("cpu"):
        found = layer(make(shape, ends), x, ntype, etype)
    assert not passes
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_hgt_with_autocast(device, passes):
    torch.manual_seed(0)
    ends, layer, x = ends_of("graph"), hgt("of another width").float(), torch.randn(40, WIDTH)
    theirs = make("graph", ends)
    types = types_of(theirs)
    expected = layer(theirs, x, *types)
    layer = layer.to(device)
    with on_tensors(device), torch.autocast(device, torch.bfloat16):
        ours = make("graph", ends, device)
        found = layer(ours, x.to(device), *(it.to(device) for it in types))
        found.float().sum().backward()
    assert passes == ["of_rows"]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=5e-2)


def test_typed_sources():
    """Pairs are in the order of types; there are none of types that are no numbers of types."""
    coo = torch.tensor([[0, 1, 1, 0, 1], [2, 2, 0, 2, 1]])
    relation = Relation(2, 3, coo=Coo(*coo))
    sources = relation.typed_sources(torch.tensor([1, 0, 0, 1, 1]))
    assert sources.counts == {0: 1, 1: 2}
    assert sources.pairs.coo().row.tolist() == [1, 0, 1]
    assert sources.edges.coo().row.tolist() == [1, 0, 0, 1, 2]
    assert torch.equal(sources.edges.coo().col, coo[1])
    assert relation.typed_sources(torch.tensor([1, 0, -1, 1, 1])) is None
