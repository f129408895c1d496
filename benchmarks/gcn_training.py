"""Training of a GCN on a rank's part of a graph: what benchmarks of its epochs share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.nn import GraphConv  # isort: skip

from benchmarks.fullgraph import Shape, random_rows
from dgl_mgpu.fullgraph.gcn import GCN

#: The largest errors of the loss and of gradients, relative to their size.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
#: The contender that others are compared with, and how those are called that keep sums.
PEER, KEPT = "GraphConv fp32", ", input sums kept"


def tolerance_of(contender: str) -> float:
    """By the precision of its products."""
    return TOLERANCES[contender.removesuffix(KEPT).split()[1]]


class Stack(torch.nn.Module):
    """What a user of DGL writes."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            GraphConv(*ends, allow_zero_in_degree=True) for ends in pairwise(widths)
        )

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(g, torch.relu(x) if number else x)
        return x


@dataclass
class Setting:
    """A rank's part of a graph, and what is trained on it.

    Attributes
    ----------
    g : DGLGraph
    x, labels : Tensor
        A row and a class for each of the rank's nodes: a node has the same on every rank.
    num_nodes : int
        Of the whole graph.
    widths : tuple of int
    """

    g: dgl.DGLGraph
    x: torch.Tensor
    labels: torch.Tensor
    num_nodes: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, g: dgl.DGLGraph, shape: Shape, widths: tuple[int, ...]) -> Setting:
        """A part of a graph of some shape, with random features and labels."""
        own = g.ndata[dgl.NID]
        # Classes differ in size and features have a mean: so do gradients, which are compared.
        skewed = random_rows(own + shape.nodes, 1).squeeze(1).square()
        labels = (shape.classes * skewed).long()
        return cls(g, random_rows(own, shape.features), labels, shape.nodes, widths)

    def training(self, contender: str) -> Training:
        """'GraphConv' or 'GCN' and the precision of products, a GCN's with `KEPT` or without."""
        kind, precision = contender.removesuffix(KEPT).split()
        torch.manual_seed(0)
        model: torch.nn.Module = Stack(self.widths)
        if kind == "GCN":
            start = model.state_dict()
            model = GCN(
                self.widths,
                keep_input_sums=contender.endswith(KEPT),
                activation_dtype=torch.bfloat16 if precision == "bf16" else None,
                allow_zero_in_degree=True,
            )
            model.load_state_dict(start)
        return Training(model.to(self.x.device), precision, self)


class Training:
    """A model that trains on a rank's part of a graph.

    Parameters
    ----------
    model : Module
    precision : {'fp32', 'tf32', 'bf16'}
        Of dense products.
    on : Setting
    """

    def __init__(self, model: torch.nn.Module, precision: str, on: Setting) -> None:
        self.model, self.precision, self.on = model, precision, on
        self._x = on.x.bfloat16() if precision == "bf16" else on.x
        self._optimizer = torch.optim.Adam(
            model.parameters(), lr=1e-3, fused=on.x.device.type == "cuda"
        )

    def gradients(self) -> torch.Tensor:
        """The loss of all ranks' nodes, detached; parameters have the gradients of all ranks."""
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        self._optimizer.zero_grad(set_to_none=True)
        out = self.model(self.on.g, self._x)
        loss = functional.cross_entropy(out.float(), self.on.labels, reduction="sum")
        loss = loss / self.on.num_nodes
        del out
        loss.backward()
        total = loss.detach()
        if dist.is_initialized():
            found = gradients_of(self.model)
            flat = torch.cat([total.view(1), *(each.flatten() for each in found)])
            dist.all_reduce(flat)
            total, *summed = flat.split([1, *(each.numel() for each in found)])
            for each, sums in zip(found, summed, strict=True):
                each.copy_(sums.view_as(each))
        return total.view(1)

    def epoch(self, _: Any = None) -> None:
        """Train once over all nodes."""
        self.gradients()
        self._optimizer.step()


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of the parameters, which all have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
