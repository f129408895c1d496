"""Claim: mini-batches come in at least 1.5 times as fast as from pylibwholegraph's loader.

Both drive the same GraphSAGE of torch-geometric's layers on the same power-law graph in GPU memory:
20 M nodes, 320 M edges, 128 features.  Ours is DGL's DataLoader over the store's graph, whose
blocks are turned into edge lists; the peer samples and gathers as its own examples do, but gets its
seeds and labels from GPU memory, where its data sets would take them from Python one by one.
Beside them: the model on batches that are there, and our loader with DGL's layers.  Ours also with
steps captured as CUDA graphs (:class:`dgl_mgpu.CapturedStep`), of the same models.

An epoch takes as many steps with either loader, so the quotient of steps is that of epochs.

Both loaders' samples and features are checked first, that both models compute the same, and that
captured steps have their losses.

    python -m benchmarks.loader_gpu --ranks 1 --out loader.json
    python -m benchmarks.loader_gpu --ranks 4 --batch 6000 --fanouts 15,10,5 25,10  # XGNN's
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip

from benchmarks.figures import Figure, Report
from benchmarks.fullgraph import Job, random_rows
from benchmarks.generated_graph import Data, all_in_gpu_memory, require_rows, seeds_of, stored
from benchmarks.gpu import common_options, this_device
from benchmarks.minibatch_gpu import CLASSES, FEATURES, HIDDEN, GraphSAGE, hops_of
from benchmarks.peers.geometric import Geometric, sage_conv
from benchmarks.peers.wholegraph import Loaded, WholeGraph, connect
from benchmarks.sampling_gpu import Checker, Hop
from benchmarks.timed_training import WARM_UP, Clock, Training, batches_of, loader_of, medians
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.launch.launch import launch

#: Beginning at the seeds: XGNN's of GCN, WholeGraph's, XGNN's of GraphSAGE.
FANOUTS = ((15, 10, 5), (30, 30, 30), (25, 10))
TIMES_PEER = 1.5
#: Between the scores of both models; sums in another order differ.
_TOLERANCE = 1e-4


def copy_parameters(given: Geometric, to: GraphSAGE) -> None:
    """Have a model of DGL's layers compute what the other one does."""
    with torch.no_grad():
        for its, mine in zip(given.layers, to.layers, strict=True):
            mine.fc_neigh.weight.copy_(its.lin_l.weight)
            mine.fc_self.weight.copy_(its.lin_r.weight)
            mine.fc_self.bias.copy_(its.lin_l.bias)


def as_edges(blocks: Sequence[dgl.DGLGraph]) -> Loaded:
    """A batch of DGL's loader for layers of torch-geometric."""
    edges = []
    for block in blocks:
        indptr, src, _ = block.adj_tensors("csc")
        # Without its own argument it repeats the numbers from 0.
        dst = torch.repeat_interleave(indptr.diff(), output_size=len(src))
        edges.append(torch.stack([src, dst]).long())
    first = blocks[0].srcdata
    sizes = [block.num_dst_nodes() for block in blocks]
    return Loaded(first[dgl.NID], first["feat"], edges, sizes)


def hops_of_edges(loaded: Loaded) -> list[Hop]:
    """Destination nodes, offsets and neighbours of each hop, that of the seeds first."""
    hops = []
    for (src, dst), size in zip(reversed(loaded.edges), reversed(loaded.sizes), strict=True):
        order = dst.argsort(stable=True)
        offsets = torch.searchsorted(dst[order], torch.arange(size + 1, device=dst.device))
        hops.append((loaded.nodes[:size], offsets, loaded.nodes[src[order]]))
    return hops


