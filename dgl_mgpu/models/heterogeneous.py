"""R-GCN and R-GAT on heterogeneous graphs, whatever features their nodes have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dgl
import torch
from torch import nn

from dgl_mgpu.config.schema import HETERO_MODELS, ModelConfig
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.models.homogeneous import RGCN, layer_widths, no_logits
from dgl_mgpu.models.rgat import RGAT, CanonicalEtype, WholeGraphRGAT


@dataclass(frozen=True)
class HeteroInputs:
    """What a model has to know of a heterogeneous graph and its features."""

    ntypes: Sequence[str]
    canonical_etypes: Sequence[CanonicalEtype]
    target: str  # The node type that logits are of
    widths: Mapping[str, int]  # Numbers in a row of features, of the node types that have some
    # For each other node type, what gives rows for node ids
    embeddings: Mapping[str, nn.Module] = field(default_factory=dict)


def common_width(ntypes: Sequence[str], widths: Mapping[str, int], hidden: int) -> int:
    """Of the rows that go into the first layer, and of embeddings.

    That of all features, if all node types have features of one width; else ``hidden``.
    """
    distinct = {widths.get(ntype) for ntype in ntypes}
    (width,) = distinct if len(distinct) == 1 else (None,)
    return hidden if width is None else width


def reached_relations(
    canonical_etypes: Sequence[CanonicalEtype], target: str, num_layers: int
) -> list[list[CanonicalEtype]]:
    """For each layer, the relations along which something comes to nodes of type ``target``."""
    reached = {target}
    layers: list[list[CanonicalEtype]] = []
    for _ in range(num_layers):
        layers.insert(0, [etype for etype in canonical_etypes if etype[2] in reached])
        reached |= {src for src, _, _ in layers[0]}
    return layers


class InputRows(nn.Module):
    """A row of one width for each input node, whatever its type.

    Features of another width go through a linear map, one a node type; nodes of types without
    features have rows of embeddings.
    """

    def __init__(self, inputs: HeteroInputs, width: int) -> None:
        super().__init__()
        self._ntypes = tuple(inputs.ntypes)
        self.projections = nn.ModuleDict(
            {
                ntype: nn.Linear(of_features, width)
                for ntype, of_features in inputs.widths.items()
                if of_features != width
            }
        )
        # In the order in which they are looked up.
        self.embeddings = nn.ModuleDict(
            {of: inputs.embeddings[of] for of in inputs.ntypes if of in inputs.embeddings}
        )

    def forward(self, inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Rows by node type, each of shape (nodes, width), from ``"feat"`` and ids ``dgl.NID``."""
        features, nodes = (self._by_ntype(inputs.get(key, {})) for key in ("feat", dgl.NID))
        return {ntype: self._of(ntype, features, nodes, dtype) for ntype in self._ntypes}

    def _by_ntype(self, rows: torch.Tensor | Mapping[str, torch.Tensor]) -> Mapping:
        # Blocks of one node type have no dicts.
        return {self._ntypes[0]: rows} if isinstance(rows, torch.Tensor) else rows

    def _of(
        self,
        ntype: str,
        features: Mapping[str, torch.Tensor],
        nodes: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if ntype in self.embeddings:
            return self.embeddings[ntype](nodes[ntype]).to(dtype)
        rows = features[ntype].to(dtype)
        return self.projections[ntype](rows) if ntype in self.projections else rows


class RelationalModel(nn.Module):
    """R-GCN or R-GAT, and what makes its input rows."""

    inputs = ("feat",)

    def __init__(self, rows: InputRows, layers: RGCN | RGAT) -> None:
        super().__init__()
        self.rows = rows
        self.layers = layers

    def forward(
        self, graphs: dgl.DGLGraph | Sequence[dgl.DGLGraph], inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Logits of the target's nodes, those of the last block, shape (nodes, classes).

        ``graphs`` are one graph, or a block for each layer, and ``inputs`` those of `InputRows`.
        Without blocks there is no output, shape (0, 1), but gradients, all zero.
        """
        if not isinstance(graphs, dgl.DGLGraph) and not graphs:
            return no_logits(self)
        rows = self.rows(inputs, next(self.layers.parameters()).dtype)
        return self.layers(graphs, {"feat": rows} if isinstance(self.layers, RGCN) else rows)


def build_relational_model(
    config: ModelConfig, width: int, num_classes: int, num_layers: int, inputs: HeteroInputs,
    *, whole: bool = False,
) -> RelationalModel:  # fmt: skip
    """The model that a configuration names, for a heterogeneous graph, or ``whole`` ones alone.

    Input rows have ``width`` numbers (`common_width`).  Raises ConfigError if it is no model of
    such graphs; InvalidInputError if R-GAT's heads do not divide its width, or no relation leads to
    a node type.
    """
    etypes, target = list(inputs.canonical_etypes), inputs.target
    layers: RGCN | RGAT
    if config.name == "rgcn":
        widths = layer_widths(config, width, num_classes, num_layers)
        layers = RGCN(widths, config, etypes, target)
    elif config.name == "rgat":
        layers = (WholeGraphRGAT if whole else RGAT)(
            inputs.ntypes, etypes, target, width, num_classes,
            config.hidden, num_layers, config.heads, config.dropout,
        )  # fmt: skip
    else:
        raise ConfigError(
            f"build model '{config.name}' for a heterogeneous graph",
            "there is no model of this name for such graphs",
            f"name one of {', '.join(HETERO_MODELS)}",
        )
    model = RelationalModel(InputRows(inputs, width), layers)
    if isinstance(layers, RGCN):
        convolutions = [each.relations for each in layers.convolutions]
        _freeze_unreached(model, convolutions, etypes, target)
    elif isinstance(layers, WholeGraphRGAT):
        _freeze_unreached(model, list(layers.layers), etypes, target)
    return model


def _freeze_unreached(
    model: RelationalModel, convolutions: list[Any], etypes: list[CanonicalEtype], target: str
) -> None:
    """Leave out of training what no gradient comes to, for which ranks would wait in vain."""
    reached = reached_relations(etypes, target, len(convolutions))
    for convolution, used in zip(convolutions, reached, strict=True):
        for etype in set(etypes) - set(used):
            convolution.mods[str(etype)].requires_grad_(False)
    ntypes = {target, *(src for src, _, _ in reached[0])}
    for ntype, projection in model.rows.projections.items():
        projection.requires_grad_(ntype in ntypes)
