"""Unmodified scripts on a GPU by ``python -m dgl_mgpu --capture=on``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.environment import search_path

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)

# Like DGL's examples: it knows nothing of the runner.
SCRIPT = """
import json
import random
import sys

import dgl
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import SAGEConv


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(16, 32, "mean"), SAGEConv(32, 5, "mean")])

    def forward(self, blocks, x):
        x = F.relu(self.layers[0](blocks[0], x))
        return self.layers[1](blocks[1], x)


def names_of_nodes(loss):
    names, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        names.add(type(node).__name__)
        left += [following for following, _ in node.next_functions if following is not None]
    return names


device = sys.argv[1]
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
dgl.seed(0)
g = dgl.rand_graph(2000, 20000)
g.ndata["feat"] = torch.randn(2000, 16)
g.ndata["label"] = torch.randint(0, 5, (2000,))
g = g.to(device)
loader = DataLoader(
    g,
    torch.arange(1000, device=device),
    NeighborSampler([5, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]),
    device=device,
    batch_size=100,
    shuffle=True,
)
model = SAGE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, nodes = [], set()
for epoch in range(3):
    for input_nodes, output_nodes, blocks in loader:
        scores = model(blocks, blocks[0].srcdata["feat"])
        loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        nodes |= names_of_nodes(loss)
print(json.dumps({"losses": losses, "nodes": sorted(nodes)}))
"""


def test_a_script_learns_the_same_by_cuda_graphs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = {}
    for word in ("off", "on"):
        done = subprocess.run(
            [sys.executable, "-m", "dgl_mgpu", f"--capture={word}", str(script), "cuda"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": search_path()},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert "kernel by kernel" not in done.stderr
        found[word] = json.loads(done.stdout)
    assert len(found["on"]["losses"]) == 30
    assert found["on"]["losses"] == pytest.approx(found["off"]["losses"], rel=1e-3)
    assert "_ReplayBackward" in found["on"]["nodes"]
    assert "_ReplayBackward" not in found["off"]["nodes"]
