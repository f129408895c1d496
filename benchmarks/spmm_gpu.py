"""Claim: reducing messages over a graph with hubs is never slower than cuSPARSE.

The graphs have the size of ogbn-products and in-degrees from a Pareto distribution of exponent 1.5.
Sources are drawn uniformly; in a second graph half of them are near their destinations, as in
an order that has locality. ``--graph`` has others, without aims. Every case is checked first, on a
sample of destinations and the largest hub, in float64. Sums of float32 messages that are one
operand, or that times one scalar an edge, are ``torch.sparse`` products, too: cuSPARSE, in turns
with ours.

Gradients of such sums are products with the transposed matrix: by atomic additions, beside the
product with a transposed copy, whose memory they save.

    python -m benchmarks.spmm_gpu --out spmm.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import host_time, this_device, window
from benchmarks.graphs import GraphSource, graph_of, graph_options
from benchmarks.machine import describe_machine
from dgl_mgpu.ops import spmm, spmm_transposed

#: Destinations of each case that are checked.
CHECKED = 2000
#: How far ids of neighbours are apart that are near, at most.
NEAR = 4096


@dataclass(frozen=True)
class Case:
    """A product to be timed.

    Attributes
    ----------
    permuted : bool
        Whether edge ids are in another order than entries.
    aim, dgl : float or None
        Milliseconds: what is to be reached, and what DGL's own CUDA build takes.
    local : bool
        Whether the graph's order has locality.
    times_peer : float
        How many times cuSPARSE's speed is to be reached.
    """

    op: str
    reduce: str
    u_shape: tuple[int, ...]
    e_shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    permuted: bool = False
    aim: float | None = None
    dgl: float | None = None
    local: bool = False
    times_peer: float = 1.0

    @property
    def name(self) -> str:
        """As in ``copy_lhs max 100 float32``."""
        shapes = [self.u_shape] + ([] if self.e_shape is None else [self.e_shape])
        rows = ", ".join("x".join(map(str, shape)) for shape in shapes)
        name = f"{self.op} {self.reduce} {rows} {str(self.dtype).removeprefix('torch.')}"
        return name + ", edge ids permuted" * self.permuted + ", local" * self.local

    @property
    def has_peer(self) -> bool:
        """Whether cuSPARSE has it."""
        one = self.e_shape is None or math.prod(self.e_shape) == 1
        return one and self.reduce == "sum" and self.dtype == torch.float32


CASES = (
    Case("copy_lhs", "sum", (16,), aim=9, dgl=11.4),
    Case("copy_lhs", "sum", (64,), aim=12, dgl=13.5),
    Case("copy_lhs", "sum", (100,), aim=17, dgl=18.2),
    Case("copy_lhs", "sum", (256,), aim=36, dgl=36.9),
    Case("mul", "sum", (16,), (1,), aim=9, dgl=11.1),
    Case("mul", "sum", (64,), (1,), aim=12, dgl=13.2),
    Case("mul", "sum", (100,), (1,), aim=17, dgl=17.9),
    Case("mul", "sum", (256,), (1,), aim=36, dgl=36.6),
    Case("mul", "sum", (100,), (1,), permuted=True),
    Case("copy_lhs", "sum", (100,), dtype=torch.bfloat16, aim=11, dgl=332),
    Case("copy_lhs", "sum", (100,), dtype=torch.float16, aim=11, dgl=334),
    Case("copy_lhs", "max", (100,), aim=25, dgl=295),
    Case("mul", "sum", (4, 16), (4, 1), aim=16, dgl=252),
    Case("mul", "sum", (8, 8), (8, 1), dgl=254),
    Case("add", "sum", (16,), (16,)),
    *(
        Case("copy_lhs", "sum", (width,), local=True, times_peer=1.3)
        for width in (16, 64, 100, 256)
    ),
)
#: Gradients: widths, and whether edges have a weight.
TRANSPOSED = ((16, False), (64, False), (100, False), (256, False), (100, True))


class Graph:
    """A graph's CSC, and the destinations that are checked.

    Parameters
    ----------
    local : bool
        Whether half of the neighbours of a node are near it, by their ids.
    """

    def __init__(self, law: GraphSource, device: torch.device, local: bool) -> None:
        indptr, self.indices = law.csc(device, torch.int32)
        self.indptr, self.nodes = indptr.to(torch.int32), law.nodes
        degrees = self.indptr.diff()
        if local:
            draw = torch.Generator(device).manual_seed(2)
            count = len(self.indices)
            near = torch.arange(law.nodes, dtype=torch.int32, device=device)
            near = near.repeat_interleave(degrees, output_size=count)
            near += torch.randint(
                -NEAR, NEAR + 1, (count,), generator=draw, device=device, dtype=torch.int32
            )
            is_near = torch.rand(count, generator=draw, device=device) < 0.5
            self.indices = torch.where(is_near, near.remainder_(law.nodes), self.indices)
        sample = torch.randint(law.nodes, (CHECKED,), device=device)
        self.checked = torch.cat([degrees.argmax()[None], sample])
        self.about = {
            "nodes": law.nodes,
            "edges": len(self.indices),
            "largest": int(degrees.max()),
            "local": local,
        }

    def transposed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``indptr``, ``indices`` and edge ids of the transposed matrix."""
        sources, eids = torch.sort(self.indices)
        nodes = torch.arange(self.nodes + 1, dtype=torch.int32, device=sources.device)
        owners = nodes[:-1].repeat_interleave(self.indptr.diff(), output_size=len(sources))
        indptr = torch.searchsorted(sources, nodes, out_int32=True)
        return indptr, owners[eids], eids.int()


