"""What the benchmarks on GPUs share: options, graphs, tables, stores and timed windows.

On a machine without GPUs everything runs in shared memory, without peer and ceilings: enough to
see that a program works, not to measure anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime, choose_runtime
from dgl_mgpu.errors import PlanDoesNotFitError, UnreachableError
from dgl_mgpu.machine import Topology, probe_shared_memory
from dgl_mgpu.placement import expected_reads
from dgl_mgpu.store.calibration import calibrate
from dgl_mgpu.store.memory import Store, build
from dgl_mgpu.store.memory.format import Source
from dgl_mgpu.store.memory.machine import topology_of_ranks
from dgl_mgpu.store.memory.tables import Blueprint
from dgl_mgpu.store.planning import StoreOptions, make_blueprint

# Edges that are drawn, and rows that are checked, at a time.
_CHUNK = 1 << 26
_CHECKED = 1 << 16
# Mini-batches that tell how hot a node is.
_PRESAMPLED = 32


def this_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def common_options(parser: argparse.ArgumentParser) -> None:
    """Options that all of these programs have."""
    parser.add_argument(
        "--ranks", type=int, default=max(1, torch.cuda.device_count()), help="one a GPU"
    )
    parser.add_argument("--nodes", type=int, default=20_000_000, help="of the graph sampled")
    parser.add_argument("--edges", type=int, default=320_000_000)
    parser.add_argument("--repeats", type=int, default=10, help="timed windows")
    parser.add_argument("--window", type=int, default=8, help="timed batches in a window")
    parser.add_argument("--no-peer", action="store_true", help="leave pylibwholegraph out")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")


def calibrate_option(parser: argparse.ArgumentParser) -> None:
    """An option of programs whose stores are made by :func:`built_store`."""
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="use as many multiprocessors as users' stores do, measured for each store",
    )


@dataclass(frozen=True)
class PowerLaw:
    """A random graph with heavy tails, the same on every rank.

    Attributes
    ----------
    nodes, edges : int
        The number of edges is met within a few per cent.
    degree_exponent : float
        In-degrees are Pareto distributed with this exponent.
    source_exponent : float
        How often a node is a source is, too; 0 draws sources uniformly.
    in_step : bool
        Draw sources in proportion to in-degrees instead, as hubs of real graphs are hubs both ways.
    """

    nodes: int
    edges: int
    degree_exponent: float = 1.5
    source_exponent: float = 0.0
    in_step: bool = False

    def csc(
        self, device: torch.device, idtype: torch.dtype, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` (int64) and ``indices`` on a device."""
        draw = torch.Generator(device).manual_seed(seed)

        def uniform(count: int) -> torch.Tensor:
            return torch.rand(count, generator=draw, device=device, dtype=torch.float64)

        # The smallest degree is that for which the mean is right.
        alpha = self.degree_exponent
        least = self.edges / self.nodes * (alpha - 1) / alpha
        degrees = (least * (1 - uniform(self.nodes)) ** (-1 / alpha)).long()
        indptr = torch.zeros(self.nodes + 1, dtype=torch.int64, device=device)
        torch.cumsum(degrees.clamp(max=self.nodes - 1), 0, out=indptr[1:])
        indices = torch.empty(int(indptr[-1]), dtype=idtype, device=device)
        # The share of all edges that comes from the first x of the nodes is x ** (1 - 1 / s).
        s = self.source_exponent
        bend = s / (s - 1) if s else 1.0
        node_of = torch.randperm(self.nodes, generator=draw, device=device)
        for part in indices.split(_CHUNK):
            if self.in_step:  # the destination of an edge drawn uniformly
                edge = (len(indices) * uniform(len(part))).long().clamp_(max=len(indices) - 1)
                part.copy_(torch.searchsorted(indptr, edge, right=True) - 1)
                continue
            rank = (self.nodes * uniform(len(part)) ** bend).long()
            part.copy_(node_of[rank.clamp_(max=self.nodes - 1)])
        return indptr, indices


