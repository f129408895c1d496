"""Claim: through the store an epoch takes at most 1.05 times as long as its model alone.

GraphSAGE, GCN and PinSAGE with XGNN's mini-batches of 6000 seeds, or with ``--paper wholegraph``
GCN, GraphSAGE and GAT with WholeGraph's of 512 (``timed_training.SETTINGS``), on generated graphs
of the sizes of the paper's, in GPU memory.  With ``--gpu-memory 16GiB``, XGNN's setting, the rest
is in host memory: at most 1.3 times, where XGNN itself stays within 1.5.

DGL's DataLoader goes over the store's graph, on a rank a GPU, with DDP.  In turns, in the same run:
steps end to end with batches made ahead, and one by one (``DGL_MGPU_PREFETCH=0``); the same
training on batches that are in GPU memory already, each used once; the loader without a model.
Both also with steps that are captured as a CUDA graph (:class:`dgl_mgpu.CapturedStep`): end to
end with mini-batches that are sampled in place, and alone on one that is there, again and again.
An epoch's time is the steps that the graph's training nodes take times the median of a step.
Samples, features and losses are checked first.

    python -m benchmarks.epoch_gpu --ranks 1 --scale 0.5 --out epoch.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

from dgl.dataloading import DataLoader  # isort: skip

from benchmarks.fullgraph import Job, column, common_options, new_report, ranks_option
from benchmarks.generated_graph import (
    Data,
    all_in_gpu_memory,
    require_edges,
    require_rows,
    seeds_of,
    stored,
)
from benchmarks.gpu import this_device
from benchmarks.minibatch_gpu import hops_of
from benchmarks.sampling_gpu import Checker
from benchmarks.timed_training import (
    SETTINGS,
    WALK_LENGTH,
    WARM_UP,
    Clock,
    Network,
    Training,
    batches_of,
    blocks_of,
    loader_of,
    medians,
    network_model,
    profiled,
    require_same_losses,
    room_for_batches,
)
from dgl_mgpu.backend.global_store.graph import StoreGraph
from dgl_mgpu.backend.ours import graphs_on_tensors
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.report.profile import StepProfile
from dgl_mgpu.store import Ranks
from dgl_mgpu.store.planning import parse_bytes
from dgl_mgpu.training.launch import launch

#: Most times the model's time, with all in GPU memory and with a part of it in the host's.
AIM, AIM_OF_PART = 1.05, 1.3
#: Least share of the time in which the GPU is to be busy.
BUSY = 0.95
#: What XGNN's own ratio may be for the second to be aimed at.
WITHIN = 1.5
#: Steps at the end of a pass that are not timed.
SPARE = 2
#: Of the batches in GPU memory: those that warm up, and those that the host is timed with.
KEPT_WARM_UP, KEPT_FOR_HOST = 2, 2
#: Seeds whose sample is checked edge by edge.
_CHECKED = 32
#: Trains on a batch's blocks, and gives the loss.
Step = Callable[[Any], torch.Tensor]
#: End to end: with batches made ahead, and without.
END_TO_END = {"ahead": "1", "one by one": "0"}
#: All that is timed; the host is timed while it trains on batches that are there.
WAYS = (*END_TO_END, "model", "loader", "host", "captured", "captured model")


class Case:
    """One network on one graph, measured on all ranks."""

    def __init__(
        self, job: Job, name: str, network: Network, data: Data, graph: StoreGraph
    ) -> None:
        self._job, self._options, self._name = job, job.options, name
        self._network, self._data, self._graph = network, data, graph
        self._clock = Clock(job)
        self._training = Training(
            network_model(network, data.spec, self._options.hidden), job.device
        )
        self._inputs = self._training.model.inputs
        steps = WARM_UP + self._options.window + SPARE
        self._ids = seeds_of(data, steps * self._options.batch * job.ranks.size)
        self._loader = self._loader_of(self._options.batch)

    def _loader_of(self, batch: int, walk_length: int = WALK_LENGTH) -> DataLoader:
        sampler = self._network.sampler(self._inputs, walk_length)
        return loader_of(self._graph, self._ids, sampler, batch, self._job.ranks)

    def check(self) -> None:
        """Raise ValueError unless its batches are right.

        Random walks are of one step then, or their ends would not be neighbours.
        """
        few = min(_CHECKED, self._options.batch)
        _, seeds, blocks = next(batches_of(self._loader_of(few, walk_length=1), "0"))
        require_edges(self._name, self._data, blocks)
        if not self._network.walks:
            hops, eids = hops_of(blocks)
            same = [(dst, indptr, nodes.to(self._data.indices)) for dst, indptr, nodes in hops]
            checker = Checker(self._data.indptr, self._data.indices)
            checker.require(self._name, seeds, self._network.fanouts, same, eids)
        _, _, blocks = next(batches_of(self._loader, "0"))
        require_rows(self._name, self._data, blocks)
        # More than there are before one is captured, which is right of that one at least.
        self._training.require_captured_right(
            self._name, lambda: self._graph.set_epoch(0), self._loader, 4 * WARM_UP
        )

    def measure(self) -> dict[str, Any]:
        """Each turn's milliseconds, on each rank."""
        kept = self._most_kept()
        spent: dict[str, list[float]] = {way: [] for way in WAYS}
        same_bits = True
        for turn in range(self._options.repeats):
            losses = {}
            for way, ahead in END_TO_END.items():
                blocks = partial(blocks_of, self._loader, ahead)
                seconds, losses[way] = self._end_to_end(turn, blocks, self._training.step_on_blocks)
                spent[way].append(seconds)
            seconds, host, losses["model"] = self._alone(turn, kept, self._training.step_on_blocks)
            spent["model"].append(seconds)
            spent["host"].append(host)
            spent["loader"].append(self._loader_alone(turn))
            captured = self._training.captured_step
            # Dropout draws other numbers, as it does so for rows to spare.
            batches = partial(self._training.captured_batches, self._loader)
            spent["captured"].append(self._end_to_end(turn, batches, captured)[0])
            spent["captured model"].append(self._in_place(turn))
            same_bits &= require_same_losses(self._name, losses)
        milliseconds = {way: [1e3 * each for each in times] for way, times in spent.items()}
        traffic = self._graph.traffic.take()
        rows = {memory: n for (table, memory), n in sorted(traffic.rows.items()) if table == "feat"}
        return {
            "each_rank_ms": self._job.ranks.all_gather(milliseconds),
            "kept_batches": kept,
            "losses_have_the_same_bits": same_bits,
            "rows_read": self._job.ranks.all_gather(rows),
            "profile": self._profile(self._training.step_on_blocks, blocks_of),
            "captured_profile": self._profile(
                self._training.captured_step, self._training.captured_batches, " captured"
            ),
        }

    def _end_to_end(
        self, turn: int, batches: Callable[[], Iterable[Any]], train: Step
    ) -> tuple[float, torch.Tensor]:
        losses: list[torch.Tensor] = []
        self._begin(turn)
        steps = (losses.append(train(batch)) for batch in batches())
        seconds = self._clock.seconds_a_step(steps, self._options.window)
        return seconds, torch.stack(losses)

    def _alone(self, turn: int, count: int, train: Step) -> tuple[float, float, torch.Tensor]:
        """Seconds of a step on batches that are there, and those of the host."""
        losses: list[torch.Tensor] = []
        self._begin(turn)
        kept = deque(itertools.islice(blocks_of(self._loader, "0"), count))

        def step() -> None:
            # Once each: what training leaves in a block, the next use would have for nothing.
            losses.append(train(kept.popleft()))

        timed = count - KEPT_WARM_UP - KEPT_FOR_HOST
        steps = (step() for _ in range(count))
        seconds = self._clock.seconds_a_step(steps, timed, KEPT_WARM_UP)
        host = [self._clock.host_seconds(step) for _ in range(KEPT_FOR_HOST)]
        return seconds, statistics.median(host), torch.stack(losses)

    def _in_place(self, turn: int) -> float:
        """Seconds of a captured step on one mini-batch, in place where that can be."""
        self._begin(turn)
        batches = self._training.captured_batches(self._loader)
        for batch in itertools.islice(batches, 2 * WARM_UP):
            self._training.captured_step(batch)
        steps = (self._training.captured_step(batch) for _ in itertools.count())
        return self._clock.seconds_a_step(steps, self._options.window)

    def _loader_alone(self, turn: int) -> float:
        self._begin(turn)
        return self._clock.seconds_a_step(blocks_of(self._loader, "0"), self._options.window)

    def _begin(self, turn: int) -> None:
        self._training.restart()
        self._graph.set_epoch(turn)

    def _most_kept(self) -> int:
        """Batches that there is room for on all GPUs, beside training."""
        self._begin(0)
        asked = self._options.kept
        if self._job.device.type == "cuda":
            asked = min(asked, room_for_batches(self._training, self._loader))
        found = min(self._job.ranks.all_gather(asked))
        least = KEPT_WARM_UP + KEPT_FOR_HOST + 1
        if found < least:
            raise ValueError(f"{self._name}: room for {found} batches, and {least} are needed")
        return min(found, WARM_UP + self._options.window)

    def _profile(
        self, train: Step, batches: Callable[[DataLoader], Iterable[Any]], way: str = ""
    ) -> StepProfile | None:
        """The trace of some steps with batches made ahead, on the first rank."""
        self._begin(0)
        steps = self._options.traced if self._job.ranks.rank == 0 else 0
        folder: Path | None = self._options.traces
        if folder is not None:
            folder /= f"{self._name}{way}".replace(" ", "_")
        return profiled(train, batches(self._loader), steps, folder)