class Bench:
    """The graph and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        law = graph_of(options)
        self._cases, orders = CASES, (False, True)
        if options.graph != "power-law":
            # Of which an order is a part; and aims are of the power law's size.
            orders = (False,)
            self._cases = [replace(case, aim=None, dgl=None) for case in CASES if not case.local]
        self._graphs = {local: Graph(law, self._device, local) for local in orders}
        self._content: dict[str, Any] = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "graphs": [graph.about for graph in self._graphs.values()],
        }
        print(*self._content["graphs"], sep="\n")

    def run(self) -> None:
        """Print every case and keep it in a file."""
        self._content["host_us"] = self._host_time()
        print(f"a call takes {self._content['host_us']:.1f} us of the host")
        print(f"{'ms':54} {'ours':>8} {'cuSPARSE':>8} {'aim':>6} {'DGL':>6}  {'GB/s':>6}  reached")
        for case in self._cases:
            figure = self._figure(case)
            verdict = {True: "yes", False: "no", None: "-"}[figure["reached"]]
            numbers = [
                (figure["ours_ms"], 8),
                (figure["cusparse_ms"], 8),
                (case.aim, 6),
                (case.dgl, 6),
            ]
            columns = " ".join(f"{'-':>{w}}" if x is None else f"{x:{w}.2f}" for x, w in numbers)
            print(f"{case.name:54} {columns}  {figure['read_gbs']:6.0f}  {verdict}", flush=True)
            self._keep("figures", figure)
        self._transposed_products()

    def _transposed_products(self) -> None:
        graph, device = self._graphs[False], self._device
        transposed = graph.transposed()
        copy_bytes = sum(tensor.nbytes for tensor in transposed)
        print(f"{'transposed, ms':54} {'ours':>8} {'copied':>8}  (copy: {copy_bytes / 1e9:.2f} GB)")
        for width, weighted in TRANSPOSED:
            draw = torch.Generator(device).manual_seed(1)
            v = torch.randn(graph.nodes, width, generator=draw, device=device)
            e = None
            if weighted:
                e = torch.randn(len(graph.indices), 1, generator=draw, device=device)
            op, name = ("mul", f"mul {width}, 1") if weighted else ("copy_lhs", f"copy_lhs {width}")
            ours = partial(
                spmm_transposed, graph.indptr, graph.indices, None, v, e, graph.nodes, op
            )
            copied = partial(spmm, *transposed, v, e, op, "sum")
            size = spmm(*transposed, v.abs(), None if e is None else e.abs(), op, "sum")[0]
            if ((ours() - copied()[0]).abs() > 1e-5 * size).any():
                raise ValueError(f"transposed {name} is wrong")
            del size
            each = self._times({"ours": ours, "copied": copied})
            times = {which: float(np.median(spent)) for which, spent in each.items()}
            print(f"{name:54} {times['ours']:8.2f} {times['copied']:8.2f}", flush=True)
            self._keep("transposed", {"case": name, "copy_bytes": copy_bytes, "each_ms": each})

    def _keep(self, table: str, figure: dict[str, Any]) -> None:
        self._content.setdefault(table, []).append(figure)
        if self._options.out:
            # Anew each time: a run that is cut off leaves what it has found.
            self._options.out.write_text(json.dumps(self._content, indent=1) + "\n")

    def _times(self, contenders: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Milliseconds of each run, in turns and after one that does not count."""
        spent: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(self._options.repeats + 1):
            for name, call in contenders.items():
                seconds = window(lambda _, call=call: call(), [None] * 3, self._device)
                if repeat > 0:
                    spent[name].append(1e3 * seconds)
        return spent

    def _host_time(self) -> float:
        """Microseconds of the host for one call on a block of a mini-batch."""
        device = self._device
        indptr = torch.arange(1025, dtype=torch.int32, device=device) * 10
        indices = torch.randint(10_000, (10_240,), dtype=torch.int32, device=device)
        u = torch.randn(10_000, 64, device=device)
        call = partial(spmm, indptr, indices, None, u, None, "copy_lhs", "sum")
        return host_time(call, 1000)

    def _figure(self, case: Case) -> dict[str, Any]:
        device, graph = self._device, self._graphs[case.local]
        entries, nodes = len(graph.indices), graph.nodes
        draw = torch.Generator(device).manual_seed(1)
        u = torch.randn(nodes, *case.u_shape, generator=draw, device=device).to(case.dtype)
        e = eids = None
        if case.e_shape is not None:
            e = torch.randn(entries, *case.e_shape, generator=draw, device=device).to(case.dtype)
        if case.permuted:
            eids = torch.randperm(entries, generator=draw, device=device, dtype=torch.int32)
        ours = partial(spmm, graph.indptr, graph.indices, eids, u, e, case.op, case.reduce)
        self._require_right(case, graph, ours(), eids, u, e)
        contenders: dict[str, Callable[[], Any]] = {"ours": ours}
        if case.has_peer and not case.permuted:
            values = torch.ones(entries, device=device) if e is None else e.view(-1)
            matrix = torch.sparse_csr_tensor(
                graph.indptr, graph.indices, values, (nodes, nodes), check_invariants=False
            )
            contenders["cusparse"] = partial(torch.mm, matrix, u)
        each = self._times(contenders)
        times = {name: float(np.median(spent)) for name, spent in each.items()}
        peer = times.get("cusparse")
        read = entries * (math.prod(case.u_shape) * u.element_size() + 4)
        if e is not None:
            read += e.numel() * e.element_size()
        aim = min(case.aim or math.inf, math.inf if peer is None else peer / case.times_peer)
        return {
            "case": case.name,
            "ours_ms": times["ours"],
            "cusparse_ms": peer,
            "aim_ms": case.aim,
            "dgl_ms": case.dgl,
            "read_gbs": read / times["ours"] / 1e6,
            "reached": None if aim == math.inf else times["ours"] <= aim,
            "each_ms": each,
        }

    def _require_right(
        self,
        case: Case,
        graph: Graph,
        found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        eids: torch.Tensor | None,
        u: torch.Tensor,
        e: torch.Tensor | None,
    ) -> None:
        """Raise ValueError unless the rows that are checked are right."""
        out, arg_u, _ = found
        rounding = torch.finfo(case.dtype).eps
        for row in graph.checked.tolist():
            begin, end = graph.indptr[row : row + 2].tolist()
            messages = u[graph.indices[begin:end].long()].double()
            if e is not None:
                edges = slice(begin, end) if eids is None else eids[begin:end].long()
                right = e[edges].double()
                messages = messages * right if case.op == "mul" else messages + right
            if case.reduce == "sum":
                exact, size = messages.sum(0), messages.abs().sum(0)
                wrong = (out[row].double() - exact).abs() > 1e-5 * size + rounding * exact.abs()
            elif end > begin:
                exact = messages.amax(0)
                assert arg_u is not None
                # Of equal ones, which are few here, the first.
                source = u[arg_u[row].long(), torch.arange(u.shape[1], device=u.device)]
                wrong = (out[row].double() != exact) | (source.double() != exact)
            else:
                wrong = out[row] != -math.inf
            if wrong.any():
                raise ValueError(f"{case.name}: node {row} of {end - begin} in-edges is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_449_029)
    parser.add_argument("--edges", type=int, default=123_718_280)
    graph_options(parser)
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each contender")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
