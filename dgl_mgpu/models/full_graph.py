"""Models that are trained on a whole graph: those of mini-batches, a GCN in less memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dgl
import torch
from torch import nn

from dgl_mgpu.config.schema import FullGraphConfig, ModelConfig
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.models import homogeneous as models
from dgl_mgpu.models.gcn import FullGraphGCN
from dgl_mgpu.models.gcn.passes import dropped
from dgl_mgpu.models.heterogeneous import HeteroInputs, RelationalModel, build_relational_model
from dgl_mgpu.models.homogeneous import Dropout

#: Of activations, None for that of the features.
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class LeanGCN(nn.Module):
    """The mini-batch GCN (`build_model('gcn', …)`) on a whole graph, computed by `FullGraphGCN`.

    As there, dropout is of the input too: then its sums differ in every epoch and are not kept.
    Neither are those of rows that are learned.
    """

    #: Features may be `HostRows`; other models are lent tensors (`offload_hooks`).
    takes_host_rows = True

    def __init__(
        self,
        widths: list[int],
        config: ModelConfig,
        options: FullGraphConfig,
        embedding: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.dropout = Dropout(config.dropout)
        self.gcn = FullGraphGCN(
            widths,
            dropout=config.dropout,
            keep_input_sums=options.keep_input_sums and not config.dropout and embedding is None,
            keep_every=options.keep_every,
            activation_dtype=_DTYPES[options.activations],
            allow_zero_in_degree=True,
        )

    def forward(self, graph: dgl.DGLGraph, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits of this rank's nodes, shape (nodes, classes).

        From their features ``"feat"``, or with an embedding from their ids `dgl.NID`.
        """
        rows = inputs["feat"] if self.embedding is None else self.embedding(inputs[dgl.NID])
        if isinstance(rows, HostRows):
            rate = self.dropout.p if self.dropout.training else 0.0
            return self.gcn(graph, dropped(graph, rows, rate) if rate else rows)
        return self.gcn(graph, self.dropout(rows))


def build_model(
    config: ModelConfig,
    num_features: int,
    num_classes: int,
    num_layers: int,
    options: FullGraphConfig | None = None,
    num_learned: int = 0,
) -> nn.Module:
    """The model that a configuration names, for a whole graph.

    Without features, each of its ``num_learned`` nodes learns a row, of width ``num_features``. As
    those of types without features in `build_whole_relational_model`, all ranks have all rows.

    Where `dgl_mgpu.models.homogeneous.build_model` draws the same random numbers, it makes a model
    of the same parameters.
    """
    embedding = _learned_rows(num_learned, num_features) if num_learned else None
    if config.name == "gcn":
        widths = models.layer_widths(config, num_features, num_classes, num_layers)
        return LeanGCN(widths, config, options or FullGraphConfig(), embedding)
    return models.build_model(config, num_features, num_classes, num_layers, embedding)


def _learned_rows(count: int, width: int) -> nn.Embedding:
    rows = nn.Embedding(count, width)
    nn.init.xavier_uniform_(rows.weight)
    return rows


def build_whole_relational_model(
    config: ModelConfig,
    width: int,
    num_classes: int,
    num_layers: int,
    inputs: HeteroInputs,
    num_nodes: Mapping[str, int],
) -> RelationalModel:
    """The model that a configuration names, for a whole heterogeneous graph.

    Nodes of types without features learn a row each. All ranks have all of these rows, as other
    parameters, and look up those of their own nodes: every row has a gradient in every epoch.
    Arguments are those of `build_relational_model`, without embeddings; ``num_nodes`` is of the
    whole graph, by type.
    """
    embeddings = {
        ntype: _learned_rows(num_nodes[ntype], width)
        for ntype in inputs.ntypes
        if ntype not in inputs.widths
    }
    inputs = replace(inputs, embeddings=embeddings)
    return build_relational_model(config, width, num_classes, num_layers, inputs, whole=True)
