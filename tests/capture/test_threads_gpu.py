"""Captures while other threads use the GPU, as a loader's thread does."""

from __future__ import annotations

import contextlib
import threading

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import SAGEConv
from torch import nn

import dgl_mgpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Waiting(threading.Thread):
    """Makes the host wait for the GPU again and again, on a stream of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.count, self.error, self.is_over = 0, None, False

    def run(self):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not self.is_over:
                    self.count += torch.ones(100, device="cuda").sum().item() == 100
        except Exception as error:
            self.error = error


class Model(nn.Module):
    def __init__(self, waits):
        super().__init__()
        self.conv, self.waits = SAGEConv(8, 3, "mean"), waits

    def forward(self, blocks, x):
        if self.waits:
            x = x * x.sum().item()
        return self.conv(blocks[0], x)


@pytest.mark.parametrize("waits", [False, True])
def test_threads_that_wait_for_the_gpu_are_left_alone(waits):
    torch.manual_seed(0)
    g = dgl.rand_graph(500, 4000).to("cuda")
    g.ndata["x"] = torch.randn(500, 8, device="cuda")
    model = Model(waits).cuda()
    loader = DataLoader(g, torch.arange(480, device="cuda"), NeighborSampler([4]), batch_size=32)
    dgl_mgpu.capture_models()
    other = Waiting()
    other.start()
    names = set()
    try:
        with (
            pytest.warns(UserWarning, match="not as a CUDA graph")
            if waits
            else contextlib.nullcontext()
        ):
            for _, _, blocks in [*loader, *loader]:
                out = model(blocks, blocks[0].srcdata["x"])
                F.mse_loss(out, torch.zeros_like(out)).backward()
                names.add(type(out.grad_fn).__name__)
    finally:
        dgl_mgpu.capture_models(False)
        other.is_over = True
        other.join(60)
    assert other.error is None and other.count > 0
    assert "_ReplayBackward" in names  # of the layer alone, where the model waits
