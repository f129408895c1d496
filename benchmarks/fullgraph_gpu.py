"""Claim: a sum over in-edges on several GPUs takes as long as its products or its rows' way alone.

Every GPU has its part of a graph of ogbn-products' or Reddit's size, in-degrees from a Pareto
distribution, sources drawn uniformly, nodes dealt out at random.  In the same run: each way of
exchanging rows; the products alone, all rows being there; what the remote rows take at the speed
of a ring of copies; and NCCL's all-gather of all rows followed by cuSPARSE.  Sums of a sample of
destinations and of the largest hub are checked first, in float64.

    python -m benchmarks.fullgraph_gpu --out fullgraph.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_mgpu

import dgl  # isort: skip

from benchmarks.ceilings import measure_ceilings, print_ceilings
from benchmarks.gpu import PowerLaw, measure, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.backend.relation import Relation
from dgl_mgpu.fullgraph.exchange.broadcast import Broadcast
from dgl_mgpu.fullgraph.exchange.chunks import Chunks
from dgl_mgpu.fullgraph.exchange.peers import PeerChunks
from dgl_mgpu.fullgraph.exchange.window import Window, reaches_all
from dgl_mgpu.fullgraph.part import Part
from dgl_mgpu.ops import add_spmm, spmm
from dgl_mgpu.store import Ranks
from dgl_mgpu.training.launch import launch

#: Nodes and edges.
SHAPES = {"products": (2_449_029, 123_718_280), "reddit": (232_965, 114_615_892)}
WIDTHS = {"products": (16, 47, 100, 256), "reddit": (16, 41, 256, 602)}
#: Destinations of each case that are checked.
CHECKED = 500


class Bench:
    """What one rank measures, together with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        self._ranks = Ranks.of_all_machines()
        self._content: dict[str, Any] = {
            "machine": describe_machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "ranks": self._ranks.size,
        }

    def run(self, ceilings: dict[str, float]) -> None:
        """Print every case and keep it in a file."""
        self._content["ceilings_gbs"] = ceilings
        for shape in self._options.shapes:
            self._measure_shape(shape, ceilings)

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(text, flush=True)

    def _measure_shape(self, shape: str, ceilings: dict[str, float]) -> None:
        nodes, edges = (int(size * self._options.scale) for size in SHAPES[shape])
        law = PowerLaw(nodes, edges)
        indptr, indices = law.csc(self._device, torch.int32)
        g = dgl.graph(
            ("csc", (indptr.int(), indices, torch.empty(0, dtype=torch.int32))), num_nodes=nodes
        )
        spent = []
        for _ in range(3):
            self._wait()
            begin = time.perf_counter()
            graph = dgl_mgpu.partition_graph(g, device=self._device)
            self._wait()
            spent.append(time.perf_counter() - begin)
        part: Part = graph._graph.parts[0].part
        group = dist.group.WORLD if self._ranks.size > 1 else None
        about = {
            "shape": shape,
            "nodes": nodes,
            "edges": int(indptr[-1]),
            "partition_s": spent,
            "own_edges": self._ranks.all_gather(part.relation.num_edges),
            "halo": self._ranks.all_gather(len(part.halo)),
        }
        self._say(f"{about}\n{'ms':12} width {'ours':>8} of bound   each")
        self._content.setdefault("graphs", []).append(about)
        owned = graph.ownership["_N"]
        mine = owned.nodes(self._ranks.rank, self._device)
        ways: dict[str, Any] = {"broadcast": Broadcast(part, group)}
        window = None
        if group is not None and reaches_all(group, self._device):
            window = Window(group, self._device)
        for chunks in sorted({1, 2, 4, self._ranks.size - 1}):
            if not 0 < chunks < self._ranks.size:
                continue
            ways[f"halo in {chunks}, messages"] = Chunks(part, group, chunks)
            if window is not None:
                ways[f"halo in {chunks}"] = PeerChunks(part, window, chunks)
        tiles = [tile.relation for tile in Chunks(part, None, 1).tiles]
        for width in WIDTHS[shape]:
            draw = torch.Generator(self._device).manual_seed(width)
            whole = torch.randn(nodes, width, generator=draw, device=self._device)
            rows = whole[mine]
            contenders: dict[str, Callable[[Any], Any]] = {
                name: lambda _, way=way, rows=rows: way.sums(rows) for name, way in ways.items()
            }
            for name, call in contenders.items():
                self._require_right(f"{shape} {width} {name}", call(None), part, g, whole, mine)
            every = torch.cat([rows, whole[_nodes_of(owned, part.halo)]])
            contenders["products alone"] = partial(_product, part, every)
            contenders["products of tiles"] = partial(_products_of_tiles, tiles, every)
            if group is not None:
                contenders["exchange alone"] = lambda _, rows=rows: graph._graph.parts[
                    0
                ].halo.fetch(rows)
            contenders |= self._peer(part, owned, rows, group)
            del whole
            batches = [None] * 6
            found = measure(contenders, lambda _, b=batches: b, self._options.repeats, self._ranks)
            self._keep(shape, width, part, found, ceilings)

    def _peer(
        self, part: Part, owned: Any, rows: torch.Tensor, group: Any
    ) -> dict[str, Callable[[Any], Any]]:
        """All rows gathered by NCCL, then cuSPARSE."""
        device, counts = self._device, [owned.count(rank) for rank in range(owned.num_ranks)]
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

        return {"all-gather, cuSPARSE": call}

    def _keep(
        self,
        shape: str,
        width: int,
        part: Part,
        found: dict[str, list[float]],
        ceilings: dict[str, float],
    ) -> None:
        slowest = {name: 1e3 * max(seconds) for name, seconds in found.items()}
        moved = max(self._ranks.all_gather(len(part.halo) * width * 4))
        copied = moved / ceilings["ring_copy"] / 1e6 if "ring_copy" in ceilings else 0.0
        bound = max(slowest["products alone"], copied)
        ways = [name for name in slowest if name.startswith(("halo", "broadcast"))]
        best = min(ways, key=slowest.__getitem__)
        figure = {
            "shape": shape,
            "width": width,
            "best": best,
            "bound_ms": bound,
            "remote_bytes": moved,
            "remote_at_ring_copy_ms": copied,
            "of_bound": slowest[best] / bound,
            "times_peer": slowest["all-gather, cuSPARSE"] / slowest[best],
            "slowest_ms": slowest,
            "each_rank_s": found,
        }
        each = ", ".join(f"{name} {spent:.2f}" for name, spent in slowest.items())
        self._say(
            f"{shape:12} {width:5} {slowest[best]:8.2f} {figure['of_bound']:8.2f}   {best}; {each};"
            f" remote at ring copy {copied:.2f}"
        )
        self._content.setdefault("figures", []).append(figure)
        if self._options.out and self._ranks.rank == 0:
            # Anew each time: a run that is cut off leaves what it has found.
            self._options.out.write_text(json.dumps(self._content, indent=1) + "\n")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._ranks.all_gather(None)

    def _require_right(
        self,
        what: str,
        found: torch.Tensor,
        part: Part,
        g: dgl.DGLGraph,
        whole: torch.Tensor,
        mine: torch.Tensor,
    ) -> None:
        """Raise ValueError unless the rows that are checked are right."""
        degrees = part.relation.in_degrees()
        sample = torch.randint(len(mine), (CHECKED,), device=self._device)
        for row in torch.cat([degrees.argmax()[None], sample]):
            sources = g.in_edges(mine[row].int())[0].long()
            exact, size = whole[sources].double().sum(0), whole[sources].double().abs().sum(0)
            if ((found[row].double() - exact).abs() > 1e-5 * size + 1e-6).any():
                raise ValueError(f"{what}: node {int(mine[row])} is wrong")


