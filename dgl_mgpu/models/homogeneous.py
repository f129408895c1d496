"""Models made of ``dgl.nn`` modules, on message-flow graphs or on a whole graph.

Each takes the blocks of a mini-batch and the features of its input nodes and gives the logits
of its seed nodes; or one graph, which each layer goes over, and gives the logits of its nodes. The
graph may be a rank's part of one.  ``inputs`` names the node features a model wants on blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import dgl
import dgl.function as fn
import torch
from dgl.nn import GATConv, GINConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn

from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.errors import ConfigError

#: Node feature with 1 / sqrt(out-degree) and 1 / sqrt(in-degree), for GCN's normalisation.
INV_SQRT_DEGREES = "inv_sqrt_degrees"
#: Edge feature with the visit counts that PinSAGE's sampler leaves in its blocks.
VISITS = "visits"

#: Rows of all nodes, or by node type.
Features = Any

# Chances are multiples of one in so many, which a draw of 16 bits is compared with.
_CHANCES = 1 << 16


class Dropout(nn.Dropout):
    """``nn.Dropout``, of which torch's generator draws four elements at a time on CPUs.

    Torch draws each by itself there, on one core: a third of the time of GraphSAGE's steps on two.
    The chance is the nearest multiple of 2^-16, and means stay exactly.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with elements dropped out, of any shape."""
        taken = round(self.p * _CHANCES)
        draws_words = rows.device.type == "cpu" and self.training and 0 < taken < _CHANCES
        # Compilers do not know how these are drawn, and draw torch's by themselves.
        if not draws_words or torch.compiler.is_compiling():
            return super().forward(rows)
        words = torch.empty(-(-rows.numel() // 4), dtype=torch.int64, device=rows.device)
        draws = words.random_(torch.iinfo(torch.int64).min, None).view(torch.int16)
        keep = draws[: rows.numel()].view(rows.shape) >= taken - _CHANCES // 2
        return rows * keep.to(rows.dtype).mul_(_CHANCES / (_CHANCES - taken))


class NodeModel(nn.Module):
    """A stack of convolutions, one a layer, with an activation and dropout between them.

    With ``drop_input`` there is dropout before the first convolution as well.
    """

    inputs: tuple[str, ...] = ("feat",)

    def __init__(
        self, convolutions: list[nn.Module], dropout: float, *, drop_input: bool = False
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        #: Gives rows for the ids of nodes, in place of their features.
        self.embedding: nn.Module | None = None
        self.dropout = Dropout(dropout)
        self._drop_input = drop_input

    def learn_inputs(self, embedding: nn.Module) -> None:
        """Take rows of an embedding in place of features, which are of nodes' ids alone."""
        self.embedding = embedding
        self.inputs = (dgl.NID, *(name for name in self.inputs if name != "feat"))

    def forward(
        self, graphs: dgl.DGLGraph | Sequence[dgl.DGLGraph], inputs: dict[str, Any]
    ) -> torch.Tensor:
        """Logits of the seed nodes, or of a graph's nodes, shape (nodes, classes).

        The model goes over one graph in each layer, or over a block for each.  Inputs are of its
        nodes, or of the first block's source nodes: ``"feat"``, and on blocks what `inputs` names
        beside it; by node type, each a dict, where there are several.  A model with an embedding
        takes ids in the whole graph, `dgl.NID`, in place of features.  Without blocks there is no
        output, shape (0, 1), but gradients, all zero.
        """
        if isinstance(graphs, dgl.DGLGraph):
            graphs = [graphs] * len(self.convolutions)
        if not graphs:
            return no_logits(self)
        dtype = next(self.parameters()).dtype
        given = inputs["feat"] if self.embedding is None else self.embedding(inputs[dgl.NID])
        hidden = _map_rows(lambda rows: rows.to(dtype), given)
        for layer, graph in enumerate(graphs):
            if layer > 0 or self._drop_input:
                hidden = _map_rows(self.dropout, hidden)
            hidden = self.convolve(layer, graph, hidden, inputs)
            if layer < len(graphs) - 1:
                hidden = _map_rows(torch.relu, hidden)
        return hidden

    def convolve(self, layer: int, graph: dgl.DGLGraph, hidden: Features, inputs: dict) -> Features:
        """Apply one convolution; ``hidden`` has a row for each source node."""
        return self.convolutions[layer](graph, hidden)


