"""Claim: placed by the solver, features are read at least as fast as other systems place them.

After XGNN's figure 13: on GPUs of which some are kept from reading each other, as on a DGX-1, the
slowest GPU's time to gather a mini-batch's features from a table of which cliques hold a part
(``--held``, half), under ``auto`` and under every other policy: cliques (Quiver), with the hottest
rows on every GPU (CliqueOpt), a cache alone (DGL+C), all on GPUs (WholeGraph), all in the host
(PyTorch-Direct), XGNN's own.  Beside them is pylibwholegraph, whose rows are on GPUs where these
are all linked and have room, else in the host.  What does not fit or needs links that are not there
is said to be impossible.  On 6 GPUs (6G) ``auto`` is at least 1.5 times as fast as cliques, and on
a ring of 4 (4Gc), where each GPU reaches two of the others and cliques are pairs.  All ranks at
once, policies in turns with ids of their own.

Ranks may share GPUs: 6G's ranks on 2 GPUs take turns on each, as a GPU runs one process at a
time, and reach each other there without a link.  What they read from the host is what
they would read on GPUs of their own.  On the ring there is less to gain than on 6G: all GPUs
together hold each row once, so that a GPU reaches three quarters of the rows, where cliques give it
half.  With all rows read alike (``--source-exponent 0``) it reads half as much from the host; the
more uneven reads are, the less of them falls on rows that cliques lack.

No time is reported for rows that are not right.

    python -m benchmarks.placement_gpu --links dgx1-6g --ranks 6 --out placement_gpu.json
    python -m benchmarks.placement_gpu --links dgx1-4gc --ranks 4 --source-exponent 0
    python -m benchmarks.placement_gpu --links dgx1-4gf --ranks 2 --held 1.1
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Report
from benchmarks.gather_gpu import FANOUTS, Gather, numbering, rows_of
from benchmarks.gpu import (
    Minibatches,
    NumberedWords,
    PowerLaw,
    built_store,
    common_options,
    from_pool,
    measure,
    require_words,
    why_not_possible,
)
from benchmarks.peers.wholegraph import WholeGraph, connect
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.machine import preset
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.placement.policies import POLICIES, cliques
from dgl_mgpu.store.memory import FeatureSource, Store
from dgl_mgpu.train.launch.launch import launch

#: Links of a DGX-1 to leave, with the number of GPUs and how many times as fast as cliques ``auto``
#: is to be there.
LINKS = {"dgx1-4gf": (4, 1.0), "dgx1-4gc": (4, 1.5), "dgx1-6g": (6, 1.5), "dgx1-8g": (8, 1.0)}
CLIQUES = ("clique", "clique_opt")
AUTO, PEER = "auto", "pylibwholegraph"


class Bench:
    """One table under every policy, on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._ranks = options, Communicator.of_this_machine()
        torch.manual_seed(self._ranks.rank)
        self._law = PowerLaw(options.nodes, options.edges, source_exponent=options.source_exponent)
        about = {**vars(options), "out": str(options.out)}
        self._report = Report(self._ranks, options.out, options=about, graph=vars(self._law))
        self._machine = preset(options.links, options.ranks)
        # In every clique the same rows, so the smallest says how many.
        self._clique = min(map(len, cliques(self._machine)))
        table_bytes = self._law.nodes * options.row_bytes
        held = int(options.held * table_bytes) // self._clique
        self._peers_memory = "cpu"
        if self._machine.fully_linked and held * options.ranks >= table_bytes:
            self._peers_memory = "cuda"
        self._store = {
            "links": options.links,
            "gpu_memory": held + 4 * self._law.nodes,  # and the positions
            "host_memory": 2 * table_bytes,
            "batch_size": options.batch,
            "fanouts": FANOUTS[::-1],
        }

    def run(self) -> None:
        """Report every policy against ``auto``."""
        options, ranks = self._options, self._ranks
        minibatches = Minibatches(self._law, options.batch, FANOUTS)
        pool = minibatches.draw(4 * (options.window + 2), distinct=not options.repeated)
        hotness = {"nodes": minibatches.hotness()} if ranks.rank == 0 else {}
        peer = connect(ranks, not options.no_peer)
        with contextlib.ExitStack() as using:
            stores, impossible = self._stores(hotness, using)
            gathers = {policy: self._checked(policy, s, pool[0]) for policy, s in stores.items()}
            if peer is not None:
                gathers[PEER] = using.enter_context(self._peers_table(peer, pool[0]))
            batches = partial(from_pool, pool, options.window + 2)
            seconds, samples = measure(gathers, batches, options.repeats, ranks)
        if peer is not None:
            peer.close()
        slowest = {policy: 1e3 * max(spent) for policy, spent in seconds.items()}
        plans = {policy: store.plan for policy, store in stores.items()}
        more = {
            "clique": self._clique,
            "gpu_memory": self._store["gpu_memory"],
            "ids_a_batch": len(pool[0]),
            "peers_memory": self._peers_memory if peer is not None else None,
            "each_rank_seconds": seconds,
            "samples": samples,
            "modelled_seconds": {policy: plan.step_seconds for policy, plan in plans.items()},
            "modelled_hits": {policy: plan.hit_rates["rows"] for policy, plan in plans.items()},
            "tiers": {
                policy: [(t.start, t.stop, t.memory, t.parts) for t in plan.tables["rows"].tiers]
                for policy, plan in plans.items()
            },
        }
        for policy in (*POLICIES, PEER):
            if policy in slowest and policy != AUTO:
                self._keep(policy, slowest[AUTO], slowest[policy], more)
                more = {}  # it is of all policies, and in the file once
            elif policy in impossible:
                self._keep(policy, slowest[AUTO], None, {"not_possible": impossible[policy]})

    def _stores(
        self, hotness: dict[str, np.ndarray], using: contextlib.ExitStack
    ) -> tuple[dict[str, Store], dict[str, str]]:
        """The table under every policy that can place it, and why others cannot."""
        sources = None
        if self._ranks.rank == 0:
            rows = NumberedWords(self._law.nodes, self._options.row_bytes)
            sources = {"rows": FeatureSource(rows, "nodes")}
        stores, impossible = {}, {}
        for policy in POLICIES:
            asked = {**self._store, "policy": policy}
            if why := why_not_possible(sources, hotness, self._ranks, asked):
                impossible[policy] = why
                continue
            store = built_store(sources, hotness, self._ranks, asked)
            stores[policy] = using.enter_context(store)
        return stores, impossible

    def _checked(self, policy: str, store: Store, ids: torch.Tensor) -> Gather:
        view = rows_of(store.tables["rows"])
        gather = partial(gather_rows, view)
        require_words(policy, gather, ids, numbering(view, self._options.row_bytes // 4))
        return gather

    @contextlib.contextmanager
    def _peers_table(self, peer: WholeGraph, ids: torch.Tensor) -> Iterator[Gather]:
        row_bytes = self._options.row_bytes
        words = torch.arange(row_bytes // 4, device=ids.device)
        with peer.numbered_table(self._peers_memory, self._law.nodes, row_bytes) as gather:
            require_words(PEER, gather, ids, lambda ids: ids[:, None] * len(words) + words)
            yield gather

    def _keep(self, policy: str, ours: float, theirs: float | None, more: dict[str, Any]) -> None:
        case = f"{self._options.links}, auto against {policy}"
        target = LINKS[self._options.links][1] if policy in CLIQUES else 1.0
        self._report.add(Figure(case, "ms", ours, theirs, times_peer=target, more=more))
        if theirs is None and self._ranks.rank == 0:
            print(f"{'':46} \N{MULTIPLICATION SIGN} {more['not_possible']}", flush=True)


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.add_argument("--links", choices=tuple(LINKS), default="dgx1-4gc")
    parser.add_argument(
        "--held", type=float, default=0.5, help="part of the rows that cliques have room for"
    )
    parser.add_argument("--row-bytes", type=int, default=512)
    parser.add_argument("--source-exponent", type=float, default=1.2, help="see PowerLaw")
    parser.add_argument("--batch", type=int, default=6000, help="seeds of a mini-batch")
    parser.add_argument(
        "--repeated", action="store_true", help="gather nodes as often as they are sampled"
    )
    options = parser.parse_args()
    needed = LINKS[options.links][0]
    fewer = preset(options.links).fully_linked and options.ranks < needed
    if options.ranks != needed and not fewer:
        parser.error(f"{options.links} is a pattern of {needed} ranks: say --ranks {needed}")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
