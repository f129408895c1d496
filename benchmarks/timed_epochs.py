"""Steps through a store's loader against their model alone: one network on one graph."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dgl_mgpu  # noqa: F401  makes DGL import

from dgl.dataloading import DataLoader  # isort: skip

from benchmarks.fullgraph import Job
from benchmarks.generated_graph import Data, require_edges, require_rows, seeds_of
from benchmarks.minibatch_gpu import hops_of
from benchmarks.sampling_gpu import Checker
from benchmarks.timed_training import (
    WALK_LENGTH,
    WARM_UP,
    Clock,
    Network,
    Training,
    batches_of,
    blocks_of,
    loader_of,
    network_model,
    profiled,
    require_same_losses,
    room_for_batches,
)
from benchmarks.utilization import SAMPLED_SECONDS, busy_share
from dgl_mgpu.report.profile import StepProfile
from dgl_mgpu.store.graph import StoreGraph

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
        # Here: what reads on is not what was timed.
        traffic = self._graph.traffic.take()
        rows = {memory: n for (table, memory), n in sorted(traffic.rows.items()) if table == "feat"}
        return {
            "each_rank_ms": self._job.ranks.all_gather(milliseconds),
            "kept_batches": kept,
            "losses_have_the_same_bits": same_bits,
            "rows_read": self._job.ranks.all_gather(rows),
            "driver_busy_shares": self._busy_shares(milliseconds),
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

    def _busy_shares(self, milliseconds: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
        """Of each way, in one long pass, how busy its driver sees the GPU that is so the least."""
        steps_of: dict[str, tuple[Callable[[DataLoader], Iterable[Any]], Step]] = {
            "ahead": (blocks_of, self._training.step_on_blocks),
            "captured": (self._training.captured_batches, self._training.captured_step),
        }
        shares = {}
        for way, (batches, train) in steps_of.items():
            slowest = max(self._job.ranks.all_gather(statistics.median(milliseconds[way])))
            steps = math.ceil(1e3 * SAMPLED_SECONDS / slowest)
            each_rank = self._job.ranks.all_gather(self._busy_share(steps, batches, train))
            shares[way] = None if None in each_rank else min(each_rank)
        return shares

    def _busy_share(
        self, steps: int, batches: Callable[[DataLoader], Iterable[Any]], train: Step
    ) -> float | None:
        if self._job.device.type != "cuda":
            return None
        seeds = steps * self._options.batch * self._job.ranks.size
        ids = seeds_of(self._data, min(seeds, self._data.spec.num_nodes))
        sampler = self._network.sampler(self._inputs)
        loader = loader_of(self._graph, ids, sampler, self._options.batch, self._job.ranks)

        def epoch() -> None:
            for batch in batches(loader):
                train(batch)

        self._begin(0)
        self._job.wait()
        return busy_share(self._job.device, epoch)

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


def case_options(parser: argparse.ArgumentParser) -> None:
    """Options of what a :class:`Case` measures."""
    parser.add_argument("--hidden", type=int, default=256, help="width of hidden layers")
    parser.add_argument("--window", type=int, default=20, help="timed steps in a window")
    parser.add_argument("--kept", type=int, default=20, help="batches in GPU memory, at most")
    parser.add_argument("--traced", type=int, default=5, help="steps that are traced")
    parser.add_argument("--traces", type=Path, help="keep traces and timelines in this folder")