class Bench:
    """What is measured, on one rank."""

    def __init__(
        self, options: argparse.Namespace, job: Job, ranks: Communicator, peer: WholeGraph | None
    ) -> None:
        self._options, self._job, self._ranks, self._peer = options, job, ranks, peer
        self._clock = Clock(job)
        about = {**vars(options), "out": str(options.out)}
        spec = GraphSpec(options.nodes, options.edges, FEATURES, CLASSES)
        self._data = Data(spec, job.device)
        self._checker = Checker(self._data.indptr, self._data.indices)
        graph = {"nodes": options.nodes, "edges": self._data.num_edges, "features": FEATURES}
        self._geometric = importlib.util.find_spec("torch_geometric") is not None
        if self._geometric:
            about["torch_geometric"] = importlib.metadata.version("torch_geometric")
        else:
            job.say("without torch-geometric's layers: it is not installed")
        self._report = Report(job.ranks, options.out, options=about, graph=graph)

    def run(self) -> None:
        """Print every figure and keep it in a file."""
        data, ranks = self._data, self._ranks
        ids = seeds_of(data, self._num_steps * self._options.batch * ranks.size)
        store = {
            **all_in_gpu_memory(data, ranks),
            "batch_size": self._options.batch,
            "fanouts": self._options.fanouts[0][::-1],
        }
        with contextlib.ExitStack() as using:
            graph = using.enter_context(stored(data, ranks, store))
            load = None
            if self._peer is not None and self._geometric:
                make = data.rows()["feat"]
                load = using.enter_context(
                    self._peer.loader("cuda", data.indptr, data.indices, FEATURES, make)
                )
            for fanouts in self._options.fanouts:
                self._compare(graph, load, ids, fanouts)

    @property
    def _num_steps(self) -> int:
        return WARM_UP + self._options.window + 1

    def _compare(
        self,
        graph: StoreGraph,
        load: Callable[[torch.Tensor, Sequence[int]], Loaded] | None,
        ids: torch.Tensor,
        fanouts: tuple[int, ...],
    ) -> None:
        options, job, data = self._options, self._job, self._data
        name = f"{options.batch} at {','.join(map(str, fanouts))}"
        sampler = NeighborSampler(
            list(fanouts[::-1]), prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        loader = loader_of(graph, ids, sampler, options.batch, job.ranks)
        seeds = ids.tensor_split(job.ranks.size)[job.ranks.rank].split(options.batch)
        labels = data.rows()["label"](torch.arange(data.spec.num_nodes, device=data.device))
        torch.manual_seed(0)
        on_blocks = GraphSAGE(len(fanouts))
        batch = next(batches_of(loader, "0"))
        self._require_batch(name, fanouts, batch)
        ways: dict[str, Callable[[], Iterator[Any]]] = {}
        if self._geometric:
            widths = [FEATURES, *[HIDDEN] * (len(fanouts) - 1), CLASSES]
            on_edges = Geometric(sage_conv, itertools.pairwise(widths))
            copy_parameters(on_edges, on_blocks)
            geometric = Training(on_edges, job.device, lambda loaded: loaded[1:])
        of_dgl = Training(on_blocks, job.device, lambda blocks: (blocks, blocks[0].srcdata["feat"]))
        if self._geometric:
            self._require_same_scores(name, on_edges, on_blocks, batch[2])

            def ours(ahead: str) -> Iterator[torch.Tensor]:
                for _, _, blocks in batches_of(loader, ahead):
                    yield geometric.step(as_edges(blocks), blocks[-1].dstdata["label"])

            def alone() -> Iterator[torch.Tensor]:
                loaded, its = as_edges(batch[2]), batch[2][-1].dstdata["label"]
                for _ in range(self._num_steps):
                    yield geometric.step(loaded, its)

            on_its_edges = Training(on_edges, job.device, lambda blocks: as_edges(blocks)[1:])
            ways |= {
                "ours": lambda: ours("1"),
                "ours, one by one": lambda: ours("0"),
                "ours, captured": self._captured(name, on_its_edges, graph, loader),
                "model alone": alone,
            }
        if load is not None:
            self._require_loaded(name, fanouts, seeds[0], load(seeds[0], fanouts))

            def peers() -> Iterator[torch.Tensor]:
                for some in seeds:
                    yield geometric.step(load(some, fanouts), labels[some])

            ways["peer"] = peers

        def ours_with_dgl() -> Iterator[torch.Tensor]:
            for _, _, blocks in batches_of(loader, "1"):
                yield of_dgl.step_on_blocks(blocks)

        ways["ours, DGL's layers"] = ours_with_dgl
        ways["ours, DGL's layers, captured"] = self._captured(name, of_dgl, graph, loader)
        self._keep(name, fanouts, self._measure(ways))

    @staticmethod
    def _captured(
        name: str, training: Training, graph: StoreGraph, loader: DataLoader
    ) -> Callable[[], Iterator[torch.Tensor]]:
        """Steps that are captured, which have been checked."""
        begin = partial(graph.set_epoch, 0)
        training.require_captured_right(f"captured, {name}", begin, loader, 4 * WARM_UP)
        return lambda: map(training.captured_step, training.captured_batches(loader))

    def _measure(self, ways: dict[str, Callable[[], Iterator[Any]]]) -> list[dict[str, list]]:
        """Milliseconds a step of each way in each turn, on each rank."""
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(self._options.repeats + 1):
            for way, steps in ways.items():
                losses: list[torch.Tensor] = []
                loop = map(losses.append, steps())
                seconds = self._clock.seconds_a_step(loop, self._options.window)
                if not torch.stack(losses).isfinite().all():
                    raise ValueError(f"{way}: a loss is not finite")
                if turn > 0:
                    spent[way].append(1e3 * seconds)
        return self._job.ranks.all_gather(spent)

    def _keep(self, name: str, fanouts: Sequence[int], spent: list[dict[str, list]]) -> None:
        median = medians(spent)
        peer = median.get("peer")
        seeds = 1e3 * self._options.batch * self._job.ranks.size
        more = {
            "fanouts_from_seeds": fanouts,
            "median_ms": median,
            "seeds_per_second": {way: seeds / ms for way, ms in median.items()},
            "each_rank_ms": spent,
        }
        for way, case, aim in (
            ("ours", "torch-geometric", TIMES_PEER),
            ("ours, captured", "torch-geometric, captured", TIMES_PEER),
            ("ours, DGL's layers", "DGL's layers; peer torch-geometric", None),
            ("ours, DGL's layers, captured", "DGL's layers, captured; peer torch-geometric", None),
        ):
            if way in median:
                figure = Figure(
                    f"{case}, {name}", "ms", median[way], peer, times_peer=aim, more=more
                )
                self._report.add(figure)
        others = {way: f"{ms:.2f}" for way, ms in median.items()}
        self._job.say(f"  {', '.join(f'{way} {ms}' for way, ms in others.items())}")

    # -- checks ------------------------------------------------------------------------------------

    def _require_batch(self, name: str, fanouts: Sequence[int], batch: Any) -> None:
        _, seeds, blocks = batch
        require_rows(name, self._data, blocks)
        self._checker.require(name, seeds, fanouts, *hops_of(blocks))
        if self._geometric:
            self._checker.require(name, seeds, fanouts, hops_of_edges(as_edges(blocks)))

    def _require_loaded(
        self, name: str, fanouts: Sequence[int], seeds: torch.Tensor, loaded: Loaded
    ) -> None:
        self._checker.require(f"peer, {name}", seeds, fanouts, hops_of_edges(loaded))
        if not torch.equal(loaded.rows, random_rows(loaded.nodes, FEATURES)):
            raise ValueError(f"peer, {name}: wrong features")

    @torch.no_grad()
    def _require_same_scores(
        self,
        name: str,
        on_edges: Geometric,
        on_blocks: GraphSAGE,
        blocks: Sequence[dgl.DGLGraph],
    ) -> None:
        scores = on_edges(*as_edges(blocks)[1:])
        others = on_blocks(blocks, blocks[0].srcdata["feat"])
        if not torch.allclose(scores, others, _TOLERANCE, _TOLERANCE):
            off = float((scores - others).abs().max())
            raise ValueError(f"{name}: the scores of both models differ by up to {off}")


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    job, ranks = Job(argparse.Namespace(out=None)), Communicator.of_this_machine()
    peer = connect(ranks, not options.no_peer)
    # Without a GPU, enough to see that the program works.
    with tensor_backed_graphs() if this_device().type == "cpu" else contextlib.nullcontext():
        Bench(options, job, ranks, peer).run()
    if peer is not None:
        peer.close()


def _fanouts(given: str) -> tuple[int, ...]:
    return tuple(map(int, given.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.set_defaults(ranks=1, repeats=7, window=40)
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument(
        "--fanouts", nargs="+", type=_fanouts, default=FANOUTS, help="beginning at the seeds: 25,10"
    )
    options = parser.parse_args()
    seeds = (WARM_UP + options.window + 1) * options.batch * options.ranks
    if seeds > options.nodes:
        parser.error(f"a window takes {seeds} distinct seeds: say --nodes {seeds} or more")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
