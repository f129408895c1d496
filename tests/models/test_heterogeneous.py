"""Models of heterogeneous graphs on blocks, whatever features there are, against dgl.nn's."""

from __future__ import annotations

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler
from dgl.nn import GATConv, GraphConv, HeteroGraphConv
from torch import nn
from torch.nn.functional import leaky_relu

from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.models.heterogeneous import (
    HeteroInputs,
    build_relational_model,
    common_width,
    reached_relations,
)

ETYPES = [
    ("author", "rev_written_by", "paper"),
    ("field", "rev_topic", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "topic", "field"),
    ("paper", "written_by", "author"),
    ("place", "of", "author"),
    ("author", "rev_of", "place"),
]
COUNTS = {"author": 60, "field": 9, "paper": 80, "place": 5}
#: Fields have the width of the layers, papers another, authors and places none.
WIDTHS = {"field": 8, "paper": 6}
HIDDEN, CLASSES, TARGET = 8, 5, "paper"


def random_graph() -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(0)

    def ends(ntype: str) -> torch.Tensor:
        return torch.randint(COUNTS[ntype], (150,), generator=draw)

    g = dgl.heterograph({each: (ends(each[0]), ends(each[2])) for each in ETYPES}, COUNTS)
    for ntype, width in WIDTHS.items():
        rows = torch.randn(COUNTS[ntype], width, generator=draw)
        g.nodes[ntype].data["feat"] = rows.half()
    return g


def build(name: str, g: dgl.DGLGraph, num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    width = common_width(g.ntypes, WIDTHS, HIDDEN)
    learned = {n: nn.Embedding(COUNTS[n], width) for n in g.ntypes if n not in WIDTHS}
    inputs = HeteroInputs(g.ntypes, g.canonical_etypes, TARGET, WIDTHS, learned)
    config = ModelConfig(name, HIDDEN, dropout=0.0, heads=2)
    return build_relational_model(config, width, CLASSES, num_layers, inputs)


def blocks_of(g: dgl.DGLGraph, num_layers: int) -> list[dgl.DGLGraph]:
    seeds = {TARGET: torch.arange(0, 80, 7)}
    _, _, blocks = NeighborSampler([3] * num_layers).sample_blocks(g, seeds)
    for ntype in WIDTHS:
        rows = g.nodes[ntype].data["feat"][blocks[0].srcnodes[ntype].data[dgl.NID]]
        blocks[0].srcnodes[ntype].data["feat"] = rows
    return blocks


def input_rows(model: nn.Module, block: dgl.DGLGraph) -> dict[str, torch.Tensor]:
    paper = model.rows.projections["paper"]
    rows = {
        ntype: table(block.srcnodes[ntype].data[dgl.NID])
        for ntype, table in model.rows.embeddings.items()
    }
    features = {ntype: block.srcnodes[ntype].data["feat"].float() for ntype in WIDTHS}
    rows["paper"] = features["paper"] @ paper.weight.T + paper.bias
    rows["field"] = features["field"]
    return rows


def by_dgl(name: str, model: nn.Module, blocks: list[dgl.DGLGraph]) -> torch.Tensor:
    """The same model of DGL's modules."""
    hidden = input_rows(model, blocks[0])
    for layer, block in enumerate(blocks):
        width = hidden["paper"].shape[1]
        last = layer == len(blocks) - 1
        own = {ntype: rows[: block.num_dst_nodes(ntype)] for ntype, rows in hidden.items()}
        if name == "rgcn":
            mine = model.layers.convolutions[layer]
            convolutions = {
                etype: GraphConv(width, CLASSES if last else HIDDEN, norm="right", bias=False)
                for etype in ETYPES
            }
            for etype, each in convolutions.items():
                each.load_state_dict(mine.relations.mods[str(etype)].state_dict())
            found = HeteroGraphConv(convolutions)(block, hidden)
            hidden = {
                ntype: rows @ mine.own.weight.T + mine.own.bias + found[ntype]
                for ntype, rows in own.items()
            }
            hidden = hidden if last else {ntype: rows.relu() for ntype, rows in hidden.items()}
        else:
            mine = model.layers.layers[layer]
            convolutions = {
                etype: GATConv(width, HIDDEN // 2, 2, allow_zero_in_degree=True) for etype in ETYPES
            }
            mine.copy_from(convolutions)
            found = HeteroGraphConv(convolutions)(block, hidden)
            hidden = {ntype: rows.flatten(1) for ntype, rows in found.items()}
            hidden = hidden if last else {n: leaky_relu(rows) for n, rows in hidden.items()}
    return hidden["paper"] if name == "rgcn" else model.layers.linear(hidden["paper"])


@pytest.mark.parametrize("name", ["rgcn", "rgat"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_they_are_what_dgls_modules_give(name, num_layers):
    g = random_graph()
    model, blocks = build(name, g, num_layers).eval(), blocks_of(g, num_layers)
    expected = by_dgl(name, model, blocks)
    found = model(blocks, dict(blocks[0].srcdata))
    assert found.shape == (12, CLASSES)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["rgcn", "rgat"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_all_that_is_trained_has_a_gradient_on_every_rank(name, num_layers):
    """Also where no edge of a relation was sampled, or no mini-batch: others wait for it."""
    g = random_graph()
    model = build(name, g, num_layers)
    model.rows.embeddings.requires_grad_(False)  # a store's have no parameters
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = blocks_of(g, num_layers)
    model(blocks, dict(blocks[0].srcdata)).square().sum().backward()
    assert all(p.grad is not None for p in trained)
    # What is left out could not have one.
    left_out = [p for p in model.layers.parameters() if not p.requires_grad]
    assert bool(left_out) == (name == "rgcn")
    assert all(p.grad is None for p in left_out)

    lonely = g.edge_subgraph({etype: [] for etype in ETYPES}, relabel_nodes=False)
    blocks = blocks_of(lonely, num_layers)
    for given in (blocks, dict(blocks[0].srcdata)), ([], {}):
        model.zero_grad()
        model(*given).sum().backward()
        assert all(p.grad is not None for p in trained)
    assert all((p.grad == 0).all() for p in trained)


def test_what_is_reached():
    last, before = ETYPES[:3], [*ETYPES[:5], ETYPES[5]]
    assert reached_relations(ETYPES, TARGET, 3) == [ETYPES, before, last]


def test_the_width_of_rows():
    same = dict.fromkeys(COUNTS, 7)
    assert common_width(list(COUNTS), same, 16) == 7
    assert common_width(list(COUNTS), same | {"paper": 8}, 16) == 16
    assert common_width([*COUNTS, "book"], same, 16) == 16
    assert common_width(list(COUNTS), {}, 16) == 16


def test_a_graph_of_one_node_type():
    etypes = [("user", "likes", "user"), ("user", "blocks", "user")]
    pairs = torch.randint(20, (2, 50)).unbind()
    g = dgl.heterograph(dict.fromkeys(etypes, pairs), {"user": 20})
    g.ndata["feat"] = torch.randn(20, 4)
    nodes, _, blocks = NeighborSampler([3]).sample_blocks(g, {"user": torch.arange(5)})
    blocks[0].srcdata["feat"] = g.ndata["feat"][nodes]
    model = build_relational_model(
        ModelConfig("rgcn", 8), 4, CLASSES, 1, HeteroInputs(["user"], etypes, "user", {"user": 4})
    )
    assert model(blocks, dict(blocks[0].srcdata)).shape == (5, CLASSES)


def test_unknown_model():
    with pytest.raises(ConfigError, match=r"rgcn.*rgat"):
        build("gcn", random_graph(), 1)
