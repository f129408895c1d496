"""Claim: a GCN on several GPUs trains faster than a stack of GraphConv, in L + 3 buffers.

MG-GCN's first model (section 6.1): two layers, hidden width 512, on a graph of ogbn-products' or
Reddit's size, in-degrees from a Pareto distribution, sources drawn uniformly, nodes dealt out at
random.  An epoch is a forward pass, the loss over all nodes, the backward pass, the sum of
gradients over ranks and a step of Adam.  In the same run and on the same partitioned graph: GCN
as it is, with the sums of its input kept, and in bfloat16, and ``dgl.nn.GraphConv``; products in
float32 and in tf32.  The loss and all gradients are compared first, with GraphConv in float32.

A buffer is a row of hidden width for each of the rank's nodes, in float32.

    python -m benchmarks.gcn_gpu --out gcn.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import dgl_mgpu

import dgl  # isort: skip
from dgl.nn import GraphConv  # isort: skip

from benchmarks.gpu import PowerLaw, measure, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.fullgraph.gcn import GCN
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.launch import launch

#: Nodes, edges, width of features, and classes.
SHAPES = {
    "products": (2_449_029, 123_718_280, 100, 47),
    "reddit": (232_965, 114_615_892, 602, 41),
}
#: The largest errors of the loss and of gradients, relative to their size.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
_PEER = "GraphConv fp32"
#: Epochs in a timed window; the first and the last are not timed.
_WINDOW = 12


class Stack(torch.nn.Module):
    """What a user of DGL writes."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            GraphConv(*ends, allow_zero_in_degree=True) for ends in pairwise(widths)
        )

    def forward(self, g: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(g, torch.relu(x) if number else x)
        return x


@dataclass
class Training:
    """A model that trains on a rank's part of a graph.

    Attributes
    ----------
    precision : {'fp32', 'tf32', 'bf16'}
        Of dense products.
    num_nodes : int
        Of the whole graph.
    """

    model: torch.nn.Module
    precision: str
    g: dgl.DGLGraph
    x: torch.Tensor
    labels: torch.Tensor
    num_nodes: int

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-3, fused=self.x.device.type == "cuda"
        )

    def gradients(self) -> torch.Tensor:
        """The loss of all ranks' nodes, detached; parameters have the gradients of all ranks."""
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        self._optimizer.zero_grad(set_to_none=True)
        out = self.model(self.g, self.x)
        loss = functional.cross_entropy(out.float(), self.labels, reduction="sum")
        loss = loss / self.num_nodes
        del out
        loss.backward()
        total = loss.detach()
        if dist.is_initialized():
            found = [parameter.grad for parameter in self.model.parameters()]
            flat = torch.cat([total.view(1), *(each.flatten() for each in found)])
            dist.all_reduce(flat)
            total, *summed = flat.split([1, *(each.numel() for each in found)])
            for each, sums in zip(found, summed, strict=True):
                each.copy_(sums.view_as(each))
        return total.view(1)

    def epoch(self, _: Any = None) -> None:
        """Train once over all nodes."""
        self.gradients()
        self._optimizer.step()


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        self._ranks = Ranks.of_all_machines()
        self._content: dict[str, Any] = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "ranks": self._ranks.size,
            "figures": [],
        }

    def run(self) -> None:
        """Print every figure and keep it in a file."""
        for shape in self._options.shapes:
            self._measure_shape(shape)

    def _measure_shape(self, shape: str) -> None:
        *sizes, width, classes = SHAPES[shape]
        nodes, edges = (int(size * self._options.scale) for size in sizes)
        indptr, indices = PowerLaw(nodes, edges).csc(self._device, torch.int32)
        g = dgl.graph(
            ("csc", (indptr.int(), indices, torch.empty(0, dtype=torch.int32))), num_nodes=nodes
        )
        pg = dgl_mgpu.partition_graph(g, exchange=self._options.exchange, device=self._device)
        own = pg.ndata[dgl.NID]
        edges = int(indptr[-1])
        del g, indptr, indices
        draw = torch.Generator(self._device).manual_seed(1)
        # Features have a mean and classes differ in size: so do gradients, which are compared.
        x = torch.rand(nodes, width, generator=draw, device=self._device)[own]
        skewed = torch.rand(nodes, generator=draw, device=self._device).square()
        labels = (classes * skewed).long()[own]
        widths = (width, *[self._options.hidden] * (self._options.layers - 1), classes)
        torch.manual_seed(0)
        start = Stack(widths).to(self._device).state_dict()

        def training(model: torch.nn.Module, precision: str) -> Training:
            model = model.to(self._device)
            model.load_state_dict(start)
            rows = x.bfloat16() if precision == "bf16" else x
            return Training(model, precision, pg, rows, labels, nodes)

        def gcn(precision: str, keep: bool) -> Training:
            dtype = torch.bfloat16 if precision == "bf16" else None
            model = GCN(
                widths, keep_input_sums=keep, activation_dtype=dtype, allow_zero_in_degree=True
            )
            return training(model, precision)

        contenders = {_PEER: training(Stack(widths), "fp32")}
        contenders["GraphConv tf32"] = training(Stack(widths), "tf32")
        for precision in TOLERANCES:
            contenders[f"GCN {precision}"] = gcn(precision, False)
            contenders[f"GCN {precision}, input sums kept"] = gcn(precision, True)
        errors = self._require_same(shape, contenders)
        buffer = max(self._ranks.all_gather(len(own))) * self._options.hidden * 4
        peaks = {name: self._peak(each.epoch) / buffer for name, each in contenders.items()}
        calls: dict[str, Callable[[Any], Any]] = {
            name: each.epoch for name, each in contenders.items()
        }
        found = measure(calls, lambda _: [None] * _WINDOW, self._options.repeats, self._ranks)
        slowest = {name: 1e3 * max(seconds) for name, seconds in found.items()}
        self._keep(
            {
                "shape": shape,
                "nodes": nodes,
                "edges": edges,
                "widths": widths,
                "slowest_ms": slowest,
                "times_peer": {name: slowest[_PEER] / spent for name, spent in slowest.items()},
                "peak_buffers": peaks,
                "buffer_bytes": buffer,
                "errors": errors,
                "each_rank_s": found,
            }
        )

    def _require_same(self, shape: str, contenders: dict[str, Training]) -> dict[str, float]:
        """The largest relative errors; raises ValueError where one is too large."""
        wanted: list[torch.Tensor] = []
        errors = {}
        for name, each in contenders.items():
            found = [each.gradients()]
            found += [parameter.grad for parameter in each.model.parameters()]
            wanted = wanted or [tensor.double() for tensor in found]  # the first is the peer
            errors[name] = max(
                float((tensor - right).norm() / right.norm())
                for tensor, right in zip(found, wanted, strict=True)
            )
            if not errors[name] <= TOLERANCES[each.precision]:
                raise ValueError(f"{shape}: {name} is off by {errors[name]:.1e}")
        return errors

    def _peak(self, epoch: Callable[[], None]) -> float:
        """Bytes that torch's allocator gives out in an epoch at most, on the worst rank."""
        epoch()
        if self._device.type != "cuda":
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        epoch()
        torch.cuda.synchronize()
        return max(self._ranks.all_gather(float(torch.cuda.max_memory_allocated() - before)))

    def _keep(self, figure: dict[str, Any]) -> None:
        if self._ranks.rank:
            return
        print(
            f"{figure['shape']}, widths {figure['widths']}, {self._ranks.size} ranks\n"
            f"  {'':26} ms an epoch  times {_PEER}  buffers  error"
        )
        for name, spent in figure["slowest_ms"].items():
            times, peak, error = (
                figure[key][name] for key in ("times_peer", "peak_buffers", "errors")
            )
            print(f"  {name:26} {spent:11.2f} {times:21.2f} {peak:8.2f} {error:6.0e}", flush=True)
        self._content["figures"].append(figure)
        if self._options.out:
            self._options.out.write_text(json.dumps(self._content, indent=1) + "\n")


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--exchange", default="halo", help="of partition_graph")
    parser.add_argument("--scale", type=float, default=1.0, help="of nodes and edges")
    parser.add_argument("--repeats", type=int, default=9, help="timed windows")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    launch(_run, options.ranks, options)


if __name__ == "__main__":
    main()
