"""Claim: GPUs that read features in host memory train faster than if the CPU gathers them.

PyTorch-Direct's figures 11 and 12: GraphSAGE as in DGL's example (mini-batches of 1000 seeds,
fanouts 25 and 10, hidden width 16) on generated graphs of the sizes of the paper's data sets,
topology in GPU memory and features in the host's.  In turns, in the same run and of the same rows:

- ``copies``, the paper's baseline (DMA): the CPU gathers a batch's rows into pinned memory, with
  as many threads as are fastest in a pass with each of ``--threads``, which are kept, and one copy
  takes them to the GPU, for the next batch meanwhile;
- ``zero-copy``: GPUs read the rows through the store, for the next batch on a part of their
  multiprocessors;
- ``naive``, as the paper calls it: torch's own kernel reads the rows, mapped but neither shifted to
  the lines of memory nor ahead of time.

The paper samples on the CPU; here GPUs sample ahead of time in all three ways, and the CPU is told
the ids.  Samples, features and losses are checked first.

    python -m benchmarks.host_features_gpu --ranks 1 2 --out host_features.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader  # isort: skip

from benchmarks.ceilings import measure_ceilings
from benchmarks.fullgraph import Job, column, common_options, new_report
from benchmarks.generated_graph import Data, require_edges, require_rows, seeds_of, stored
from benchmarks.gpu import this_device
from benchmarks.mapped import host_rows, mapped
from benchmarks.minibatch_gpu import hops_of
from benchmarks.sampling_gpu import Checker
from benchmarks.timed_training import (
    WARM_UP,
    Clock,
    Network,
    Training,
    batches_of,
    loader_of,
    medians,
    network_model,
    require_same_losses,
)
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data import generate
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.launch.launch import launch

#: Sizes of PyTorch-Direct's table 4, which states no classes, and counts the edges of
#: ogbn-products once for both directions.
SHAPES = {
    "wikipedia": GraphSpec(13_600_000, 437_200_000, 315, 64, shape="wikipedia"),
    "amazon": GraphSpec(14_700_000, 64_000_000, 578, 64, shape="amazon"),
    "papers100M": generate.SHAPES["papers100M"],
    "products": generate.SHAPES["products"],
}
#: The shape that the paper gives features of several widths (figure 12).
OF_WIDTHS = "products"
NETWORK = Network("graphsage", fanouts=(25, 10))
WAYS = COPIES, ZERO_COPY, NAIVE = "copies", "zero-copy", "naive"
#: Steps at the end of a pass that are not timed.
SPARE = 2
#: Seeds whose sample is checked edge by edge.
_CHECKED = 32


@dataclass(frozen=True)
class Copied:
    """Rows that are on their way to the GPU.

    Attributes
    ----------
    rows : Tensor
    done : torch.cuda.Event or None
        When they are there; None on the CPU.
    """

    rows: torch.Tensor
    done: torch.cuda.Event | None


class CopiedRows:
    """Gives batches their features as the paper's baseline does: gathered by the CPU, then copied.

    A thread gathers the next batch's rows while the host queues the model, and the GPU works on it.

    Parameters
    ----------
    rows : Tensor, shape (num_nodes, width)
        All nodes' features, in the host's memory.
    device : torch.device
        Where they are to go.

    Attributes
    ----------
    threads : int
        How many gather.
    """

    def __init__(self, rows: torch.Tensor, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.threads = torch.get_num_threads()
        self._on_gpu = device.type == "cuda"
        # Ids that come do not wait for rows that go.
        self._ids_stream, self._rows_stream = (
            torch.cuda.Stream(device) if self._on_gpu else None for _ in range(2)
        )

    def added(self, batches: Iterable[list[dgl.DGLGraph]]) -> Iterator[list[dgl.DGLGraph]]:
        """The blocks of batches, with features of their input nodes."""
        with ThreadPoolExecutor(1, initializer=self._begin) as thread:
            under_way: deque[tuple[list[dgl.DGLGraph], Future[Copied]]] = deque()
            for blocks in batches:
                ids = blocks[0].srcdata[dgl.NID]
                under_way.append((blocks, thread.submit(self._copy, ids, self._mark())))
                if len(under_way) > 1:
                    yield self._add(*under_way.popleft())
            for blocks, future in under_way:
                yield self._add(blocks, future)

    def _begin(self) -> None:
        torch.set_num_threads(self.threads)  # of this thread, and of those that begin later
        if self._on_gpu:
            torch.cuda.set_device(self._device)  # else a thread's own is the first GPU

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what is queued so far, sampling included."""
        return torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None

    def _copy(self, ids: torch.Tensor, sampled: torch.cuda.Event | None) -> Copied:
        with torch.cuda.stream(self._ids_stream):
            if sampled is not None:
                torch.cuda.current_stream().wait_event(sampled)
            ids = ids.cpu()
        with torch.cuda.stream(self._rows_stream):
            # torch keeps pinned memory until its copy is done, and then for the next one.
            gathered = self._rows.new_empty(len(ids), self._rows.shape[1], pin_memory=self._on_gpu)
            torch.index_select(self._rows, 0, ids, out=gathered)
            rows = gathered.to(self._device, non_blocking=True)
            return Copied(
                rows, torch.cuda.current_stream().record_event() if self._on_gpu else None
            )

    def _add(self, blocks: list[dgl.DGLGraph], future: Future[Copied]) -> list[dgl.DGLGraph]:
        copied = future.result()
        if copied.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied.done)
            copied.rows.record_stream(stream)
        blocks[0].srcdata["feat"] = copied.rows
        return blocks


