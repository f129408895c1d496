"""What the benchmarks of full-graph training share: graphs, parts of them, checks and reports.

On a machine without GPUs ranks exchange rows over gloo: enough to see that a program works, not to
measure anything.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.gpu import this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.strategies import ExchangeStrategies
from dgl_mgpu.distributed.exchange.tuner import Auto, Case
from dgl_mgpu.distributed.exchange.window import Window, reaches_all
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.index import PartitionedRelation

#: Of the Pareto distribution of in-degrees.
_EXPONENT = 1.5
#: Destinations of each case that are checked, and how far off they may be.
_CHECKED, _TOLERANCE = 500, 1e-5
#: Numbers of rows that are made at a time.
_CHUNK = 1 << 26
#: Calls after which 'auto' must have chosen.
_MAX_CALLS = 1000
#: Odd numbers whose bits look random (splitmix64's).
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class Shape:
    """The size of a graph, and of what is trained on it.

    The graph is generated: in-degrees are Pareto distributed, sources are drawn uniformly.  The
    same on every rank, if all are on machines of one kind.
    """

    nodes: int
    edges: int
    features: int
    classes: int

    def scaled(self, by: float) -> Shape:
        """With so many times the nodes and edges."""
        return replace(self, nodes=int(self.nodes * by), edges=int(self.edges * by))

    def csc(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` and ``indices``, int32, with exactly these numbers of nodes and edges."""
        draw = torch.Generator(device).manual_seed(0)
        uniform = torch.rand(self.nodes, generator=draw, device=device, dtype=torch.float64)
        # In units of the smallest degree, of which the mean is the edges' share of each node.
        least = self.edges / self.nodes * (_EXPONENT - 1) / _EXPONENT
        degrees = ((1 - uniform) ** (-1 / _EXPONENT)).clamp_(max=self.nodes / least)
        # Whole numbers: of others, sums would differ from rank to rank.
        ends = (1024 * degrees).long().cumsum(0)
        indptr = torch.zeros(self.nodes + 1, dtype=torch.int32, device=device)
        indptr[1:] = (ends.double() * (self.edges / int(ends[-1]))).round()
        indices = torch.randint(
            self.nodes, (self.edges,), dtype=torch.int32, generator=draw, device=device
        )
        return indptr, indices


#: Those of MG-GCN's data sets (table 1, whose Cora and Proteins are larger graphs than those that
#: are called so elsewhere), and of MGG's other graphs (table 3, which counts the edges of
#: ogbn-products once for both directions).
SHAPES = {
    "products": Shape(2_449_029, 123_718_280, 100, 47),
    "reddit": Shape(232_965, 114_615_892, 602, 41),
    "papers100M": Shape(111_059_956, 1_615_685_872, 128, 172),
    "arxiv": Shape(169_343, 1_166_243, 128, 40),
    "cora": Shape(3_327, 9_228, 3_703, 6),
    "large proteins": Shape(8_740_000, 1_300_000_000, 128, 256),
    "enwiki-2013": Shape(4_203_323, 202_623_226, 96, 128),
    "products, edges once": Shape(2_449_029, 61_859_140, 100, 64),
    "proteins": Shape(132_534, 39_561_252, 128, 112),
    "com-orkut": Shape(3_072_441, 117_185_083, 128, 32),
}


def graph_of(indptr: torch.Tensor, indices: torch.Tensor) -> dgl.DGLGraph:
    """A graph whose edge ids are places among ``indices``."""
    return dgl.graph(("csc", (indptr, indices, indices[:0])), num_nodes=len(indptr) - 1)


