"""Claim: placed by the solver, features are read at least as fast as placed in cliques.

After XGNN's figure 13: on GPUs of which some are kept from reading each other, as on a DGX-1, the
slowest GPU's time to gather a mini-batch's features under the policies ``auto``, ``clique`` and
``clique_opt``, from a table twice as large as what cliques hold.  On 6 GPUs (6G) ``auto`` is at
least 1.5 times as fast, and on a ring of 4 (4Gc), where each GPU reaches two of the others and
cliques are pairs.  All ranks at once, policies in turns with ids of their own.

Ranks may share GPUs: 6G's ranks on 2 GPUs take turns on each, as a GPU runs one process at a
time, and reach each other there without a link.  What they read from the host is what
they would read on GPUs of their own.  On the ring there is less to gain than on 6G: all GPUs
together hold each row once, so that a GPU reaches three quarters of the rows, where cliques give it
half.  With all rows read alike (``--source-exponent 0``) it reads half as much from the host; the
more uneven reads are, the less of them falls on rows that cliques lack.

No time is reported for rows that are not right.

    python -m benchmarks.placement_gpu --links dgx1-6g --ranks 6 --out placement_gpu.json
    python -m benchmarks.placement_gpu --links dgx1-4gc --ranks 4 --source-exponent 0
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial

import torch

from benchmarks.figures import Figure, Report
from benchmarks.gather_gpu import FANOUTS, numbering, rows_of
from benchmarks.gpu import (
    Minibatches,
    NumberedWords,
    PowerLaw,
    built_store,
    common_options,
    from_pool,
    measure,
    require_words,
)
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.placement.policies import cliques
from dgl_mgpu.store import FeatureSource, Ranks, Store
from dgl_mgpu.topology import preset
from dgl_mgpu.training.launch import launch

#: Links of a DGX-1 to leave, with the number of GPUs and what is to be reached.
LINKS = {"dgx1-4gf": (4, 1.0), "dgx1-4gc": (4, 1.5), "dgx1-6g": (6, 1.5), "dgx1-8g": (8, 1.0)}
POLICIES = ("auto", "clique", "clique_opt")


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    ranks = Ranks.of_this_machine()
    torch.manual_seed(ranks.rank)
    law = PowerLaw(options.nodes, options.edges, source_exponent=options.source_exponent)
    about = {**vars(options), "out": str(options.out)}
    report = Report(ranks, options.out, options=about, graph=vars(law))
    minibatches = Minibatches(law, options.batch, FANOUTS)
    pool = minibatches.draw(4 * (options.window + 2), distinct=not options.repeated)
    # In every clique the same rows, so the smallest says how many.
    smallest = min(map(len, cliques(preset(options.links))))
    table_bytes = law.nodes * options.row_bytes
    store_options = {
        "links": options.links,
        "gpu_memory": table_bytes // (2 * smallest) + 4 * law.nodes,  # and the positions
        "host_memory": 2 * table_bytes,
        "batch_size": options.batch,
        "fanouts": FANOUTS[::-1],
    }
    sources, hotness = None, {}
    if ranks.rank == 0:
        rows = NumberedWords(law.nodes, options.row_bytes)
        sources, hotness = {"rows": FeatureSource(rows, "nodes")}, {"nodes": minibatches.hotness()}
    stores: dict[str, Store] = {}
    gathers = {}
    with contextlib.ExitStack() as open_stores:
        for policy in POLICIES:
            store = built_store(sources, hotness, ranks, {**store_options, "policy": policy})
            stores[policy] = open_stores.enter_context(store)
            view = rows_of(stores[policy].tables["rows"])
            gathers[policy] = partial(gather_rows, view)
            numbers = numbering(view, options.row_bytes // 4)
            require_words(policy, gathers[policy], pool[0], numbers)
        batches = partial(from_pool, pool, options.window + 2)
        seconds, samples = measure(gathers, batches, options.repeats, ranks)
    slowest = {policy: 1e3 * max(spent) for policy, spent in seconds.items()}
    more = {
        "clique": smallest,
        "gpu_memory": store_options["gpu_memory"],
        "ids_a_batch": len(pool[0]),
        "each_rank_seconds": seconds,
        "samples": samples,
        "modelled_seconds": {policy: s.plan.step_seconds for policy, s in stores.items()},
        "modelled_hits": {policy: s.plan.hit_rates["rows"] for policy, s in stores.items()},
        "tiers": {
            policy: [(t.start, t.stop, t.memory, t.parts) for t in s.plan.tables["rows"].tiers]
            for policy, s in stores.items()
        },
    }
    for policy in POLICIES[1:]:
        case = f"{options.links}, auto against {policy}"
        target = LINKS[options.links][1]
        report.add(
            Figure(case, "ms", slowest["auto"], slowest[policy], times_peer=target, more=more)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.add_argument("--links", choices=tuple(LINKS), default="dgx1-4gc")
    parser.add_argument("--row-bytes", type=int, default=512)
    parser.add_argument("--source-exponent", type=float, default=1.2, help="see PowerLaw")
    parser.add_argument("--batch", type=int, default=6000, help="seeds of a mini-batch")
    parser.add_argument(
        "--repeated", action="store_true", help="gather nodes as often as they are sampled"
    )
    options = parser.parse_args()
    needed = LINKS[options.links][0]
    if options.ranks != needed:
        parser.error(f"{options.links} is a pattern of {needed} ranks: say --ranks {needed}")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