class MappedRows:
    """Gives batches their features by torch's own kernel, when they are asked for.

    Parameters
    ----------
    rows : Tensor, shape (num_nodes, width)
        All nodes' features, in host memory that is registered with the GPU.
    device : torch.device
    """

    def __init__(self, rows: torch.Tensor, device: torch.device) -> None:
        self._rows = mapped(rows, device)

    def added(self, batches: Iterable[list[dgl.DGLGraph]]) -> Iterator[list[dgl.DGLGraph]]:
        """The blocks of batches, with features of their input nodes."""
        for blocks in batches:
            blocks[0].srcdata["feat"] = self._rows.index_select(0, blocks[0].srcdata[dgl.NID])
            yield blocks


class Case:
    """One graph, trained on in all ways by all ranks."""

    def __init__(self, job: Job, name: str, data: Data, graph: StoreGraph) -> None:
        self._job, self._options, self._name = job, job.options, name
        self._data, self._graph = data, graph
        self._clock = Clock(job)
        self._training = Training(network_model(NETWORK, data.spec, job.options.hidden), job.device)
        self._view = graph.get_node_storage("feat").view
        rows = host_rows(self._view)
        self._copied = CopiedRows(rows, job.device)
        self._others: dict[str, CopiedRows | MappedRows] = {
            COPIES: self._copied,
            NAIVE: MappedRows(rows, job.device),
        }
        steps = WARM_UP + self._options.window + SPARE
        self._ids = seeds_of(data, steps * self._options.batch * job.ranks.size)
        # Of each way one for all passes, as in a script: it learns when to make batches.
        self._loaders = {way: self._loader(way, self._options.batch) for way in WAYS}

    def _loader(self, way: str, batch: int) -> DataLoader:
        sampler = NETWORK.sampler(() if way in self._others else ("feat",))
        return loader_of(self._graph, self._ids, sampler, batch, self._job.ranks)

    def _added(self, way: str, loader: DataLoader) -> Iterator[list[dgl.DGLGraph]]:
        """The blocks of one pass, with features."""
        batches = (blocks for _, _, blocks in batches_of(loader, "1"))
        return self._others[way].added(batches) if way in self._others else batches

    def check(self) -> None:
        """Raise ValueError unless batches are right, the same in all ways and in host memory."""
        for way in WAYS:
            name = f"{self._name}, {way}"
            self._begin(0)
            few = self._loader(way, min(_CHECKED, self._options.batch))
            blocks = next(self._added(way, few))
            seeds = blocks[-1].dstdata[dgl.NID]
            require_edges(name, self._data, blocks)
            hops, eids = hops_of(blocks)
            same = [(dst, indptr, nodes.to(self._data.indices)) for dst, indptr, nodes in hops]
            checker = Checker(self._data.indptr, self._data.indices)
            checker.require(name, seeds, NETWORK.fanouts, same, eids)
            self._begin(0)
            blocks = next(self._added(way, self._loaders[way]))
            require_rows(name, self._data, blocks)
            nodes = blocks[0].srcdata[dgl.NID]
            if way == COPIES:
                expected = nodes
            elif not torch.equal(nodes, expected):
                raise ValueError(f"{name}: a batch of other nodes than with {COPIES}")
        read = {memory for (table, memory) in self._graph.traffic.take().rows if table == "feat"}
        if read != {"host"}:
            raise ValueError(f"{self._name}: features come from {sorted(read)}, not from the host")

    def measure(self) -> dict[str, Any]:
        """Each way's milliseconds a step in each turn, on each rank."""
        by_threads = self._milliseconds_by_threads()
        self._copied.threads = min(by_threads, key=by_threads.__getitem__)
        spent: dict[str, list[float]] = {way: [] for way in WAYS}
        same_bits = True
        nodes: list[int] = []
        for turn in range(self._options.repeats):
            losses = {}
            for way in WAYS:
                seconds, losses[way], nodes = self._pass(turn, way)
                spent[way].append(1e3 * seconds)
            same_bits &= require_same_losses(self._name, losses)
        return {
            "each_rank_ms": self._job.ranks.all_gather(spent),
            "threads": self._copied.threads,
            "copies_ms_by_threads": by_threads,
            "losses_have_the_same_bits": same_bits,
            "row_bytes": self._view.row_bytes,
            "rows_a_step": self._job.ranks.all_gather(statistics.mean(nodes)),
        }

    def _milliseconds_by_threads(self) -> dict[int, float]:
        """A step's of copies, on the slowest rank, with so many threads of each rank."""
        self._pass(0, COPIES)  # which gets the pinned memory
        found = {}
        for threads in self._options.threads:
            self._copied.threads = threads
            seconds, _, _ = self._pass(0, COPIES)
            found[threads] = 1e3 * max(self._job.ranks.all_gather(seconds))
        return found

    def _pass(self, turn: int, way: str) -> tuple[float, torch.Tensor, list[int]]:
        """Seconds of a step, the losses, and the input nodes of each batch."""
        losses: list[torch.Tensor] = []
        nodes: list[int] = []

        def step(blocks: list[dgl.DGLGraph]) -> None:
            losses.append(self._training.step_on_blocks(blocks))
            nodes.append(blocks[0].num_src_nodes())

        self._begin(turn)
        steps = map(step, self._added(way, self._loaders[way]))
        seconds = self._clock.seconds_a_step(steps, self._options.window)
        return seconds, torch.stack(losses), nodes

    def _begin(self, turn: int) -> None:
        self._training.restart()
        self._graph.set_epoch(turn)


