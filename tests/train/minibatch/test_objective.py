"""What a model is given of a mini-batch."""

from __future__ import annotations

import dgl
import torch
from torch import nn

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.train.minibatch.links import LinkPrediction
from tests.sampling.loaders import node_graph


class _Model(nn.Module):
    inputs = ("feat",)

    def forward(self, blocks, inputs):
        assert inputs.keys() == {"feat", dgl.NID}
        return inputs["feat"]


def test_features_that_a_model_does_not_want_are_not_read(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    g = node_graph("cpu")
    loops = dgl.graph(([0, 1], [0, 1]))
    with dgl_mgpu.GlobalStore.from_dgl(g) as store:
        nodes, _, blocks = store.graph.sample_blocks(torch.arange(9), [3])
        scores = LinkPrediction().outputs(_Model(), (nodes, loops, loops, blocks))
        expected = g.ndata["feat"][nodes[:2]].square().sum(1)
        assert torch.allclose(scores, expected[:, None].expand(2, 2))
        assert {table for table, _ in store.graph.traffic.take().rows} == {"feat"}
