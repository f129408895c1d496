"""Claim: sampling moves half of the bytes over links that reading neighbour lists whole does.

After XGNN's figure 14, for the topology dealt out over all GPUs and the mini-batches of
``sampling_gpu``; in the place of the peer is a sampler that reads the whole list of each node.

``counted``: the sectors of 32 bytes, in other GPUs' memory, of the bounds of each node's list and
of the entries that are sampled from it, or of all.  They follow from the samples.  (Edge ids follow
from the bounds, where the edges of a node have consecutive ones.)  ``measured``: what NVLink's
counters say that the GPUs received, while all sample, and while all read the same nodes' lists
whole.

What can be gained is bounded by the graph: a list no longer than the fanout is read whole by any
sampler, and long ones are met as often as hubs are sampled.  So there are two graphs of the same
in-degrees: sources drawn in proportion to these (``in step``), as in graphs of web pages and
people, and drawn uniformly.  The JSON has how many of the edges of the nodes are sampled, and what
it would take to read lists whole with edge ids beside them.

    python -m benchmarks.sampling_bytes --ranks 4 --out sampling_bytes.json
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from operator import add

import torch

from benchmarks.figures import Figure, Report
from benchmarks.gpu import PowerLaw, common_options, this_device
from benchmarks.nvlink import Counters
from benchmarks.peers.wholegraph import connect
from benchmarks.sampling_gpu import IDTYPES, SETTINGS, Checker, new_seeds, our_hops, our_view
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import GraphView, SampledBlock, SampleKey, sample_blocks, sample_neighbors
from dgl_mgpu.train.launch.launch import launch

TIMES_WHOLE = 2.0
_SECTOR = 32


@dataclass(frozen=True)
class Sectors:
    """Sectors that one mini-batch reads in other GPUs' memory."""

    bounds: int = 0
    sampled: int = 0
    whole: int = 0
    #: Entries that these hold of a list: those sampled, and all.
    sampled_edges: int = 0
    edges: int = 0

    def __add__(self, other: Sectors) -> Sectors:
        return Sectors(*map(add, astuple(self), astuple(other)))

    @property
    def sampled_megabytes(self) -> float:
        """Of the bounds and of the entries sampled."""
        return _SECTOR * (self.bounds + self.sampled) / 1e6

    @property
    def whole_megabytes(self) -> float:
        """Of the bounds and of the whole lists."""
        return _SECTOR * (self.bounds + self.whole) / 1e6


class Layout:
    """Where a topology's rows are when they are dealt out over GPUs.

    Parameters
    ----------
    indptr : Tensor, int64, shape (nodes + 1,)
    entry_bytes : int
        Of a neighbour.
    parts, mine : int
        GPUs, and which of them reads.  What a single one reads counts as if it were elsewhere.
    """

    def __init__(self, indptr: torch.Tensor, entry_bytes: int, parts: int, mine: int) -> None:
        self._indptr, self._entry_bytes = indptr, entry_bytes
        self._parts, self._mine = parts, mine
        degrees = indptr.diff()
        self._first = torch.empty_like(degrees)
        for part in range(parts):
            held = degrees[part::parts]
            self._first[part::parts] = held.cumsum(0) - held

    def read(self, nodes: torch.Tensor, sizes: torch.Tensor, eids: torch.Tensor) -> Sectors:
        """By one hop: of each node so many sampled edges, whose ids are their places in CSC."""
        remote = nodes % self._parts != self._mine if self._parts > 1 else nodes >= 0
        rows = nodes[remote]
        local = rows // self._parts
        # A row has its first edge's place and id, 16 bytes, and ends where the next begins.
        bounds = len(rows) + int((local % 2 == 1).sum())
        sampled = torch.repeat_interleave(remote, sizes)
        row = torch.repeat_interleave(sizes)[sampled]
        place = self._first[nodes[row]] + eids[sampled] - self._indptr[nodes[row]]
        touched = (row << 40) + self._sector(place)
        first, degrees = self._first[rows], self._indptr[rows + 1] - self._indptr[rows]
        whole = self._sector(first + degrees - 1) - self._sector(first) + 1
        return Sectors(
            bounds, len(touched.unique()), int(whole[degrees > 0].sum()), len(row),
            int(degrees.sum()),
        )  # fmt: skip

    def _sector(self, place: torch.Tensor) -> torch.Tensor:
        return place * self._entry_bytes // _SECTOR


