"""Claim: a rebuilt package is as fast as it was.

What two checkouts take for the same work through the public interface, in turns on one machine:
rows of a store, its mini-batches and those of a graph on the device, steps of a model, and layers
on a whole graph.

    git worktree add ../before 0e2a7714
    python -m benchmarks.compare_checkouts --before ../before --out compared.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

#: By how much the new checkout may be slower.
AIM = 1.03
FEATURES = 128


def _graph(nodes: int, edges: int, device: torch.device) -> Any:
    """Sources are drawn with a bias to small ids, so that there are hubs."""
    import dgl

    generator = torch.Generator().manual_seed(0)
    sources = (torch.rand(edges, generator=generator) ** 3 * nodes).long()
    targets = torch.randint(nodes, (edges,), generator=generator)
    g = dgl.graph((sources.int(), targets.int()), num_nodes=nodes)
    g.ndata["x"] = torch.randn(nodes, FEATURES, generator=generator)
    g.ndata["y"] = torch.randint(32, (nodes,), generator=generator)
    g = g.formats(["csc", "csr"])
    g.create_formats_()
    return g.to(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _windows(device: torch.device, call: Callable[[], Any], count: int) -> float:
    """Median of five windows of some calls, in milliseconds for a call."""
    for _ in range(3):
        call()
    spent = []
    for _ in range(5):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        spent.append(1e3 * (time.perf_counter() - begin) / count)
    return statistics.median(spent)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def figures(nodes: int, edges: int) -> dict[str, float]:
    """Milliseconds of each piece of work in this checkout."""
    import dgl_mgpu  # isort: skip
    import dgl  # isort: skip
    from dgl.dataloading import DataLoader, NeighborSampler
    from dgl.nn import GraphConv, SAGEConv

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    found: dict[str, float] = {}
    whole = _graph(nodes, edges, torch.device("cpu"))
    here = whole.to(device)
    seeds = torch.arange(nodes, dtype=torch.int32)
    with dgl_mgpu.GlobalStore.from_dgl(whole) as store:
        ids = torch.randint(nodes, (200_000,), device=store.device)
        found["rows of a store"] = _windows(device, lambda: store.gather("x", ids), 20)
        for name, graph in (("a store", store.graph), ("a graph", here)):
            torch.manual_seed(0)
            loader = DataLoader(
                graph,
                seeds.to(graph.device),
                NeighborSampler([15, 10, 5], prefetch_node_feats=["x"], prefetch_labels=["y"]),
                batch_size=1024,
                shuffle=True,
                device=device,
            )
            batches = _endless(loader)
            found[f"mini-batch of {name}"] = _windows(device, lambda b=batches: next(b), 20)
            layers = torch.nn.ModuleList(
                SAGEConv(width, out, "mean").to(device)
                for width, out in ((FEATURES, 256), (256, 256), (256, 32))
            )
            optimizer = torch.optim.Adam(layers.parameters(), fused=on_gpu)

            def step(batches: Any = batches, layers: Any = layers, adam: Any = optimizer) -> None:
                _, _, blocks = next(batches)
                h = blocks[0].srcdata["x"]
                for layer, block in zip(layers, blocks, strict=True):
                    h = layer(block, h)
                loss = torch.nn.functional.cross_entropy(h, blocks[-1].dstdata["y"])
                adam.zero_grad()
                loss.backward()
                adam.step()

            found[f"step of {name}"] = _windows(device, step, 20)
    features = here.ndata["x"]
    for name, layer in (
        ("GraphConv on a whole graph", GraphConv(FEATURES, 64, allow_zero_in_degree=True)),
        ("SAGEConv, maxima, on a whole graph", SAGEConv(FEATURES, 64, "pool")),
    ):
        layer = layer.to(device)
        run = lambda layer=layer: layer(here, features).sum().backward()  # noqa: E731
        found[name] = _windows(device, run, 3)
    scores = torch.randn(edges, 4, device=device)
    found["edge softmax"] = _windows(device, lambda: dgl.ops.edge_softmax(here, scores), 5)
    return found


def _measured(checkout: Path, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a checkout, in a process of its own."""
    paths = [str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(Path(__file__).resolve()), "--figures"]
    command += ["--nodes", str(options.nodes), "--edges", str(options.edges)]
    ran = subprocess.run(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{checkout} failed:\n{ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Print a row for each piece of work, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=32_000_000)
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout")
    parser.add_argument("--figures", action="store_true", help="print those of the checkout alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.figures:
        print(json.dumps(figures(options.nodes, options.edges)))
        return
    if options.before is None:
        parser.error("--before is required")
    from benchmarks.machine import keep

    checkouts = {"before": options.before, "now": Path(__file__).parents[1]}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            runs[name].append(_measured(checkout, options))
    rows = []
    for work in runs["now"][0]:
        row: dict[str, Any] = {"work": work}
        for name, turns in runs.items():
            spent = [turn[work] for turn in turns]
            row |= {f"{name}_ms": statistics.median(spent), f"{name}_all_ms": spent}
        row["ratio"] = row["now_ms"] / row["before_ms"]
        row["reached"] = row["ratio"] <= AIM
        rows.append(row)
        print(f"{work:36} {row['before_ms']:9.3f} {row['now_ms']:9.3f} ms {row['ratio']:6.2f}")
    keep(options, rows)


if __name__ == "__main__":
    main()
