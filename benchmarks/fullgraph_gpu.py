"""Claim: a sum over in-edges on several GPUs takes as long as its products or its rows' way alone.

Every GPU has its part of a graph of ogbn-products' or Reddit's size, in-degrees from a Pareto
distribution, sources drawn uniformly, nodes dealt out at random.  In the same run: each way of
exchanging rows; two of them one after the other, a round's rows being fetched when the product
before is done (MG-GCN, figure 8); the products alone, all rows being there; what the remote rows
take at the speed of a ring of copies; and NCCL's all-gather of all rows followed by cuSPARSE.  Sums
of a sample of destinations and of the largest hub are checked first, in float64.

    python -m benchmarks.fullgraph_gpu --out fullgraph.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ceilings import measure_ceilings, print_ceilings
from benchmarks.fullgraph import (
    SHAPES,
    ExpectedSums,
    Job,
    common_options,
    exchanges,
    graph_of,
    new_report,
    random_rows,
    ranks_option,
)
from benchmarks.gpu import measure
from dgl_mgpu.distributed.exchange.collectives import Chunks
from dgl_mgpu.distributed.exchange.schedule import CommSchedule
from dgl_mgpu.distributed.exchange.strategies import BROADCAST
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.distributed.partition import Ownership
from dgl_mgpu.graph.relation import Relation
from dgl_mgpu.ops import add_spmm, spmm
from dgl_mgpu.train.launch.launch import launch

WIDTHS = {"products": (16, 47, 100, 256), "reddit": (16, 41, 256, 602)}
_PEER = "all-gather, cuSPARSE"
#: Sums in a timed window; the first and the last are not timed.
_WINDOW = 6


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace, ceilings: dict[str, float]) -> None:
        self._job, self._ceilings = Job(options), ceilings
        self._job.content["ceilings_gbs"] = ceilings

    def run(self) -> None:
        """Print every case and keep it in a file."""
        for shape in self._job.options.shapes:
            self._measure_shape(shape)

    def _measure_shape(self, name: str) -> None:
        job = self._job
        shape = SHAPES[name].scaled(job.options.scale)
        indptr, indices = shape.csc(job.device)
        graph, spent = job.partition(graph_of(indptr, indices))
        (spread,) = graph._graph.parts
        part = spread.part
        about = {
            "shape": name,
            "nodes": shape.nodes,
            "edges": shape.edges,
            "partition_s": statistics.median(spent),
            "each_partition_s": spent,
            "own_edges": job.ranks.all_gather(part.relation.num_edges),
            "halo": job.ranks.all_gather(len(part.halo)),
        }
        job.say(f"{about}\n{'ms':12} width {'ours':>8} of bound   each")
        job.content.setdefault("graphs", []).append(about)
        owned = graph.ownership["_N"]
        mine = owned.nodes(part.rank, job.device)
        every_way = job.ways(spread)
        ways = exchanges(every_way, messages=True)
        finest = max(every_way.candidates, key=lambda way: way.chunks)
        apart = {
            f"{way}, one after the other": partial(_one_after_the_other, every_way[way])
            for way in (BROADCAST, finest)
        }
        tiles = [tile.relation for tile in Chunks(part, None, 1).tiles]
        for width in WIDTHS[name]:
            whole = random_rows(torch.arange(shape.nodes, device=job.device), width) - 0.5
            rows = whole[mine]
            expected = ExpectedSums(indptr, indices, mine, whole)
            for way, rounds in ways.items():
                expected.require(f"{name} {width} {way}", rounds.sums(rows))
            for way, sums in apart.items():
                expected.require(f"{name} {width} {way}", sums(rows, None))
            every = torch.cat([rows, whole[_nodes_of(owned, part.halo)]])
            del expected, whole
            contenders: dict[str, Callable[[Any], Any]] = {
                way: partial(_called, rounds.sums, rows) for way, rounds in ways.items()
            }
            contenders |= {way: partial(sums, rows) for way, sums in apart.items()}
            contenders["products alone"] = partial(_product, part, every)
            contenders["products of tiles"] = partial(_products_of_tiles, tiles, every)
            if job.group is not None:
                contenders["exchange alone"] = partial(_called, spread.halo.fetch, rows)
            contenders[_PEER] = self._peer(part, owned, rows)
            found, samples = measure(
                contenders, lambda _: [None] * _WINDOW, job.options.repeats, job.ranks
            )
            self._keep(name, width, part, list(ways), found, samples)

    def _peer(self, part: Part, owned: Ownership, rows: torch.Tensor) -> Callable[[Any], Any]:
        """All rows gathered by NCCL, then cuSPARSE."""
        device, group = self._job.device, self._job.group
        counts = [owned.count(rank) for rank in range(owned.num_ranks)]
        longest, width = max(counts), rows.shape[1]
        indptr, indices, _ = part.relation.csc()
        positions = torch.cat(
            [torch.arange(counts[part.rank], device=device) + owned.bounds[part.rank], part.halo]
        )[indices.long()]
        owners = owned.owners(positions)
        bounds = torch.tensor(owned.bounds, device=device)
        columns = (positions - bounds[owners] + owners * longest).int()
        matrix = torch.sparse_csr_tensor(
            indptr,
            columns,
            torch.ones(len(columns), device=device),
            (part.num_own_dst, longest * len(counts)),
            check_invariants=False,
        )
        padded = rows.new_zeros(longest, width)
        padded[: len(rows)] = rows
        gathered = rows.new_zeros(longest * len(counts), width)

        def call(_: Any) -> torch.Tensor:
            if group is not None:
                dist.all_gather_into_tensor(gathered, padded)
            return torch.mm(matrix, gathered)

        return call

    def _keep(
        self,
        shape: str,
        width: int,
        part: Part,
        ways: list[str],
        found: dict[str, list[float]],
        samples: dict[str, list[list[float]]],
    ) -> None:
        slowest = {name: 1e3 * max(seconds) for name, seconds in found.items()}
        moved = max(self._job.ranks.all_gather(len(part.halo) * width * 4))
        copied = moved / self._ceilings["ring_copy"] / 1e6 if "ring_copy" in self._ceilings else 0.0
        bound = max(slowest["products alone"], copied)
        best = min(ways, key=slowest.__getitem__)
        each = ", ".join(f"{name} {spent:.2f}" for name, spent in slowest.items())
        self._job.say(
            f"{shape:12} {width:5} {slowest[best]:8.2f} {slowest[best] / bound:8.2f}   {best};"
            f" {each}; remote at ring copy {copied:.2f}"
        )
        self._job.keep(
            shape=shape,
            width=width,
            best=best,
            bound_ms=bound,
            remote_bytes=moved,
            remote_at_ring_copy_ms=copied,
            of_bound=slowest[best] / bound,
            times_peer=slowest[_PEER] / slowest[best],
            slowest_ms=slowest,
            each_rank_s=found,
            samples=samples,
        )


def _nodes_of(owned: Ownership, positions: torch.Tensor) -> torch.Tensor:
    return positions if owned.order is None else owned.order.to(positions.device)[positions]


def _called(exchange: Callable[[torch.Tensor], Any], rows: torch.Tensor, _: Any) -> Any:
    return exchange(rows)


def _product(part: Part, rows: torch.Tensor, _: Any) -> torch.Tensor:
    indptr, indices, eids = part.relation.csc()
    return spmm(indptr, indices, eids, rows, None, "copy_lhs", "sum")[0]


def _products_of_tiles(tiles: list[Relation], rows: torch.Tensor, _: Any) -> torch.Tensor:
    """The products of own and of other rows, one after the other, all being there."""
    rows_of = rows.split_with_sizes([tile.num_src for tile in tiles])
    return _added_up(zip(tiles, rows_of, strict=True))


def _one_after_the_other(rounds: CommSchedule, rows: torch.Tensor, _: Any) -> torch.Tensor:
    """The sums of an exchange whose rounds begin when the product before is done."""
    return _added_up(
        (tile.relation, rounds.start(number, rows)()) for number, tile in enumerate(rounds.tiles)
    )


def _added_up(products: Iterable[tuple[Relation, torch.Tensor]]) -> torch.Tensor:
    """The sum of tiles' products with rows, in this order."""
    out: torch.Tensor | None = None
    for tile, rows in products:
        indptr, indices, eids = tile.csc()
        if out is None:
            out = spmm(indptr, indices, eids, rows, None, "copy_lhs", "sum")[0]
        else:
            add_spmm(out, indptr, indices, eids, rows, None, "copy_lhs")
    assert out is not None  # there are own rows
    return out


def _run(options: argparse.Namespace, ceilings: dict[str, float]) -> None:
    Bench(options, ceilings).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks_option(parser)
    parser.add_argument("--shapes", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    common_options(parser)
    options = parser.parse_args()
    ceilings = measure_ceilings(options.ranks)
    print_ceilings(ceilings)
    new_report(options)
    launch(_run, options.ranks, options, ceilings)


if __name__ == "__main__":
    main()
