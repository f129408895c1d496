"""Claim: gathering rows over GPUs is ahead of pylibwholegraph and near what copies reach.

Five parts, all ranks at once, each contender with ids of its own in turns:

- ``uniform``: rows partitioned over all GPUs, ids uniform; at least 1.15 times the peer, and 0.9 of
  a ring of copies over the remote share;
- ``skewed``: ids as 3-hop sampling of a graph yields them, after and before repeats are taken out,
  and memory for a partition and 10 % more; at least twice the peer, which is the fastest of its
  partition alone and its partition with a cache on each GPU in those 10 %;
- ``cached``: such ids, rows in host memory, and memory of each GPU for a tenth of them; beside the
  peer's caches of that size, and its reads of host memory without one;
- ``host``: rows in host memory; at least 0.9 of pinned copies (rows below 400 B: 0.75), and the
  peer's speed; beside the same without what PyTorch-Direct adds (its figure 8): our kernel in the
  order of addresses and not shifted to where lines of memory begin, shifted and in the order of the
  ids, and torch's own, which does neither;
- ``unexpected``: uniform ids, as inference over all nodes reads them, where GPUs have room for half
  of the rows and the plan expects what sampling reads; beside gathers that go by the plan.

No speed is reported for rows that are not right.

    python -m benchmarks.gather_gpu --ranks 4 --out gather.json
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.ceilings import measure_ceilings, print_ceilings
from benchmarks.figures import Figure, Report
from benchmarks.gpu import (
    Minibatches,
    NumberedWords,
    built_store,
    calibrate_option,
    common_options,
    from_pool,
    measure,
    require_words,
    this_device,
)
from benchmarks.graphs import GraphSource, facts, graph_of, graph_options
from benchmarks.mapped import host_rows, mapped
from benchmarks.peers.wholegraph import Cache, Gather, WholeGraph, connect, numbered_words
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import RowView, count_tiers, gather, gather_rows
from dgl_mgpu.ops.view import PARTS, START, STOP
from dgl_mgpu.store.memory import FeatureSource, Table
from dgl_mgpu.train.launch.launch import launch

PARTS_OF_IT = ("uniform", "skewed", "cached", "host", "unexpected")
#: Most ids of a gather that the plan does not expect: more are put in order by the plan, too.
UNEXPECTED_IDS = 100_000
#: Fanouts of the skewed ids, beginning at the seeds.
FANOUTS = (15, 10, 5)
#: What reads rows of the host's memory wherever they begin: torch's kernel, and ours; and ours that
#: reads rows in the order of the ids.
UNSHIFTED, IN_ORDER, SHIFTED = "unshifted", "in order, unshifted", "shifted, as the ids are"
#: More memory than a partition takes, and what of its rows each GPU caches, as shares.
MORE, CACHED = 0.1, 0.1
#: Turns of batches by which the peer's cache is filled before it is timed.
_FILLED_BY = 4


def without_shift() -> contextlib.AbstractContextManager[object]:
    """Have each row read from its begin on, and not from that of the line of memory it lies in.

    The operator has no such option, which is of no use but to tell what the shift gains.
    """
    return mock.patch.object(gather, "row_slots", lambda row_bytes, vector: row_bytes // vector)


def in_order_unshifted(view: RowView, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the host's memory, read in the order of their addresses, and not shifted."""
    with without_shift():
        return gather_rows(view, ids)


