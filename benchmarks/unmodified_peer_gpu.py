"""Claim: an unmodified script is 1.3 times as fast as a peer's, and captured 2.5 times.

Ours is a script of ``unmodified_scripts``: DGL's DataLoader and SAGEConv, fused Adam, eager and
captured.  The peer trains the same GraphSAGE of torch-geometric's layers on mini-batches that
pylibwholegraph samples and gathers, as its own examples do, from the same graph and features in GPU
memory.  Its time is that of the fastest of its ways: each of ``LAYOUTS`` of a layer's edges, with
each of ``SCHEDULES`` of batches.  All ways, ours and the peer's, run in turns in one process.  The
aims are for every setting of fanouts.

A way of the peer that fails is left out: its error is printed and kept beside the figures.
The peer's samples are checked first, that its layouts have the same loss and gradients, and that a
batch of either side is as large.

    python -m benchmarks.unmodified_peer_gpu --out unmodified_peer.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import NeighborSampler  # isort: skip

from benchmarks.fullgraph import column
from benchmarks.gpu import this_device
from benchmarks.graphs import graph_of, graph_options
from benchmarks.machine import keep
from benchmarks.peers.geometric import LAYOUTS, Geometric, Hop, Layout, edge_list, sage_conv
from benchmarks.peers.wholegraph import WholeGraph, connect, hops
from benchmarks.sampling_gpu import Checker
from benchmarks.unmodified_gpu import WARM_UP, WINDOW, require_same_losses, train
from benchmarks.unmodified_scripts import Case, made_graph, sage, widths
from dgl_mgpu.comm.communicator import Communicator

#: Beginning at the seeds, or with ``--dgl-order`` as DGL's sampler reads them: ending there.
FANOUTS = ((15, 10, 5), (25, 10), (30, 30, 30))
#: Aims: times that the peer takes as long.
EAGER, CAPTURED = 1.3, 2.5
#: Most that a batch's edges differ by between both sides, as a share.
_SAME_WORK = 0.05
#: Between losses and gradients of two layouts: sums in another order.
_TOLERANCE = 1e-3


class Batch(NamedTuple):
    """A mini-batch of the peer, the layer nearest the input first; ``sizes`` of destinations."""

    rows: torch.Tensor
    labels: torch.Tensor
    edges: list[torch.Tensor]
    sizes: list[int]


Make = Callable[[torch.Tensor], Batch]


#: Takes a C compiler, and a minute for each setting.
COMPILED = {"edge list, compiled": Layout(edge_list, sage_conv, is_compiled=True)}


def one_by_one(make: Make, seeds: Sequence[torch.Tensor]) -> Iterator[Batch]:
    """Batches that are made on the model's stream when they are asked for, as in its examples."""
    return map(make, seeds)


def ahead(
    make: Make,
    seeds: Sequence[torch.Tensor],
    start: Callable[..., Callable[[], tuple[Batch, torch.cuda.Event]]] = partial,
) -> Iterator[Batch]:
    """Batches that are made on a side stream while the GPU trains on the one before.

    ``start`` begins to make one, and gives what waits for it; by default that makes it, while
    the GPU does what it was told of training.  A batch's memory goes back to the side stream, which
    waits for the steps before the batch that is trained on before it makes another.
    """
    script, side = torch.cuda.current_stream(), _side_stream()

    def made(some: torch.Tensor, after: torch.cuda.Event) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(side):
            side.wait_event(after)
            return make(some), side.record_event()

    batch, ready = made(seeds[0], script.record_event())
    for some in [*seeds[1:], seeds[0]]:
        script.wait_event(ready)
        coming = start(made, some, script.record_event())
        yield batch
        batch, ready = coming()


def ahead_in_a_thread(make: Make, seeds: Sequence[torch.Tensor]) -> Iterator[Batch]:
    """The same, made by another thread than the one that trains."""
    with ThreadPoolExecutor(1) as pool:
        yield from ahead(make, seeds, lambda *given: pool.submit(*given).result)


#: One for all: torch's allocator keeps memory for each stream.
@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=-1)


SCHEDULES = {
    "one by one": one_by_one,
    "ahead": ahead,
    "ahead in a thread": ahead_in_a_thread,
}


class PeersTraining:
    """The peer's model and optimizer, on edges of one layout."""

    def __init__(self, layout: Layout, depth: int) -> None:
        self.layout = layout
        self.model = Geometric(layout.layer, widths(depth)).to(this_device())
        self._optimizer = torch.optim.Adam(self.model.parameters(), 3e-3, fused=True)
        # Sizes differ from batch to batch.
        self._called = torch.compile(self.model, dynamic=True) if layout.is_compiled else self.model

    def loss(self, batch: Batch) -> torch.Tensor:
        """Of the seeds' scores."""
        return F.cross_entropy(self._called(batch.rows, batch.edges, batch.sizes), batch.labels)

    def step(self, batch: Batch) -> torch.Tensor:
        """Change the model; the loss before."""
        loss = self.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def take_parameters(self, other: PeersTraining) -> None:
        """Those of another's model, whose layers have the same ones."""
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(its)

    def loss_and_gradients(self, batch: Batch) -> list[torch.Tensor]:
        """Those of the parameters, which stay as they are."""
        loss = self.loss(batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(self.model.parameters()))]


