"""Training scripts as DGL's tutorials have them, for benchmarks of how long their steps take.

They know nothing of this package: a ``DataLoader``, a model that is called with a mini-batch's
blocks, a loss, and fused Adam.  Three kinds: classes of nodes, classes of nodes of a graph of
several types, and links, with negative ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler  # isort: skip
from dgl.dataloading.negative_sampler import Uniform  # isort: skip
from dgl.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv  # isort: skip

from benchmarks.gpu import this_device

FEATURES, HIDDEN, CLASSES = 128, 256, 47
#: Types of nodes of a graph of several, and of edges between them.
NTYPES = "even", "odd"
ETYPES = tuple((source, f"{source}_to_{target}", target) for source in NTYPES for target in NTYPES)


class Model(nn.Module):
    """Layers with ReLU and dropout in between."""

    def __init__(self, layers: Sequence[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        """Scores of the seeds."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x).flatten(1)
            if layer is not self.layers[-1]:
                x = self.dropout(F.relu(x))
        return x


def widths(depth: int) -> itertools.pairwise[tuple[int, int]]:
    """Numbers that a layer is given and makes, by layer."""
    return itertools.pairwise([FEATURES, *[HIDDEN] * (depth - 1), CLASSES])


def sage(depth: int) -> Model:
    """GraphSAGE."""
    return Model([SAGEConv(given, made, "mean") for given, made in widths(depth)])


def sage_with_dropout(depth: int) -> Model:
    """GraphSAGE, with dropout."""
    return Model([SAGEConv(given, made, "mean") for given, made in widths(depth)], 0.5)


def gcn(depth: int) -> Model:
    """GCN, which looks for nodes without in-edges."""
    return Model([GraphConv(given, made) for given, made in widths(depth)])


def gin(depth: int) -> Model:
    """GIN."""
    return Model([GINConv(nn.Linear(given, made), "sum") for given, made in widths(depth)])


