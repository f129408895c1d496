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
from dgl_mgpu.distributed.exchange.collectives import Broadcast
from dgl_mgpu.distributed.exchange.schedule import Arriving, CommSchedule, Returning, nothing
from dgl_mgpu.distributed.index import PartitionedRelation
from dgl_mgpu.models.gcn import FullGraphGCN

#: The largest errors of the loss and of gradients, relative to their size.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
#: The contender that others are compared with, and how those are called that keep sums.
PEER, KEPT = "GraphConv fp32", ", input sums kept"
#: GraphConv whose rows are exchanged as CAGNET does it in one dimension: see :class:`InTurns`.
ONE_D = "1D fp32"


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


class InTurns(Broadcast):
    """A staged broadcast beside which nothing is computed.

    A rank's rows are sent when the product with those of the one before is done, as CAGNET does it
    in one dimension, where MG-GCN has two buffers for both at once.
    """

    def start(self, number: int, rows: torch.Tensor) -> Arriving:
        begin = super().start
        return lambda: begin(number, rows)()

    def start_return(self, number: int, rows: torch.Tensor) -> Returning:
        returning = super().start_return(number, rows)
        returning.wait()
        return Returning(nothing, returning.add)


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
    rounds : CommSchedule
        How the graph exchanges rows.
    """

    g: dgl.DGLGraph
    x: torch.Tensor
    labels: torch.Tensor
    num_nodes: int
    widths: tuple[int, ...]
    rounds: CommSchedule

    @classmethod
    def of(cls, g: dgl.DGLGraph, shape: Shape, widths: tuple[int, ...]) -> Setting:
        """A part of a graph of some shape, with random features and labels."""
        own = g.ndata[dgl.NID]
        # Classes differ in size and features have a mean: so do gradients, which are compared.
        skewed = random_rows(own + shape.nodes, 1).squeeze(1).square()
        labels = (shape.classes * skewed).long()
        x, rounds = random_rows(own, shape.features), _spread(g).rounds
        return cls(g, x, labels, shape.nodes, widths, rounds)

    def training(self, contender: str) -> Training:
        """'GraphConv', '1D' or 'GCN' and products' precision, a GCN's with `KEPT` or without."""
        kind, precision = contender.removesuffix(KEPT).split()
        torch.manual_seed(0)
        model: torch.nn.Module = Stack(self.widths)
        if kind == "GCN":
            start = model.state_dict()
            model = FullGraphGCN(
                self.widths,
                keep_input_sums=contender.endswith(KEPT),
                activation_dtype=torch.bfloat16 if precision == "bf16" else None,
                allow_zero_in_degree=True,
            )
            model.load_state_dict(start)
        rounds = self.rounds
        if contender == ONE_D:
            rounds = InTurns(_spread(self.g).part, rounds.group)
        return Training(model.to(self.x.device), precision, self, rounds)


def _spread(g: dgl.DGLGraph) -> PartitionedRelation:
    (spread,) = g._graph.parts
    return spread


class Training:
    """A model that trains on a rank's part of a graph.

    Parameters
    ----------
    model : Module
    precision : {'fp32', 'tf32', 'bf16'}
        Of dense products.
    on : Setting
    rounds : CommSchedule
        How rows are exchanged.
    """

    def __init__(
        self, model: torch.nn.Module, precision: str, on: Setting, rounds: CommSchedule
    ) -> None:
        self.model, self.precision, self.on, self._rounds = model, precision, on, rounds
        self._x = on.x.bfloat16() if precision == "bf16" else on.x
        self._optimizer = torch.optim.Adam(
            model.parameters(), lr=1e-3, fused=on.x.device.type == "cuda"
        )

    def gradients(self) -> torch.Tensor:
        """The loss of all ranks' nodes, detached; parameters have the gradients of all ranks."""
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        self._optimizer.zero_grad(set_to_none=True)
        _spread(self.on.g).rounds = self._rounds
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
