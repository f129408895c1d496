"""Every public class of `dgl.nn.pytorch` is built and runs forward and backward on small graphs.

Deprecation and future warnings are errors: what a user would see printed fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
from dgl import function as fn
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("error::DeprecationWarning"),
    pytest.mark.filterwarnings("error::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("error::FutureWarning"),
    pytest.mark.filterwarnings("error:TypedStorage is deprecated"),
]

N, IN, OUT, EDGE_IN = 6, 4, 3, 2


def ring() -> dgl.DGLGraph:
    """Six nodes on a ring with chords and self-loops, every edge in both directions."""
    source = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2, 4])
    target = torch.tensor([1, 2, 3, 4, 5, 0, 2, 4, 0])
    return dgl.add_self_loop(dgl.to_bidirected(dgl.graph((source, target), num_nodes=N)))


def block() -> dgl.DGLGraph:
    """Five source nodes, of which the first three are the destinations."""
    source, target = torch.tensor([0, 1, 3, 2, 4, 4]), torch.tensor([0, 1, 0, 2, 1, 2])
    return dgl.create_block((source, target), num_src_nodes=5, num_dst_nodes=3)


def hetero() -> dgl.DGLGraph:
    return dgl.heterograph(
        {
            ("user", "follows", "user"): ([0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]),
            ("user", "plays", "game"): ([0, 1, 2, 2], [0, 0, 1, 0]),
            ("game", "played-by", "user"): ([0, 0, 1, 0], [0, 1, 2, 2]),
        }
    )


def batched() -> dgl.DGLGraph:
    return dgl.batch([ring(), ring()])


def feat(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def edges(g: dgl.DGLGraph) -> int:
    return g.num_edges()


class Model(nn.Module):
    """What the explainers explain: graph- or node-level logits, with optional edge weights."""

    def __init__(self, graph_level: bool) -> None:
        super().__init__()
        self.conv = dglnn.GraphConv(IN, OUT)
        self.graph_level = graph_level

    def forward(self, graph, feat, embed=False, edge_weight=None, eweight=None):
        weight = eweight if edge_weight is None else edge_weight
        h = self.conv(graph, feat, edge_weight=weight)
        if embed or not self.graph_level:
            return h
        return dglnn.AvgPooling()(graph, h)


class HeteroModel(nn.Module):
    def __init__(self, graph_level: bool) -> None:
        super().__init__()
        self.linear = dglnn.HeteroLinear({"user": IN, "game": IN}, OUT)
        self.graph_level = graph_level

    def forward(self, graph, feat, embed=False, edge_weight=None, eweight=None):
        weight = eweight if edge_weight is None else edge_weight
        with graph.local_scope():
            graph.ndata["h"] = self.linear(feat)
            message = fn.copy_u("h", "m")
            if weight is not None:
                graph.edata["w"] = {e: w.view(-1, 1) for e, w in weight.items()}
                message = fn.u_mul_e("h", "w", "m")
            graph.multi_update_all(
                {e: (message, fn.sum("m", "o")) for e in graph.canonical_etypes}, "sum"
            )
            h = graph.ndata["o"]
            if embed or not self.graph_level:
                return h
            return sum(dgl.mean_nodes(graph, "o", ntype=n) for n in graph.ntypes)


def explainer(cls: type, heterogeneous: bool) -> Callable[[], Any]:
    def run() -> Any:
        g = hetero() if heterogeneous else ring()
        x = (
            {n: torch.randn(g.num_nodes(n), IN) for n in g.ntypes}
            if heterogeneous
            else torch.randn(N, IN)
        )
        model: nn.Module = (HeteroModel if heterogeneous else Model)(graph_level=True)
        if "SubgraphX" in cls.__name__:
            explain = cls(model, num_hops=1, num_rollouts=2, shapley_steps=2, num_child=2)
            return explain.explain_graph(g, x, target_class=0)
        if "PGExplainer" in cls.__name__:
            explain = cls(model, OUT)
            loss = explain.train_step(g, x, 5.0)
            loss.backward()
            return explain.explain_graph(g, x)
        explain = cls(model, num_hops=1, num_epochs=3, log=False)
        out = explain.explain_graph(g, x)
        explain.model = (HeteroModel if heterogeneous else Model)(graph_level=False)
        node = explain.explain_node(*(["user", 0] if heterogeneous else [0]), g, x)
        return [*out, *node]

    return run


def deepwalk() -> torch.Tensor:
    model = dglnn.DeepWalk(ring(), emb_dim=4, walk_length=5, window_size=2)
    return model(model.sample(torch.arange(3)))


def metapath2vec() -> torch.Tensor:
    model = dglnn.MetaPath2Vec(hetero(), ["plays", "played-by"], window_size=1, emb_dim=4)
    return model(*model.sample(torch.arange(2)))


def node_embedding() -> torch.Tensor:
    embedding = dglnn.NodeEmbedding(N, OUT, "compat_test", init_func=nn.init.ones_)
    optimizer = dgl.optim.SparseAdam([embedding], lr=0.1)
    out = embedding(torch.tensor([0, 2]))
    out.sum().backward()
    optimizer.step()
    assert (embedding.weight[0] < 1).all() and (embedding.weight[1] == 1).all()
    return out


def lap_pos(model_type: str) -> Callable[[], Any]:
    def run() -> Any:
        g = ring()
        vectors, values = dgl.lap_pe(g, 3, padding=True, return_eigval=True)
        options = {"n_head": 2} if model_type == "Transformer" else {}
        encoder = dglnn.LapPosEncoder(model_type, 2, 3, 8, **options)
        return encoder(values.repeat(N, 1), vectors)

    return run


def path_encoder() -> torch.Tensor:
    g = ring()
    distance, path = dgl.shortest_dist(g, root=None, return_paths=True)
    encoder = dglnn.PathEncoder(path.shape[-1], EDGE_IN, num_heads=2)
    return encoder(distance.unsqueeze(0), feat(edges(g), EDGE_IN)[path].unsqueeze(0))


def on(graph: Callable[[], dgl.DGLGraph], build: Callable[[], nn.Module], *inputs: Any) -> Any:
    """A case that runs ``build()(graph, *inputs)``; an input may depend on the graph."""

    def run() -> Any:
        g = graph()
        return build()(g, *(i(g) if callable(i) else i for i in inputs))

    return run


def nodes_feat(g: dgl.DGLGraph) -> torch.Tensor:
    return feat(g.num_src_nodes(), IN)


def edges_feat(g: dgl.DGLGraph) -> torch.Tensor:
    return feat(g.num_edges(), EDGE_IN)


def pair(g: dgl.DGLGraph) -> tuple[torch.Tensor, torch.Tensor]:
    x = feat(g.num_src_nodes(), IN)
    return x, x[: g.num_dst_nodes()]


def etypes(g: dgl.DGLGraph) -> torch.Tensor:
    return torch.arange(g.num_edges()) % 2


def cases(name: str, *runs: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    return {f"{name}-{i}" if len(runs) > 1 else name: run for i, run in enumerate(runs)}


SAGE = ("mean", "gcn", "pool", "lstm")
PNA = (["mean", "max", "min", "std", "var", "sum"], ["identity", "amplification", "attenuation"])

CASES: dict[str, Callable[[], Any]] = {
    # convolutions
    "AGNNConv": on(ring, dglnn.AGNNConv, nodes_feat),
    "AGNNConv-block": on(block, dglnn.AGNNConv, pair),
    "APPNPConv": on(ring, lambda: dglnn.APPNPConv(3, 0.5, edge_drop=0.2), nodes_feat),
    "AtomicConv": on(
        ring,
        lambda: dglnn.AtomicConv(torch.ones(3) * 2, torch.rand(3), torch.rand(3)),
        lambda g: feat(N, 1),
        lambda g: feat(edges(g), 1),
    ),
    "CFConv": on(ring, lambda: dglnn.CFConv(IN, EDGE_IN, 5, OUT), nodes_feat, edges_feat),
    "ChebConv": on(ring, lambda: dglnn.ChebConv(IN, OUT, 3), nodes_feat, torch.tensor([2.0])),
    "DGNConv": on(
        ring,
        lambda: dglnn.DGNConv(IN, OUT, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5),
        nodes_feat,
        None,
        lambda g: torch.rand(N, 2),
    ),
    "DenseChebConv": lambda: dglnn.DenseChebConv(IN, OUT, 2)(torch.eye(N), feat(N, IN), 2.0),
    "DenseGraphConv": lambda: dglnn.DenseGraphConv(IN, OUT)(torch.eye(N), feat(N, IN)),
    "DenseSAGEConv": lambda: dglnn.DenseSAGEConv(IN, OUT)(torch.eye(N), feat(N, IN)),
    "DotGatConv": on(ring, lambda: dglnn.DotGatConv(IN, OUT, 2), nodes_feat),
    "EGATConv": on(
        ring, lambda: dglnn.EGATConv(IN, EDGE_IN, OUT, 2, num_heads=2), nodes_feat, edges_feat
    ),
    "EGNNConv": on(
        ring,
        lambda: dglnn.EGNNConv(IN, 5, OUT, EDGE_IN),
        nodes_feat,
        lambda g: feat(N, 3),
        edges_feat,
    ),
    "EdgeConv": on(ring, lambda: dglnn.EdgeConv(IN, OUT, batch_norm=True), nodes_feat),
    "EdgeConv-block": on(block, lambda: dglnn.EdgeConv(IN, OUT), pair),
    "EdgeGATConv": on(ring, lambda: dglnn.EdgeGATConv(IN, EDGE_IN, OUT, 2), nodes_feat, edges_feat),
    "EdgeWeightNorm": on(
        ring, lambda: dglnn.EdgeWeightNorm("both"), lambda g: torch.rand(edges(g))
    ),
    "GATConv": on(ring, lambda: dglnn.GATConv(IN, OUT, 2, 0.1, 0.1, residual=True), nodes_feat),
    "GATConv-block": on(block, lambda: dglnn.GATConv(IN, OUT, 2), pair),
    "GATv2Conv": on(ring, lambda: dglnn.GATv2Conv(IN, OUT, 2), nodes_feat),
    "GATv2Conv-block": on(block, lambda: dglnn.GATv2Conv(IN, OUT, 2), pair),
    "GCN2Conv": on(ring, lambda: dglnn.GCN2Conv(IN, 1), nodes_feat, nodes_feat),
    "GINConv": on(ring, lambda: dglnn.GINConv(nn.Linear(IN, OUT), learn_eps=True), nodes_feat),
    "GINConv-max": on(block, lambda: dglnn.GINConv(nn.Linear(IN, OUT), "max"), pair),
    "GINEConv": on(
        ring,
        lambda: dglnn.GINEConv(nn.Linear(IN, OUT), learn_eps=True),
        nodes_feat,
        lambda g: feat(edges(g), IN),
    ),
    "GMMConv": on(ring, lambda: dglnn.GMMConv(IN, OUT, EDGE_IN, 3), nodes_feat, edges_feat),
    "GatedGCNConv": on(ring, lambda: dglnn.GatedGCNConv(IN, EDGE_IN, OUT), nodes_feat, edges_feat),
    "GatedGraphConv": on(ring, lambda: dglnn.GatedGraphConv(IN, IN, 2, 2), nodes_feat, etypes),
    "GraphConv": on(ring, lambda: dglnn.GraphConv(IN, OUT), nodes_feat),
    "GraphConv-block": on(block, lambda: dglnn.GraphConv(IN, OUT, norm="right"), pair),
    "GroupRevRes": on(
        ring,
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(2, 2), 2),
        lambda g: feat(N, IN) * 1,  # a reversible layer frees its input: not a leaf
    ),
    "HGTConv": on(
        ring,
        lambda: dglnn.HGTConv(IN, 2, 2, 2, 2),
        nodes_feat,
        torch.arange(N) % 2,
        etypes,
    ),
    "NNConv": on(
        ring, lambda: dglnn.NNConv(IN, OUT, nn.Linear(EDGE_IN, IN * OUT)), nodes_feat, edges_feat
    ),
    "PNAConv": on(
        ring, lambda: dglnn.PNAConv(IN, OUT, *PNA, 2.5, edge_feat_size=2), nodes_feat, edges_feat
    ),
    **{
        f"RelGraphConv-{regularizer}": on(
            ring,
            lambda r=regularizer, b=bases: dglnn.RelGraphConv(IN, 6, 2, r, b, layer_norm=True),
            nodes_feat,
            etypes,
        )
        for regularizer, bases in ((None, None), ("basis", 2), ("bdd", 2))
    },
    **{
        f"SAGEConv-{kind}-{graph.__name__}": on(
            graph, lambda k=kind: dglnn.SAGEConv(IN, OUT, k), inputs
        )
        for kind in SAGE
        for graph, inputs in ((ring, nodes_feat), (block, pair))
    },
    "SGConv": on(ring, lambda: dglnn.SGConv(IN, OUT, 2), nodes_feat),
    "TAGConv": on(ring, lambda: dglnn.TAGConv(IN, OUT, 2), nodes_feat),
    "TWIRLSConv": on(
        ring, lambda: dglnn.TWIRLSConv(IN, OUT, 5, 2, attention=True, attn_bef=True), nodes_feat
    ),
    "TWIRLSUnfoldingAndAttention": on(
        ring, lambda: dglnn.TWIRLSUnfoldingAndAttention(IN, 0.5, 1.0, 2), nodes_feat
    ),
    # pooling
    "SumPooling": on(batched, dglnn.SumPooling, nodes_feat),
    "AvgPooling": on(batched, dglnn.AvgPooling, nodes_feat),
    "MaxPooling": on(batched, dglnn.MaxPooling, nodes_feat),
    "SortPooling": on(batched, lambda: dglnn.SortPooling(3), nodes_feat),
    "WeightAndSum": on(batched, lambda: dglnn.WeightAndSum(IN), nodes_feat),
    "GlobalAttentionPooling": on(
        batched, lambda: dglnn.GlobalAttentionPooling(nn.Linear(IN, 1)), nodes_feat
    ),
    "Set2Set": on(batched, lambda: dglnn.Set2Set(IN, 2, 1), nodes_feat),
    "SetTransformerEncoder": on(
        batched, lambda: dglnn.SetTransformerEncoder(IN, 2, 2, 8), nodes_feat
    ),
    "SetTransformerEncoder-isab": on(
        batched,
        lambda: dglnn.SetTransformerEncoder(IN, 2, 2, 8, block_type="isab", m=2),
        nodes_feat,
    ),
    "SetTransformerDecoder": on(
        batched, lambda: dglnn.SetTransformerDecoder(IN, 2, 2, 8, 1, 2), nodes_feat
    ),
    # links, types, embeddings
    "EdgePredictor": lambda: [
        dglnn.EdgePredictor(op, *size, bias=bool(size))(feat(N, IN), feat(N, IN))
        for op, *size in (("dot",), ("cos",), ("ele", IN, OUT), ("cat", IN, OUT))
    ],
    "TransE": lambda: dglnn.TransE(2, IN)(feat(N, IN), feat(N, IN), torch.arange(N) % 2),
    "TransR": lambda: dglnn.TransR(2, OUT, IN)(feat(N, IN), feat(N, IN), torch.arange(N) % 2),
    "HeteroGraphConv": lambda: dglnn.HeteroGraphConv(
        {e: dglnn.SAGEConv(IN, OUT, "mean") for e in hetero().etypes}, aggregate="stack"
    )(hetero(), {"user": feat(3, IN), "game": feat(2, IN)}),
    "HeteroLinear": lambda: dglnn.HeteroLinear({"a": IN, "b": 2}, OUT)(
        {"a": feat(2, IN), "b": feat(3, 2)}
    ),
    "HeteroEmbedding": lambda: dglnn.HeteroEmbedding({"a": 2, "b": 4}, OUT)(
        {"a": torch.tensor([1]), "b": torch.tensor([0, 3])}
    ),
    "TypedLinear": lambda: dglnn.TypedLinear(IN, OUT, 2)(feat(N, IN), torch.arange(N) % 2),
    "TypedLinear-sorted": lambda: dglnn.TypedLinear(IN, OUT, 2)(
        feat(N, IN), torch.arange(N) // 3, sorted_by_type=True
    ),
    "NodeEmbedding": node_embedding,
    "DeepWalk": deepwalk,
    "MetaPath2Vec": metapath2vec,
    # graph transformers
    "BiasedMHA": lambda: dglnn.BiasedMHA(IN, 2)(feat(2, N, IN), feat(2, N, N, 2)),
    "DegreeEncoder": lambda: dglnn.DegreeEncoder(5, OUT)(
        torch.stack([ring().in_degrees(), ring().out_degrees()]).unsqueeze(1)
    ),
    "EGTLayer": lambda: dglnn.EGTLayer(IN, EDGE_IN, 2, 1)(feat(2, N, IN), feat(2, N, N, EDGE_IN)),
    "GraphormerLayer": lambda: dglnn.GraphormerLayer(IN, 8, 2)(feat(2, N, IN), feat(2, N, N, 2)),
    # Writes into a ReLU's output in place: with any torch, DGL's DeepSet has no backward.
    "LapPosEncoder-DeepSet": torch.no_grad()(lap_pos("DeepSet")),
    "LapPosEncoder-Transformer": lap_pos("Transformer"),
    "PathEncoder": path_encoder,
    "SpatialEncoder": lambda: dglnn.SpatialEncoder(3, 2)(
        dgl.shortest_dist(ring(), root=None).unsqueeze(0)
    ),
    "SpatialEncoder3d": lambda: dglnn.SpatialEncoder3d(4, 2)(feat(1, N, 3)),
    # containers and factories
    "JumpingKnowledge": lambda: [
        dglnn.JumpingKnowledge(mode, IN, 2)([feat(N, IN), feat(N, IN)])
        for mode in ("cat", "max", "lstm")
    ],
    "LabelPropagation": on(ring, lambda: dglnn.LabelPropagation(3, 0.5), torch.arange(N) % 2),
    "Sequential": on(
        ring, lambda: dglnn.Sequential(dglnn.GraphConv(IN, 5), dglnn.GraphConv(5, OUT)), nodes_feat
    ),
    "WeightBasis": lambda: dglnn.WeightBasis((2, 3), 2, 4)(),
    "KNNGraph": lambda: [
        dglnn.KNNGraph(2)(torch.rand(N, 3), algorithm=a, dist="cosine").num_edges()
        for a in ("bruteforce-blas", "bruteforce", "kd-tree")
    ],
    "SegmentedKNNGraph": lambda: dglnn.SegmentedKNNGraph(2)(torch.rand(N, 3), [3, 3]).num_edges(),
    "RadiusGraph": lambda: dglnn.RadiusGraph(0.5)(torch.rand(N, 3)).num_nodes(),
    # explainers
    "GNNExplainer": explainer(dglnn.GNNExplainer, False),
    "HeteroGNNExplainer": explainer(dglnn.HeteroGNNExplainer, True),
    "PGExplainer": explainer(dglnn.PGExplainer, False),
    "HeteroPGExplainer": explainer(dglnn.HeteroPGExplainer, True),
    "SubgraphX": explainer(dglnn.SubgraphX, False),
    "HeteroSubgraphX": explainer(dglnn.HeteroSubgraphX, True),
}

#: Wrappers round RAPIDS' kernels: DGL itself runs them on a GPU with pylibcugraphops only.
NEEDS_CUGRAPH = {"CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"}


def public_classes() -> set[str]:
    return {
        name
        for name, value in vars(dglnn).items()
        if isinstance(value, type) and value.__module__.startswith("dgl.") and name[0] != "_"
    }


def tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def test_every_public_class_has_a_case():
    assert {name.partition("-")[0] for name in CASES} | NEEDS_CUGRAPH == public_classes()


@pytest.mark.parametrize("name", CASES)
def test_runs_forward_and_backward(name):
    torch.manual_seed(0)
    outputs = list(tensors(CASES[name]()))
    assert all(torch.isfinite(out).all() for out in outputs if out.is_floating_point())
    differentiable = [out for out in outputs if out.requires_grad]
    if differentiable:
        sum(out.float().sum() for out in differentiable).backward()


@pytest.mark.parametrize("name", sorted(NEEDS_CUGRAPH))
def test_cugraph_layers_say_what_they_need(name):
    with pytest.raises(ModuleNotFoundError, match="pylibcugraphops"):
        getattr(dglnn, name)(IN, OUT, 2)