class GraphSAGE(NodeModel):
    """GraphSAGE (Hamilton et al., 2017)."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__(
            [SAGEConv(i, o, config.aggregator) for i, o in _pairs(widths)], config.dropout
        )


class GCN(NodeModel):
    """GCN (Kipf and Welling, 2017) with the degrees of the whole graph.

    Blocks hold a sample of each node's in-edges, so neither their degrees nor their sums are
    the graph's: the weight of a sampled edge is the one it has in the graph, times the
    in-degree over the number of edges sampled.  With all neighbours that is GCN exactly.
    """

    inputs = ("feat", INV_SQRT_DEGREES)

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__(
            [GraphConv(i, o, allow_zero_in_degree=True) for i, o in _pairs(widths)],
            config.dropout,
            drop_input=True,
        )
        #: Sums over a sample, with the parameters of the convolutions.
        self._weighted_sums = [
            GraphConv(i, o, norm="none", weight=False, bias=False, allow_zero_in_degree=True)
            for i, o in _pairs(widths)
        ]

    def convolve(
        self, layer: int, graph: dgl.DGLGraph, hidden: torch.Tensor, inputs: dict
    ) -> torch.Tensor:
        convolution = self.convolutions[layer]
        if not graph.is_block:
            return convolution(graph, hidden)
        # A block's source nodes are the first of the block before it.
        source = inputs[INV_SQRT_DEGREES][: graph.num_src_nodes(), 0]
        target = inputs[INV_SQRT_DEGREES][: graph.num_dst_nodes(), 1]
        sampled = graph.in_degrees().to(source.dtype).clamp(min=1)
        # in-degree / sampled * 1 / sqrt(in-degree): what the target contributes to a weight
        scale = 1 / (sampled * target)
        src, dst = graph.edges()
        sums = self._weighted_sums[layer](
            graph,
            hidden,
            weight=convolution.weight,
            edge_weight=source[src.long()] * scale[dst.long()],
        )
        return sums + convolution.bias


class GAT(NodeModel):
    """GAT (Veličković et al., 2018); heads are joined, and averaged in the last layer."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        heads, last = config.heads, len(widths) - 2
        super().__init__(
            [
                GATConv(
                    width_in if layer == 0 else width_in * heads,
                    width_out,
                    heads,
                    attn_drop=config.dropout,
                    allow_zero_in_degree=True,
                )
                for layer, (width_in, width_out) in enumerate(_pairs(widths))
            ],
            config.dropout,
            drop_input=True,
        )
        self._last = last

    def convolve(
        self, layer: int, graph: dgl.DGLGraph, hidden: torch.Tensor, inputs: dict
    ) -> torch.Tensor:
        heads = self.convolutions[layer](graph, hidden)
        return heads.mean(1) if layer == self._last else heads.flatten(1)


class GIN(NodeModel):
    """GIN (Xu et al., 2019) with a two-layer perceptron in each convolution."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__(
            [
                GINConv(
                    nn.Sequential(
                        nn.Linear(i, config.hidden), nn.ReLU(), nn.Linear(config.hidden, o)
                    ),
                    config.aggregator,
                    learn_eps=True,
                )
                for i, o in _pairs(widths)
            ],
            config.dropout,
        )


class _ImportanceConv(nn.Module):
    """PinSAGE's convolution: neighbours weighted by how often walks visited them."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.neighbour = nn.Linear(width_in, width_in)
        self.own = nn.Linear(2 * width_in, width_out)

    def forward(self, block: dgl.DGLGraph, hidden: torch.Tensor) -> torch.Tensor:
        with block.local_scope():
            block.edata["w"] = block.edata[VISITS].to(hidden.dtype)
            block.srcdata["h"] = torch.relu(self.neighbour(hidden))
            block.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "h"))
            block.update_all(fn.copy_e("w", "m"), fn.sum("m", "total"))
            total = block.dstdata["total"].clamp(min=1).unsqueeze(-1)
            mean = block.dstdata["h"] / total
        return self.own(torch.cat([hidden[: block.num_dst_nodes()], mean], 1))


