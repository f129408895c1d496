"""A generated graph of IGBH's schema as R-GAT is trained on it: the graph, its rows and a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip

from dgl_mgpu.data.igbh import NODE_TYPES, Igbh
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.utils.stages import stage

LEARNING_RATE = 2e-3

Blocks = Sequence[dgl.DGLGraph]


def graph_of(data: Igbh) -> dgl.DGLGraph:
    """The graph, with labels; features stay aside."""
    edges: Mapping[Any, Any] = {
        etype: ("csc", (indptr, indices, indices[:0]))  # places are ids
        for etype, (indptr, indices) in data.edges.items()
    }
    graph = dgl.heterograph(edges, data.num_nodes)
    graph.nodes["paper"].data["label"] = data.labels
    return graph


class Rows:
    """Features of all node types, read together and cast on the way."""

    def __init__(self, data: Igbh, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._views = {ntype: _rows_view(data.features_of(ntype)) for ntype in NODE_TYPES}

    def of(self, block: dgl.DGLGraph) -> torch.Tensor:
        """Those of a block's source nodes, one type after the other."""
        ids = [block.srcnodes[ntype].data[dgl.NID] for ntype in NODE_TYPES]
        counts = [len(each) for each in ids]
        (width,) = next(iter(self._views.values())).row_shape
        found = torch.empty(sum(counts), width, dtype=self._dtype, device=ids[0].device)
        for view, some, part in zip(self._views.values(), ids, found.split(counts), strict=True):
            gather_rows(view, some, part, dtype=self._dtype)
        return found


def _rows_view(rows: torch.Tensor) -> RowView:
    device = rows.device
    return RowView(
        tiers=torch.tensor([[0, len(rows), 1, 0]]).to(device),
        pointers=torch.tensor([rows.data_ptr()]).to(device),
        num_rows=len(rows),
        row_shape=tuple(rows.shape[1:]),
        dtype=rows.dtype,
        position=torch.empty(0, dtype=torch.int64, device=device),
        owner=rows,
    )


class Training:
    """A model, its optimizer and a step."""

    def __init__(self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self._device, self._dtype = model.to(device), device, dtype
        self._optimizer = torch.optim.Adam(
            model.parameters(), LEARNING_RATE, fused=device.type == "cuda"
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(self, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
        """The loss of a mini-batch, before the model learns from it."""
        labels = blocks[-1].dstnodes["paper"].data["label"]
        mixed = self._dtype != torch.float32
        with stage("forward"), torch.autocast(self._device.type, self._dtype, enabled=mixed):
            loss = functional.cross_entropy(self.model(blocks, rows), labels)
        with stage("backward"):
            self._optimizer.zero_grad()
            self._scaler.scale(loss).backward()
        with stage("update"):
            self._scaler.step(self._optimizer)
            self._scaler.update()
        return loss.detach()
