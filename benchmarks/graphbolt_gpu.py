"""Claim: GraphBolt's loader takes at most 1.1 times as long on a GPU as DGL's other one.

Both sample the same graph, in GPU memory or pinned in the host's, and gather the same features:
loaders alone, and in a script of ``unmodified_scripts`` with its model eager and captured.  Loaders
run in turns in one process; a time is the median of all windows.

    python -m benchmarks.graphbolt_gpu --out graphbolt.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import dgl_mgpu

import dgl  # isort: skip
import dgl.graphbolt as gb  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip

from benchmarks.gpu import PowerLaw, this_device
from benchmarks.machine import keep
from benchmarks.unmodified_gpu import WARM_UP, WINDOW, require_captured, windows_of
from benchmarks.unmodified_scripts import Case, made_graph, sage

CASES = (
    Case(sage, 1024, (15, 10, 5)),
    Case(sage, 1024, (25, 10)),
    Case(sage, 6000, (25, 10)),
    Case(sage, 1024, (15, 10, 5), use_uva=True),
)
#: What is done with a batch.
MODES = "loader", "eager", "captured"


class Batch(NamedTuple):
    """What a model is given."""

    blocks: list[Any]
    rows: torch.Tensor
    labels: torch.Tensor


def dgls(g: dgl.DGLGraph, case: Case, seeds: torch.Tensor) -> Iterator[Batch]:
    """Batches of DGL's DataLoader."""
    sampler = NeighborSampler(case.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    device = this_device()
    loader = DataLoader(
        g,
        seeds if case.use_uva else seeds.to(device),
        sampler,
        batch_size=case.batch,
        device=device,
        use_uva=case.use_uva,
    )
    for _, _, blocks in loader:
        yield Batch(blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"])


def graphbolts(g: dgl.DGLGraph, case: Case, seeds: torch.Tensor) -> Iterator[Batch]:
    """Batches of GraphBolt's DataLoader, as its examples chain it."""
    indptr, indices, _ = g.adj_tensors("csc")
    graph = gb.fused_csc_sampling_graph(indptr, indices)
    features = gb.BasicFeatureStore({("node", None, "feat"): gb.TorchBasedFeature(g.ndata["feat"])})
    if case.use_uva:
        graph.pin_memory_()
        features._features["node", None, "feat"].pin_memory_()
    labels = g.ndata["label"].cpu()[seeds.long()]
    items = gb.ItemSet((seeds, labels), names=("seed_nodes", "labels"))
    datapipe = gb.ItemSampler(items, batch_size=case.batch)
    datapipe = datapipe.copy_to(device=this_device(), extra_attrs=["seed_nodes"])
    datapipe = datapipe.sample_neighbor(graph, [*case.fanouts])
    datapipe = datapipe.fetch_feature(features, node_feature_keys=["feat"])
    for batch in gb.DataLoader(datapipe):
        yield Batch(batch.blocks, batch.node_features["feat"], batch.labels)


LOADERS: dict[str, Callable[..., Iterator[Batch]]] = {"dgl": dgls, "graphbolt": graphbolts}


def run(
    g: dgl.DGLGraph, case: Case, loader: str, mode: str, steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of a step in each window, and the losses."""
    torch.manual_seed(0)
    dgl.seed(0)
    dgl_mgpu.capture_models(mode == "captured")
    model = case.model(len(case.fanouts)).to(this_device())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    seeds = torch.arange((steps + WARM_UP) * case.batch, dtype=g.idtype) % g.num_nodes()
    losses, times = [], []
    for number, batch in enumerate(LOADERS[loader](g, case, seeds)):
        if mode != "loader":
            loss = F.cross_entropy(model(batch.blocks, batch.rows), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        if (number + 1) % WINDOW == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    if mode == "captured":
        require_captured(case)
    dgl_mgpu.capture_models(False)
    return windows_of(times), torch.stack(losses).tolist() if losses else []


def _row(g: dgl.DGLGraph, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for _ in range(options.turns):
        for mode, loader in itertools.product(MODES, LOADERS):
            windows, losses[f"{mode} {loader}"] = run(g, case, loader, mode, options.steps)
            times.setdefault(f"{mode} {loader}", []).extend(windows)
    for loader in LOADERS:
        eager, captured = (losses[f"{mode} {loader}"] for mode in ("eager", "captured"))
        if abs(statistics.mean(eager) - statistics.mean(captured)) > 0.02 * statistics.mean(eager):
            raise RuntimeError(f"{case.name}, {loader}: captured losses are others than eager ones")
    medians = {name: statistics.median(windows) for name, windows in times.items()}
    ratios = {mode: medians[f"{mode} graphbolt"] / medians[f"{mode} dgl"] for mode in MODES}
    return {"name": case.name, "ms": medians, "ratios": ratios, "all_ms": times}


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    g = made_graph(*PowerLaw(options.nodes, options.edges).csc(this_device(), torch.int32))
    rows: list[dict[str, Any]] = []
    print(f"{'ms of a step, DGL : GraphBolt':36}" + "".join(f"{mode:>24}" for mode in MODES))
    for case in CASES:
        if case.use_uva and g.device.type == "cuda":
            g = g.to("cpu")  # which the loaders pin
        row = _row(g, case, options)
        rows.append(row)
        cells = (
            "{:.2f} : {:.2f} = {:.2f}".format(
                row["ms"][f"{mode} dgl"], row["ms"][f"{mode} graphbolt"], row["ratios"][mode]
            )
            for mode in MODES
        )
        print(f"{case.name:36}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
        keep(options, rows)


if __name__ == "__main__":
    main()
