"""R-GAT against DGL's own modules."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler
from dgl.nn import GATConv, HeteroGraphConv

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models import rgat as hetero
from dgl_mgpu.models.rgat import RGAT, RelationalAttention, RelationEdges, WholeGraphRGAT
from dgl_mgpu.ops import tall

ETYPES = [
    ("author", "rev_written_by", "paper"),
    ("field", "rev_topic", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "topic", "field"),
    ("paper", "written_by", "author"),
]
COUNTS = {"author": 60, "field": 9, "paper": 80}
WIDTH, HIDDEN, HEADS, CLASSES = 6, 8, 2, 5


def random_graph(edges: int = 150) -> dgl.DGLGraph:
    """Many nodes without in-edges of a relation, and parallel edges."""
    draw = torch.Generator().manual_seed(0)

    def ends(ntype: str) -> torch.Tensor:
        return torch.randint(COUNTS[ntype], (edges,), generator=draw)

    return dgl.heterograph({each: (ends(each[0]), ends(each[2])) for each in ETYPES}, COUNTS)


def features(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        ntype: torch.randn(count, WIDTH, generator=draw, dtype=dtype)
        for ntype, count in COUNTS.items()
    }


class Reference(torch.nn.Module):
    """R-GAT of DGL's modules."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for layer in range(num_layers):
            width = HIDDEN if layer else WIDTH
            convolutions = {
                etype: GATConv(width, HIDDEN // HEADS, HEADS, allow_zero_in_degree=True)
                for etype in ETYPES
            }
            for each in convolutions.values():
                torch.nn.init.normal_(each.bias)
            self.layers.append(HeteroGraphConv(convolutions, aggregate="sum"))
        self.linear = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, blocks, rows):
        for layer, block in zip(self.layers, blocks, strict=True):
            rows = {ntype: each.flatten(1) for ntype, each in layer(block, rows).items()}
            if layer is not self.layers[-1]:
                rows = {k: torch.nn.functional.leaky_relu(each) for k, each in rows.items()}
        return self.linear(rows["paper"])


def pair(num_layers: int) -> tuple[RGAT, Reference]:
    """Our model and DGL's with the same parameters, in float64."""
    torch.manual_seed(0)
    g = random_graph()
    theirs = Reference(num_layers).double()
    ours = RGAT(
        g.ntypes, g.canonical_etypes, "paper", WIDTH, CLASSES, HIDDEN, num_layers, HEADS
    ).double()
    ours.eval()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        mine.copy_from({etype: other.mods[str(etype)] for etype in ETYPES})
    ours.linear.load_state_dict(theirs.linear.state_dict())
    return ours, theirs


def gradients(model: torch.nn.Module, graphs, rows: dict) -> tuple[torch.Tensor, dict]:
    """Logits, and the gradients of rows."""
    rows = {ntype: each.clone().requires_grad_() for ntype, each in rows.items()}
    logits = model(graphs, rows)
    weights = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()
    return logits, {ntype: each.grad for ntype, each in rows.items()}


def assert_same(ours: RGAT, theirs: Reference, graphs, rows: dict) -> None:
    """Logits and all gradients are those of DGL's modules."""
    logits, d_rows = gradients(ours, graphs, rows)
    expected, expected_d_rows = gradients(
        theirs, [graphs] * len(theirs.layers) if isinstance(graphs, dgl.DGLGraph) else graphs, rows
    )
    assert logits.numel()
    torch.testing.assert_close(logits, expected)
    for ntype, each in expected_d_rows.items():
        torch.testing.assert_close(
            d_rows[ntype], torch.zeros_like(d_rows[ntype]) + (0 if each is None else each)
        )
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for relation, etype in enumerate(mine.canonical_etypes):
            conv = other.mods[str(etype)]
            found = mine.weight.grad[relation], mine.bias.grad[relation]
            for grad, parameter in zip(found, (conv.fc.weight, conv.bias), strict=True):
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(grad.flatten(), wanted.flatten())
            attention = mine.attention.grad[relation].transpose(0, 1)
            for grad, parameter in zip(attention, (conv.attn_l, conv.attn_r), strict=True):
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(grad.flatten(), wanted.flatten())
    torch.testing.assert_close(ours.linear.weight.grad, theirs.linear.weight.grad)


