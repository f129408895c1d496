"""``python -m dgl_mgpu --partition``: scripts for one process, run by several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgl_mgpu.dgl.runner_options import RunnerOptions, take_options
from dgl_mgpu.errors import ConfigError
from tests.environment import search_path

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# In the style of DGL's examples, with nothing in it of ranks.
TRAINING = """
import numpy as np, random
import dgl, dgl.nn as dglnn, torch, torch.nn as nn, torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, in_size, hid_size, out_size):
        super().__init__()
        self.gcn = dglnn.GraphConv(in_size, hid_size, activation=F.relu)
        self.norm = nn.BatchNorm1d(hid_size)
        self.gat = dglnn.GATConv(hid_size, out_size, 2, feat_drop=DROP, attn_drop=DROP)
        self.dropout = nn.Dropout(DROP)

    def forward(self, g, h):
        h = self.dropout(self.norm(self.gcn(g, h)))
        return self.gat(g, h).mean(1)

def evaluate(g, features, labels, mask, model):
    model.eval()
    with torch.no_grad():
        logits = model(g, features)[mask]
        labels = labels[mask]
        _, indices = torch.max(logits, dim=1)
        correct = torch.sum(indices == labels)
        return correct.item() * 1.0 / len(labels)

def main():
    torch.manual_seed(0), np.random.seed(0), dgl.seed(0)
    torch.set_default_dtype(torch.float64)
    labels = torch.arange(300) % 4
    src, steps = torch.from_numpy(np.random.randint(300, size=(2, 900)))
    src, dst = torch.cat([src, src]), torch.cat([(src + 4 * steps) % 300, steps])
    g = dgl.add_self_loop(dgl.graph((src, dst), num_nodes=300))
    g.ndata["feat"] = torch.randn(4, 12)[labels] + torch.randn(300, 12)
    g.ndata["label"] = labels
    train_mask = torch.arange(300) < 120
    g.ndata["train_mask"] = train_mask
    g = g.int().to(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    features, labels = g.ndata["feat"], g.ndata["label"].long()
    model = Model(features.shape[1], 16, int(labels.max()) + 1).to(g.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for epoch in range(EPOCHS):
        model.train()
        logits = model(g, features)
        loss = F.cross_entropy(logits[g.ndata["train_mask"]], labels[train_mask.to(g.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = evaluate(g, features, labels, ~g.ndata["train_mask"], model)
        print(f"Epoch {epoch} | Loss {loss.item():.6f} | Accuracy {accuracy:.4f}")
    torch.save(model.state_dict(), "model.pt")
    print("predicted", np.bincount(logits.argmax(1).cpu().numpy()).sum(), random.random() < 2)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script by some ranks, without a GPU."""

    def start(ranks: int, code: str, *options: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(code)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("DGL", "_DGL"))}
        environment |= {"PYTHONPATH": search_path(), "HOME": str(tmp_path)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        words = ["-m", *(torchrun if ranks > 1 else []), "dgl_mgpu", *options, str(path)]
        return subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    return start


def _training(epochs: int, dropout: float) -> str:
    return TRAINING.replace("DROP", str(dropout)).replace("EPOCHS", str(epochs))


def test_a_script_for_one_process_gives_the_same_over_ranks(run, tmp_path):
    import torch

    alone = run(1, _training(8, 0.0), "--partition")
    assert alone.returncode == 0, alone.stderr
    saved = torch.load(tmp_path / "model.pt")
    for ranks, option in ((2, "--partition"), (3, "--partition=order")):
        shared = run(ranks, _training(8, 0.0), option)
        assert shared.returncode == 0, shared.stderr
        # What it prints is there once; other ranks' is not.
        assert shared.stdout == alone.stdout and len(alone.stdout.split("\n")) == 10
        for name, value in torch.load(tmp_path / "model.pt").items():
            torch.testing.assert_close(value, saved[name], rtol=1e-5, atol=1e-6)


def test_dropout_learns_as_well_over_ranks(run):
    accuracies = []
    for ranks in (1, 2):
        done = run(ranks, _training(25, 0.5), "--partition")
        assert done.returncode == 0, done.stderr
        accuracies.append(float(re.findall(r"Accuracy ([\d.]+)", done.stdout)[-1]))
    assert min(accuracies) > 0.5  # by chance, 0.25
    assert abs(accuracies[0] - accuracies[1]) < 0.15


MOVING = """
import dgl, torch
g = dgl.graph((torch.arange(20), torch.arange(20).flip(0)))
g.ndata["x"] = torch.ones(20, 2)
STATEMENT
print("done")
"""


@pytest.mark.parametrize(
    ("statement", "options", "words"),
    [
        ("dgl.ops.copy_u_sum(g, g.ndata['x'])", ["--partition"], "nothing was partitioned"),
        ("g.to('cpu')", [], "each of 2 ranks ran the whole script"),
        ("g.to('cpu')", ["--partition"], None),
        ("torch.distributed.init_process_group('gloo'); g.to('cpu')", [], None),
    ],
)
def test_ranks_that_share_nothing_are_told(run, statement, options, words):
    done = run(2, MOVING.replace("STATEMENT", statement), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == (1 if options else 2)
    told = [line for line in done.stderr.split("\n") if line.startswith("python -m dgl_mgpu")]
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


def test_what_is_refused_ends_the_script_with_the_reason(run):
    code = MOVING.replace("STATEMENT", "torch.fft.fft(g.to('cpu').ndata['x'], dim=0)")
    done = run(2, code, "--partition")
    assert done.returncode != 0 and "done" not in done.stdout
    assert "cannot call torch.fft.fft with rows of a partitioned graph" in done.stderr


@pytest.mark.parametrize(("visible", "taken"), [(None, "2"), ("7,5,3,1", "3"), ("a,b,c", "c")])
def test_a_rank_sees_its_gpu_alone(monkeypatch, visible, taken):
    import torch

    from dgl_mgpu.distributed.whole_view import script

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    script._take_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="it has 3 GPUs"):
        script._take_gpu()


def test_options():
    rest = ["script.py", "--partition=mine"]
    for word, by in (("--partition", "random"), ("--partition=metis", "metis")):
        assert take_options([word, *rest]) == (RunnerOptions(partition=by), rest)
    options, _ = take_options(["--capture=off", "--store.sms=4", "--partition", *rest])
    assert options == RunnerOptions({"sms": 4}, captures=False, partition="random")
    for word in ("--partition=", "--partition=2"):
        with pytest.raises(ConfigError, match="use random, order, metis"):
            take_options([word, "script.py"])