def narrowed(view: RowView, row_bytes: int) -> RowView:
    """The same rows of another width, laid out as a table of that width is, each segment's at its
    beginning.  So one build serves all widths."""
    return replace(view, row_shape=(row_bytes // 4,))


def refilled(view: RowView, row_bytes: int) -> RowView:
    """As :func:`narrowed`, with as many rows as the memory of the only tier holds."""
    parts = int(view.tiers[0, PARTS])
    num_rows = view.num_rows // parts * view.row_bytes // row_bytes * parts
    tiers = view.tiers.clone()
    tiers[0, STOP] = num_rows
    return narrowed(replace(view, tiers=tiers, num_rows=num_rows), row_bytes)


def numbering(view: RowView, wide: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What tells the numbers of rows' words, int64, shape (len(ids), width), from their ids.

    ``wide`` is the width, in words, that the memory was filled with as
    :class:`~benchmarks.gpu.NumberedWords`.
    """
    ordered = view.position.numel() > 0
    id_at = view.position.argsort()
    width = view.row_shape[0]

    def numbers(ids: torch.Tensor) -> torch.Tensor:
        place = view.position[ids].long() if ordered else ids
        tier = view.tiers[(place[:, None] >= view.tiers[:-1, STOP]).sum(1)]
        start, parts = tier[:, START, None], tier[:, PARTS, None]
        offset = place[:, None] - start
        word = offset // parts * width + torch.arange(width, device=ids.device)
        wide_place = start + word // wide * parts + offset % parts
        return (id_at[wide_place] if ordered else wide_place) * wide + word % wide

    return numbers


def rows_of(table: Table) -> RowView:
    """A table of rows as this rank sees it."""
    assert isinstance(table.view, RowView)
    return table.view


class Bench:
    """The parts, on one rank."""

    def __init__(self, options: argparse.Namespace, ceilings: dict[str, float]) -> None:
        self._options = options
        self._ceilings = ceilings
        self._ranks = Communicator.of_this_machine()
        self._device = this_device()
        self._wide = max(options.row_bytes)
        about = {key: str(value) if key == "out" else value for key, value in vars(options).items()}
        self._report = Report(self._ranks, options.out, options=about, ceilings=ceilings)

    def run(self) -> None:
        torch.manual_seed(self._ranks.rank)
        peer = connect(self._ranks, not self._options.no_peer)
        for part in self._options.parts:
            getattr(self, part)(peer)
        if peer is not None:
            peer.close()

    def uniform(self, peer: WholeGraph | None) -> None:
        """Rows partitioned over all GPUs, ids uniform."""
        ranks, options = self._ranks, self._options
        targets, ceiling = {}, self._over("device_copy", 1.0)
        if ranks.size > 1:
            targets = {"times_peer": 1.15, "of_ceiling": 0.9}
            ceiling = self._over("ring_copy", 1 - 1 / ranks.size)
        rows = int(options.gb_per_gpu * 1e9) // self._wide * ranks.size
        with self._table(rows, {"policy": "partitioned"}) as table:
            for row_bytes in options.row_bytes:
                view = refilled(rows_of(table), row_bytes)
                ids = partial(self._uniform_ids, view.num_rows, options.window)
                case = f"uniform, {row_bytes} B"
                self._figure(case, peer, "cuda", table, view, ids, ceiling, targets)

    def skewed(self, peer: WholeGraph | None) -> None:
        """Ids as sampling yields them, memory for a partition and 10 % more."""
        ranks = self._ranks.size
        if ranks == 1:
            print("skewed: one GPU holds everything; left out")
            return
        caches = [Cache("local_device", MORE / ranks)]
        self._as_sampled("skewed", peer, 1 + MORE, "cuda", caches, {"times_peer": 2.0})

    def cached(self, peer: WholeGraph | None) -> None:
        """Ids as sampling yields them, rows in host memory and memory of GPUs for some of them."""
        ranks = self._ranks.size
        caches = [Cache("local_device", CACHED)]
        if 1 < ranks < 1 / CACHED:
            caches.append(Cache("all_devices", CACHED * ranks))
        self._as_sampled("cached", peer, CACHED * ranks, "cpu", caches, {})

    def _as_sampled(
        self,
        part: str,
        peer: WholeGraph | None,
        held: float,
        where: str,
        caches: Sequence[Cache],
        targets: dict[str, float],
    ) -> None:
        """Ids as sampling yields them, after and before repeats are taken out.

        All GPUs' memory together has room for ``held`` times the rows.  The peer's table is
        ``where``, and the peer has each of these caches beside it, or none.
        """
        law, minibatches = self._sampling()
        with self._sampled_table(law, minibatches, held) as (table, budget):
            for kind in ("distinct", "repeated"):
                pool = minibatches.draw(4 * (self._options.window + 2), kind == "distinct")
                shares = self._shares(table, pool)
                slowest = "host" if shares["host"] else "peer"
                copy = {"host": "pinned_copy", "peer": "ring_copy"}[slowest]
                ceiling = self._over(copy, shares[slowest]) if shares[slowest] else None
                more = {
                    "shares": shares,
                    "graph": facts(law),
                    "fanouts_from_seeds": FANOUTS,
                    "neighbours": "drawn with replacement",
                    "gpu_budget_bytes": budget,
                }
                for row_bytes in self._options.row_bytes:
                    view = narrowed(rows_of(table), row_bytes)
                    ids = partial(from_pool, pool, self._options.window + 2)
                    case = f"{part}, {kind} ids, {row_bytes} B"
                    self._figure(
                        case, peer, where, table, view, ids, ceiling, targets, more, caches=caches
                    )

    def unexpected(self, _peer: WholeGraph | None) -> None:
        """Uniform ids, where the plan expects what sampling reads."""
        count = min(self._options.ids, UNEXPECTED_IDS)
        with self._sampled_table(*self._sampling(), 0.5) as (table, budget):
            for row_bytes in self._options.row_bytes:
                view = narrowed(rows_of(table), row_bytes)
                ids = partial(self._uniform_ids, view.num_rows, self._options.window, count=count)
                shares = self._shares(table, ids(0))
                gathers = {
                    "ours": partial(gather_rows, view),
                    "by the plan": partial(gather_rows, replace(view, host_reads=None)),
                }
                numbers = numbering(view, self._wide // 4)
                for name, gather in gathers.items():
                    require_words(f"{name}, {row_bytes} B", gather, ids(0)[0], numbers)
                seconds, samples = measure(gathers, ids, self._options.repeats, self._ranks)
                rates = {
                    name: float(np.mean(count * row_bytes / np.array(each) / 1e9))
                    for name, each in seconds.items()
                }
                more = {"by_the_plan": rates["by the plan"], "shares": shares, "ids": count,
                        "expected_host_share": view.host_share, "gpu_budget_bytes": budget,
                        "times_the_plan": rates["ours"] / rates["by the plan"],
                        "samples": samples}  # fmt: skip
                case = f"unexpected, {row_bytes} B"
                self._report.add(Figure(case, "GB/s", rates["ours"], more=more))

    def _sampling(self) -> tuple[GraphSource, Minibatches]:
        """A graph, and mini-batches that are sampled from it."""
        options = self._options
        law = graph_of(options, source_exponent=options.source_exponent)
        return law, Minibatches(law, options.batch, FANOUTS)

    @contextlib.contextmanager
    def _sampled_table(
        self, law: GraphSource, minibatches: Minibatches, part: float
    ) -> Iterator[tuple[Table, int]]:
        """A table for these mini-batches, in so much of its size of all GPUs' memory together; and
        the bytes of each GPU."""
        hotness = {"nodes": minibatches.hotness()} if self._ranks.rank == 0 else {}
        budget = int(part * law.nodes * self._wide / self._ranks.size)
        # What the machine says of its memory may be less than it gives.
        store = {"policy": "auto", "gpu_memory": budget, "batch_size": self._options.batch,
                 "fanouts": FANOUTS[::-1], "host_memory": 2 * law.nodes * self._wide}  # fmt: skip
        with self._table(law.nodes, store, hotness) as table:
            yield table, budget

    def host(self, peer: WholeGraph | None) -> None:
        """Rows in host memory, ids uniform."""
        options, ceiling = self._options, self._over("pinned_copy", 1.0)
        nbytes = int(options.host_gb * 1e9)
        # What the machine says of its memory may be less than it gives.
        store = {"policy": "host", "host_memory": 2 * nbytes}
        with self._table(nbytes // self._wide, store) as table:
            for row_bytes in options.row_bytes:
                view = refilled(rows_of(table), row_bytes)
                ids = partial(self._uniform_ids, view.num_rows, max(1, options.window // 4))
                targets = {"times_peer": 1.0, "of_ceiling": 0.9 if row_bytes >= 400 else 0.75}
                case = f"host, {row_bytes} B"
                there = mapped(host_rows(view), self._device)
                others = {
                    UNSHIFTED: partial(torch.index_select, there, 0),
                    IN_ORDER: partial(in_order_unshifted, view),
                    SHIFTED: partial(gather_rows, replace(view, host_start=-1)),
                }
                self._figure(case, peer, "cpu", table, view, ids, ceiling, targets, others=others)

    @contextlib.contextmanager
    def _table(
        self, rows: int, options: dict[str, Any], hotness: dict[str, np.ndarray] | None = None
    ) -> Iterator[Table]:
        order = "" if hotness is None else "nodes"
        sources = {"rows": FeatureSource(NumberedWords(rows, self._wide), order)}
        first = self._ranks.rank == 0
        with built_store(
            sources if first else None,
            hotness or {},
            self._ranks,
            options,
            calibrated=self._options.calibrate,
        ) as store:
            yield store.tables["rows"]

    def _over(self, kind: str, share: float) -> float | None:
        return self._ceilings[kind] / share if kind in self._ceilings else None

    def _uniform_ids(
        self, num_rows: int, window: int, turn: int, count: int = 0
    ) -> list[torch.Tensor]:
        shape = (window + 2, count or self._options.ids)
        return list(torch.randint(num_rows, shape, device=self._device))

    def _shares(self, table: Table, pool: Sequence[torch.Tensor]) -> dict[str, float]:
        """Share of the rows read from each kind of memory, the mean over ranks."""
        view, read = rows_of(table), Counter({"device": 0, "peer": 0, "host": 0})
        served = torch.stack([count_tiers(view, ids) for ids in pool]).sum(0).tolist()
        for memory, count in zip(table.memories, served, strict=True):
            read[memory] += count
        everyone = sum(map(Counter, self._ranks.all_gather(dict(read))), Counter())
        return {kind: everyone[kind] / everyone.total() for kind in read}

    def _figure(
        self,
        case: str,
        peer: WholeGraph | None,
        where: str,
        table: Table,
        view: RowView,
        new_batches: Callable[[int], Sequence[torch.Tensor]],
        ceiling: float | None,
        targets: dict[str, float],
        more: dict[str, Any] | None = None,
        others: Mapping[str, Gather] | None = None,
        caches: Sequence[Cache] = (),
    ) -> None:
        ids, row_bytes = new_batches(0)[0], view.row_bytes
        contenders: dict[str, Gather] = {"ours": partial(gather_rows, view), **(others or {})}
        numbers = numbering(view, self._wide // 4)
        for name, gathering in contenders.items():
            require_words(f"{name}, {case}", gathering, ids, numbers)
        with contextlib.ExitStack() as using:
            if peer is not None:
                ways = self._peers_ways(peer, where, view, caches, new_batches, using)
                words = torch.arange(row_bytes // 4, device=ids.device)
                for name, gathering in ways.items():
                    require_words(
                        f"{name}, {case}",
                        gathering,
                        ids,
                        lambda ids: ids[:, None] * len(words) + words,
                    )
                contenders |= ways
            seconds, samples = measure(contenders, new_batches, self._options.repeats, self._ranks)
        # Batches of sampled nodes differ in size a little.
        sizes = self._ranks.all_gather(np.mean([len(ids) for ids in new_batches(0)]))
        rates = {
            name: [size * row_bytes / s / 1e9 for size, s in zip(sizes, spent, strict=True)]
            for name, spent in seconds.items()
        }
        mean = {name: float(np.mean(found)) for name, found in rates.items()}
        peers = {name: rate for name, rate in mean.items() if name.startswith("peer")}
        best = max(peers, key=peers.__getitem__, default=None)
        tiers = [vars(tier) | {"source": len(tier.source)} for tier in table.plan.tiers]
        details = {"row_bytes": row_bytes, "rows": view.num_rows, "ids_a_batch": sizes[0],
                   "gb_per_second": mean, "each_rank": rates, "samples": samples, "tiers": tiers,
                   "peers_way": best, **(more or {})}  # fmt: skip
        peers_rate = None if best is None else peers[best]
        self._report.add(
            Figure(case, "GB/s", mean["ours"], peers_rate, ceiling, more=details, **targets)
        )

    @staticmethod
    def _peers_ways(
        peer: WholeGraph,
        where: str,
        view: RowView,
        caches: Sequence[Cache],
        new_batches: Callable[[int], Sequence[torch.Tensor]],
        using: contextlib.ExitStack,
    ) -> dict[str, Gather]:
        """The peer's gathers from a table as large as this one, without a cache and with each."""
        rows, width = view.num_rows, view.row_bytes // 4
        ways = {"peer": using.enter_context(peer.numbered_table(where, rows, view.row_bytes))}
        for cache in caches:
            reads = (ids for turn in range(_FILLED_BY) for ids in new_batches(turn))
            table = peer.cached_table(where, rows, width, numbered_words(width), cache, reads)
            found = using.enter_context(table)
            ways |= {f"peer, {name}": gathering for name, gathering in found.items()}
        return ways


def work(options: argparse.Namespace, ceilings: dict[str, float]) -> None:
    """All that a rank does."""
    Bench(options, ceilings).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    calibrate_option(parser)
    graph_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS_OF_IT, default=PARTS_OF_IT)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[128, 400, 512, 1024])
    parser.add_argument("--ids", type=int, default=1_000_000, help="uniform ids a batch")
    parser.add_argument("--gb-per-gpu", type=float, default=2.0, help="partitioned table")
    parser.add_argument("--host-gb", type=float, default=16.0, help="table in host memory")
    parser.add_argument("--source-exponent", type=float, default=1.2, help="see PowerLaw")
    parser.add_argument("--batch", type=int, default=6000, help="seeds of the graph sampled")
    options = parser.parse_args()
    ceilings = measure_ceilings(options.ranks)
    print_ceilings(ceilings)
    launch(work, options.ranks, options, ceilings)


if __name__ == "__main__":
    main()