def random_rows(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Random numbers in [0, 1), float32, shape (nodes, width): a node has the same everywhere."""
    out = torch.empty(len(ids), width, device=ids.device)
    columns = torch.arange(width, device=ids.device)
    some = max(1, _CHUNK // width)
    for nodes, rows in zip(ids.long().split(some), out.split(some), strict=True):
        mixed = (nodes[:, None] * width + columns + 1) * _FIRST
        mixed ^= mixed >> 29
        mixed *= _SECOND
        rows.copy_((mixed >> 40) & 0xFFFFFF)
    return out.mul_(2.0**-24)


class ExpectedSums:
    """Sums over the in-edges of a sample of a rank's nodes and of its largest hub, in float64.

    Parameters
    ----------
    indptr, indices : Tensor
        Of the whole graph.
    own : Tensor, shape (num_own,)
        The rank's nodes.
    whole : Tensor, shape (num_nodes, width)
        All nodes' rows.
    """

    def __init__(
        self, indptr: torch.Tensor, indices: torch.Tensor, own: torch.Tensor, whole: torch.Tensor
    ) -> None:
        own = own.long()
        degrees = indptr.diff()[own].long()
        sample = torch.randint(len(own), (_CHECKED,), device=own.device)
        self._rows = torch.cat([degrees.argmax()[None], sample])
        self._nodes, counts = own[self._rows], degrees[self._rows]
        of_row = torch.repeat_interleave(counts)
        begin = indptr[self._nodes] - (counts.cumsum(0) - counts)
        entries = torch.arange(len(of_row), device=own.device) + begin[of_row]
        messages = whole[indices[entries].long()].double()
        self._exact = messages.new_zeros(len(self._rows), whole.shape[1])
        self._sizes = self._exact.clone().index_add_(0, of_row, messages.abs())
        self._exact.index_add_(0, of_row, messages)

    def require(self, what: str, found: torch.Tensor) -> None:
        """Raise ValueError unless the sums of all own nodes, of which some are known, are right."""
        errors = (found[self._rows].double() - self._exact).abs()
        wrong = (errors > _TOLERANCE * self._sizes + 1e-6).any(1)
        if wrong.any():
            raise ValueError(f"{what}: node {int(self._nodes[wrong][0])} is wrong")


class Job:
    """One rank of a benchmark, which works, waits and reports with the others.

    What is reported is in ``options.out`` after each figure: a run that is cut off leaves what it
    has found.  What jobs before it have found stays there, see `new_report`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, this_device()
        self.ranks = Communicator.of_all_machines()
        self.group = dist.group.WORLD if self.ranks.size > 1 else None
        self.content: dict[str, Any] = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "figures": [],
        }
        if options.out and options.out.exists():
            self.content = json.loads(options.out.read_text())

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def keep(self, **figure: Any) -> None:
        """Keep a figure in the file."""
        self.content["figures"].append({"ranks": self.ranks.size, **figure})
        if self.options.out and self.ranks.rank == 0:
            self.options.out.write_text(json.dumps(self.content, indent=1) + "\n")

    def wait(self) -> None:
        """Until all ranks have come here and their GPUs are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ranks.all_gather(None)

    def partition(
        self,
        g: dgl.DGLGraph,
        exchange: str = "halo",
        by: str | torch.Tensor = "random",
        repeats: int = 3,
    ) -> tuple[PartitionedGraph, list[float]]:
        """This rank's part, and the seconds that it took to make it each time."""
        spent = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            graph = dgl_mgpu.partition_graph(g, by=by, exchange=exchange, device=self.device)
            self.wait()
            spent.append(time.perf_counter() - begin)
        return graph, spent

    def ways(self, spread: PartitionedRelation) -> ExchangeStrategies:
        """All ways of a part to exchange rows."""
        window = None
        if self.group is not None and reaches_all(self.group, self.device):
            window = Window(self.group, self.device)
        return ExchangeStrategies(spread.part, self.group, window)


def exchanges(ways: ExchangeStrategies, messages: bool = False) -> dict[str, CommSchedule]:
    """Those that have rows sent or copied, by name.

    If ``messages``, also the halo in NCCL's messages, where copy engines would fetch it.
    """
    found = {}
    for way in ways.candidates:
        if way.pipeline is None:
            found[str(way)] = ways[way]
        if messages and way.chunks and type(ways[way]) is not Chunks:
            found[f"{way}, messages"] = Chunks(ways.part, ways.group, way.chunks)
    return found


def tuned(auto: Auto, case: Case, rows: torch.Tensor) -> tuple[int, float]:
    """How many calls it takes until 'auto' has chosen for a case, and their seconds; collective.

    Raises
    ------
    RuntimeError
        If it has not in `_MAX_CALLS` calls.
    """
    if auto.part.num_ranks == 1:
        return 0, 0.0  # there is nothing to choose from
    begin = time.perf_counter()
    for calls in range(1, _MAX_CALLS + 1):
        (auto.transposed_sums if case.transposed else auto.sums)(rows)
        if case in auto.found:
            return calls, time.perf_counter() - begin
    raise RuntimeError(f"nothing was chosen for {case} in {_MAX_CALLS} calls")


def new_report(options: argparse.Namespace) -> None:
    """Begin a report anew: jobs of several numbers of ranks then add to it."""
    if options.out:
        options.out.unlink(missing_ok=True)


def column(value: float | None, width: int, digits: str = ".2f") -> str:
    """A number in a table; a dash where there is none."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}{digits}}"


def common_options(parser: argparse.ArgumentParser) -> None:
    """Options that all of these programs have."""
    parser.add_argument("--scale", type=float, default=1.0, help="of nodes and edges")
    parser.add_argument("--repeats", type=int, default=9, help="timed windows")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")


def rank_counts_option(parser: argparse.ArgumentParser) -> None:
    """Numbers of ranks that a program has, one after the other."""
    gpus = max(1, torch.cuda.device_count())
    counts = [count for count in (1, 2, 4, 8) if count <= gpus]
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=counts, help="numbers of them, one after the other"
    )


def ranks_option(parser: argparse.ArgumentParser) -> None:
    """How many ranks a program has that runs with one number of them."""
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
