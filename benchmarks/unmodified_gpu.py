"""Claim: an unmodified training loop runs at the speed of its GPU where its model is captured.

Each case is a script as DGL's tutorials have it: ``DataLoader``, ``model(blocks, x)``, a loss,
``backward()`` and fused Adam, over a graph and features in GPU memory, or pinned in the host's
(``use_uva=True``). It runs eagerly, with ``dgl_mgpu.capture_models()``, and with the one change
that ``dgl_mgpu.CapturedStep`` asks for, in turns. Captured losses are compared with eager ones.
``--graph`` says on which graph. Beside a step's time stands the time of the GPU's kernels in it,
from torch's profiler; kernels of two streams that overlap count twice.

    python -m benchmarks.unmodified_gpu --out unmodified_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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

from benchmarks.gpu import this_device
from benchmarks.graphs import graph_of, graph_options
from benchmarks.machine import keep
from dgl_mgpu.capture import calls

FEATURES, HIDDEN, CLASSES = 128, 256, 47
#: Steps before the first one that counts: prefetching and captures have settled by then.
WARM_UP = 64
#: Steps between two waits for the GPU: the host gets ahead of it by a few, and not by hundreds.
WINDOW = 16
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


def widths(depth: int) -> itertools.pairwise[tuple[int, int]]:
    """Numbers that a layer is given and makes, by layer."""
    return itertools.pairwise([FEATURES, *[HIDDEN] * (depth - 1), CLASSES])


def sage(depth: int) -> Model:
    """GraphSAGE."""
    return Model([SAGEConv(given, made, "mean") for given, made in widths(depth)])


def sage_with_dropout(depth: int) -> Model:
    """GraphSAGE, with dropout."""
    return Model([SAGEConv(given, made, "mean") for given, made in widths(depth)], 0.5)


def gcn(depth: int) -> Model:
    """GCN, which looks for nodes without in-edges."""
    return Model([GraphConv(given, made) for given, made in widths(depth)])


def gin(depth: int) -> Model:
    """GIN."""
    return Model([GINConv(nn.Linear(given, made), "sum") for given, made in widths(depth)])


def gat(depth: int) -> Model:
    """GAT with 4 heads of 64."""
    *inner, (last, _) = widths(depth)
    return Model(
        [*(GATConv(given, HIDDEN // 4, 4) for given, _ in inner), GATConv(last, CLASSES, 1)]
    )


@dataclass(frozen=True)
class Case:
    """A script; one with ``use_uva`` has its graph and features in the host's memory."""

    model: Callable[[int], Model]
    batch: int
    fanouts: tuple[int, ...]
    use_uva: bool = False

    @property
    def name(self) -> str:
        memory = ", use_uva" if self.use_uva else ""
        return f"{self.model.__name__} {self.batch} at {','.join(map(str, self.fanouts))}{memory}"

    @property
    def modes(self) -> tuple[str, ...]:
        """How it runs.  GCN and GAT look at the GPU, which a captured step refuses."""
        has_step = self.model not in (gcn, gat) and not self.use_uva
        return ("eager", "captured", *(["step"] if has_step else []))


CASES = (
    Case(sage, 1024, (15, 10, 5)),
    Case(sage, 1024, (25, 10)),
    Case(sage, 6000, (25, 10)),
    Case(sage_with_dropout, 1024, (15, 10, 5)),
    Case(gcn, 1024, (15, 10, 5)),
    Case(gin, 1024, (15, 10, 5)),
    Case(gat, 1024, (15, 10, 5)),
    Case(sage, 1024, (15, 10, 5), use_uva=True),
)