def sectors_of(layout: Layout, blocks: Sequence[SampledBlock]) -> Sectors:
    """What the hops of one sample read."""
    total = Sectors()
    for (nodes, offsets, _), eids in zip(*our_hops(blocks), strict=True):
        total += layout.read(nodes.long(), offsets.long().diff(), eids.long())
    return total


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    ranks, device = Communicator.of_this_machine(), this_device()
    torch.manual_seed(ranks.rank)
    counters = Counters(ranks)
    if counters.missing and ranks.rank == 0:
        print(f"nothing is measured: {counters.missing}")
    peer = connect(ranks, not (options.no_peer or counters.missing))
    laws = {
        sources: PowerLaw(options.nodes, options.edges, in_step=sources == "in step")
        for sources in ("in step", "uniform")
    }
    report = Report(
        ranks,
        options.out,
        options={**vars(options), "out": str(options.out)},
        graphs={sources: vars(law) for sources, law in laws.items()},
        nothing_measured_because=counters.missing,
    )
    for idtype, (sources, law) in product(options.idtypes, laws.items()):
        indptr, indices = law.csc(device, IDTYPES[idtype])
        checker = Checker(indptr, indices)
        layout = Layout(indptr, indices.element_size(), ranks.size, ranks.rank)
        with contextlib.ExitStack() as using:
            view = using.enter_context(our_view(indptr, indices, "gpu", ranks))
            theirs = None
            if peer is not None:
                theirs = using.enter_context(peer.sampler("cuda", indptr, indices))
            for batch, fanouts in SETTINGS:
                name = f"{idtype}, {sources}, {batch} at {','.join(map(str, fanouts))}"
                seeds = new_seeds(law.nodes, batch, options.window, IDTYPES[idtype], 0)
                sample = partial(sampled, view, fanouts)
                blocks = [sample(some) for some in seeds]
                checker.require(name, seeds[0], fanouts, *our_hops(blocks[0]))
                report.add(counted(name, [sectors_of(layout, each) for each in blocks], ranks))
                if not counters.missing:
                    bytes_of = partial(counters.bytes_a_call, repeats=options.repeats)
                    peers = None
                    if theirs is not None:
                        peers = bytes_of(partial(_peer, theirs, fanouts), seeds)
                    report.add(measured(name, bytes_of, view, sample, seeds, blocks, peers))
    if peer is not None:
        peer.close()


def sampled(view: GraphView, fanouts: tuple[int, ...], seeds: torch.Tensor) -> list[SampledBlock]:
    """One mini-batch."""
    return sample_blocks(view, seeds, fanouts[::-1], SampleKey(0))


def _peer(sampler: Callable, fanouts: tuple[int, ...], seeds: torch.Tensor) -> None:
    sampler(seeds, fanouts)


def counted(name: str, batches: Sequence[Sectors], ranks: Communicator) -> Figure:
    """MB a batch, from the samples."""
    # Ranks tell each other plain data.
    each_rank = ranks.all_gather([astuple(sectors) for sectors in batches])
    every = [Sectors(*sectors) for mine in each_rank for sectors in mine]
    total = sum(every, Sectors())
    more = {
        "bounds": _SECTOR * total.bounds / len(every) / 1e6,
        "whole_with_edge_ids": _SECTOR * (total.bounds + 2 * total.whole) / len(every) / 1e6,
        "share_of_edges_sampled": total.sampled_edges / max(1, total.edges),
    }
    ours, whole = total.sampled_megabytes / len(every), total.whole_megabytes / len(every)
    return Figure(f"{name}, counted", "MB", ours, whole, times_peer=TIMES_WHOLE, more=more)


def measured(
    name: str,
    bytes_of: Callable[[Callable, Sequence], float],
    view: GraphView,
    sample: Callable[[torch.Tensor], list[SampledBlock]],
    seeds: Sequence[torch.Tensor],
    blocks: Sequence[list[SampledBlock]],
    peer_bytes: float | None,
) -> Figure:
    """MB a batch that NVLink's counters tell of."""

    def read_whole(nodes: Sequence[torch.Tensor]) -> None:
        for each in nodes:
            sample_neighbors(view, each, -1, SampleKey(0))

    nodes = [[block.src_nodes[: block.num_dst] for block in of_batch] for of_batch in blocks]
    ours, whole = bytes_of(sample, seeds), bytes_of(read_whole, nodes)
    more = None if peer_bytes is None else {"pylibwholegraph": peer_bytes / 1e6}
    return Figure(
        f"{name}, measured", "MB", ours / 1e6, whole / 1e6, times_peer=TIMES_WHOLE, more=more
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.add_argument("--idtypes", nargs="+", choices=tuple(IDTYPES), default=["int32"])
    options = parser.parse_args()
    seeds = (options.window + 2) * max(batch for batch, _ in SETTINGS)
    if seeds > options.nodes:
        parser.error(f"a window takes {seeds} distinct seeds: say --nodes {seeds} or more")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
