"""Claim: reducing messages over a graph with hubs is never slower than cuSPARSE.

The graph has the size of ogbn-products, in-degrees from a Pareto distribution of exponent 1.5 and
sources drawn uniformly. Every case is checked first, on a sample of destinations and the largest
hub, in float64. Sums of float32 messages that are one operand, or that times one scalar an edge,
are ``torch.sparse`` products, too: cuSPARSE, in turns with ours.

    python -m benchmarks.spmm_gpu --out spmm.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import PowerLaw, this_device, window
from benchmarks.machine import describe_machine
from dgl_mgpu.ops import spmm

#: Destinations of each case that are checked.
CHECKED = 2000


@dataclass(frozen=True)
class Case:
    """A product to be timed.

    Attributes
    ----------
    permuted : bool
        Whether edge ids are in another order than entries.
    aim, dgl : float or None
        Milliseconds: what is to be reached, and what DGL's own CUDA build takes.
    """

    op: str
    reduce: str
    u_shape: tuple[int, ...]
    e_shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    permuted: bool = False
    aim: float | None = None
    dgl: float | None = None

    @property
    def name(self) -> str:
        """As in ``copy_lhs max 100 float32``."""
        shapes = [self.u_shape] + ([] if self.e_shape is None else [self.e_shape])
        rows = ", ".join("x".join(map(str, shape)) for shape in shapes)
        name = f"{self.op} {self.reduce} {rows} {str(self.dtype).removeprefix('torch.')}"
        return name + ", edge ids permuted" * self.permuted

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
)


class Bench:
    """The graph and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        law = PowerLaw(options.nodes, options.edges)
        indptr, self._indices = law.csc(self._device, torch.int32)
        self._indptr = indptr.to(torch.int32)
        degrees = indptr.diff()
        hub = degrees.argmax()
        sample = torch.randint(law.nodes, (CHECKED,), device=self._device)
        self._checked = torch.cat([hub[None], sample])
        self._about = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "graph": {
                "nodes": law.nodes,
                "edges": len(self._indices),
                "largest": int(degrees.max()),
            },
        }
        print(self._about["graph"])

    def run(self) -> None:
        """Print every case and keep it in a file."""
        host = self.host_time()
        print(f"a call takes {host:.1f} us of the host")
        print(f"{'ms':54} {'ours':>8} {'cuSPARSE':>8} {'aim':>6} {'DGL':>6}  {'GB/s':>6}  reached")
        figures: list[dict[str, Any]] = []
        for case in CASES:
            figure = self._figure(case)
            figures.append(figure)
            verdict = {True: "yes", False: "no", None: "-"}[figure["reached"]]
            numbers = [
                (figure["ours_ms"], 8),
                (figure["cusparse_ms"], 8),
                (case.aim, 6),
                (case.dgl, 6),
            ]
            columns = " ".join(f"{'-':>{w}}" if x is None else f"{x:{w}.2f}" for x, w in numbers)
            print(f"{case.name:54} {columns}  {figure['read_gbs']:6.0f}  {verdict}", flush=True)
            if self._options.out:
                # Anew each time: a run that is cut off leaves what it has found.
                content = {**self._about, "host_us": host, "figures": figures}
                self._options.out.write_text(json.dumps(content, indent=1) + "\n")

    def host_time(self) -> float:
        """Microseconds of the host for one call on a block of a mini-batch."""
        device, calls = self._device, 1000
        indptr = torch.arange(1025, dtype=torch.int32, device=device) * 10
        indices = torch.randint(10_000, (10_240,), dtype=torch.int32, device=device)
        u = torch.randn(10_000, 64, device=device)
        call = partial(spmm, indptr, indices, None, u, None, "copy_lhs", "sum")
        for _ in range(10):
            call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    def _figure(self, case: Case) -> dict[str, Any]:
        device, entries = self._device, len(self._indices)
        draw = torch.Generator(device).manual_seed(1)
        nodes = len(self._indptr) - 1
        u = torch.randn(nodes, *case.u_shape, generator=draw, device=device).to(case.dtype)
        e = eids = None
        if case.e_shape is not None:
            e = torch.randn(entries, *case.e_shape, generator=draw, device=device).to(case.dtype)
        if case.permuted:
            eids = torch.randperm(entries, generator=draw, device=device, dtype=torch.int32)
        ours = partial(spmm, self._indptr, self._indices, eids, u, e, case.op, case.reduce)
        self._require_right(case, ours(), eids, u, e)
        contenders: dict[str, Callable[[], Any]] = {"ours": ours}
        if case.has_peer and not case.permuted:
            values = torch.ones(entries, device=device) if e is None else e.view(-1)
            matrix = torch.sparse_csr_tensor(
                self._indptr, self._indices, values, (nodes, nodes), check_invariants=False
            )
            contenders["cusparse"] = partial(torch.mm, matrix, u)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(self._options.repeats + 1):
            for name, call in contenders.items():
                spent = window(lambda _, call=call: call(), [None] * 3, device)
                if repeat > 0:
                    seconds[name].append(spent)
        times = {name: float(np.median(spent)) * 1e3 for name, spent in seconds.items()}
        peer = times.get("cusparse")
        read = entries * (math.prod(case.u_shape) * u.element_size() + 4)
        if e is not None:
            read += e.numel() * e.element_size()
        reached = None if case.aim is None else times["ours"] <= min(case.aim, peer or math.inf)
        return {
            "case": case.name,
            "ours_ms": times["ours"],
            "cusparse_ms": peer,
            "aim_ms": case.aim,
            "dgl_ms": case.dgl,
            "read_gbs": read / times["ours"] / 1e6,
            "reached": reached,
            "each_ms": {name: [s * 1e3 for s in spent] for name, spent in seconds.items()},
        }

    def _require_right(
        self,
        case: Case,
        found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        eids: torch.Tensor | None,
        u: torch.Tensor,
        e: torch.Tensor | None,
    ) -> None:
        """Raise ValueError unless the rows that are checked are right."""
        out, arg_u, _ = found
        rounding = torch.finfo(case.dtype).eps
        for row in self._checked.tolist():
            begin, end = self._indptr[row : row + 2].tolist()
            messages = u[self._indices[begin:end].long()].double()
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
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each contender")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