def script(
    g: dgl.DGLGraph, case: Case, mode: str, steps: int
) -> tuple[DataLoader, Model, torch.optim.Optimizer]:
    """What a script makes before its first step: the loader, the model and the optimizer."""
    torch.manual_seed(0)
    dgl.seed(0)
    dgl_mgpu.capture_models(mode == "captured")
    device = this_device()
    model = case.model(len(case.fanouts)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    seeds = torch.arange((steps + WARM_UP) * case.batch, dtype=g.idtype) % g.num_nodes()
    sampler = NeighborSampler(case.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(
        g,
        seeds if case.use_uva else seeds.to(device),
        sampler,
        batch_size=case.batch,
        device=device,
        use_uva=case.use_uva,
    )
    return loader, model, optimizer


def train(
    g: dgl.DGLGraph, case: Case, mode: str, steps: int, profiled: bool = False
) -> tuple[float, list[float], float | None]:
    """Milliseconds of a step (median), the losses, and milliseconds of kernels in a step."""
    loader, model, optimizer = script(g, case, mode, steps)
    losses, times, profile = [], [], None
    for number, loss in enumerate(_steps(loader, model, optimizer, mode)):
        losses.append(loss.detach().clone())
        if (number + 1) % WINDOW == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        if number + 1 == WARM_UP and profiled:
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
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
    if mode == "captured":
        require_captured(case)
    dgl_mgpu.capture_models(False)
    return statistics.median(windows_of(times)), torch.stack(losses).tolist(), kernels


def windows_of(times: Sequence[float]) -> list[float]:
    """Milliseconds of a step in each window that counts, by when the windows ended."""
    counted = times[WARM_UP // WINDOW - 1 :]
    return [1e3 * (after - before) / WINDOW for before, after in itertools.pairwise(counted)]


def require_captured(case: Case) -> None:
    """Raise RuntimeError unless a model has been captured."""
    kinds = [kind for it in calls._models.values() for kind in it._kinds.values()]
    if not any(kind.graphs is not None for kind in kinds):
        raise RuntimeError(f"{case.name} was not captured: {[kind.refusal for kind in kinds]}")


def _steps(
    loader: Any, model: Model, optimizer: torch.optim.Optimizer, mode: str
) -> Iterator[torch.Tensor]:
    """The loss of each step."""
    if mode == "step":
        step = dgl_mgpu.CapturedStep(
            model, lambda blocks: model(blocks, blocks[0].srcdata["feat"]), F.cross_entropy
        )
        for batch in step.batches(loader):
            loss = step(batch)
            optimizer.step()
            yield loss
        return
    for _, _, blocks in loader:
        scores = model(blocks, blocks[0].srcdata["feat"])
        loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def made_graph(indptr: torch.Tensor, src: torch.Tensor) -> dgl.DGLGraph:
    """With self-loops, features and labels."""
    nodes, device = len(indptr) - 1, indptr.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    g = dgl.add_self_loop(dgl.graph(("csc", (indptr.int(), src, none)))).formats("csc")
    g.ndata["feat"] = torch.randn(nodes, FEATURES, device=device)
    g.ndata["label"] = torch.randint(CLASSES, (nodes,), device=device)
    return g


def require_same_losses(
    case: Case, mode: str, expected: Sequence[float], found: Sequence[float]
) -> None:
    """Raise RuntimeError unless a mode's losses are those of the eager one."""
    # Dropout draws other numbers in a graph.
    is_random = case.model is sage_with_dropout
    pairs = [(sum(expected), sum(found))] if is_random else zip(expected, found, strict=True)
    if any(abs(one - other) > _TOLERANCE * abs(one) for one, other in pairs):
        raise RuntimeError(f"{case.name}, {mode}: losses are others than eager ones")


def _row(g: dgl.DGLGraph, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {mode: [] for mode in case.modes}
    losses: dict[str, list[float]] = {}
    for _ in range(options.turns):
        for mode, taken in times.items():
            time_, losses[mode], _ = train(g, case, mode, options.steps)
            taken.append(time_)
    expected = losses.pop("eager")
    for mode, found in losses.items():
        require_same_losses(case, mode, expected, found)
    _, _, kernels = train(g, case, "captured", 2 * WINDOW, profiled=True)
    medians = {mode: statistics.median(taken) for mode, taken in times.items()}
    return {
        "name": case.name,
        **{f"{mode}_ms": medians.get(mode) for mode in ("eager", "captured", "step")},
        "kernels_ms": kernels,
        "ratio": medians["eager"] / medians["captured"],
        "all_ms": times,
    }


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    graph_options(parser)
    options = parser.parse_args()
    g = made_graph(*graph_of(options).csc(this_device(), torch.int32))
    rows: list[dict[str, Any]] = []
    columns = "eager", "captured", "step", "kernels"
    print(f"{'ms of a step':40}" + "".join(f"{name:>10}" for name in (*columns, "ratio")))
    for case in CASES:
        if case.batch > g.num_nodes():
            continue  # of a real graph
        if case.use_uva and g.device.type == "cuda":
            g = g.to("cpu")  # which the loader pins
        row = _row(g, case, options)
        rows.append(row)
        shown = [row[f"{name}_ms"] for name in columns] + [row["ratio"]]
        cells = (f"{'' if it is None else format(it, '.2f'):>10}" for it in shown)
        print(f"{case.name:40}" + "".join(cells), flush=True)
        keep(options, rows)


if __name__ == "__main__":
    main()
