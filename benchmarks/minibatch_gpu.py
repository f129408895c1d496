"""Claim: DGL's samplers make a mini-batch on a GPU in less than half the time of DGL's CUDA build.

The graph is a DGLGraph on the GPU, or on the CPU and pinned (UVA): 20 M nodes, 320 M edges,
in-degrees from a Pareto distribution of exponent 1.5 and sources drawn uniformly.  What is timed is
all of ``sampler.sample(g, seeds)``, with the operator alone beside it, then a training step of
GraphSAGE through DGL's DataLoader, with the model alone and with batches made one by one
(``DGL_MGPU_PREFETCH=0``) beside it.  Samples are checked first.

What DGL's own CUDA build takes, which users cannot install, was measured once on an H200.

    python -m benchmarks.minibatch_gpu --out minibatch.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip
from dgl.nn import SAGEConv  # isort: skip

from benchmarks.gpu import PowerLaw, this_device, window
from benchmarks.machine import describe_machine
from benchmarks.sampling_gpu import IDTYPES, Checker, Hop, new_seeds
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.ops import BlockEdges, EtypeBlock, SampleKey, sample_blocks
from dgl_mgpu.sampling import dataloading
from dgl_mgpu.sampling.block_sampling import tensor_blocks
from dgl_mgpu.sampling.side_stream import side_stream_of
from dgl_mgpu.sampling.views import edges_view
from dgl_mgpu.train.capture import CapturedStep

FEATURES, HIDDEN, CLASSES, LAYERS = 128, 256, 47, 3
#: Timed steps of training, and those before them.
STEPS, WARM_UP = 60, 10
#: Times that a loop of steps is timed each way.
TURNS = 3
#: Most microseconds of the host for a block, and what is aimed at.
BLOCK_LIMIT_US = 150.0
#: Trains on a batch's blocks, and gives the loss.
Train = Callable[[Any], torch.Tensor]


class ExchangeStrategy(NamedTuple):
    """How steps are made: with batches made ahead ('1') or one by one ('0'), on how many
    multiprocessors, of what a pass gives, and by what."""

    ahead: str
    sms: int | None
    batches: Callable[[], Iterable[Any]]
    train: Train


@dataclass(frozen=True)
class Case:
    """Seeds of a mini-batch and fanouts, beginning at the seeds.

    Attributes
    ----------
    aim, dgl : float or None
        Milliseconds: what is to be reached, and what DGL's own CUDA build takes.
    """

    batch: int
    fanouts: tuple[int, ...]
    aim: float | None = None
    dgl: float | None = None

    @property
    def name(self) -> str:
        """As in ``6000 at 15,10,5``."""
        return f"{self.batch} at {','.join(map(str, self.fanouts))}"


SAMPLING = (
    Case(6000, (15, 10, 5), aim=1.1, dgl=2.87),
    Case(6000, (25, 10), aim=0.35, dgl=1.00),
    Case(1024, (15, 10, 5), aim=0.4, dgl=1.52),
    Case(512, (30, 30, 30), aim=0.4, dgl=1.55),
)
PINNED = (
    Case(6000, (15, 10, 5), aim=8.0, dgl=15.9),
    Case(1024, (15, 10, 5), aim=2.0, dgl=3.9),
)
STEP = (
    Case(1024, (15, 10, 5), aim=3.5, dgl=6.6),
    Case(6000, (25, 10, 5), dgl=16.7),
)


class Figures:
    """Prints figures as they come, and keeps them in a JSON file."""

    def __init__(self, out: Path | None, **about: Any) -> None:
        self._out, self._about = out, {"machine": describe_machine(), **about}
        self._figures: list[dict[str, Any]] = []
        print(f"{'':34} {'ours':>9} {'aim':>8} {'DGL':>8}  reached")

    def add(
        self,
        case: str,
        unit: str,
        ours: float,
        aim: float | None = None,
        dgl: float | None = None,
        **more: Any,
    ) -> None:
        """One figure, of which less is better."""
        reached = None if aim is None else ours <= aim
        verdict = {True: "yes", False: "no", None: "-"}[reached]
        columns = " ".join(f"{'-':>8}" if x is None else f"{x:8.2f}" for x in (aim, dgl))
        print(f"{case:31} {unit} {ours:9.2f} {columns}  {verdict}", flush=True)
        figure = {"case": case, "unit": unit, "ours": ours, "aim": aim, "dgl": dgl}
        self._keep({**figure, "reached": reached, **more})

    def fail(self, case: str, error: Exception) -> None:
        """A part that could not be measured."""
        traceback.print_exception(error)
        print(f"{case:31} failed", flush=True)
        self._keep({"case": case, "failed": f"{type(error).__name__}: {error}", "reached": False})

    def _keep(self, figure: dict[str, Any]) -> None:
        self._figures.append(figure)
        if self._out:
            # Anew each time: a run that is cut off leaves what it has found.
            content = {**self._about, "figures": self._figures}
            self._out.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        """Whether a part could not be measured."""
        return any("failed" in figure for figure in self._figures)


class Bench:
    """The graph and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        self._idtype = IDTYPES[options.idtype]
        self._law = PowerLaw(options.nodes, options.edges)
        self._indptr, self._indices = self._law.csc(self._device, self._idtype)
        self._checker = Checker(self._indptr, self._indices)
        self._number = itertools.count()
        self._figures = Figures(
            options.out,
            options={name: str(value) for name, value in vars(options).items()},
            graph={"nodes": options.nodes, "edges": len(self._indices)},
        )

    def run(self) -> bool:
        """Measure every part; whether all could be."""
        g = self._graph(self._device)
        for case in SAMPLING:
            with self._part(f"sample {case.name}"):
                self._sample(g, case)
        with self._part("one block"):
            self._block(g)
        if self._device.type == "cuda":
            with self._part("pinned"):
                pinned = self._graph(torch.device("cpu")).pin_memory_()
                for case in PINNED:
                    self._sample(pinned, case)
                del pinned
        for case in STEP:
            with self._part(f"step {case.name}"):
                self._step(g, case)
        if self._device.type == "cuda":
            with self._part("pinned steps"):
                # Of one format: the loader would make all that it may.
                pinned = self._graph(torch.device("cpu")).formats("csc")
                self._add_features(g)
                for name, rows in g.ndata.items():
                    pinned.ndata[name] = rows.cpu()
                for case in STEP:
                    self._step(pinned, case)
        return not self._figures.failed

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A part without which the others are still measured."""
        try:
            yield
        except Exception as error:
            self._figures.fail(name, error)

    def _graph(self, device: torch.device) -> dgl.DGLGraph:
        indptr, indices = (each.to(device) for each in (self._indptr, self._indices))
        edge_ids = indices[:0]  # places are ids
        return dgl.graph(
            ("csc", (indptr.to(self._idtype), indices, edge_ids)), num_nodes=self._law.nodes
        )

    def _seeds(self, batch: int, turn: int = 0) -> list[torch.Tensor]:
        return new_seeds(self._law.nodes, batch, self._options.window, self._idtype, turn)

    def _sample(self, g: dgl.DGLGraph, case: Case) -> None:
        """Milliseconds of a mini-batch."""
        sampler = NeighborSampler(case.fanouts[::-1])
        sample = partial(sampler.sample, g)
        pinned = g.device != self._device
        name = f"{'pinned, ' if pinned else ''}sample {case.name}"
        first = self._seeds(case.batch)[0]
        blocks = sample(first)[2]
        self._checker.require(name, first, case.fanouts, *hops_of(blocks))
        contenders: dict[str, Callable[[torch.Tensor], Any]] = {"sampler": sample}
        if not pinned:
            contenders["operator"] = partial(self._operator, g, case)
        seconds: dict[str, list[float]] = {who: [] for who in contenders}
        for repeat in range(self._options.repeats + 1):
            for who, call in contenders.items():
                spent = window(call, self._seeds(case.batch, repeat), self._device)
                if repeat > 0:
                    seconds[who].append(1e3 * spent)
        median = {who: float(np.median(spent)) for who, spent in seconds.items()}
        self._figures.add(
            name,
            "ms",
            median["sampler"],
            case.aim,
            case.dgl,
            operator_ms=median.get("operator"),
            sampled_edges=sum(block.num_edges() for block in blocks),
            input_nodes=blocks[0].num_src_nodes(),
            each_ms=seconds,
        )

    def _operator(self, g: dgl.DGLGraph, case: Case, seeds: torch.Tensor) -> Any:
        view = edges_view(g._graph.relations[0], "csc", self._device)
        key = SampleKey(0, batch=next(self._number))
        return sample_blocks(view, seeds, case.fanouts[::-1], key)

    def _block(self, g: dgl.DGLGraph) -> None:
        """Microseconds of the host for one of a mini-batch's blocks."""
        (ntype,), (etype,) = g.ntypes, g.canonical_etypes
        found = self._operator(g, SAMPLING[2], self._seeds(SAMPLING[2].batch)[0])
        hops = [
            EtypeBlock({etype: BlockEdges(*each[:3])}, {ntype: each[3]}, {ntype: each[4]})
            for each in found
        ]
        rounds = 1000
        for _ in range(2):  # the first warms up
            begin = time.perf_counter()
            for _ in range(rounds):
                tensor_blocks(hops, g.ntypes, g.canonical_etypes, {})
            spent = time.perf_counter() - begin
        self._figures.add("one block", "us", 1e6 * spent / (rounds * len(hops)), BLOCK_LIMIT_US)

    def _add_features(self, g: dgl.DGLGraph) -> None:
        if "feat" not in g.ndata:
            draw = torch.Generator(self._device).manual_seed(0)
            shape = self._law.nodes, FEATURES
            g.ndata["feat"] = torch.randn(shape, generator=draw, device=self._device)
            g.ndata["label"] = torch.randint(
                CLASSES, shape[:1], generator=draw, device=self._device
            )

    def _step(self, g: dgl.DGLGraph, case: Case) -> None:
        """Milliseconds of a training step."""
        self._add_features(g)
        pinned = g.device != self._device
        name = f"{'pinned, ' if pinned else ''}step {case.name}"
        training = Training(self._device)
        ways = self._ways(self._loader(g, case), training)
        spent: dict[str, list[float]] = {way: [] for way in (*ways, "model")}
        for _ in range(TURNS):
            for way, how in ways.items():
                seconds, losses, batch = self._timed_pass(how)
                spent[way].append(seconds)
                if not losses.isfinite().all():
                    raise ValueError(f"{name}: a loss is not finite")
            spent["model"].append(self._timed_model(training, batch))  # of the last way, ahead
        median = {way: 1e3 * float(np.median(seconds)) for way, seconds in spent.items()}
        print(f"  {median['one by one']:.2f} one by one, {median['model']:.2f} the model alone:")
        self._figures.add(
            name,
            "ms",
            median["ahead"],
            None if pinned else case.aim,
            None if pinned else case.dgl,
            model_ms=median["model"],
            one_by_one_ms=median["one by one"],
            captured_ms=median["captured"],
            seeds_per_second=1e3 * case.batch / median["ahead"],
            each_ms={way: [1e3 * each for each in seconds] for way, seconds in spent.items()},
        )

    def _loader(self, g: dgl.DGLGraph, case: Case) -> DataLoader:
        sampler = NeighborSampler(
            case.fanouts[::-1], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        draw = torch.Generator(self._device).manual_seed(0)
        nodes = torch.randperm(self._law.nodes, generator=draw, device=self._device)
        ids = nodes[: case.batch * (self._options.steps + WARM_UP)].to(self._idtype)
        pinned = g.device != self._device
        return DataLoader(
            g, ids, sampler, device=self._device, batch_size=case.batch, use_uva=pinned
        )

    def _ways(self, loader: DataLoader, training: Training) -> dict[str, ExchangeStrategy]:
        """Ways to train on a loader's batches; the last of them have blocks."""

        def all_blocks() -> Iterator[Sequence[dgl.DGLGraph]]:
            return (blocks for *_, blocks in loader)

        captured = partial(training.captured.batches, loader)
        ways = {
            "one by one": ExchangeStrategy("0", None, all_blocks, training.train),
            "captured": ExchangeStrategy("1", None, captured, training.train_captured),
            "ahead": ExchangeStrategy("1", None, all_blocks, training.train),
        }
        for sms in self._options.sms:
            ways[f"ahead on {sms}"] = ExchangeStrategy("1", sms, all_blocks, training.train)
        return ways

    def _timed_pass(self, how: ExchangeStrategy) -> tuple[float, torch.Tensor, Any]:
        """Seconds of a step, all losses, and the last batch."""
        losses, batch = [], None
        begin = 0.0
        with (
            patch.dict(os.environ, DGL_MGPU_PREFETCH=how.ahead),
            patch.object(dataloading, "side_stream_of", partial(side_stream_of, sms=how.sms)),
        ):
            batches = iter(how.batches())
            first = next(batches)  # when the pass begins
        for number, batch in enumerate(itertools.chain([first], batches)):
            losses.append(how.train(batch).detach())
            if number == WARM_UP - 1:
                self._wait()
                begin = time.perf_counter()
        self._wait()
        seconds = (time.perf_counter() - begin) / (len(losses) - WARM_UP)
        return seconds, torch.stack(losses), batch

    def _timed_model(self, training: Training, batch: Any) -> float:
        """Seconds of a step on a batch that is there."""
        begin = time.perf_counter()
        for _ in range(self._options.steps):
            training.train(batch)
        self._wait()
        return (time.perf_counter() - begin) / self._options.steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Training:
    """A model and its optimizer, which train on blocks or on batches of a captured step."""

    def __init__(self, device: torch.device) -> None:
        self._model = GraphSAGE().to(device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), fused=device.type == "cuda")
        self.captured = CapturedStep(self._model, self._scores, torch.nn.functional.cross_entropy)

    def _scores(self, blocks: Sequence[dgl.DGLGraph]) -> torch.Tensor:
        return self._model(blocks, blocks[0].srcdata["feat"])

    def train(self, blocks: Sequence[dgl.DGLGraph]) -> torch.Tensor:
        """Change the model; the loss before."""
        labels = blocks[-1].dstdata["label"]
        loss = torch.nn.functional.cross_entropy(self._scores(blocks), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss

    def train_captured(self, batch: Any) -> torch.Tensor:
        """The same with a batch of `captured`."""
        loss = self.captured(batch)
        self._optimizer.step()
        return loss


class GraphSAGE(torch.nn.Module):
    """As in DGL's example, with the mean of neighbours."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (layers - 1), CLASSES]
        self.layers = torch.nn.ModuleList(
            SAGEConv(given, made, "mean") for given, made in itertools.pairwise(widths)
        )

    def forward(self, blocks: Sequence[dgl.DGLGraph], rows: torch.Tensor) -> torch.Tensor:
        """Scores of the last block's destinations."""
        for layer, block in zip(self.layers, blocks, strict=True):
            rows = layer(block, rows)
            if layer is not self.layers[-1]:
                rows = rows.relu()
        return rows


def hops_of(blocks: Sequence[dgl.DGLGraph]) -> tuple[list[Hop], list[torch.Tensor]]:
    """Hops and edge ids, those of the seeds first."""
    hops: list[Hop] = []
    for block in reversed(blocks):
        indptr, indices, _ = block.adj_tensors("csc")
        sources = block.srcdata[dgl.NID]
        hops.append((block.dstdata[dgl.NID], indptr, sources[indices.long()]))
    return hops, [block.edata[dgl.EID] for block in reversed(blocks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20_000_000)
    parser.add_argument("--edges", type=int, default=320_000_000)
    parser.add_argument("--idtype", choices=tuple(IDTYPES), default="int64")
    parser.add_argument("--repeats", type=int, default=10, help="timed windows")
    parser.add_argument("--window", type=int, default=20, help="timed batches in a window")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of training")
    parser.add_argument(
        "--sms", type=int, nargs="*", default=(),
        help="also make batches ahead on so many multiprocessors",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    batches = max(options.window + 2, options.steps + WARM_UP)
    most = batches * max(case.batch for case in (*SAMPLING, *STEP))
    if options.nodes < most:
        parser.error(f"{batches} batches take {most} distinct seeds: say --nodes {most} or more")
    # Without a GPU, enough to see that the program works.
    with tensor_backed_graphs() if this_device().type == "cpu" else contextlib.nullcontext():
        sys.exit(not Bench(options).run())


if __name__ == "__main__":
    main()