def _nodes_of(owned: Any, positions: torch.Tensor) -> torch.Tensor:
    return positions if owned.order is None else owned.order.to(positions.device)[positions]


def _product(part: Part, rows: torch.Tensor, _: Any) -> torch.Tensor:
    indptr, indices, eids = part.relation.csc()
    return spmm(indptr, indices, eids, rows, None, "copy_lhs", "sum")[0]


def _products_of_tiles(tiles: list[Relation], rows: torch.Tensor, _: Any) -> torch.Tensor:
    """The products of own and of other rows, one after the other, all being there."""
    rows_of = rows.split_with_sizes([tile.num_src for tile in tiles])
    indptr, indices, eids = tiles[0].csc()
    out = spmm(indptr, indices, eids, rows_of[0], None, "copy_lhs", "sum")[0]
    for tile, found in zip(tiles[1:], rows_of[1:], strict=True):
        indptr, indices, eids = tile.csc()
        add_spmm(out, indptr, indices, eids, found, None, "copy_lhs")
    return out


def _run(options: argparse.Namespace, ceilings: dict[str, float]) -> None:
    Bench(options).run(ceilings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--scale", type=float, default=1.0, help="of nodes and edges")
    parser.add_argument("--repeats", type=int, default=9, help="timed windows")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    ceilings = measure_ceilings(options.ranks)
    print_ceilings(ceilings)
    launch(_run, options.ranks, options, ceilings)


if __name__ == "__main__":
    main()