class Bench:
    """All shapes, on one rank."""

    def __init__(self, options: argparse.Namespace, pinned_copy: float | None) -> None:
        self._job, self._options = Job(options), options
        self._pinned_copy = pinned_copy

    def run(self) -> None:
        """Print every shape's figures and keep them in a file."""
        self._job.say(
            f"{'ms a step':30} {'copies':>8} {'zero-c.':>8} {'naive':>8} {'ratio':>6}"
            f"  GB/s: {'copies':>6} {'zero-c.':>7}"
        )
        for shape in self._options.shapes:
            spec = SHAPES[shape].scaled(self._options.scale)
            widths = self._options.widths if shape == OF_WIDTHS else [spec.num_features]
            for width in widths:
                self._shape(shape, replace(spec, num_features=width))

    def _shape(self, shape: str, spec: GraphSpec) -> None:
        job, ranks = self._job, Communicator.of_this_machine()
        name = f"{shape}, {spec.num_features} features"
        begin = time.perf_counter()
        data = Data(spec, job.device)
        store = {
            "gpu_memory": data.nbytes,
            "graph_ratio": 1.0,
            "feature_ratio": 0.0,
            # What the machine says of its memory may be less than it gives.
            "host_memory": 2 * data.nbytes,
            "batch_size": self._options.batch,
            "fanouts": NETWORK.fanouts[::-1],
        }
        with stored(data, ranks, store) as graph:
            job.wait()
            build_s = time.perf_counter() - begin
            case = Case(job, name, data, graph)
            ranks.run_all("check batches", case.check)
            found = case.measure()
        median = medians(found["each_rank_ms"])
        # Of the rank that reads most, in the time of a step.
        nbytes = max(found["rows_a_step"]) * found["row_bytes"]
        rates = {way: nbytes / (1e6 * median[way]) for way in WAYS}
        ratio = median[COPIES] / median[ZERO_COPY]
        times = " ".join(column(median[way], 8) for way in WAYS)
        self._job.say(
            f"{name + f', {ranks.size} ranks':30} {times} {ratio:6.2f}"
            f"        {rates[COPIES]:6.1f} {rates[ZERO_COPY]:7.1f}"
        )
        job.keep(
            case=name,
            unit="ms",
            copies=median[COPIES],
            zero_copy=median[ZERO_COPY],
            naive=median[NAIVE],
            ratio=ratio,
            ratio_naive=median[COPIES] / median[NAIVE],
            gb_per_s=rates,
            pinned_copy_gb_per_s=self._pinned_copy,
            nodes=spec.num_nodes,
            edges=data.num_edges,
            build_s=build_s,
            **found,
        )


def work(options: argparse.Namespace, pinned_copy: float | None) -> None:
    """All that a rank does."""
    # Without a GPU, enough to see that the program works.
    with tensor_backed_graphs() if this_device().type == "cpu" else contextlib.nullcontext():
        Bench(options, pinned_copy).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.set_defaults(scale=0.25, repeats=3)
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[count for count in (1, 2) if count <= max(1, gpus)],
        help="numbers of them, one after the other",
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[128, 512, 1024, 4096],
        help=f"of the features of {OF_WIDTHS}",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[2**power for power in range(cores.bit_length())],
        help="of each rank, by which its CPU gathers rows for copies: all are tried",
    )
    parser.add_argument("--batch", type=int, default=1000, help="seeds of a mini-batch")
    parser.add_argument("--hidden", type=int, default=16, help="width of the hidden layer")
    parser.add_argument("--window", type=int, default=40, help="timed steps in a window")
    options = parser.parse_args()
    seeds = (WARM_UP + options.window + SPARE) * options.batch * max(options.ranks)
    for name in options.shapes:
        nodes = SHAPES[name].scaled(options.scale).num_nodes
        if nodes < seeds:
            parser.error(f"{name} has {nodes} nodes at this scale, and {seeds} are to be seeds")
    new_report(options)
    # One rank runs in this process, and would leave its pinned memory to the others' time.
    for count in sorted(options.ranks, reverse=True):
        launch(work, count, options, measure_ceilings(count).get("pinned_copy"))


if __name__ == "__main__":
    main()
