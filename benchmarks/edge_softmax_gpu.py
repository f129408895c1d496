"""Claim: softmax over in-edges and operations on edges run at the speed of memory, hubs or not.

The graph has the size of ogbn-products, in-degrees from a Pareto distribution of exponent 1.5 and
sources drawn uniformly. Every case is checked first, on a sample of destinations and the largest
hub, in float64. Beside its time stands the least it could take: the bytes that it has to move, over
the rate of a copy within the GPU, measured in the same run. DGL's figures are those of its own CUDA
build.

    python -m benchmarks.edge_softmax_gpu --out edge_softmax.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ceilings import copy_rates
from benchmarks.gpu import PowerLaw, host_time, this_device, window
from benchmarks.machine import describe_machine
from dgl_mgpu.ops import edge_softmax, edge_softmax_backward, sddmm

#: Destinations of each case that are checked, beside the largest hub.
CHECKED = 300
#: Bytes that are copied to measure the ceiling.
COPIED = 1 << 30
ID_BYTES = 4
#: Milliseconds of DGL's CUDA build, and those to be reached, by heads.
DGL, AIM = {4: 207.0, 8: 219.0}, {4: 4.0, 8: 8.0}


@dataclass(frozen=True)
class Case:
    """Something to be timed.

    Attributes
    ----------
    call : callable
    eids : Tensor or None
        Edge ids of the entries, where they are in another order.
    exact : callable
        What the result is to be in float64 at the in-edges of a node, given its number and the ids
        of these edges.
    nbytes : int
        That have to be moved.
    aim, dgl : float or None
        Milliseconds: what is to be reached, and what DGL's own CUDA build takes.
    """

    name: str
    call: Callable[[], torch.Tensor]
    eids: torch.Tensor | None
    exact: Callable[[int, torch.Tensor], torch.Tensor]
    nbytes: int
    aim: float | None = None
    dgl: float | None = None


class Bench:
    """The graph and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        law = PowerLaw(options.nodes, options.edges)
        indptr, self._src = law.csc(self._device, torch.int32)
        self._nodes, self._edges = law.nodes, len(self._src)
        degrees = indptr.diff()
        self._indptr = indptr.int()
        nodes = torch.arange(law.nodes, dtype=torch.int32, device=self._device)
        self._dst = nodes.repeat_interleave(degrees, output_size=self._edges)
        sample = torch.randint(law.nodes, (CHECKED,), device=self._device)
        self._checked = [int(degrees.argmax()), *sample.tolist()]
        self._draw = torch.Generator(self._device).manual_seed(1)
        self._about = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "graph": {**asdict(law), "edges": self._edges, "largest": int(degrees.max())},
        }
        print(self._about["graph"])

    def run(self) -> None:
        """Print every case and keep it in a file."""
        copy, host = self._copy_rate(), self._host_times()
        print(f"a copy moves {copy:.0f} GB/s; a call takes of the host, us: {host}")
        print(f"{'ms':44} {'ours':>8} {'least':>8} {'aim':>8} {'DGL':>8}  {'GB/s':>6}  reached")
        figures: list[dict[str, Any]] = []
        for case in self._cases():
            figure = self._figure(case, copy)
            figures.append(figure)
            numbers = (figure["ours_ms"], figure["least_ms"], case.aim, case.dgl)
            columns = " ".join(f"{'-':>8}" if x is None else f"{x:8.2f}" for x in numbers)
            verdict = {True: "yes", False: "no", None: "-"}[figure["reached"]]
            print(f"{case.name:44} {columns}  {figure['gbs']:6.0f}  {verdict}", flush=True)
            if self._options.out:
                # Anew each time: a run that is cut off leaves what it has found.
                content = {**self._about, "copy_gbs": copy, "host_us": host, "figures": figures}
                self._options.out.write_text(json.dumps(content, indent=1) + "\n")

    def _cases(self) -> Iterator[Case]:
        order = self._permuted()
        for heads in (4, 8):
            for eids in (None, order):
                yield from self._softmax_cases(heads, torch.float32, eids)
        yield from self._softmax_cases(4, torch.bfloat16, None)
        yield self._sddmm_case("add", (4, 1))
        yield self._sddmm_case("dot", (4, 64))
        yield self._sddmm_case("dot", (100,))

    def _softmax_cases(
        self, heads: int, dtype: torch.dtype, eids: torch.Tensor | None
    ) -> Iterator[Case]:
        scores, grad = (self._random(self._edges, heads).to(dtype) for _ in range(2))
        name = f"{heads} heads {str(dtype).removeprefix('torch.')}"
        name += ", edge ids permuted" * (eids is not None)
        common = ID_BYTES * (self._nodes + (0 if eids is None else self._edges))
        out = edge_softmax(self._indptr, eids, scores)
        yield Case(
            f"softmax {name}",
            partial(edge_softmax, self._indptr, eids, scores),
            eids,
            lambda _, edges: scores[edges].double().softmax(0),
            common + 2 * scores.nbytes,
            AIM[heads],
            DGL[heads] if eids is None and dtype == torch.float32 else None,
        )

        def gradient(_: int, edges: torch.Tensor) -> torch.Tensor:
            weights, grads = out[edges].double(), grad[edges].double()
            return weights * (grads - (weights * grads).sum(0))

        yield Case(
            f"its gradient {name}",
            partial(edge_softmax_backward, self._indptr, eids, out, grad),
            eids,
            gradient,
            common + 3 * scores.nbytes,
            AIM[heads],
        )

    def _sddmm_case(self, op: str, shape: tuple[int, ...]) -> Case:
        """Of sources' and destinations' rows, edges ordered by destination: these are read once."""
        u, v = (self._random(self._nodes, *shape) for _ in range(2))
        call = partial(sddmm, self._src, self._dst, u, v, op)

        def exact(node: int, edges: torch.Tensor) -> torch.Tensor:
            left, right = u[self._src[edges].long()].double(), v[node].double()
            return left + right if op == "add" else (left * right).sum(-1, keepdim=True)

        row = u[0].nbytes
        results = (row if op == "add" else row // shape[-1]) + 2 * ID_BYTES
        width = "x".join(map(str, shape))
        name = f"u_{op}_v {width} float32"
        return Case(name, call, None, exact, self._edges * (row + results) + v.nbytes)

    def _figure(self, case: Case, copy: float) -> dict[str, Any]:
        self._require_right(case)
        spent = [
            window(lambda _: case.call(), [None] * 5, self._device)
            for _ in range(self._options.repeats + 1)
        ][1:]
        ours = float(np.median(spent)) * 1e3
        return {
            "case": case.name,
            "ours_ms": ours,
            "least_ms": case.nbytes / copy / 1e6,
            "aim_ms": case.aim,
            "dgl_ms": case.dgl,
            "gbs": case.nbytes / ours / 1e6,
            "reached": None if case.aim is None else ours <= case.aim,
            "each_ms": [1e3 * each for each in spent],
        }

    def _require_right(self, case: Case) -> None:
        """Raise ValueError unless the in-edges of the nodes that are checked are right."""
        found = case.call()
        rounding = max(1e-4, torch.finfo(found.dtype).eps)
        for node in self._checked:
            begin, end = self._indptr[node : node + 2].tolist()
            edges = torch.arange(begin, end, device=self._device)
            if case.eids is not None:
                edges = case.eids[begin:end].long()
            exact = case.exact(node, edges)
            size = exact.abs() + exact.abs().mean()
            wrong = (found[edges].double() - exact).abs() > rounding * size
            if wrong.any():
                raise ValueError(f"{case.name}: node {node} of {end - begin} in-edges is wrong")

    def _copy_rate(self) -> float:
        """GB/s of a copy within the GPU, bytes read and bytes written; 1 where there is none."""
        if self._device.type != "cuda":
            return 1.0
        block = torch.zeros(COPIED, dtype=torch.uint8, device=self._device)
        return 2 * copy_rates([(torch.empty_like(block), block)])[0]

    def _host_times(self) -> dict[str, float]:
        """Microseconds of the host for a call on a block of a mini-batch."""
        rows, degree, device = 4096, 10, self._device
        indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * degree
        src = torch.randint(rows, (rows * degree,), dtype=torch.int32, device=device)
        dst = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(degree)
        scores, u = self._random(rows * degree, 4), self._random(rows, 4)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "softmax": partial(edge_softmax, indptr, None, scores),
            "u_add_v": partial(sddmm, src, dst, u, u, "add"),
        }
        return {name: round(host_time(call), 1) for name, call in calls.items()}

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._draw, device=self._device)

    def _permuted(self) -> torch.Tensor:
        return torch.randperm(
            self._edges, generator=self._draw, device=self._device, dtype=torch.int32
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_449_029)
    parser.add_argument("--edges", type=int, default=123_718_280)
    parser.add_argument("--repeats", type=int, default=10, help="timed windows")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