@pytest.mark.parametrize("on_tensors", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_on_blocks_it_is_what_dgls_modules_give(on_tensors, num_layers):
    ours, theirs = pair(num_layers)
    with tensor_backed_graphs(on_tensors):
        g = random_graph()
        seeds = {"paper": torch.arange(0, 80, 7)}
        inputs, _, blocks = NeighborSampler([3] * num_layers).sample_blocks(g, seeds)
        rows = {ntype: each[inputs[ntype]] for ntype, each in features().items()}
        assert_same(ours, theirs, blocks, rows)


@pytest.mark.parametrize("on_tensors", [False, True])
def test_on_a_graph_it_is_what_dgls_modules_give(on_tensors):
    ours, theirs = pair(2)
    with tensor_backed_graphs(on_tensors):
        assert_same(ours, theirs, random_graph(), features())


def test_features_need_no_gradient():
    ours, theirs = pair(2)
    g, rows = random_graph(), features()
    for model, graphs in ((ours, g), (theirs, [g, g])):
        model(graphs, rows).square().sum().backward()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for relation, etype in enumerate(mine.canonical_etypes):
            attention = mine.attention.grad[relation].transpose(0, 1)
            conv = other.mods[str(etype)]
            for grad, parameter in zip(attention, (conv.attn_l, conv.attn_r), strict=True):
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(grad.flatten(), wanted.flatten())


def test_many_rows_are_multiplied_in_pieces(monkeypatch):
    monkeypatch.setattr(tall, "_LEAST_PIECE", 7)
    ours, theirs = pair(2)
    assert_same(ours, theirs, random_graph(), features())


def test_ids_become_wide_where_they_must(monkeypatch):
    ours, theirs = pair(2)
    with tensor_backed_graphs():
        g = random_graph().int()
        assert (
            RelationEdges.from_graph(g, g.ntypes, g.canonical_etypes).indices.dtype == torch.int32
        )
        assert_same(ours, theirs, g, features())
        ours.zero_grad(), theirs.zero_grad()
        monkeypatch.setattr(hetero, "_MAX_INT32", 150 * len(ETYPES) + 1)
        assert (
            RelationEdges.from_graph(g, g.ntypes, g.canonical_etypes).indices.dtype == torch.int64
        )
        assert_same(ours, theirs, g, features())
        ours.zero_grad(), theirs.zero_grad()
        # Cells fit, entries of edges and heads do not.
        cells = 2 * len(ETYPES) * sum(COUNTS.values())
        monkeypatch.setattr(hetero, "_MAX_INT32", cells)
        g = random_graph(edges=250).int()
        seen = []

        def add_spmm(out, indptr, *others):
            seen.append(indptr.dtype)
            spmm(out, indptr, *others)

        spmm = hetero.add_spmm
        monkeypatch.setattr(hetero, "add_spmm", add_spmm)
        assert (
            RelationEdges.from_graph(g, g.ntypes, g.canonical_etypes).indices.dtype == torch.int32
        )
        assert_same(ours, theirs, g, features())
        assert set(seen) == {torch.int64}


def test_seeds_without_in_edges():
    ours, theirs = pair(1)
    with tensor_backed_graphs():
        nothing = torch.empty(0, dtype=torch.int64)
        g = dgl.heterograph({each: (nothing, nothing) for each in ETYPES}, COUNTS)
        assert_same(ours, theirs, g, features())


def test_autocast_computes_in_half_precision():
    ours, _ = pair(2)
    ours, g, rows = ours.float(), random_graph(), features(torch.float32)
    expected = ours(g, rows)
    expected.square().sum().backward()
    gradient = ours.layers[0].weight.grad.clone()
    ours.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(g, rows)
        edges = RelationEdges.from_graph(g, g.ntypes, g.canonical_etypes)
        layer = ours.layers[0](edges, torch.cat([rows[ntype] for ntype in g.ntypes]))
    assert found.dtype == layer.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.03 * expected.norm()
    found.float().square().sum().backward()
    assert ours.layers[0].weight.grad.dtype == torch.float32
    assert (ours.layers[0].weight.grad - gradient).norm() < 0.05 * gradient.norm()


def test_it_learns_with_dropout():
    torch.manual_seed(0)
    g, rows = random_graph(), features(torch.float32)
    model = RGAT(g.ntypes, g.canonical_etypes, "paper", WIDTH, CLASSES, HIDDEN, 2, HEADS, 0.2)
    labels = torch.randint(CLASSES, (COUNTS["paper"],))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(g, rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert model(g, rows).ne(model(g, rows)).any()
    model.eval()
    torch.testing.assert_close(model(g, rows), model(g, torch.cat([rows[t] for t in g.ntypes])))


def test_second_derivatives_are_refused():
    g = random_graph()
    model = RGAT(g.ntypes, g.canonical_etypes, "paper", WIDTH, CLASSES, HIDDEN, 2, HEADS).double()
    rows = {ntype: each.requires_grad_() for ntype, each in features().items()}
    (first,) = torch.autograd.grad(model(g, rows).sum(), rows["paper"], create_graph=True)
    for wanted in (rows["paper"], model.linear.weight):
        with pytest.raises(InvalidInputError, match="differentiate R-GAT twice"):
            torch.autograd.grad(first.sum(), wanted)


def test_invalid_inputs():
    g = random_graph()
    with pytest.raises(InvalidInputError, match="leads to author"):
        RelationalAttention(g.ntypes, ETYPES[:4], 4, 4, 2)
    with pytest.raises(InvalidInputError, match="unknown node types"):
        RelationalAttention(["paper"], ETYPES, 4, 4, 2)
    with pytest.raises(InvalidInputError, match="multiple of the heads"):
        RGAT(g.ntypes, ETYPES, "paper", 4, 2, hidden=9, heads=2)
    with pytest.raises(InvalidInputError, match="no node type 'book'"):
        RGAT(g.ntypes, ETYPES, "book", 4, 2, hidden=8, heads=2)
    model = RGAT(g.ntypes, g.canonical_etypes, "paper", WIDTH, CLASSES, HIDDEN, 1, HEADS)
    with pytest.raises(InvalidInputError, match="148 rows, but 149 source nodes"):
        model(g, torch.zeros(148, WIDTH))
    _, _, blocks = NeighborSampler([3]).sample_blocks(g, {"paper": torch.empty(0).long()})
    with pytest.raises(InvalidInputError, match="leads to any node"):
        RelationEdges.from_graph(blocks[0], g.ntypes, g.canonical_etypes)


def test_on_a_whole_graph_it_is_the_same_by_convolutions_of_dgls():
    ours, _ = pair(2)
    whole = WholeGraphRGAT(
        list(COUNTS), ETYPES, "paper", WIDTH, CLASSES, HIDDEN, 2, HEADS, dropout=0.0
    ).double()
    for layer, of_whole in zip(ours.layers, whole.layers, strict=True):
        layer.copy_from({etype: of_whole.mods[str(etype)] for etype in ETYPES})
    ours.linear.load_state_dict(whole.linear.state_dict())
    g, rows = random_graph(), features()
    torch.testing.assert_close(whole(g, rows), ours(g, rows))
    with pytest.raises(InvalidInputError, match="cannot be shared among 3 heads"):
        WholeGraphRGAT(list(COUNTS), ETYPES, "paper", WIDTH, CLASSES, HIDDEN, 2, 3)
    with pytest.raises(InvalidInputError, match="no relation leads to author"):
        WholeGraphRGAT(list(COUNTS), ETYPES[:4], "paper", WIDTH, CLASSES, HIDDEN, 2, HEADS)