class Minibatches:
    """The nodes that mini-batches of a graph read.

    Neighbours are drawn with replacement, in plain torch: what is gathered does not depend on the
    sampler.

    Parameters
    ----------
    law : PowerLaw
        Or another of ``benchmarks.graphs``.
    batch : int
        Seeds of one.
    fanouts : sequence of int
        Beginning at the seeds.
    """

    def __init__(self, law: PowerLaw, batch: int, fanouts: Sequence[int]) -> None:
        self._law, self._batch, self._fanouts = law, batch, fanouts
        self._indptr, self._indices = law.csc(this_device(), torch.int32)

    def draw(self, count: int, distinct: bool) -> list[torch.Tensor]:
        """Node ids, int64: each once and in random order, or as often and in the order in which
        they are sampled."""
        shape, device = (count, self._batch), self._indptr.device
        return [
            self._nodes(seeds.unique(), distinct)
            for seeds in torch.randint(self._law.nodes, shape, device=device)
        ]

    def hotness(self) -> np.ndarray:
        """How many of some mini-batches will read each node, by those that did."""
        degrees = torch.bincount(self._indices, minlength=self._law.nodes)
        reads = torch.zeros_like(degrees)
        for nodes in self.draw(_PRESAMPLED, distinct=True):
            reads[nodes] += 1
        return expected_reads(reads.cpu().numpy(), degrees.cpu().numpy())

    def _nodes(self, seeds: torch.Tensor, distinct: bool) -> torch.Tensor:
        nodes, sampled = seeds, [seeds]
        for fanout in self._fanouts:
            first, degrees = self._indptr[nodes], self._indptr[nodes + 1] - self._indptr[nodes]
            draws = torch.rand(len(nodes), fanout, dtype=torch.float64, device=nodes.device)
            places = first[:, None] + (draws * degrees[:, None]).long()
            drawn = torch.arange(fanout, device=nodes.device) < degrees[:, None]
            sampled.append(self._indices[places[drawn]].long())
            nodes = torch.cat([nodes, sampled[-1]]).unique()
        if distinct:
            return nodes[torch.randperm(len(nodes), device=nodes.device)]
        return torch.cat(sampled)


@contextmanager
def built_store(
    sources: Mapping[str, Source] | None,
    hotness: Mapping[str, np.ndarray],
    ranks: Communicator,
    options: Mapping[str, Any],
    *,
    calibrated: bool = False,
) -> Iterator[Store]:
    """A store of tables; ``sources`` and ``hotness`` are looked at on the first rank.

    Collective.  It is in the GPUs' memory where there are any.  If ``calibrated``, it is read with
    as many multiprocessors as users' stores are; else with the defaults of views.
    """
    runtime = choose_runtime("auto", ranks)
    topology = machine_of(ranks, runtime)
    blueprint = None
    if sources is not None:
        blueprint = _blueprint(sources, hotness, topology, options, runtime)
    store = build(blueprint, ranks, runtime)
    try:
        if calibrated:
            calibrate(store, StoreOptions(**options), ranks)
        yield store
    finally:
        store.close()


def why_not_possible(
    sources: Mapping[str, Source] | None,
    hotness: Mapping[str, np.ndarray],
    ranks: Communicator,
    options: Mapping[str, Any],
) -> str:
    """Why :func:`built_store` could not place these tables; nothing, if it could.  Collective."""
    runtime = choose_runtime("auto", ranks)
    topology = machine_of(ranks, runtime)

    def why() -> str:
        try:
            _blueprint(sources or {}, hotness, topology, options, runtime)
        except (UnreachableError, PlanDoesNotFitError) as error:
            return error.found
        return ""

    return ranks.broadcast_from_rank0("try a placement", why)


def _blueprint(
    sources: Mapping[str, Source],
    hotness: Mapping[str, np.ndarray],
    topology: Topology,
    options: Mapping[str, Any],
    runtime: Runtime | None,
) -> Blueprint:
    on_gpus = runtime is not None
    return make_blueprint(sources, hotness, topology, StoreOptions(**options), on_gpus=on_gpus)