def milliseconds(losses: Iterator[torch.Tensor]) -> float:
    """Of a step, as :func:`benchmarks.unmodified_gpu.train` times its own."""
    found, times = [], []
    for number, loss in enumerate(losses, start=1):
        found.append(loss)
        if number % WINDOW == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    if not torch.stack(found).isfinite().all():
        raise ValueError("a loss is not finite")
    counted = times[WARM_UP // WINDOW - 1 :]
    return 1e3 * statistics.median((b - a) / WINDOW for a, b in itertools.pairwise(counted))


class Sample(NamedTuple):
    """What the peer's sampler gives: nodes, edges, offsets and sources of each layer, the one
    nearest the input first; the last nodes are the seeds."""

    nodes: list[torch.Tensor]
    edges: list[torch.Tensor]
    offsets: list[torch.Tensor]
    sources: list[torch.Tensor]

    @property
    def work(self) -> dict[str, int]:
        """How large the batch is."""
        return {"inputs": len(self.nodes[0]), "edges": sum(map(len, self.sources))}


class Peer:
    """The peer's graph, features and labels."""

    def __init__(
        self,
        sample: Callable[[torch.Tensor, list[int]], Any],
        gather: Callable[[torch.Tensor], torch.Tensor],
        labels: torch.Tensor,
    ) -> None:
        self._sample, self._gather, self._labels = sample, gather, labels

    def sample(self, seeds: torch.Tensor, fanouts: Sequence[int]) -> Sample:
        """Fanouts begin at the seeds."""
        return Sample(*self._sample(seeds, list(fanouts)))

    def batch(self, sample: Sample, layout: Layout) -> Batch:
        """What the model takes."""
        sizes = list(map(len, sample.nodes))
        layers = zip(*sample[1:], sizes[:-1], sizes[1:], strict=True)
        return Batch(
            self._gather(sample.nodes[0]),
            # By torch: the peer's examples get them from Python, one by one.
            self._labels[sample.nodes[-1]],
            [layout.edges(Hop(*layer)) for layer in layers],
            sizes[1:],
        )


@contextlib.contextmanager
def trying(way: str, failures: dict[str, str]) -> Iterator[None]:
    """Print and keep the error of a way of the peer; the others are measured nevertheless."""
    try:
        yield
    except Exception as error:
        failures[way] = f"{type(error).__name__}: {error}"
        print(f"the peer failed, {way}: {failures[way]}", file=sys.stderr, flush=True)


class Setting:
    """Fanouts, beginning at the seeds, at which both sides train."""

    def __init__(
        self, g: dgl.DGLGraph, peer: Peer, fanouts: tuple[int, ...], options: argparse.Namespace
    ) -> None:
        self._g, self._peer, self._fanouts, self._options = g, peer, fanouts, options
        self._case = Case(sage, options.batch, fanouts[::-1])  # DGL's order
        count = (WARM_UP + options.steps) * options.batch
        seeds = torch.arange(count, dtype=g.idtype, device=g.device) % g.num_nodes()
        self._seeds = seeds.split(options.batch)
        self._failures: dict[str, str] = {}

    def row(self) -> dict[str, Any]:
        """All figures."""
        work = self._checked_work()
        ways = self._peers_ways(LAYOUTS | (COMPILED if self._options.compiled else {}))
        ours: dict[str, list[float]] = {"eager": [], "captured": []}
        peers: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self._options.turns):
            losses = []
            for mode, taken in ours.items():
                spent, found, _ = train(self._g, self._case, mode, self._options.steps)
                taken.append(spent)
                losses.append(found)
            require_same_losses(self._case, "captured", *losses)
            for way, timed in ways.items():
                if way not in self._failures:
                    with trying(way, self._failures):
                        peers[way].append(timed())
        return self._figures(work, ours, peers)

    def _figures(
        self,
        work: dict[str, dict[str, int]],
        ours: dict[str, list[float]],
        peers: dict[str, list[float]],
    ) -> dict[str, Any]:
        eager, captured = (statistics.median(taken) for taken in ours.values())
        medians = {
            way: statistics.median(taken)
            for way, taken in peers.items()
            if way not in self._failures
        }
        best = min(medians, key=medians.__getitem__, default=None)
        peer = None if best is None else medians[best]
        return {
            "case": f"{self._options.batch} at {','.join(map(str, self._fanouts))}",
            "fanouts_from_seeds": self._fanouts,
            "eager_ms": eager,
            "captured_ms": captured,
            "peer_ms": peer,
            "peers_way": best,
            "ratio_eager": None if peer is None else peer / eager,
            "ratio_captured": None if peer is None else peer / captured,
            "aims": {"eager": EAGER, "captured": CAPTURED},
            "reached": None if peer is None else peer >= max(EAGER * eager, CAPTURED * captured),
            "peers_ms": medians,
            "peers_failures": self._failures,
            "a_batch": work,
            "all_ms": {"ours": ours, "peer": peers},
        }

    def _peers_ways(self, layouts: Mapping[str, Layout]) -> dict[str, Callable[[], float]]:
        """What times a step, of each schedule and each layout that computes what it must."""
        sample = self._peer.sample(self._seeds[0], self._fanouts)
        first: PeersTraining | None = None
        ways: dict[str, Callable[[], float]] = {}
        for name, layout in layouts.items():
            with trying(name, self._failures):
                training = PeersTraining(layout, len(self._fanouts))
                base = first or training
                training.take_parameters(base)
                expected = base.loss_and_gradients(self._peer.batch(sample, base.layout))
                found = training.loss_and_gradients(self._peer.batch(sample, layout))
                _require_close(found, expected)
                first = base
                for schedule in SCHEDULES:
                    ways[f"{name}, {schedule}"] = partial(self._timed, training, schedule)
        return ways

    def _timed(self, training: PeersTraining, schedule: str) -> float:
        """Milliseconds of a step of the peer."""

        def make(seeds: torch.Tensor) -> Batch:
            return self._peer.batch(self._peer.sample(seeds, self._fanouts), training.layout)

        return milliseconds(map(training.step, SCHEDULES[schedule](make, self._seeds)))

    def _checked_work(self) -> dict[str, dict[str, int]]:
        """How large a batch is on either side; the peer's is a sample of the graph."""
        seeds = self._seeds[0]
        sample = self._peer.sample(seeds, self._fanouts)
        indptr, indices, _ = self._g.adj_tensors("csc")
        checker = Checker(indptr.long(), indices)
        checker.require("the peer", seeds, self._fanouts, hops(sample))
        _, _, blocks = NeighborSampler(self._case.fanouts).sample(self._g, seeds)
        edges = sum(block.num_edges() for block in blocks)
        work = {
            "ours": {"inputs": blocks[0].num_src_nodes(), "edges": edges},
            "peer": sample.work,
        }
        if abs(sample.work["edges"] - edges) > _SAME_WORK * edges:
            raise ValueError(f"batches of both sides are not alike: {work}")
        return work


