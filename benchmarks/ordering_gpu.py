"""Claim: nodes dealt out at random keep GPUs evenly busy, whatever the order in which they come.

MG-GCN's figures 6 and 7, on generated graphs of ogbn-products' and Reddit's size whose order of
nodes has structure: by the numbers of their in-edges, the largest first, hubs being the sources of
as many edges («hubs first»); or each community's nodes in a row («communities»), of which most
edges join two.  Nodes are dealt out as they come, each GPU as many; as they come, in ranges of
about the same numbers of edges and nodes (by='order'); and at random (by='random').  In the same
run, with rows exchanged by MG-GCN's staged broadcast and by the halo: one product, that is sums
over in-edges, and an epoch of MG-GCN's model of two layers and hidden width 512.  Sums of a sample
of nodes and of the largest hub are checked first, in float64; losses are to be the same everywhere.

    python -m benchmarks.ordering_gpu --out ordering.json
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip

from benchmarks.fullgraph import (
    SHAPES,
    ExpectedSums,
    Job,
    Shape,
    common_options,
    graph_of,
    new_report,
    random_rows,
    ranks_option,
)
from benchmarks.gcn_cases import Case
from benchmarks.gcn_training import PEER, Setting, tolerance_of
from benchmarks.gpu import measure
from dgl_mgpu.distributed.exchange.collectives import Broadcast
from dgl_mgpu.distributed.exchange.cost import RankLoad
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.train.launch.launch import launch

#: Columns of the product.
WIDTH = 256
#: Products and epochs in a timed window; the first and the last are not timed.
_WINDOW = 6
#: Communities of a graph, and the share of edges that begin in their destination's.
_COMMUNITIES, _WITHIN = 100, 0.8
#: Edges that are drawn at a time.
_CHUNK = 1 << 26
_EVENLY, _BY_EDGES, _AT_RANDOM = "as they come", "as they come, by edges", "at random"
_CONTENDER = "GCN fp32"

Csc = tuple[torch.Tensor, torch.Tensor]


def hubs_first(shape: Shape, device: torch.device) -> Csc:
    """``indptr`` and ``indices``: nodes by in-degree, sources drawn in proportion to it."""
    indptr, indices = shape.csc(device)
    indptr[1:] = indptr.diff().sort(descending=True).values.cumsum(0)
    draw = torch.Generator(device).manual_seed(1)
    for some in indices.split(_CHUNK):
        edges = torch.randint(
            shape.edges, some.shape, dtype=indptr.dtype, generator=draw, device=device
        )
        some.copy_(torch.searchsorted(indptr, edges, right=True) - 1)  # where these end
    return indptr, indices


def communities(shape: Shape, device: torch.device) -> Csc:
    """``indptr`` and ``indices``: ranges of nodes in which most sources are their destination's."""
    indptr, indices = shape.csc(device)
    size = max(1, shape.nodes // _COMMUNITIES)
    draw = torch.Generator(device).manual_seed(1)
    first = 0
    for some in indices.split(_CHUNK):
        edges = torch.arange(first, first + len(some), dtype=indptr.dtype, device=device)
        rows = torch.searchsorted(indptr, edges, right=True) - 1
        begin = rows // size * size
        inside = begin + torch.randint(size, some.shape, generator=draw, device=device)
        within = torch.rand(some.shape, generator=draw, device=device) < _WITHIN
        some.copy_(torch.where(within, inside.clamp_(max=shape.nodes - 1), some))
        first += len(some)
    return indptr, indices


ORDERS: dict[str, Callable[[Shape, torch.device], Csc]] = {
    "hubs first": hubs_first,
    "communities": communities,
}


def splits(num_nodes: int, num_ranks: int) -> dict[str, str | torch.Tensor]:
    """Ways to deal nodes out, as `partition_graph` takes them."""
    evenly = torch.arange(num_nodes) * num_ranks // num_nodes
    return {_EVENLY: evenly, _BY_EDGES: "order", _AT_RANDOM: "random"}


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job = Job(options)

    def run(self) -> None:
        """Print every graph's figures and keep them in a file."""
        for name in self._job.options.shapes:
            for order in ORDERS:
                self._measure(name, SHAPES[name].scaled(self._job.options.scale), order)
                gc.collect()  # models and graphs refer to each other
                if self._job.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _measure(self, name: str, shape: Shape, order: str) -> None:
        job, case = self._job, Case(shape)
        csc = ORDERS[order](shape, job.device)
        g = graph_of(*csc)
        whole = random_rows(torch.arange(shape.nodes, device=job.device), WIDTH) - 0.5
        products: dict[str, Callable[[Any], Any]] = {}
        epochs: dict[str, Callable[[Any], Any]] = {}
        losses, parts = {}, {}
        for split, by in splits(shape.nodes, job.ranks.size).items():
            pg, _ = job.partition(g, by=by, repeats=1)
            (spread,) = pg._graph.parts
            own = pg.ndata[dgl.NID].long()
            rows, expected = whole[own], ExpectedSums(*csc, own, whole)
            setting = Setting.of(pg, shape, case.widths)
            ways = {"broadcast": Broadcast(spread.part, job.group), "halo": spread.rounds}
            for way, rounds in ways.items():
                what = f"{split}, {way}"
                products[what] = partial(_sums, rounds, rows)
                expected.require(f"{name}, {order}, {what}", rounds.sums(rows))
                training = replace(setting, rounds=rounds).training(_CONTENDER)
                losses[what] = float(training.gradients())
                epochs[what] = training.epoch
            parts[split] = {
                "nodes": job.ranks.all_gather(len(own)),
                # By the rank that has the sources.
                "edges": job.ranks.all_gather(RankLoad.of(spread.part).edges),
                "halo": job.ranks.all_gather(len(spread.part.halo)),
            }
        # On the last split, which is as good as any.
        losses[PEER] = float(setting.training(PEER).gradients())
        _require_same(f"{name}, {order}", losses)
        job.content.setdefault("graphs", []).append({"shape": name, "order": order, "parts": parts})
        self._keep(name, order, "product", (WIDTH,), products)
        self._keep(name, order, "epoch", case.widths, epochs)

    def _keep(
        self,
        name: str,
        order: str,
        what: str,
        widths: tuple[int, ...],
        contenders: Mapping[str, Callable[[Any], Any]],
    ) -> None:
        """One figure: what each split takes, by each exchange."""
        job = self._job
        found, samples = measure(
            contenders, lambda _: [None] * _WINDOW, job.options.repeats, job.ranks
        )
        slowest = {each: 1e3 * max(seconds) for each, seconds in found.items()}
        job.say(f"{name}, {order}, {what} of widths {widths}, {job.ranks.size} ranks: ms")
        for each, spent in slowest.items():
            of_random = spent / slowest[f"{_AT_RANDOM}, {each.rpartition(', ')[2]}"]
            job.say(f"  {each:34} {spent:9.2f}  {of_random:6.2f} times at random")
        job.keep(
            shape=name,
            order=order,
            what=what,
            widths=widths,
            slowest_ms=slowest,
            each_rank_s=found,
            samples=samples,
        )


def _sums(rounds: CommSchedule, rows: torch.Tensor, _: Any) -> torch.Tensor:
    return rounds.sums(rows)


def _require_same(what: str, losses: Mapping[str, float]) -> None:
    """Raise ValueError unless all losses are that of `PEER`."""
    for each, loss in losses.items():
        if not abs(loss - losses[PEER]) <= tolerance_of(_CONTENDER) * abs(losses[PEER]):
            raise ValueError(f"{what}: '{each}' has a loss of {loss}, not {losses[PEER]}")


def _run(options: argparse.Namespace) -> None:
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks_option(parser)
    shapes = ["products", "reddit"]
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=shapes)
    common_options(parser)
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    new_report(options)
    launch(_run, options.ranks, options)


if __name__ == "__main__":
    main()
