"""Every public class of `dgl.nn.pytorch` on small graphs: how it is built and what it is given."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import dgl.nn.pytorch as dglnn
import numpy as np
import torch
from dgl import function as fn
from torch import nn

N, IN, OUT, EDGE_IN = 6, 4, 3, 2


# -- graphs ---------------------------------------------------------------------------------------


def ring() -> dgl.DGLGraph:
    """Six nodes on a ring with chords and self-loops, every edge in both directions."""
    source = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2, 4])
    target = torch.tensor([1, 2, 3, 4, 5, 0, 2, 4, 0])
    return dgl.add_self_loop(dgl.to_bidirected(dgl.graph((source, target), num_nodes=N)))


def uneven() -> dgl.DGLGraph:
    """Parallel edges, a node without edges and one without in-edges, edges in no order."""
    source, target = torch.tensor([5, 0, 3, 0, 2, 5, 0]), torch.tensor([0, 2, 0, 2, 3, 1, 3])
    return dgl.graph((source, target), num_nodes=N + 1)


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


def hetero_block() -> dgl.DGLGraph:
    seeds = {"user": torch.tensor([2, 0]), "game": torch.tensor([0])}
    return dgl.to_block(dgl.in_subgraph(hetero(), seeds), seeds)


def batched() -> dgl.DGLGraph:
    return dgl.batch([ring(), uneven(), ring()])


# -- inputs ---------------------------------------------------------------------------------------


def feat(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def nodes_feat(g: dgl.DGLGraph) -> torch.Tensor:
    return feat(g.num_src_nodes(), IN)


def edges_feat(g: dgl.DGLGraph) -> torch.Tensor:
    return feat(g.num_edges(), EDGE_IN)


def weights(g: dgl.DGLGraph) -> torch.Tensor:
    return (torch.rand(g.num_edges()) + 1).requires_grad_()


def pair(g: dgl.DGLGraph) -> tuple[torch.Tensor, torch.Tensor]:
    return feat(g.num_src_nodes(), IN), feat(g.num_dst_nodes(), IN)


def node_types(g: dgl.DGLGraph) -> torch.Tensor:
    return torch.arange(g.num_nodes()) % 2


def edge_types(g: dgl.DGLGraph) -> torch.Tensor:
    return torch.arange(g.num_edges()) % 2


def feat_by_type(g: dgl.DGLGraph) -> dict[str, torch.Tensor]:
    return {ntype: feat(g.num_src_nodes(ntype), IN) for ntype in g.srctypes}


# -- cases ----------------------------------------------------------------------------------------

Call = Callable[..., Any]


def forward(model: nn.Module, *inputs: Any) -> Any:
    return model(*inputs)


@dataclass(frozen=True)
class Case:
    """A module and what it is run on.

    Parameters
    ----------
    build : Callable
        Makes the module, of the graph if `of_graph`.
    graph : Callable or None
        Makes the graph that the module is called with.
    inputs : tuple
        What follows the graph in the call; a function is called with the graph.
    call : Callable
        Takes the module, the graph if there is one, and the inputs.
    of_graph : bool
    doubles : bool
        Whether DGL's module works in float64; some have float32 written into them.
    spread : float
        How many times the tolerance results on a GPU may differ by: more than once where torch's
        own attention rounds otherwise there, and gradients are small differences of large numbers.
    """

    build: Callable[..., Any]
    graph: Callable[[], dgl.DGLGraph] | None
    inputs: tuple[Any, ...]
    call: Call = forward
    of_graph: bool = False
    doubles: bool = True
    spread: float = 1.0

    def make(self, device: str = "cpu", idtype: torch.dtype = torch.int64) -> tuple[Any, list[Any]]:
        """The module and the arguments of its call on a device, of the same numbers on each."""
        seed()
        graph = None if self.graph is None else placed(self.graph(), device, idtype)
        module = self.build(graph) if self.of_graph else self.build()
        if isinstance(module, nn.Module):
            module = module.to(device)
        inputs = [value(graph) if callable(value) else value for value in self.inputs]
        inputs = placed(inputs, device, idtype)
        return module, inputs if graph is None else [graph, *inputs]

    def run(self) -> Any:
        """The results of one call on the CPU."""
        module, inputs = self.make()
        return self.call(module, *inputs)


def seed() -> None:
    """The same random numbers from here on."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def placed(value: Any, device: str, idtype: torch.dtype) -> Any:
    """A graph, or tensors as new leaves, on a device; graphs with ids of a dtype."""
    if isinstance(value, dgl.DGLGraph):
        return value.astype(idtype).to(torch.device(device))
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: placed(item, device, idtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(placed(item, device, idtype) for item in value)
    return value


def tensors(value: Any) -> Iterable[torch.Tensor]:
    """All tensors of a result; of a graph its edges."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dgl.DGLGraph):
        for etype in value.canonical_etypes:
            yield from value.edges(order="eid", etype=etype)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def on(
    graph: Callable[[], dgl.DGLGraph],
    build: Callable[..., Any],
    *inputs: Any,
    call: Call = forward,
    of_graph: bool = False,
    doubles: bool = True,
    spread: float = 1.0,
) -> Case:
    return Case(build, graph, inputs, call, of_graph, doubles, spread)


def apart(
    build: Callable[[], Any], *inputs: Any, call: Call = forward, spread: float = 1.0
) -> Case:
    """A case without a graph; inputs that are functions are called with None."""
    return Case(build, None, inputs, call, spread=spread)


def values(*shape: int) -> Callable[[Any], torch.Tensor]:
    """An input of random numbers."""
    return lambda _: feat(*shape)


def with_keywords(*names: str) -> Call:
    """A call whose last inputs are keyword arguments."""

    def call(model: nn.Module, *inputs: Any) -> Any:
        plain = len(inputs) - len(names)
        return model(*inputs[:plain], **dict(zip(names, inputs[plain:], strict=True)))

    return call


# -- what the explainers explain -------------------------------------------------------------------


class Model(nn.Module):
    """Graph- or node-level logits, with optional edge weights."""

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


def explained(cls: type, graph_level: bool = True) -> Case:
    """An explainer of a graph's or of a node's logits."""
    heterogeneous = cls.__name__.startswith("Hetero")
    model = HeteroModel if heterogeneous else Model
    kind = cls.__name__.removeprefix("Hetero")
    node = ["user", 0] if heterogeneous else [0]

    def build() -> Any:
        if kind == "SubgraphX":
            return cls(model(True), num_hops=1, num_rollouts=2, shapley_steps=2, num_child=2)
        if kind == "PGExplainer":
            return cls(
                model(graph_level),
                OUT,
                **({} if graph_level else {"num_hops": 1, "explain_graph": False}),
            )
        return cls(model(graph_level), num_hops=1, num_epochs=3, log=False)

    def call(explainer: Any, graph: dgl.DGLGraph, x: Any) -> Any:
        if kind == "SubgraphX":
            return explainer.explain_graph(graph, x, target_class=0)
        if kind == "PGExplainer":
            if graph_level:
                return explainer.train_step(graph, x, 5.0), explainer.explain_graph(graph, x)
            nodes = {"user": [0]} if heterogeneous else [0]
            return (
                explainer.train_step_node(nodes, graph, x, 5.0),
                explainer.explain_node(nodes, graph, x),
            )
        if graph_level:
            return explainer.explain_graph(graph, x)
        return explainer.explain_node(*node, graph, x)

    def features(g: dgl.DGLGraph) -> Any:
        x = {n: torch.randn(g.num_nodes(n), IN) for n in g.ntypes}
        return x if heterogeneous else x["_N"]

    return on(hetero if heterogeneous else ring, build, features, call=call)


# -- embeddings ------------------------------------------------------------------------------------

_embeddings = itertools.count()


def train_embedding(optimizer: str) -> Case:
    """Rows of an embedding after each of some steps.

    Its storage is shared memory, and has a name of its own among all processes that run tests.
    """

    def call(_: None, rows: torch.Tensor) -> list[torch.Tensor]:
        name = f"test_nn_{os.getpid()}_{next(_embeddings)}"
        embedding = dglnn.NodeEmbedding(N, OUT, name, init_func=nn.init.ones_, device=rows.device)
        step = getattr(dgl.optim, optimizer)([embedding], lr=0.1)
        seen = []
        for _ in range(2):
            out = embedding(rows, rows.device)
            (
                out * torch.arange(1.0, 1 + out.numel(), device=rows.device).view_as(out)
            ).sum().backward()
            step.step()
            seen += [out.detach().clone(), embedding.weight.clone()]
        return seen

    return Case(lambda: None, None, (torch.tensor([0, 2]),), call, doubles=False)


def walk_and_embed(model: dglnn.DeepWalk, graph: dgl.DGLGraph, walks: torch.Tensor) -> Any:
    """The loss of given walks; the model's own are checked to follow edges."""
    own = model.sample(torch.arange(3, dtype=graph.idtype, device=graph.device))
    steps = own[:, :-1].flatten(), own[:, 1:].flatten()
    assert own.shape == (3, 5) and bool(graph.has_edges_between(*steps).all())
    return model(walks)


def walk_metapaths(
    model: dglnn.MetaPath2Vec, graph: dgl.DGLGraph, *pairs: torch.Tensor
) -> torch.Tensor:
    centre, context, negative = model.sample(
        torch.arange(2, dtype=graph.idtype, device=graph.device)
    )
    assert len(centre) == len(context) == len(negative) and negative.shape[1] == 5
    assert int(torch.cat([centre, context, negative.flatten().cpu()]).max()) < graph.num_nodes()
    return model(*pairs)


# -- transformers ----------------------------------------------------------------------------------


def encode_laplacian(encoder: nn.Module, graph: dgl.DGLGraph) -> torch.Tensor:
    # Fewer eigenvectors are approximated, from a random vector.
    vectors, values = dgl.lap_pe(graph, N - 2, padding=True, return_eigval=True)
    # The sign of an eigenvector is arbitrary.
    values, vectors = values.to(graph.device), vectors.to(graph.device)
    return encoder(values.repeat(graph.num_nodes(), 1), vectors.abs())


def encode_paths(encoder: nn.Module, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
    distance, path = dgl.shortest_dist(graph, root=None, return_paths=True)
    return encoder(distance.unsqueeze(0), x[path].unsqueeze(0))


def neighbours_of_points(*algorithms: str) -> Call:
    """Edges of the graphs of nearest neighbours, sorted."""

    def call(model: nn.Module, points: torch.Tensor, *segments: Any) -> Any:
        seen = []
        for algorithm, distance in itertools.product(algorithms, ("euclidean", "cosine")):
            g = model(points, *segments, algorithm=algorithm, dist=distance)
            source, target = g.edges()
            seen.append((source * len(points) + target).sort().values)
        return seen

    return call


# -- the table -------------------------------------------------------------------------------------

SAGE = ("mean", "gcn", "pool", "lstm")
PNA = (["mean", "max", "min", "std", "var", "sum"], ["identity", "amplification", "attenuation"])
KNN = ("bruteforce-blas", "bruteforce")


def by_relation(aggregate: Any, allow_zero: bool = True) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        convs = {
            "follows": dglnn.GraphConv(IN, OUT, norm="right", allow_zero_in_degree=allow_zero),
            "plays": dglnn.SAGEConv(IN, OUT, "mean"),
            "played-by": dglnn.GATConv(IN, OUT, 1, allow_zero_in_degree=allow_zero),
        }
        layer = dglnn.HeteroGraphConv(convs, aggregate)
        layer.mods["played-by"].register_forward_hook(lambda _, __, out: out.squeeze(1))
        return layer

    return build


CASES: dict[str, Case] = {
    # convolutions
    "AGNNConv": on(ring, dglnn.AGNNConv, nodes_feat),
    "AGNNConv-block": on(block, dglnn.AGNNConv, pair),
    "APPNPConv": on(ring, lambda: dglnn.APPNPConv(3, 0.5, edge_drop=0.2), nodes_feat),
    "APPNPConv-weighted": on(
        ring,
        lambda: dglnn.APPNPConv(3, 0.5),
        nodes_feat,
        weights,
        call=with_keywords("edge_weight"),
    ),
    "AtomicConv": on(
        ring,
        lambda: dglnn.AtomicConv(torch.ones(3) * 2, torch.rand(3), torch.rand(3)),
        lambda g: feat(N, 1),
        lambda g: feat(g.num_edges(), 1),
    ),
    "CFConv": on(ring, lambda: dglnn.CFConv(IN, EDGE_IN, 5, OUT), nodes_feat, edges_feat),
    "CFConv-block": on(block, lambda: dglnn.CFConv(IN, EDGE_IN, 5, OUT), pair, edges_feat),
    "ChebConv": on(ring, lambda: dglnn.ChebConv(IN, OUT, 3), nodes_feat, torch.tensor([2.0])),
    "ChebConv-uneven": on(uneven, lambda: dglnn.ChebConv(IN, OUT, 2), nodes_feat),
    "DGNConv": on(
        ring,
        lambda: dglnn.DGNConv(IN, OUT, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5),
        nodes_feat,
        None,
        lambda g: torch.rand(N, 2),
    ),
    "DGNConv-edges": on(
        ring,
        lambda: dglnn.DGNConv(
            IN, OUT, ["dir1-dx", "mean"], ["attenuation"], 2.5, edge_feat_size=EDGE_IN
        ),
        nodes_feat,
        edges_feat,
        lambda g: torch.rand(N, 2),
    ),
    "DenseChebConv": apart(
        lambda: dglnn.DenseChebConv(IN, OUT, 2), lambda _: torch.eye(N), values(N, IN), 2.0
    ),
    "DenseGraphConv": apart(
        lambda: dglnn.DenseGraphConv(IN, OUT), lambda _: torch.eye(N), values(N, IN)
    ),
    "DenseSAGEConv": apart(
        lambda: dglnn.DenseSAGEConv(IN, OUT), lambda _: torch.eye(N), values(N, IN)
    ),
    "DotGatConv": on(ring, lambda: dglnn.DotGatConv(IN, OUT, 2), nodes_feat),
    "DotGatConv-block": on(block, lambda: dglnn.DotGatConv((IN, IN), OUT, 2), pair),
    "DotGatConv-attention": on(
        ring,
        lambda: dglnn.DotGatConv(IN, OUT, 2),
        nodes_feat,
        True,
        call=with_keywords("get_attention"),
    ),
    "EGATConv": on(
        ring, lambda: dglnn.EGATConv(IN, EDGE_IN, OUT, 2, num_heads=2), nodes_feat, edges_feat
    ),
    "EGATConv-block": on(
        block, lambda: dglnn.EGATConv((IN, IN), EDGE_IN, OUT, 2, num_heads=2), pair, edges_feat
    ),
    "EGATConv-weighted": on(
        ring,
        lambda: dglnn.EGATConv(IN, EDGE_IN, OUT, 2, num_heads=2),
        nodes_feat,
        edges_feat,
        weights,
        True,
        call=with_keywords("edge_weight", "get_attention"),
    ),
    "EGNNConv": on(
        uneven,  # a self-loop has length 0, where a norm has no gradient
        lambda: dglnn.EGNNConv(IN, 5, OUT, EDGE_IN),
        nodes_feat,
        lambda g: feat(g.num_nodes(), 3),
        edges_feat,
    ),
    "EdgeConv": on(ring, lambda: dglnn.EdgeConv(IN, OUT, batch_norm=True), nodes_feat),
    "EdgeConv-uneven": on(
        uneven, lambda: dglnn.EdgeConv(IN, OUT, allow_zero_in_degree=True), nodes_feat
    ),
    "EdgeConv-block": on(block, lambda: dglnn.EdgeConv(IN, OUT), pair),
    "EdgeGATConv": on(ring, lambda: dglnn.EdgeGATConv(IN, EDGE_IN, OUT, 2), nodes_feat, edges_feat),
    "EdgeGATConv-block": on(
        block, lambda: dglnn.EdgeGATConv((IN, IN), EDGE_IN, OUT, 2), pair, edges_feat
    ),
    "EdgeGATConv-uneven": on(
        uneven,
        lambda: dglnn.EdgeGATConv(IN, EDGE_IN, OUT, 2, allow_zero_in_degree=True),
        nodes_feat,
        edges_feat,
        True,
        call=with_keywords("get_attention"),
    ),
    **{
        f"EdgeWeightNorm-{norm}": on(ring, lambda n=norm: dglnn.EdgeWeightNorm(n), weights)
        for norm in ("both", "right", "none")
    },
    "GATConv": on(ring, lambda: dglnn.GATConv(IN, OUT, 2, 0.1, 0.1, residual=True), nodes_feat),
    "GATConv-block": on(block, lambda: dglnn.GATConv(IN, OUT, 2), pair),
    "GATConv-uneven": on(
        uneven, lambda: dglnn.GATConv(IN, OUT, 2, allow_zero_in_degree=True), nodes_feat
    ),
    "GATConv-weighted": on(
        ring,
        lambda: dglnn.GATConv(IN, OUT, 2, activation=torch.tanh),
        nodes_feat,
        weights,
        True,
        call=with_keywords("edge_weight", "get_attention"),
    ),
    "GATv2Conv": on(ring, lambda: dglnn.GATv2Conv(IN, OUT, 2), nodes_feat),
    "GATv2Conv-shared": on(
        ring, lambda: dglnn.GATv2Conv(IN, OUT, 2, residual=True, share_weights=True), nodes_feat
    ),
    "GATv2Conv-block": on(
        block, lambda: dglnn.GATv2Conv(IN, OUT, 2), pair, True, call=with_keywords("get_attention")
    ),
    "GCN2Conv": on(ring, lambda: dglnn.GCN2Conv(IN, 1), nodes_feat, nodes_feat),
    "GCN2Conv-weighted": on(
        ring,
        lambda: dglnn.GCN2Conv(IN, 2, project_initial_features=False),
        nodes_feat,
        nodes_feat,
        weights,
        call=with_keywords("edge_weight"),
    ),
    "GINConv": on(ring, lambda: dglnn.GINConv(nn.Linear(IN, OUT), learn_eps=True), nodes_feat),
    **{
        f"GINConv-{kind}-{graph.__name__}": on(
            graph, lambda k=kind: dglnn.GINConv(nn.Linear(IN, OUT), k), inputs
        )
        for kind in ("sum", "mean", "max")
        for graph, inputs in ((uneven, nodes_feat), (block, pair))
    },
    "GINConv-weighted": on(block, dglnn.GINConv, pair, weights, call=with_keywords("edge_weight")),
    "GINEConv": on(
        ring,
        lambda: dglnn.GINEConv(nn.Linear(IN, OUT), learn_eps=True),
        nodes_feat,
        lambda g: feat(g.num_edges(), IN),
    ),
    "GINEConv-block": on(
        block,
        lambda: dglnn.GINEConv(nn.Linear(IN, OUT)),
        pair,
        lambda g: feat(g.num_edges(), IN),
    ),
    "GMMConv": on(ring, lambda: dglnn.GMMConv(IN, OUT, EDGE_IN, 3), nodes_feat, edges_feat),
    **{
        f"GMMConv-{kind}": on(
            block, lambda k=kind: dglnn.GMMConv((IN, IN), OUT, EDGE_IN, 2, k), pair, edges_feat
        )
        for kind in ("mean", "max")
    },
    "GatedGCNConv": on(ring, lambda: dglnn.GatedGCNConv(IN, EDGE_IN, OUT), nodes_feat, edges_feat),
    "GatedGraphConv": on(ring, lambda: dglnn.GatedGraphConv(IN, IN, 2, 2), nodes_feat, edge_types),
    "GatedGraphConv-one": on(uneven, lambda: dglnn.GatedGraphConv(IN, OUT + 2, 2, 1), nodes_feat),
    "GraphConv": on(ring, lambda: dglnn.GraphConv(IN, OUT), nodes_feat),
    "GraphConv-wide": on(
        ring, lambda: dglnn.GraphConv(IN, IN + 2, activation=torch.relu), nodes_feat
    ),
    **{
        f"GraphConv-{norm}-{graph.__name__}": on(
            graph,
            lambda n=norm: dglnn.GraphConv(IN, OUT, n, allow_zero_in_degree=True),
            inputs,
            weights,
            call=with_keywords("edge_weight"),
        )
        for norm in ("none", "both", "right", "left")
        for graph, inputs in ((uneven, nodes_feat), (block, pair))
    },
    "GroupRevRes": on(
        ring,
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(2, 2), 2),
        nodes_feat,
        call=lambda model, g, x: model(g, x * 1),  # it frees its input: not a leaf
    ),
    "HGTConv": on(ring, lambda: dglnn.HGTConv(IN, 2, 2, 2, 2), nodes_feat, node_types, edge_types),
    "HGTConv-presorted": on(
        ring,
        lambda: dglnn.HGTConv(IN, 2, 2, 2, 2, use_norm=True),
        nodes_feat,
        lambda g: torch.arange(N) // 3,
        edge_types,
        False,
        call=with_keywords("presorted"),
    ),
    **{
        f"NNConv-{kind}-{graph.__name__}": on(
            graph,
            lambda k=kind: dglnn.NNConv(IN, OUT, nn.Linear(EDGE_IN, IN * OUT), k, residual=True),
            inputs,
            edges_feat,
        )
        for kind in ("sum", "mean", "max")
        for graph, inputs in ((ring, nodes_feat), (block, pair))
    },
    "PNAConv": on(
        ring, lambda: dglnn.PNAConv(IN, OUT, *PNA, 2.5, edge_feat_size=2), nodes_feat, edges_feat
    ),
    "PNAConv-towers": on(ring, lambda: dglnn.PNAConv(IN, IN, *PNA, 2.5, num_towers=2), nodes_feat),
    **{
        f"RelGraphConv-{regularizer}-{graph.__name__}": on(
            graph,
            lambda r=regularizer, b=bases: dglnn.RelGraphConv(IN, 6, 2, r, b, layer_norm=True),
            nodes_feat,
            edge_types,
        )
        for regularizer, bases in ((None, None), ("basis", 2), ("bdd", 2))
        for graph in (ring, uneven)
    },
    "RelGraphConv-normed": on(
        block,
        lambda: dglnn.RelGraphConv(IN, OUT, 2, self_loop=True, activation=torch.tanh),
        nodes_feat,
        lambda g: torch.arange(g.num_edges()) // 3,
        lambda g: weights(g).detach()[:, None].requires_grad_(),
        True,
        call=with_keywords("norm", "presorted"),
    ),
    **{
        f"SAGEConv-{kind}-{graph.__name__}": on(
            graph, lambda k=kind: dglnn.SAGEConv(IN, OUT, k), inputs
        )
        for kind in SAGE
        for graph, inputs in ((ring, nodes_feat), (block, pair), (uneven, nodes_feat))
    },
    **{
        f"SAGEConv-{kind}-weighted": on(
            ring,
            lambda k=kind: dglnn.SAGEConv(IN, OUT, k, norm=nn.functional.normalize),
            nodes_feat,
            weights,
            call=with_keywords("edge_weight"),
        )
        for kind in SAGE[:3]
    },
    "SGConv": on(ring, lambda: dglnn.SGConv(IN, OUT, 2), nodes_feat),
    "SGConv-weighted": on(
        uneven,
        lambda: dglnn.SGConv(IN, OUT, 2, cached=True, allow_zero_in_degree=True),
        lambda g: nodes_feat(g).detach(),  # it keeps what it made of its first input
        lambda g: weights(g).detach(),
        call=with_keywords("edge_weight"),
    ),
    "TAGConv": on(ring, lambda: dglnn.TAGConv(IN, OUT, 2), nodes_feat),
    "TAGConv-weighted": on(
        uneven,
        lambda: dglnn.TAGConv(IN, OUT),
        nodes_feat,
        weights,
        call=with_keywords("edge_weight"),
    ),
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
        batched,
        lambda: dglnn.GlobalAttentionPooling(nn.Linear(IN, 1), nn.Linear(IN, OUT)),
        nodes_feat,
        True,
        call=with_keywords("get_attention"),
    ),
    "Set2Set": on(batched, lambda: dglnn.Set2Set(IN, 2, 1), nodes_feat),
    "SetTransformerEncoder": on(
        batched, lambda: dglnn.SetTransformerEncoder(IN, 2, 2, 8), nodes_feat
    ),
    "SetTransformerEncoder-isab": on(
        batched,
        lambda: dglnn.SetTransformerEncoder(IN, 2, 2, 8, block_type="isab", m=2),
        nodes_feat,
        doubles=False,
    ),
    "SetTransformerDecoder": on(
        batched, lambda: dglnn.SetTransformerDecoder(IN, 2, 2, 8, 1, 2), nodes_feat, doubles=False
    ),
    # links, types, embeddings
    **{
        f"EdgePredictor-{op}": apart(
            lambda o=op, s=tuple(size): dglnn.EdgePredictor(o, *s, bias=bool(s)),
            values(N, IN),
            values(N, IN),
        )
        for op, *size in (("dot",), ("cos",), ("ele", IN, OUT), ("cat", IN, OUT))
    },
    "TransE": apart(lambda: dglnn.TransE(2, IN), values(N, IN), values(N, IN), torch.arange(N) % 2),
    "TransR": apart(
        lambda: dglnn.TransR(2, OUT, IN), values(N, IN), values(N, IN), torch.arange(N) % 2
    ),
    **{
        f"HeteroGraphConv-{aggregate}-{graph.__name__}": on(
            graph, by_relation(aggregate), feat_by_type
        )
        for aggregate in ("sum", "max", "min", "mean", "stack")
        for graph in (hetero, hetero_block)
    },
    "HeteroGraphConv-own": on(
        hetero,
        by_relation(lambda tensors, ntype: sum(tensors) * len(tensors)),
        feat_by_type,
    ),
    "HeteroGraphConv-weighted": on(
        lambda: dgl.edge_type_subgraph(hetero(), ["plays"]),
        lambda: dglnn.HeteroGraphConv({"plays": dglnn.GraphConv(IN, OUT, "none")}),
        lambda g: {"user": feat(3, IN), "game": feat(2, IN)},
        lambda g: {"plays": {"edge_weight": weights(g)}},
        call=with_keywords("mod_kwargs"),
    ),
    "HeteroLinear": apart(
        lambda: dglnn.HeteroLinear({"a": IN, "b": 2}, OUT),
        lambda _: {"a": feat(2, IN), "b": feat(3, 2)},
    ),
    "HeteroEmbedding": apart(
        lambda: dglnn.HeteroEmbedding({"a": 2, "b": 4}, OUT),
        {"a": torch.tensor([1]), "b": torch.tensor([0, 3])},
    ),
    **{
        f"TypedLinear-{regularizer}-{name}": apart(
            lambda r=regularizer, b=bases: dglnn.TypedLinear(IN, 6, 2, r, b),
            values(N, IN),
            types,
            name == "sorted",
            call=with_keywords("sorted_by_type"),
        )
        for regularizer, bases in ((None, None), ("basis", 2), ("bdd", 2))
        for name, types in (("mixed", torch.arange(N) % 2), ("sorted", torch.arange(N) // 3))
    },
    "NodeEmbedding-SparseAdam": train_embedding("SparseAdam"),
    "NodeEmbedding-SparseAdagrad": train_embedding("SparseAdagrad"),
    "DeepWalk": Case(
        lambda g: dglnn.DeepWalk(g, emb_dim=4, walk_length=5, window_size=2),
        ring,
        (lambda g: g, torch.tensor([[0, 1, 2, 4, 4], [5, 0, 0, 2, 3]])),
        lambda model, _, *inputs: walk_and_embed(model, *inputs),
        of_graph=True,
    ),
    "MetaPath2Vec": Case(
        lambda g: dglnn.MetaPath2Vec(g, ["plays", "played-by"], window_size=1, emb_dim=4),
        hetero,
        (torch.tensor([0, 3]), torch.tensor([4, 2]), torch.arange(10).view(2, 5) % 5),
        walk_metapaths,
        of_graph=True,
    ),
    # graph transformers
    "BiasedMHA": apart(lambda: dglnn.BiasedMHA(IN, 2), values(2, N, IN), values(2, N, N, 2)),
    "BiasedMHA-multiplied": apart(
        lambda: dglnn.BiasedMHA(IN, 2, attn_bias_type="mul"),
        values(2, N, IN),
        values(2, N, N, 2),
        lambda _: torch.eye(N).bool().expand(2, N, N),
    ),
    "DegreeEncoder": on(
        uneven,
        lambda: dglnn.DegreeEncoder(5, OUT),
        call=lambda model, g: model(torch.stack([g.in_degrees(), g.out_degrees()]).unsqueeze(1)),
    ),
    "EGTLayer": apart(
        lambda: dglnn.EGTLayer(IN, EDGE_IN, 2, 1),
        values(2, N, IN),
        values(2, N, N, EDGE_IN),
        spread=25,
    ),
    "GraphormerLayer": apart(
        lambda: dglnn.GraphormerLayer(IN, 8, 2), values(2, N, IN), values(2, N, N, 2)
    ),
    # Writes into a ReLU's output in place: with any torch, DGL's DeepSet has no backward.
    "LapPosEncoder-DeepSet": on(
        ring,
        lambda: dglnn.LapPosEncoder("DeepSet", 2, N - 2, 8),
        call=torch.no_grad()(encode_laplacian),
        doubles=False,
    ),
    "LapPosEncoder-Transformer": on(
        ring,
        lambda: dglnn.LapPosEncoder("Transformer", 2, N - 2, 8, n_head=2),
        call=encode_laplacian,
        doubles=False,
        spread=250,
    ),
    "PathEncoder": on(
        ring, lambda: dglnn.PathEncoder(2, EDGE_IN, num_heads=2), edges_feat, call=encode_paths
    ),
    "SpatialEncoder": on(
        ring,
        lambda: dglnn.SpatialEncoder(3, 2),
        call=lambda model, g: model(dgl.shortest_dist(g, root=None).unsqueeze(0)),
    ),
    "SpatialEncoder3d": apart(lambda: dglnn.SpatialEncoder3d(4, 2), values(1, N, 3)),
    "SpatialEncoder3d-types": apart(
        lambda: dglnn.SpatialEncoder3d(4, 2, max_node_type=3),
        values(1, N, 3),
        torch.arange(N)[None] % 3,
    ),
    # containers and factories
    **{
        f"JumpingKnowledge-{mode}": apart(
            lambda m=mode: dglnn.JumpingKnowledge(m, IN, 2), lambda _: [feat(N, IN), feat(N, IN)]
        )
        for mode in ("cat", "max", "lstm")
    },
    "LabelPropagation": on(ring, lambda: dglnn.LabelPropagation(3, 0.5), node_types),
    "LabelPropagation-masked": on(
        uneven,
        lambda: dglnn.LabelPropagation(2, 0.5, "row", clamp=False, normalize=True, reset=True),
        node_types,
        torch.arange(N + 1) < 4,
        call=with_keywords("mask"),
    ),
    "Sequential": on(
        ring, lambda: dglnn.Sequential(dglnn.GraphConv(IN, 5), dglnn.GraphConv(5, OUT)), nodes_feat
    ),
    "Sequential-graphs": on(
        ring,
        lambda: dglnn.Sequential(dglnn.GraphConv(IN, 5), dglnn.GraphConv(5, OUT)),
        lambda g: dgl.reverse(g),
        nodes_feat,
        call=lambda model, first, second, x: model([first, second], x),
    ),
    "WeightBasis": apart(lambda: dglnn.WeightBasis((2, 3), 2, 4)),
    "KNNGraph": apart(
        lambda: dglnn.KNNGraph(2),
        lambda _: torch.rand(N, 3),
        call=neighbours_of_points(*KNN),
    ),
    "SegmentedKNNGraph": apart(
        lambda: dglnn.SegmentedKNNGraph(2),
        lambda _: torch.rand(N, 3),
        [4, 2],
        call=neighbours_of_points(*KNN),
    ),
    "RadiusGraph": apart(
        lambda: dglnn.RadiusGraph(0.5),
        lambda _: torch.rand(N, 3),
        True,
        call=with_keywords("get_distances"),
    ),
    # explainers
    "GNNExplainer": explained(dglnn.GNNExplainer),
    "GNNExplainer-node": explained(dglnn.GNNExplainer, graph_level=False),
    "HeteroGNNExplainer": explained(dglnn.HeteroGNNExplainer),
    "HeteroGNNExplainer-node": explained(dglnn.HeteroGNNExplainer, graph_level=False),
    "PGExplainer": explained(dglnn.PGExplainer),
    "PGExplainer-node": explained(dglnn.PGExplainer, graph_level=False),
    "HeteroPGExplainer": explained(dglnn.HeteroPGExplainer),
    "HeteroPGExplainer-node": explained(dglnn.HeteroPGExplainer, graph_level=False),
    "SubgraphX": explained(dglnn.SubgraphX),
    "HeteroSubgraphX": explained(dglnn.HeteroSubgraphX),
}

#: Wrappers round RAPIDS' kernels: DGL itself runs them on a GPU with pylibcugraphops only.
NEEDS_CUGRAPH = {"CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"}
