"""Models on message-flow graphs, made of ``dgl.nn`` modules.

Each takes the blocks of a mini-batch and the features of its input nodes and gives the logits
of its seed nodes.  ``inputs`` names the node features a model wants for the input nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import dgl
import dgl.function as fn
import torch
from dgl.nn import GATConv, GINConv, GraphConv, SAGEConv
from torch import nn

from dgl_mgpu.errors import ConfigError
from dgl_mgpu.minibatch.config import ModelConfig

#: Node feature with 1 / sqrt(out-degree) and 1 / sqrt(in-degree), for GCN's normalisation.
INV_SQRT_DEGREES = "inv_sqrt_degrees"
#: Edge feature with the visit counts that PinSAGE's sampler leaves in its blocks.
VISITS = "visits"


class BlockModel(nn.Module):
    """A stack of convolutions with an activation and dropout between them.

    Parameters
    ----------
    convolutions : list of nn.Module
        One for each block.
    dropout : float
        Share of activations dropped before each convolution.
    drop_input : bool
        Whether that includes the input features.
    """

    inputs: tuple[str, ...] = ("feat",)

    def __init__(
        self, convolutions: list[nn.Module], dropout: float, *, drop_input: bool = False
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.dropout = nn.Dropout(dropout)
        self._drop_input = drop_input

    def forward(self, blocks: list[dgl.DGLGraph], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of the seed nodes, float, shape (seeds, classes).

        Without blocks there is no output, shape (0, 1), but gradients, all zero.
        """
        if not blocks:
            return torch.stack([p.sum() for p in self.parameters()]).sum() * torch.zeros(0, 1)
        hidden = inputs["feat"].float()
        for layer, block in enumerate(blocks):
            if layer > 0 or self._drop_input:
                hidden = self.dropout(hidden)
            hidden = self.convolve(layer, block, hidden, inputs)
            if layer < len(blocks) - 1:
                hidden = torch.relu(hidden)
        return hidden

    def convolve(
        self, layer: int, block: dgl.DGLGraph, hidden: torch.Tensor, inputs: dict
    ) -> torch.Tensor:
        """Apply one convolution; ``hidden`` has a row for each source node of the block."""
        return self.convolutions[layer](block, hidden)


class GraphSAGE(BlockModel):
    """GraphSAGE (Hamilton et al., 2017)."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__(
            [SAGEConv(i, o, config.aggregator) for i, o in _pairs(widths)], config.dropout
        )


class GCN(BlockModel):
    """GCN (Kipf and Welling, 2017) with the degrees of the whole graph.

    Blocks hold a sample of each node's in-edges, so neither their degrees nor their sums are
    the graph's: the weight of a sampled edge is the one it has in the graph, times the
    in-degree over the number of edges sampled.  With all neighbours that is GCN exactly.
    """

    inputs = ("feat", INV_SQRT_DEGREES)

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__(
            [GraphConv(i, o, norm="none", allow_zero_in_degree=True) for i, o in _pairs(widths)],
            config.dropout,
            drop_input=True,
        )

    def convolve(
        self, layer: int, block: dgl.DGLGraph, hidden: torch.Tensor, inputs: dict
    ) -> torch.Tensor:
        # A block's source nodes are the first of the block before it.
        source = inputs[INV_SQRT_DEGREES][: block.num_src_nodes(), 0]
        target = inputs[INV_SQRT_DEGREES][: block.num_dst_nodes(), 1]
        sampled = block.in_degrees().to(source.dtype).clamp(min=1)
        # in-degree / sampled * 1 / sqrt(in-degree): what the target contributes to a weight
        scale = 1 / (sampled * target)
        src, dst = block.edges()
        weight = source[src.long()] * scale[dst.long()]
        return self.convolutions[layer](block, hidden, edge_weight=weight)


class GAT(BlockModel):
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
        self, layer: int, block: dgl.DGLGraph, hidden: torch.Tensor, inputs: dict
    ) -> torch.Tensor:
        heads = self.convolutions[layer](block, hidden)
        return heads.mean(1) if layer == self._last else heads.flatten(1)


class GIN(BlockModel):
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


class PinSAGE(BlockModel):
    """PinSAGE (Ying et al., 2018) for node classification, as in XGNN's evaluation."""

    def __init__(self, widths: list[int], config: ModelConfig) -> None:
        super().__init__([_ImportanceConv(i, o) for i, o in _pairs(widths)], config.dropout)


_MODELS: dict[str, Callable[[list[int], ModelConfig], BlockModel]] = {
    "graphsage": GraphSAGE,
    "gcn": GCN,
    "gat": GAT,
    "gin": GIN,
    "pinsage": PinSAGE,
}


def build_model(
    config: ModelConfig, num_features: int, num_classes: int, num_layers: int
) -> BlockModel:
    """The model that a configuration names.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if config.name not in _MODELS:
        raise ConfigError(
            f"build model '{config.name}'", f"models {sorted(_MODELS)}", "name one of them"
        )
    widths = [num_features, *[config.hidden] * (num_layers - 1), num_classes]
    return _MODELS[config.name](widths, config)


def _pairs(widths: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(widths))