def gat(depth: int) -> Model:
    """GAT with 4 heads of 64."""
    *inner, (last, _) = widths(depth)
    return Model(
        [*(GATConv(given, HIDDEN // 4, 4) for given, _ in inner), GATConv(last, CLASSES, 1)]
    )


class RGCN(nn.Module):
    """A GCN layer for each type of edges, whose results are added up; scores of the first type."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HeteroGraphConv(
                {
                    name: GraphConv(given, made, norm="right", allow_zero_in_degree=True)
                    for _, name, _ in ETYPES
                }
            )
            for given, made in widths(depth)
        )

    def forward(self, blocks: Sequence[Any], x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Scores of the seeds."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = {ntype: F.relu(rows) for ntype, rows in x.items()}
        return x[NTYPES[0]]


class LinkPredictor(nn.Module):
    """GraphSAGE of one width, and a perceptron of the products of both ends."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        every = itertools.pairwise([FEATURES, *[HIDDEN] * depth])
        self.sage = Model([SAGEConv(given, made, "mean") for given, made in every])
        self.predictor = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )  # fmt: skip

    def forward(
        self, pairs: Any, no_pairs: Any, blocks: Sequence[Any], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of pairs that are edges, and of others."""
        h = self.sage(blocks, x)
        (src, dst), (other_src, other_dst) = pairs.edges(), no_pairs.edges()
        return self.predictor(h[src] * h[dst]), self.predictor(h[other_src] * h[other_dst])


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes
    ----------
    model : callable
        Of the number of layers.
    batch : int
        Seeds of a mini-batch: nodes, or edges of a :class:`LinkPredictor`.
    fanouts : tuple of int
    use_uva : bool
        Whether the graph and features are in the host's memory.
    """

    model: Callable[[int], nn.Module]
    batch: int
    fanouts: tuple[int, ...]
    use_uva: bool = False

    @property
    def name(self) -> str:
        """What results have."""
        memory = ", use_uva" if self.use_uva else ""
        kind = {RGCN: "rgcn", LinkPredictor: "links"}.get(self.model) or self.model.__name__
        return f"{kind} {self.batch} at {','.join(map(str, self.fanouts))}{memory}"

    @property
    def is_typed(self) -> bool:
        """Whether its graph has several types of nodes and of edges."""
        return self.model is RGCN

    @property
    def modes(self) -> tuple[str, ...]:
        """How it runs.  A captured step takes one kind of script, and refuses what GCN and GAT do:
        they look at the GPU."""
        has_step = self.model not in (gcn, gat, RGCN, LinkPredictor) and not self.use_uva
        return ("eager", "captured", *(["step"] if has_step else []))


CASES = (
    Case(sage, 1024, (15, 10, 5)),
    Case(sage, 1024, (25, 10)),
    Case(sage, 6000, (25, 10)),
    Case(sage_with_dropout, 1024, (15, 10, 5)),
    Case(gcn, 1024, (15, 10, 5)),
    Case(gin, 1024, (15, 10, 5)),
    Case(gat, 1024, (15, 10, 5)),
    Case(RGCN, 1024, (15, 10)),
    Case(LinkPredictor, 1024, (15, 10, 5)),
    Case(sage, 1024, (15, 10, 5), use_uva=True),
)


class Script(NamedTuple):
    """What a script makes before its first step; ``loss`` is that of a mini-batch."""

    loader: DataLoader
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], torch.Tensor]


def script(g: dgl.DGLGraph, case: Case, steps: int) -> Script:
    """A script of so many steps, repeatable from its seed."""
    torch.manual_seed(0)
    dgl.seed(0)
    device = this_device()
    model = case.model(len(case.fanouts)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    is_of_links = case.model is LinkPredictor
    sampler = NeighborSampler(case.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    if case.is_typed:
        sampler = NeighborSampler(
            case.fanouts,
            prefetch_node_feats={ntype: ["feat"] for ntype in NTYPES},
            prefetch_labels={NTYPES[0]: ["label"]},
        )
    elif is_of_links:
        sampler = as_edge_prediction_sampler(
            NeighborSampler(case.fanouts, prefetch_node_feats=["feat"]),
            negative_sampler=Uniform(1),
        )
    number = g.num_edges() if is_of_links else g.num_nodes(NTYPES[0] if case.is_typed else None)
    seeds = torch.arange(steps * case.batch, dtype=g.idtype) % number
    if not case.use_uva:
        seeds = seeds.to(device)
    loader = DataLoader(
        g,
        {NTYPES[0]: seeds} if case.is_typed else seeds,
        sampler,
        batch_size=case.batch,
        device=device,
        use_uva=case.use_uva,
    )

    def loss_of_nodes(batch: Any) -> torch.Tensor:
        _, _, blocks = batch
        scores = model(blocks, blocks[0].srcdata["feat"])
        labels = blocks[-1].dstdata["label"]
        return F.cross_entropy(scores, labels[NTYPES[0]] if case.is_typed else labels)

    def loss_of_links(batch: Any) -> torch.Tensor:
        _, pairs, no_pairs, blocks = batch
        scores = torch.cat(model(pairs, no_pairs, blocks, blocks[0].srcdata["feat"]))
        labels = torch.zeros_like(scores)
        labels[: pairs.num_edges()] = 1
        return F.binary_cross_entropy_with_logits(scores, labels)

    return Script(loader, model, optimizer, loss_of_links if is_of_links else loss_of_nodes)


def made_graph(indptr: torch.Tensor, src: torch.Tensor) -> dgl.DGLGraph:
    """With self-loops, features and labels."""
    nodes, device = len(indptr) - 1, indptr.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    g = dgl.add_self_loop(dgl.graph(("csc", (indptr.int(), src, none)))).formats("csc")
    g.ndata["feat"] = torch.randn(nodes, FEATURES, device=device)
    g.ndata["label"] = torch.randint(CLASSES, (nodes,), device=device)
    return g


def graph_for(case: Case, g: dgl.DGLGraph) -> dgl.DGLGraph:
    """The graph that a case runs on, of one that :func:`made_graph` has made."""
    if case.is_typed:
        return _typed_graph(g)
    if case.model is LinkPredictor:
        g = g.formats(["coo", "csc"])  # ends of edges are looked up
        g.create_formats_()
    elif case.use_uva:
        g = g.to("cpu")  # which the loader pins
    return g


def _typed_graph(g: dgl.DGLGraph) -> dgl.DGLGraph:
    """Nodes of a graph with even and odd ids as two types, with their features and labels."""
    indptr, src, _ = g.adj_tensors("csc")
    nodes = torch.arange(g.num_nodes(), dtype=g.idtype, device=g.device)
    dst = nodes.repeat_interleave(indptr.diff(), output_size=len(src))
    edges = {}
    for source, name, target in ETYPES:
        at = (src % 2 == NTYPES.index(source)) & (dst % 2 == NTYPES.index(target))
        edges[source, name, target] = src[at] // 2, dst[at] // 2
    counts = {ntype: len(nodes[odd::2]) for odd, ntype in enumerate(NTYPES)}
    typed = dgl.heterograph(edges, counts, idtype=g.idtype)
    for name in ("feat", "label"):
        for odd, ntype in enumerate(NTYPES):
            typed.nodes[ntype].data[name] = g.ndata[name][odd::2].contiguous()
    typed.create_formats_()
    return typed.formats("csc")
