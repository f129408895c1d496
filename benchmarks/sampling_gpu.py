"""Claim: sampling a mini-batch on GPUs is at least 3 times as fast as pylibwholegraph.

All hops with append-unique, on a graph (``--graph``) whose topology is partitioned over all GPUs
(``gpu``), with all of it in host memory (``host``), and with half of it there (``half``, at least
twice as fast), where the peer, which has no halves, has all of it: not like with like.  All ranks
at once, contenders in turns with seeds of their own.

No time is reported for a sample that is not right.

    python -m benchmarks.sampling_gpu --ranks 4 --out sampling.json
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Report
from benchmarks.gpu import (
    built_store,
    calibrate_option,
    common_options,
    measure,
    this_device,
)
from benchmarks.graphs import facts, graph_of, graph_options
from benchmarks.peers.wholegraph import Hop, connect, hops
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import GraphView, SampledBlock, SampleKey, sample_blocks
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.train.launch.launch import launch

#: Seeds of a mini-batch and fanouts, beginning at the seeds.
SETTINGS = ((6000, (15, 10, 5)), (6000, (25, 10)), (1024, (15, 10, 5)), (512, (30, 30, 30)))
#: What is to be reached, by where the topology is; of all in host memory nothing was said.
TIMES_PEER = {"gpu": 3.0, "half": 2.0, "host": None}
IDTYPES = {"int32": torch.int32, "int64": torch.int64}


class Checker:
    """Whether samples are samples without replacement of a graph that is all here."""

    def __init__(self, indptr: torch.Tensor, indices: torch.Tensor) -> None:
        self._indptr = indptr
        self._indices = indices

    def require(
        self,
        who: str,
        seeds: torch.Tensor,
        fanouts: Sequence[int],
        found: Sequence[Hop],
        eids: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Raise ValueError unless every hop is right.

        Each destination has as many edges as it must, each is an edge of the graph and drawn
        no more often than the graph has it, and a hop's destinations are all nodes before it.
        """
        nodes = seeds
        for hop, (sample, fanout) in enumerate(zip(found, fanouts, strict=True)):
            wrong = self._wrong(nodes, fanout, sample, None if eids is None else eids[hop])
            if wrong:
                raise ValueError(f"{who}, hop {hop} of {tuple(fanouts)}: wrong {wrong}")
            nodes = torch.cat([sample[0], sample[2]]).unique()

    def _wrong(
        self, nodes: torch.Tensor, fanout: int, sample: Hop, eids: torch.Tensor | None
    ) -> str:
        """What is wrong with one hop, if anything is."""
        dst, offsets, neighbors = sample
        if not torch.equal(dst.sort()[0], nodes.sort()[0]):
            return "destinations"
        first = self._indptr[dst.long()]
        degrees, sizes = self._indptr[dst.long() + 1] - first, offsets.long().diff()
        if not torch.equal(sizes, degrees.clamp(max=fanout)) or len(neighbors) != sizes.sum():
            return "number of edges"
        if not self._edges_exist(first, degrees, sizes, neighbors):
            return "edges"
        if eids is not None:
            row = torch.repeat_interleave(sizes)
            within = eids - first[row]
            theirs = ((within >= 0) & (within < degrees[row])).all()
            distinct = len(eids.unique()) == len(row)
            if not (theirs and distinct and torch.equal(self._indices[eids.long()], neighbors)):
                return "edge ids"
        return ""

    def _edges_exist(
        self,
        first: torch.Tensor,
        degrees: torch.Tensor,
        sizes: torch.Tensor,
        neighbors: torch.Tensor,
    ) -> bool:
        many = len(self._indptr)
        row = torch.repeat_interleave(degrees)
        begins = degrees.cumsum(0) - degrees
        places = torch.arange(len(row), device=row.device) + (first - begins)[row]
        there, times = (row * many + self._indices[places]).unique(return_counts=True)
        drawn = torch.repeat_interleave(sizes)
        taken, taken_times = (drawn * many + neighbors).unique(return_counts=True)
        if not len(taken):
            return True
        found = torch.searchsorted(there, taken).clamp(max=len(there) - 1)
        return bool(((there[found] == taken) & (taken_times <= times[found])).all())


def our_hops(blocks: Sequence[SampledBlock]) -> tuple[list[Hop], list[torch.Tensor]]:
    """Hops and edge ids, those of the seeds first."""
    order = blocks[::-1]
    return (
        [(b.src_nodes[: b.num_dst], b.indptr.long(), b.src_nodes[b.src.long()]) for b in order],
        [b.eids for b in order],
    )


def new_seeds(
    nodes: int, batch: int, window: int, idtype: torch.dtype, turn: int
) -> list[torch.Tensor]:
    """Distinct seeds for each batch of a window."""
    device = this_device()
    drawn = torch.randperm(nodes, device=device)[: batch * (window + 2)].to(idtype)
    return list(drawn.split(batch))