def _require_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        if not torch.allclose(one, other, _TOLERANCE, _TOLERANCE * float(other.abs().max())):
            off = float((one - other).abs().max())
            raise ValueError(f"its loss or gradients are others, by up to {off}")


@contextlib.contextmanager
def peer_of(library: WholeGraph, g: dgl.DGLGraph) -> Iterator[Peer]:
    """The peer, with a graph's edges and features in memory of its own."""
    indptr, indices, _ = g.adj_tensors("csc")
    rows, labels = g.ndata["feat"], g.ndata["label"]
    num_rows, width = rows.shape
    with (
        library.sampler("cuda", indptr.long(), indices) as sample,
        library.table("cuda", num_rows, width, rows.__getitem__) as gather,
    ):
        yield Peer(sample, gather, labels)


def measure(g: dgl.DGLGraph, peer: Peer, options: argparse.Namespace) -> bool:
    """Print a row of each setting, and keep all in a file; whether each has the peer's time."""
    rows: list[dict[str, Any]] = []
    for fanouts in options.fanouts:
        from_seeds = fanouts[::-1] if options.dgl_order else fanouts
        row = Setting(g, peer, from_seeds, options).row()
        rows.append(row)
        shown = ("eager_ms", "captured_ms", "peer_ms", "ratio_eager", "ratio_captured")
        cells = (f"{name} {column(row[name], 1)}" for name in shown)
        print(f"{row['case']}: {', '.join(cells)}, peer's way: {row['peers_way']}", flush=True)
        keep(options, rows)
    return all(row["peer_ms"] is not None for row in rows)


def _fanouts(given: str) -> tuple[int, ...]:
    return tuple(map(int, given.split(",")))


def main() -> None:
    """Measure; fails where the peer cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--fanouts", nargs="+", type=_fanouts, default=FANOUTS)
    parser.add_argument(
        "--dgl-order", action="store_true", help="fanouts end at the seeds, as DGL's sampler has it"
    )
    parser.add_argument("--steps", type=int, default=96, help=f"timed ones, in windows of {WINDOW}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--compiled", action="store_true", help="the peer's model by torch.compile, too"
    )
    parser.add_argument("--out", type=Path)
    graph_options(parser)
    options = parser.parse_args()
    if options.steps < WINDOW or options.steps % WINDOW:
        parser.error(f"--steps is a multiple of {WINDOW}")
    if importlib.util.find_spec("torch_geometric") is None:
        sys.exit("the peer's model is torch-geometric's, which is not installed")
    library = connect(Communicator.of_this_machine(), wanted=True)
    if library is None:
        sys.exit(1)
    g = made_graph(*graph_of(options).csc(this_device(), torch.int32))
    with peer_of(library, g) as peer:
        is_complete = measure(g, peer, options)
    library.close()
    sys.exit(not is_complete)


if __name__ == "__main__":
    main()
