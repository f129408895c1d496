"""Claim: an unmodified training loop runs at the speed of its GPU where its model is captured.

Each case is a script as DGL's tutorials have it: ``DataLoader``, ``model(blocks, x)``, a loss,
``backward()`` and fused Adam, over a graph and features in GPU memory. It runs eagerly and with
``dgl_mgpu.capture_models()``, in turns. Captured losses are compared with eager ones first. Beside
a step's time stands the time of the GPU's kernels in it, from torch's profiler; kernels of two
streams that overlap count twice.

    python -m benchmarks.unmodified_gpu --out unmodified_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dgl_mgpu

import dgl  # isort: skip
import torch.nn.functional as F  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip
from dgl.nn import GATConv, GINConv, GraphConv, SAGEConv  # isort: skip
from torch import nn  # isort: skip

from benchmarks.gpu import PowerLaw, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.capture import calls

FEATURES, HIDDEN, CLASSES = 128, 256, 47
#: Steps before the first one that counts: prefetching and captures have settled by then.
WARM_UP = 60
#: Between eager and captured losses, as a share: sums in another order, grown over the steps.
_TOLERANCE = 2e-2


class Model(nn.Module):
    """Layers with ReLU and dropout in between."""

    def __init__(self, layers: Sequence[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        """Scores of the seeds."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x).flatten(1)
            if layer is not self.layers[-1]:
                x = self.dropout(F.relu(x))
        return x


def _widths(depth: int) -> itertools.pairwise[tuple[int, int]]:
    return itertools.pairwise([FEATURES, *[HIDDEN] * (depth - 1), CLASSES])


def sage(depth: int) -> Model:
    """GraphSAGE."""
    return Model([SAGEConv(given, made, "mean") for given, made in _widths(depth)])


def sage_with_dropout(depth: int) -> Model:
    """GraphSAGE, with dropout."""
    return Model([SAGEConv(given, made, "mean") for given, made in _widths(depth)], 0.5)


def gcn(depth: int) -> Model:
    """GCN, which looks for nodes without in-edges."""
    return Model([GraphConv(given, made) for given, made in _widths(depth)])


def gin(depth: int) -> Model:
    """GIN."""
    return Model([GINConv(nn.Linear(given, made), "sum") for given, made in _widths(depth)])


def gat(depth: int) -> Model:
    """GAT with 4 heads of 64."""
    *inner, (last, _) = _widths(depth)
    return Model(
        [*(GATConv(given, HIDDEN // 4, 4) for given, _ in inner), GATConv(last, CLASSES, 1)]
    )


@dataclass(frozen=True)
class Case:
    """A script."""

    model: Callable[[int], Model]
    batch: int
    fanouts: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.model.__name__} {self.batch} at {','.join(map(str, self.fanouts))}"


CASES = (
    Case(sage, 1024, (15, 10, 5)),
    Case(sage, 1024, (25, 10)),
    Case(sage, 6000, (25, 10)),
    Case(sage_with_dropout, 1024, (15, 10, 5)),
    Case(gcn, 1024, (15, 10, 5)),
    Case(gin, 1024, (15, 10, 5)),
    Case(gat, 1024, (15, 10, 5)),
)


def train(
    g: dgl.DGLGraph, case: Case, captured: bool, steps: int, profiled: bool = False
) -> tuple[float, list[float], float | None]:
    """Milliseconds of a step (median), the losses, and milliseconds of kernels in a step."""
    torch.manual_seed(0)
    dgl.seed(0)
    dgl_mgpu.capture_models(captured)
    model = case.model(len(case.fanouts)).to(g.device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    seeds = torch.arange((steps + WARM_UP) * case.batch, device=g.device, dtype=g.idtype)
    sampler = NeighborSampler(case.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(g, seeds % g.num_nodes(), sampler, batch_size=case.batch, device=g.device)
    losses, times, profile = [], [], None
    for number, (_, _, blocks) in enumerate(loader):
        if number >= WARM_UP:
            times.append(time.perf_counter())
        if number == WARM_UP and profiled:
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
        scores = model(blocks, blocks[0].srcdata["feat"])
        loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if number % 16 == 0:
            # The host gets ahead of the GPU by a few steps, and not by hundreds.
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    kernels = None
    if profile is not None:
        profile.stop()
        spans = (
            event.time_range.elapsed_us()
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        kernels = sum(spans) / steps / 1e3
    if captured:
        kinds = [kind for it in calls._models.values() for kind in it._kinds.values()]
        if not any(kind.graphs is not None for kind in kinds):
            raise RuntimeError(f"{case.name} was not captured: {[kind.refusal for kind in kinds]}")
    dgl_mgpu.capture_models(False)
    window = 16
    windows = [
        (b - a) / window for a, b in zip(times[::window], times[window::window], strict=False)
    ]
    return 1e3 * statistics.median(windows), torch.stack(losses).tolist(), kernels


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = this_device()
    indptr, src = PowerLaw(options.nodes, options.edges).csc(device, torch.int32)
    nodes = len(indptr) - 1
    g = dgl.graph(("csc", (indptr.int(), src, torch.empty(0, dtype=torch.int32, device=device))))
    g = dgl.add_self_loop(g).formats("csc")
    g.ndata["feat"] = torch.randn(nodes, FEATURES, device=device)
    g.ndata["label"] = torch.randint(CLASSES, (nodes,), device=device)
    rows: list[dict[str, Any]] = []
    print(f"{'ms of a step':40} {'eager':>7} {'captured':>9} {'kernels':>8} {'ratio':>6}")
    for case in CASES:
        eager, captured = [], []
        for _ in range(options.turns):
            time_, expected, _ = train(g, case, False, options.steps)
            eager.append(time_)
            time_, losses, _ = train(g, case, True, options.steps)
            captured.append(time_)
        # Dropout draws other numbers in a graph.
        is_random = case.model is sage_with_dropout
        pairs = [(sum(expected), sum(losses))] if is_random else zip(expected, losses, strict=True)
        if any(abs(one - other) > _TOLERANCE * abs(one) for one, other in pairs):
            raise RuntimeError(f"{case.name}: captured losses are others than eager ones")
        _, _, kernels = train(g, case, True, 32, profiled=True)
        row = {
            "name": case.name,
            "eager_ms": statistics.median(eager),
            "captured_ms": statistics.median(captured),
            "kernels_ms": kernels,
            "all_eager_ms": eager,
            "all_captured_ms": captured,
        }
        rows.append(row)
        print(
            f"{case.name:40} {row['eager_ms']:7.2f} {row['captured_ms']:9.2f} "
            f"{row['kernels_ms']:8.2f} {row['eager_ms'] / row['captured_ms']:6.2f}",
            flush=True,
        )
        if options.out:
            content = {
                "machine": describe_machine(),
                "options": {name: str(value) for name, value in vars(options).items()},
                "figures": rows,
            }
            options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