class Bench:
    """All networks on all graphs, on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._job, self._options = Job(options), options
        self._setting = SETTINGS[options.paper]
        self._failed = False

    def run(self) -> bool:
        """Whether all could be measured."""
        self._job.say(
            f"{'ms a step':28} {'ahead':>8} {'1 by 1':>8} {'model':>8} {'loader':>8} {'host':>8}"
            f" {'captured':>8} {'its mod.':>8} {'busy':>5} {'ratio':>6} {'capt.':>6} {'aim':>5}"
            f"  {'reached':7} {'epoch, s':>8}"
        )
        for name in self._options.shapes:
            with self._part(name):
                self._shape(name)
        return not self._failed

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A part without which the others are still measured, by a rank that is alone."""
        try:
            yield
        except Exception as error:
            if self._job.ranks.size > 1:
                raise
            traceback.print_exception(error)
            self._job.say(f"{name:28} failed")
            self._job.keep(case=name, failed=f"{type(error).__name__}: {error}", reached=False)
            self._failed = True

    def _shape(self, shape: str) -> None:
        job, ranks = self._job, Ranks.of_this_machine()
        begin = time.perf_counter()
        spec = self._setting.graphs[shape].scaled(self._options.scale)
        data = Data(spec, job.device)
        networks = [self._setting.networks[name] for name in self._options.models]
        store = {
            **self._memory(data, ranks),
            "batch_size": self._options.batch,
            "fanouts": networks[0].fanouts[::-1],
        }
        limited = self._options.gpu_memory is not None
        with stored(data, ranks, store, by_hotness=limited) as graph:
            job.wait()
            spent = time.perf_counter() - begin
            about = {
                "shape": shape,
                "nodes": spec.num_nodes,
                "edges": data.num_edges,
                "features": spec.num_features,
                "bytes": data.nbytes,
                "idtype": str(data.idtype),
                "build_s": spent,
            }
            job.content.setdefault("graphs", []).append(about)
            job.say(f"{shape}: {data.nbytes / 1e9:.1f} GB, made and stored in {spent:.0f} s")
            cases = []
            for network in networks:
                name = f"{shape} {network.model}"
                with self._part(name):
                    case = Case(job, name, network, data, graph)
                    ranks.together("check a sample", case.check)
                    cases.append((name, network, case))
            data.forget_edges()
            for name, network, case in cases:
                with self._part(name):
                    self._keep(name, spec, network, case.measure())

    def _memory(self, data: Data, ranks: Ranks) -> dict[str, Any]:
        if self._options.gpu_memory is None:
            return all_in_gpu_memory(data, ranks)
        memory = int(self._options.gpu_memory * self._options.scale)
        # What the machine says of its memory may be less than it gives.
        return {"policy": "auto", "gpu_memory": memory, "host_memory": 2 * data.nbytes}

    def _keep(self, name: str, spec: GraphSpec, network: Network, found: dict[str, Any]) -> None:
        profile: StepProfile | None = found.pop("profile")
        captured_profile: StepProfile | None = found.pop("captured_profile")
        median = medians(found["each_rank_ms"])
        ratio = median["ahead"] / median["model"]
        xgnns = network.xgnn.get(spec.shape)
        aim: float | None = AIM
        if self._options.gpu_memory is not None:
            aim = AIM_OF_PART if xgnns is not None and xgnns <= WITHIN else None
        seeds = self._options.batch * self._job.ranks.size
        steps = math.ceil(spec.train * spec.num_nodes / seeds)
        reached = None if aim is None else ratio <= aim
        busy = None if profile is None else profile.busy_share
        ways = " ".join(f"{median[way]:8.2f}" for way in WAYS)
        verdict = {True: "yes", False: "no", None: "-"}[reached]
        self._job.say(
            f"{name:28} {ways} {column(busy, 5)} {ratio:6.2f}"
            f" {median['captured'] / median['model']:6.2f} {column(aim, 5)}  {verdict:7}"
            f" {steps * median['ahead'] / 1e3:8.2f}"
        )
        self._job.keep(
            case=name,
            unit="ms",
            ours=median["ahead"],
            one_by_one=median["one by one"],
            model=median["model"],
            loader=median["loader"],
            host_us=1e3 * median["host"],
            captured=median["captured"],
            captured_model=median["captured model"],
            busy_share=busy,
            captured_busy_share=None if captured_profile is None else captured_profile.busy_share,
            busy_enough=None if busy is None else busy >= BUSY,
            ratio=ratio,
            ratio_one_by_one=median["one by one"] / median["model"],
            captured_to_model=median["captured"] / median["model"],
            captured_to_captured_model=median["captured"] / median["captured model"],
            captured_reached=None if aim is None else median["captured"] <= aim * median["model"],
            aim=aim,
            reached=reached,
            xgnns_ratio=xgnns,
            seeds_per_second=1e3 * seeds / median["ahead"],
            epoch_steps=steps,
            epoch_s=steps * median["ahead"] / 1e3,
            profile=None if profile is None else vars(profile),
            captured_profile=None if captured_profile is None else vars(captured_profile),
            **found,
        )


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    # Without a GPU, enough to see that the program works.
    with graphs_on_tensors() if this_device().type == "cpu" else contextlib.nullcontext():
        if not Bench(options).run():
            sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    ranks_option(parser)
    parser.set_defaults(scale=0.5, repeats=5)
    parser.add_argument("--paper", choices=tuple(SETTINGS), default="xgnn", help="whose setting")
    parser.add_argument("--shapes", nargs="+", help="of the paper's graphs; all by default")
    parser.add_argument("--models", nargs="+", help="of the paper's; all by default")
    parser.add_argument(
        "--gpu-memory",
        type=partial(parse_bytes, asked="--gpu-memory"),
        metavar="16GiB",
        help="of each GPU for a graph of scale 1, and so much less for a smaller one",
    )
    parser.add_argument("--batch", type=int, help="seeds of a mini-batch; by default the paper's")
    parser.add_argument("--hidden", type=int, default=256, help="width of hidden layers")
    parser.add_argument("--window", type=int, default=20, help="timed steps in a window")
    parser.add_argument("--kept", type=int, default=20, help="batches in GPU memory, at most")
    parser.add_argument("--traced", type=int, default=5, help="steps that are traced")
    parser.add_argument("--traces", type=Path, help="keep traces and timelines in this folder")
    options = parser.parse_args()
    setting = SETTINGS[options.paper]
    options.shapes = options.shapes or list(setting.graphs)
    options.models = options.models or list(setting.networks)
    options.batch = options.batch or setting.batch
    for asked, known in ((options.shapes, setting.graphs), (options.models, setting.networks)):
        if unknown := set(asked) - set(known):
            parser.error(f"{options.paper} has {', '.join(known)}, and no {', '.join(unknown)}")
    seeds = (WARM_UP + options.window + SPARE) * options.batch * options.ranks
    for name in options.shapes:
        nodes = setting.graphs[name].scaled(options.scale).num_nodes
        if nodes < seeds:
            parser.error(f"{name} has {nodes} nodes at this scale, and {seeds} are to be seeds")
    new_report(options)
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
