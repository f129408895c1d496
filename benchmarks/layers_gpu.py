"""Claim: DGL's layers train on hubs as fast as on any graph, in no more memory than DGL's own CUDA.

Forward and backward pass of GraphConv, SAGEConv and GATConv on a graph of ogbn-products' size with
in-degrees from a Pareto distribution of exponent 1.5, and what one ``update_all`` and a layer's
forward pass cost the host.  Each layer is first compared with DGL's C++ on the CPU, on a small
graph.

    python -m benchmarks.layers_gpu --out layers.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
import dgl.function as fn  # isort: skip
from dgl.nn.pytorch import GATConv, GraphConv, SAGEConv  # isort: skip

from benchmarks.gpu import PowerLaw, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.ops import spmm

FEATURES = 100


@dataclass(frozen=True)
class Case:
    """A layer to be timed.

    Attributes
    ----------
    aim, dgl : float
        Milliseconds: what is to be reached, and what DGL's own CUDA build takes.
    dgl_gb : float or None
        Peak memory of DGL's own CUDA build.
    """

    name: str
    layer: Callable[[], torch.nn.Module]
    aim: float
    dgl: float
    dgl_gb: float | None = None


CASES = (
    Case("GraphConv 256", lambda: GraphConv(FEATURES, 256), 45, 52.4, 14.9),
    Case("SAGEConv mean 256", lambda: SAGEConv(FEATURES, 256, "mean"), 55, 65.9),
    Case("GATConv 4x64", lambda: GATConv(FEATURES, 64, 4), 160, 1406, 25.8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2_449_029)
    parser.add_argument("--edges", type=int, default=123_718_280)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = this_device()
    about = {
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    overhead = update_all_overhead(device)
    print(
        f"update_all takes {overhead['update_all_us']:.0f} us of the host and the GPU, its kernel"
        f" alone {overhead['kernel_us']:.0f}"
    )
    forwards = forwards_of_the_host(device)
    for figure in forwards:
        print(
            f"{figure['case']}: a forward pass takes the host {figure['forward_us']:.0f} us, its"
            f" {figure['kernels']} launches {figure['launches_us']:.0f}"
        )
    print(f"{'forward and backward':32} {'ms':>8} {'aim':>6} {'DGL':>7} {'GB':>6} {'DGL':>6}")
    figures: list[dict[str, Any]] = []
    for idtype in (torch.int32, torch.int64):
        graph = big_graph(options, device, idtype)
        for case in CASES:
            torch.manual_seed(0)
            layer = case.layer()
            check(layer, device, idtype)
            figure = {"case": case.name, "idtype": str(idtype), **measure(layer, graph, options)}
            figure |= {"aim_ms": case.aim, "dgl_ms": case.dgl, "dgl_gb": case.dgl_gb}
            figures.append(figure)
            name = f"{case.name} {str(idtype).removeprefix('torch.')}"
            dgl_gb = f"{case.dgl_gb:6.1f}" if case.dgl_gb else f"{'-':>6}"
            print(
                f"{name:32} {figure['ms']:8.1f} {case.aim:6.0f} {case.dgl:7.1f}"
                f" {figure['peak_gb']:6.1f} {dgl_gb}",
                flush=True,
            )
            if options.out:
                content = {**about, "overhead": overhead, "forwards": forwards, "figures": figures}
                options.out.write_text(json.dumps(content, indent=1) + "\n")
        del graph


def big_graph(
    options: argparse.Namespace, device: torch.device, idtype: torch.dtype
) -> dgl.DGLGraph:
    """The graph, with what message passing needs of it made."""
    indptr, indices = PowerLaw(options.nodes, options.edges).csc(device, idtype)
    nodes = torch.arange(options.nodes, dtype=idtype, device=device)
    dst = nodes.repeat_interleave(indptr.diff())
    graph = dgl.graph((indices.to(idtype), dst), num_nodes=options.nodes)
    graph.create_formats_()
    return graph


def check(layer: torch.nn.Module, device: torch.device, idtype: torch.dtype) -> None:
    """Compare a layer on the GPU with DGL's C++ on the CPU, gradients included."""
    src, dst = torch.randint(500, (2, 20_000), dtype=idtype)
    dst[:2000] = 7
    x = torch.randn(500, FEATURES)
    results = []
    for place in ("cpu", device):
        graph = dgl.add_self_loop(dgl.graph((src, dst), num_nodes=500)).to(place)
        h = x.detach().clone().to(place).requires_grad_()
        layer.to(place).zero_grad()
        out = layer(graph, h)
        out.square().mean().backward()
        found = [out, h.grad, *(p.grad for p in layer.parameters())]
        # Copies: with the layer, its gradients go to the other device.
        results.append([each.detach().cpu().clone() for each in found])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-3, atol=2e-5)


def measure(
    layer: torch.nn.Module, graph: dgl.DGLGraph, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a forward and backward pass, the median, and the most memory it takes."""
    device = graph.device
    layer.to(device)
    if hasattr(layer, "set_allow_zero_in_degree"):
        layer.set_allow_zero_in_degree(True)
    x = torch.randn(graph.num_nodes(), FEATURES, device=device, requires_grad=True)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(graph, x)
        out.backward(torch.ones_like(out))

    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    samples = []
    for _ in range(options.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return {
        "ms": statistics.median(samples),
        "samples_ms": samples,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
    }


def small_graph(device: torch.device) -> dgl.DGLGraph:
    """A graph that takes the host longer than the GPU, every node with an in-edge."""
    num_nodes = 2000
    src = torch.randint(num_nodes, (10 * num_nodes,), device=device)
    dst = torch.arange(10 * num_nodes, device=device) % num_nodes
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    graph.create_formats_()
    return graph


def microseconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """Of one call; the host's and the GPU's, whichever take longer."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def forwards_of_the_host(device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of each layer's forward pass on a small graph, and of as many launches as it
    has kernels: of torch's addition of small vectors."""
    graph = small_graph(device)
    x = torch.randn(graph.num_nodes(), FEATURES, device=device)
    some, others = torch.zeros(2, 1000, device=device)
    launch = microseconds(lambda: some.add_(others))
    figures = []
    for case in CASES:
        layer = case.layer().to(device)

        def forward(layer: torch.nn.Module = layer) -> torch.Tensor:
            return layer(graph, x)

        spent = microseconds(forward)
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            forward()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        kernels = sum(event.device_type == cuda for event in profile.events())
        figures.append(
            {
                "case": case.name,
                "forward_us": spent,
                "kernels": kernels,
                "launches_us": kernels * launch,
                "over_us": spent - kernels * launch,
            }
        )
    return figures


def update_all_overhead(device: torch.device) -> dict[str, float]:
    """Microseconds of one ``update_all`` on a small graph, and of the kernel below it."""
    graph = small_graph(device)
    x = graph.ndata["h"] = torch.randn(graph.num_nodes(), 16, device=device)
    indptr, indices, _ = graph._graph.relations[0].csc()
    with torch.no_grad():
        whole = microseconds(lambda: graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out")))
        operator = microseconds(lambda: spmm(indptr, indices, None, x, None, "copy_lhs", "sum"))
        replay = torch.cuda.CUDAGraph()
        with torch.cuda.graph(replay):
            spmm(indptr, indices, None, x, None, "copy_lhs", "sum")
        kernel = microseconds(replay.replay)
    return {"update_all_us": whole, "operator_us": operator, "kernel_us": kernel}


if __name__ == "__main__":
    main()