def settings_on(options: argparse.Namespace) -> list[tuple[int, tuple[int, ...]]]:
    """The settings for whose windows a graph has enough seeds."""
    return [each for each in SETTINGS if (options.window + 2) * each[0] <= options.nodes]


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    ranks, device = Communicator.of_this_machine(), this_device()
    torch.manual_seed(ranks.rank)
    peer = connect(ranks, not options.no_peer)
    law = graph_of(options, source_exponent=options.source_exponent)
    about = {**vars(options), "out": str(options.out)}
    report = Report(ranks, options.out, options=about, graph=facts(law))
    for idtype in options.idtypes:
        indptr, indices = law.csc(device, IDTYPES[idtype])
        checker = Checker(indptr, indices)
        for memory in options.memory:
            with contextlib.ExitStack() as using:
                view = using.enter_context(
                    our_view(indptr, indices, memory, ranks, options.calibrate)
                )
                theirs = None
                if peer is not None:
                    where = "cuda" if memory == "gpu" else "cpu"
                    theirs = using.enter_context(peer.sampler(where, indptr, indices))
                for batch, fanouts in settings_on(options):
                    seeds = partial(new_seeds, law.nodes, batch, options.window, IDTYPES[idtype])
                    name = f"{idtype}, {memory}, {batch} at {','.join(map(str, fanouts))}"
                    figure = compare(
                        name, view, theirs, checker, fanouts, seeds, options.repeats, ranks,
                        TIMES_PEER[memory],
                    )  # fmt: skip
                    report.add(figure)
    if peer is not None:
        peer.close()


@contextlib.contextmanager
def our_view(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    memory: str,
    ranks: Communicator,
    calibrated: bool = False,
) -> Iterator[GraphView]:
    """The topology in a store, as this rank sees it; calibrated for the first setting."""
    nodes, edges = len(indptr) - 1, len(indices)
    options: dict[str, Any] = {"policy": "partitioned"}
    if memory == "half":
        # The hotter half of the rows, dealt out; it may be a little more than half of the bytes,
        # which are bounds, neighbours and positions.
        nbytes = 16 * nodes + indices.element_size() * edges
        memory_a_gpu = int(1.1 * nbytes / (2 * ranks.size)) + 4 * nodes
        options = {"policy": "auto", "gpu_memory": memory_a_gpu, "graph_ratio": 0.5}
    elif memory == "host":
        # What the machine says of its memory may be less than it gives.
        options = {"policy": "host", "host_memory": 2 * (16 * nodes + 8 * edges)}
    sources, hotness = None, {}
    if ranks.rank == 0:
        order = "nodes" if memory == "half" else ""
        sources = {
            "graph": TopologySource(
                indptr.cpu().numpy(), indices.cpu().numpy(), None, nodes, indices.dtype, order
            )
        }
        if order:
            hotness = {order: torch.bincount(indices, minlength=nodes).cpu().numpy()}
    batch, fanouts = SETTINGS[0]
    options |= {"batch_size": batch, "fanouts": fanouts[::-1]}
    with built_store(sources, hotness, ranks, options, calibrated=calibrated) as store:
        view = store.tables["graph"].view
        assert isinstance(view, GraphView)
        yield view


def compare(
    name: str,
    view: GraphView,
    theirs: Callable[[torch.Tensor, Sequence[int]], Any] | None,
    checker: Checker,
    fanouts: tuple[int, ...],
    seeds: Callable[[int], Sequence[torch.Tensor]],
    repeats: int,
    ranks: Communicator,
    times_peer: float | None,
) -> Figure:
    """Milliseconds a batch of one setting."""
    number = count(ranks.rank, ranks.size)

    def ours(some: torch.Tensor) -> list[SampledBlock]:
        return sample_blocks(view, some, fanouts[::-1], SampleKey(0, batch=next(number)))

    contenders: dict[str, Callable[[torch.Tensor], Any]] = {"ours": ours}
    first = seeds(0)[0]
    blocks = ours(first)
    checker.require(f"ours, {name}", first, fanouts, *our_hops(blocks))
    if theirs is not None:
        sampler = theirs
        contenders["peer"] = lambda some: sampler(some, fanouts)
        checker.require(f"peer, {name}", first, fanouts, hops(sampler(first, fanouts)))
    seconds, samples = measure(contenders, seeds, repeats, ranks)
    mean = {who: 1e3 * float(np.mean(spent)) for who, spent in seconds.items()}
    more = {
        "seeds": len(first),
        "fanouts_from_seeds": fanouts,
        "sampled_edges": sum(len(block.src) for block in blocks),
        "input_nodes": len(blocks[0].src_nodes),
        "each_rank_seconds": seconds,
        "samples": samples,
        "tiers": view.tiers.tolist(),
    }
    return Figure(name, "ms", mean["ours"], mean.get("peer"), times_peer=times_peer, more=more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    calibrate_option(parser)
    graph_options(parser)
    parser.add_argument(
        "--memory", nargs="+", choices=tuple(TIMES_PEER), default=["gpu", "half", "host"]
    )
    parser.add_argument("--idtypes", nargs="+", choices=tuple(IDTYPES), default=list(IDTYPES))
    parser.add_argument(
        "--source-exponent", type=float, default=0.0, help="0: uniform sources; see PowerLaw"
    )
    options = parser.parse_args()
    graph_of(options)
    if not settings_on(options):
        seeds = (options.window + 2) * min(batch for batch, _ in SETTINGS)
        parser.error(
            f"a window takes {seeds} distinct seeds, of {options.nodes} nodes: "
            "say more --nodes or a smaller --window"
        )
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