class PinSAGE(NodeModel):
    """PinSAGE (Ying et al., 2018) for node classification, as in XGNN's evaluation."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__([_ImportanceConv(i, o) for i, o in _pairs(widths)], config.dropout)


class _RelationalConv(nn.Module):
    """R-GCN's convolution: a mean and a matrix for each relation, and one matrix for nodes."""

    def __init__(
        self, width_in: int, width_out: int, etypes: Sequence[str | tuple[str, str, str]]
    ) -> None:
        super().__init__()
        self.relations = HeteroGraphConv(
            {etype: GraphConv(width_in, width_out, norm="right", bias=False) for etype in etypes}
        )
        self.own = nn.Linear(width_in, width_out)

    def forward(
        self, graph: dgl.DGLGraph, hidden: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        sums = self.relations(graph, hidden)
        own = {ntype: rows[: graph.num_dst_nodes(ntype)] for ntype, rows in hidden.items()}
        return {
            ntype: self.own(rows) + sums[ntype] if ntype in sums else self.own(rows)
            for ntype, rows in own.items()
        }


class RGCN(NodeModel):
    """R-GCN (Schlichtkrull et al., 2018), on graphs of one type of nodes or many.

    ``etypes`` are the graph's edge types, by names or canonically; logits are of type ``target``.
    """

    def __init__(
        self,
        widths: list[int],
        config: ModelConfig,
        etypes: Sequence[str | tuple[str, str, str]] = ("_E",),
        target: str = "_N",
    ) -> None:
        super().__init__([_RelationalConv(i, o, etypes) for i, o in _pairs(widths)], config.dropout)
        self._target = target

    def convolve(self, layer: int, graph: dgl.DGLGraph, hidden: Features, inputs: dict) -> Features:
        if isinstance(hidden, torch.Tensor):
            hidden = {self._target: hidden}
        out = self.convolutions[layer](graph, hidden)
        return out[self._target] if layer == len(self.convolutions) - 1 else out


_MODELS: dict[str, Callable[[list[int], ModelConfig], NodeModel]] = {
    "graphsage": GraphSAGE,
    "gcn": GCN,
    "gat": GAT,
    "gin": GIN,
    "rgcn": RGCN,
    "pinsage": PinSAGE,
}


def build_model(
    config: ModelConfig,
    num_features: int,
    num_classes: int,
    num_layers: int,
    embedding: nn.Module | None = None,
) -> NodeModel:
    """The model that a configuration names, whose nodes have features or rows of an embedding."""
    if config.name not in _MODELS:
        raise ConfigError(
            f"build model '{config.name}'",
            "there is no model of this name",
            f"name one of {', '.join(sorted(_MODELS))}",
        )
    widths = layer_widths(config, num_features, num_classes, num_layers)
    model = _MODELS[config.name](widths, config)
    if embedding is not None:
        model.learn_inputs(embedding)
    return model


def no_logits(model: nn.Module) -> torch.Tensor:
    """Logits of no nodes, shape (0, 1), whose gradients are zeros for all parameters."""
    total = torch.stack([p.sum() for p in model.parameters()]).sum()
    return total * total.new_zeros(0, 1)


def layer_widths(
    config: ModelConfig, num_features: int, num_classes: int, num_layers: int
) -> list[int]:
    """Of the input and of each layer's output."""
    return [num_features, *[config.hidden] * (num_layers - 1), num_classes]


def _map_rows(function: Callable[[torch.Tensor], torch.Tensor], features: Features) -> Features:
    if isinstance(features, dict):
        return {ntype: function(rows) for ntype, rows in features.items()}
    return function(features)


def _pairs(widths: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(widths))