def machine_of(ranks: Communicator, runtime: Runtime | None) -> Topology:
    """The machine that a store is placed on; ranks may share its GPUs.  Collective."""
    if runtime is None:
        return probe_shared_memory(ranks.size)
    return topology_of_ranks(
        runtime.machine(), runtime.gpus(), ranks.all_gather(runtime.device_info())
    )


class NumberedWords:
    """Rows of float32 whose words number themselves: word ``w`` of row ``r`` of a table of
    width ``n`` has the bits of ``r * n + w`` modulo 2**32.

    Rows are made when they are asked for, in one buffer: they last until the next are.
    """

    ndim = 2
    dtype = np.dtype(np.float32)

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.shape = (num_rows, row_bytes // 4)
        self._words = torch.arange(self.shape[1], dtype=torch.int32)
        self._buffer = torch.empty(0, self.shape[1], dtype=torch.int32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) > len(self._buffer):
            self._buffer = torch.empty(len(ids), self.shape[1], dtype=torch.int32)
        # In torch, which has several threads.
        first = torch.from_numpy(ids * self.shape[1]).to(torch.int32)
        rows = torch.add(first[:, None], self._words, out=self._buffer[: len(ids)])
        return rows.numpy().view(np.float32)


def require_words(
    what: str,
    gather: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    numbers: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Raise ValueError unless the words gathered have the ``numbers`` of their rows' words."""
    rows = gather(ids)
    # A part at a time: the numbers take twice the memory of the words.
    for some, found in zip(ids.split(_CHECKED), rows.split(_CHECKED), strict=True):
        wrong = (found.view(torch.int32) != numbers(some).to(torch.int32)).any(1)
        if wrong.any():
            raise ValueError(f"{what}: wrong rows, the first is {int(some[wrong][0])}")


def from_pool(pool: Sequence[torch.Tensor], size: int, turn: int) -> list[torch.Tensor]:
    """``size`` batches of a pool, those after the turn's before."""
    return [pool[(turn * size + i) % len(pool)] for i in range(size)]


def window(call: Callable[[Any], Any], batches: Sequence[Any], device: torch.device) -> float:
    """Seconds a batch.

    The first and the last batch are not timed: while one rank is timed, the others are busy.
    """
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call(batches[0])
        start.record()
        for batch in batches[1:-1]:
            call(batch)
        stop.record()
        call(batches[-1])
        torch.cuda.synchronize()
        seconds = start.elapsed_time(stop) / 1e3
    else:
        begin = time.perf_counter()
        for batch in batches[1:-1]:
            call(batch)
        seconds = time.perf_counter() - begin
    return seconds / (len(batches) - 2)


def host_time(call: Callable[[], Any], calls: int = 100) -> float:
    """Microseconds of a call until it returns."""
    for _ in range(10):
        call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def measure(
    contenders: Mapping[str, Callable[[Any], Any]],
    new_batches: Callable[[int], Sequence[Any]],
    repeats: int,
    ranks: Communicator,
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Seconds a batch, all ranks at once, contenders in turns.

    Every window has batches of its own; the first of each contender warms it up.

    Returns
    -------
    medians : dict
        By contender, of each rank.
    samples : dict
        By contender, each rank's, of every window.
    """
    device, names = this_device(), list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for turn in range(len(names)):
            name = names[(turn + repeat) % len(names)]
            batches = new_batches(repeat * len(names) + turn)
            if device.type == "cuda":
                torch.cuda.synchronize()
            ranks.all_gather(None)  # all begin together
            spent = window(contenders[name], batches, device)
            if repeat > 0:
                seconds[name].append(spent)
    everyone = ranks.all_gather(seconds)
    samples = {name: [rank[name] for rank in everyone] for name in names}
    medians = {name: [float(np.median(rank)) for rank in each] for name, each in samples.items()}
    return medians, samples
