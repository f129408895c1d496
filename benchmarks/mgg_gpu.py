"""Claim: sums of 16 columns on several GPUs take less than a quarter of the time of MGG's.

MGG's table 4 has a GCN of one layer and width 16 on five graphs, forward; here graphs of the same
numbers of nodes and edges are generated, in-degrees from a Pareto distribution, sources drawn
uniformly.  A layer multiplies rows by weights and then sums them; the sums alone are timed too,
which is what MGG's own code was measured with on H200s.  In the same run: every way of exchanging
rows, 'auto' after its search, and remote reads with 16 entries a partition and 2 warps a block
against what they gain by (figure 9): with all of a row's entries in one warp, and with local and
remote entries in warps of their own.  Sums and outputs of a sample of nodes and of the largest hub
are checked first, in float64.

MGG's second model, a GIN of 5 layers of 64 (figure 8), runs forward in every way of exchanging
rows but 'auto', too: its layers sum rows before they multiply them.  Its outputs are compared with
those of products of the whole graph's matrix by torch.

Preprocessing is to partition the graph, which every rank has in its GPU's memory, and to group the
edges of its part for an exchange.

    python -m benchmarks.mgg_gpu --out mgg.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.nn import GINConv  # isort: skip

from benchmarks.fullgraph import (
    SHAPES,
    ExpectedSums,
    Job,
    Shape,
    column,
    common_options,
    exchanges,
    graph_of,
    new_report,
    random_rows,
    ranks_option,
    tuned,
)
from benchmarks.gpu import measure
from benchmarks.mgg_baselines import RemoteEntries, SeparateReads
from dgl_mgpu.distributed.exchange.remote_reads import RemoteReads
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.tuner import Auto, Case
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.index import PartitionedRelation
from dgl_mgpu.models.gcn import FullGraphGCN
from dgl_mgpu.train.launch.launch import launch

WIDTH = 16
#: How many ranks aims are for.
AIMED_RANKS = 8
#: Calls in a timed window; the first and the last are not timed.
_WINDOW = 12
_AUTO, _REMOTE = "auto", "remote reads"
#: Layers and hidden width of the GIN, and how far off its outputs may be, as a share of their norm:
#: sums in another order, over five layers.
_GIN_DEPTH, _GIN_WIDTH, _GIN_TOLERANCE = 5, 64, 1e-4


@dataclass(frozen=True)
class Peer:
    """What MGG takes for a graph.

    Attributes
    ----------
    layer_ms, preprocessing_ms : float or None
        A layer's forward pass on 8 A100s, and what comes before it (MGG, table 4).
    sums_ms : dict
        By number of GPUs, what its own code took for the sums on H200s, at the best of 25 settings.
    sums_aim_ms : float or None
        For the sums on 8 GPUs.
    """

    layer_ms: float | None = None
    preprocessing_ms: float | None = None
    sums_ms: dict[int, float] = field(default_factory=dict)
    sums_aim_ms: float | None = None


PEERS = {
    "reddit": Peer(6.95, 590, {1: 9.6, 4: 7.2, 8: 4.6}, sums_aim_ms=1.0),
    "products": Peer(None, 1410, {1: 16.0, 4: 10.7, 8: 6.9}, sums_aim_ms=1.7),
    "products, edges once": Peer(3.35, 1410),
    "enwiki-2013": Peer(12.79, 1220),
    "proteins": Peer(2.66, 540),
    "com-orkut": Peer(17.20, 1600),
}


class Summing(Protocol):
    """What adds up rows, in whatever way."""

    def sums(self, rows: torch.Tensor) -> torch.Tensor: ...


class GIN(torch.nn.Module):
    """MGG's second model, of DGL's layers."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        widths = [features, *[_GIN_WIDTH] * (_GIN_DEPTH - 1), classes]
        self.layers = torch.nn.ModuleList(
            GINConv(torch.nn.Linear(given, made)) for given, made in itertools.pairwise(widths)
        )

    def forward(self, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        """Scores of the graph's nodes."""
        return self.scores(x, lambda layer, x: layer(graph, x))

    def on_matrix(self, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The same, by torch's product with a graph's matrix of destinations by sources."""
        return self.scores(x, lambda layer, x: layer.apply_func(x + matrix @ x))

    def scores(
        self, x: torch.Tensor, apply: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """With ReLU between layers."""
        for layer in self.layers:
            x = apply(layer, x)
            if layer is not self.layers[-1]:
                x = x.relu()
        return x


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job = Job(options)

    def run(self) -> None:
        """Print every graph's figures and keep them in a file."""
        self._job.say(
            f"{'':22} {'of':14} {'ms':>7} {'aim':>7} {'MGG, H200':>9} {'MGG, A100':>9}  by; others"
        )
        for name in self._job.options.shapes:
            self._measure(name, SHAPES[name].scaled(self._job.options.scale))

    def _measure(self, name: str, shape: Shape) -> None:
        job = self._job
        indptr, indices = shape.csc(job.device)
        graph, each_partitioning = job.partition(graph_of(indptr, indices))
        partitioning = statistics.median(each_partitioning)
        (spread,) = graph._graph.parts
        rounds, grouping = self._rounds(spread)
        narrow = torch.rand(spread.part.num_own_src, WIDTH, device=job.device)
        case = Case(False, 4 * WIDTH, narrow.dtype, 0)
        for _ in range(2):  # the first search compiles kernels
            auto = Auto(job.ways(spread), cached=False)
            job.wait()
            calls, searching = tuned(auto, case, narrow)
        rounds[_AUTO] = auto
        own = spread.part.dst.nodes(spread.part.rank, job.device)
        x = random_rows(own, shape.features) - 0.5
        torch.manual_seed(0)
        model = FullGraphGCN((shape.features, WIDTH), allow_zero_in_degree=True).to(job.device)
        gin = GIN(shape.features, shape.classes).to(job.device)
        rows = x @ model.get_parameter("layers.0.weight").detach()

        contenders: dict[str, Callable[[Any], torch.Tensor]] = {}
        for way, made in rounds.items():
            contenders[f"sums, {way}"] = partial(_sums, made, rows)
            contenders[f"layer, {way}"] = _forward(model, graph, spread, made, x)
            if way != _AUTO:  # whose search would take long for each of its widths
                contenders[f"GIN, {way}"] = _forward(gin, graph, spread, made, x)
        baselines = self._baselines(rounds.get(_REMOTE))
        for ways in baselines.values():
            for way, reads in ways.items():
                contenders[f"sums, {way}"] = partial(_sums, reads, rows)
        self._require_right(name, shape, contenders, graph, (indptr, indices), model, gin)
        found, samples = measure(
            contenders, lambda _: [None] * _WINDOW, job.options.repeats, job.ranks
        )
        slowest = {way: 1e3 * max(seconds) for way, seconds in found.items()}

        def each(what: str, ways: Iterable[str] = tuple(rounds)) -> dict[str, float]:
            return {way: slowest[f"{what}, {way}"] for way in ways}

        def every(what: str, ways: Iterable[str] = tuple(rounds)) -> dict[str, list[list[float]]]:
            return {way: samples[f"{what}, {way}"] for way in ways}

        peer = PEERS[name]
        self._keep(
            name,
            "sums",
            each("sums"),
            peer.sums_aim_ms,
            on_h200=peer.sums_ms.get(job.ranks.size),
            samples=every("sums"),
        )
        layer_aim = None if peer.layer_ms is None else peer.layer_ms / 4
        self._keep(
            name, "layer", each("layer"), layer_aim, on_a100=peer.layer_ms, samples=every("layer")
        )
        others = tuple(way for way in rounds if way != _AUTO)
        self._keep(name, "GIN", each("GIN", others), None, samples=every("GIN", others))
        for what, ways in baselines.items():
            self._keep(name, what, each("sums", ways), None, samples=every("sums", ways))
        fastest = min(grouping, key=each("layer").__getitem__)
        self._keep(
            name,
            "preprocessing",
            {fastest: 1e3 * (partitioning + grouping[fastest])},
            peer.preprocessing_ms,
            on_a100=peer.preprocessing_ms,
            partition_ms=1e3 * partitioning,
            each_partition_ms=[1e3 * spent for spent in each_partitioning],
            grouping_ms={way: 1e3 * spent for way, spent in grouping.items()},
            auto_choice=str(auto.found.get(case, "nothing to choose from")),
            auto_search_calls=calls,
            auto_search_ms=1e3 * searching,
            graph=vars(shape),
            halo=job.ranks.all_gather(len(spread.part.halo)),
        )

    def _rounds(
        self, spread: PartitionedRelation
    ) -> tuple[dict[str, CommSchedule], dict[str, float]]:
        """All ways by name, and the seconds to group edges for them."""
        ways = self._job.ways(spread)
        rounds = exchanges(ways)
        for way in ways.candidates:
            if way.pipeline is not None:
                rounds[_REMOTE] = ways[way]
        grouping = {}
        for name, made in rounds.items():
            self._job.wait()
            begin = time.perf_counter()
            _ = made.tiles
            self._job.wait()
            grouping[name] = max(self._job.ranks.all_gather(time.perf_counter() - begin))
        return rounds, grouping

    def _baselines(self, reads: CommSchedule | None) -> dict[str, dict[str, Summing]]:
        """Remote reads with and without what MGG's figure 9 leaves out, if GPUs read each other."""
        if not isinstance(reads, RemoteReads):
            return {}
        aside = torch.cuda.Stream(self._job.device)
        return {
            "partitioning": {
                "partitions": RemoteEntries(reads, partitioned=True),
                "a row a warp": RemoteEntries(reads, partitioned=False),
            },
            "interleaving": {
                "interleaved": reads,
                "local beside remote": SeparateReads(reads, aside),
                "local, then remote": SeparateReads(reads),
            },
        }

    def _require_right(
        self,
        name: str,
        shape: Shape,
        contenders: dict[str, Callable[[Any], torch.Tensor]],
        graph: PartitionedGraph,
        csc: tuple[torch.Tensor, torch.Tensor],
        model: FullGraphGCN,
        gin: GIN,
    ) -> None:
        """Raise ValueError unless sums, layers and the GIN's scores are right."""
        device = self._job.device
        own = graph._graph.parts[0].part.dst.nodes(self._job.ranks.rank, device)
        nodes = torch.arange(shape.nodes, device=device)
        weight, bias = (
            model.get_parameter(f"layers.0.{each}").detach() for each in ("weight", "bias")
        )
        x = random_rows(nodes, shape.features) - 0.5
        whole = x @ weight
        sums = ExpectedSums(*csc, own, whole)
        degrees = torch.bincount(csc[1], minlength=shape.nodes).clamp_(min=1)
        layers = ExpectedSums(*csc, own, whole * degrees.pow(-0.5)[:, None])
        by = csc[0].diff()[own].clamp(min=1).sqrt()[:, None]
        with torch.no_grad():
            scores = gin.on_matrix(_matrix(*csc), x)[own]
        for contender, call in contenders.items():
            found = call(None)
            if contender.startswith("sums"):
                sums.require(f"{name} {contender}", found)
            elif contender.startswith("layer"):
                layers.require(f"{name} {contender}", (found - bias) * by)
            elif not (off := (found - scores).norm() / scores.norm()) <= _GIN_TOLERANCE:
                raise ValueError(f"{name} {contender}: scores are off by {float(off):.1e}")

    def _keep(
        self,
        name: str,
        what: str,
        each: dict[str, float],
        aim: float | None,
        *,
        on_h200: float | None = None,
        on_a100: float | None = None,
        **more: Any,
    ) -> None:
        """One figure: the best of all ways, and the others."""
        best = min(each, key=each.__getitem__)
        unaimed = self._job.ranks.size != AIMED_RANKS
        columns = " ".join(
            column(value, width)
            for value, width in ((each[best], 7), (aim, 7), (on_h200, 9), (on_a100, 9))
        )
        others = [f"; {way} {spent:.2f}" for way, spent in each.items() if way != best]
        self._job.say(f"{name:22} {what:14} {columns}  {best}{''.join(others)}")
        self._job.keep(
            shape=name,
            what=what,
            best=best,
            ours_ms=each[best],
            aim_ms=aim,
            reached=None if aim is None or unaimed else each[best] <= aim,
            mgg_h200_ms=on_h200,
            mgg_8_a100_ms=on_a100,
            each_ms=each,
            **more,
        )


def _sums(rounds: Summing, rows: torch.Tensor, _: Any) -> torch.Tensor:
    return rounds.sums(rows)


def _matrix(indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A graph's, destinations by sources."""
    ones = torch.ones(len(indices), device=indices.device)
    size = (len(indptr) - 1, len(indptr) - 1)
    return torch.sparse_csr_tensor(indptr, indices, ones, size, check_invariants=False)


def _forward(
    model: torch.nn.Module,
    graph: PartitionedGraph,
    spread: PartitionedRelation,
    rounds: CommSchedule,
    x: torch.Tensor,
) -> Callable[[Any], torch.Tensor]:
    """The model's forward pass by one way of exchanging rows."""

    def call(_: Any) -> torch.Tensor:
        spread.rounds = rounds
        with torch.no_grad():
            return model(graph, x)

    return call


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks_option(parser)
    parser.add_argument("--shapes", nargs="+", default=list(PEERS), choices=list(PEERS))
    common_options(parser)
    options = parser.parse_args()
    new_report(options)
    launch(_run, options.ranks, options)


if __name__ == "__main__":
    main()
