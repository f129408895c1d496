"""Claim: R-GAT trains on 25,000 seeds a second and GPU on a graph of IGBH's schema.

As in MLPerf Training's GNN benchmark: three layers, fanouts 15, 10 and 5 from the seeds on (which
DGL takes the other way round), hidden width 512 in 4 heads, 1,024 features, 2,983 classes, dropout
0.2, mixed precision, Adam.  The best public submission on 8 H200s has mini-batches of 2,048 on each
GPU.  The graph (`dgl_mgpu.data.igbh`) is a DGLGraph in the GPU's memory, its features float8 or
float16 beside it: as large as fits the memory that is given to both.

Samples, rows and the model are checked first: the model in float64 against DGL's own modules,
forward and backward.  Timed are whole steps through DGL's DataLoader, with batches made ahead and
one by one, and their parts alone; and the same model of DGL's modules.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # batches differ in size by gigabytes
    python -m benchmarks.rgat_gpu --batch 1024 --out rgat.json --profile rgat
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dgl_mgpu  # noqa: F401  makes DGL import

from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip

from benchmarks.gpu import this_device
from benchmarks.minibatch_gpu import Figures
from benchmarks.rgat_checks import (
    DglRGAT,
    require_near,
    require_rows,
    require_same,
    require_samples,
)
from benchmarks.rgat_training import Blocks, Rows, Training, graph_of
from benchmarks.timed_training import batches_of
from dgl_mgpu.data.igbh import NODE_TYPES, IgbhSpec, generate_igbh, largest_scale
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models.rgat import RGAT
from dgl_mgpu.report.profile import WARM_UP as UNPROFILED
from dgl_mgpu.report.profile import Profile
from dgl_mgpu.utils.stages import stage

#: From the seeds on.
FANOUTS = (15, 10, 5)
LAYERS, HEADS, DROPOUT = len(FANOUTS), 4, 0.2
#: Seeds a second and GPU.
AIM = 25_000
#: Steps before those that are timed, and those that are traced.
WARM_UP, PROFILED = 10, 10
#: Times that each way is timed.
TURNS = 3
#: Seeds, and edges of a node and relation, of the batch that the model is checked on.
CHECKED, CHECKED_FANOUT = 16, 3
FEATURE_TYPES = {"float8": torch.float8_e4m3fn, "float16": torch.float16}
COMPUTED_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class Bench:
    """The graph and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        self._stored = FEATURE_TYPES[options.features]
        self._dtype = COMPUTED_TYPES[options.dtype]
        room = int(options.memory * 2**30)
        scale = options.scale or largest_scale(room, self._stored, options.width)
        self._spec = IgbhSpec(scale, options.classes, options.width)
        begin = time.perf_counter()
        self._data = generate_igbh(self._spec, self._device, self._stored)
        self._wait()
        self._graph = graph_of(self._data)
        sizes = {
            "scale": scale,
            "nodes": self._data.num_nodes,
            "edges": {str(each): len(csc.indices) for each, csc in self._data.edges.items()},
            "feature_bytes": self._data.features.numel() * self._data.features.element_size(),
            "seconds": time.perf_counter() - begin,
        }
        print(f"scale {scale:.4g} in {sizes['seconds']:.1f} s: {self._data.num_nodes}", flush=True)
        self._figures = Figures(
            options.out,
            options={name: str(value) for name, value in vars(options).items()},
            graph=sizes,
        )
        self._sampler = NeighborSampler(FANOUTS[::-1], prefetch_labels={"paper": ["label"]})
        self._rows = Rows(self._data, self._dtype)

    def run(self) -> bool:
        """Check, and measure every part; whether all could be."""
        with self._part("samples and rows"):
            self._check_batch()
        with self._part("model against DGL's modules"):
            self._check_model()
        if self._figures.failed:
            return False  # the time that something wrong takes is of no interest
        for part in (self._sample, self._gather, self._model, self._step, self._profile):
            with self._part(part.__name__.strip("_")):
                part()
        if not self._options.no_reference:
            with self._part("model of DGL's modules"):
                self._reference()
        return not self._figures.failed

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A part without which the others are still measured."""
        try:
            yield
        except Exception as error:
            self._figures.fail(name, error)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    # -- mini-batches ----------------------------------------------------------------------------

    def _seeds(self, count: int, turn: int = 0) -> torch.Tensor:
        draw = torch.Generator(self._device).manual_seed(turn)
        papers = torch.randperm(self._data.num_nodes["paper"], generator=draw, device=self._device)
        return papers[:count].int()

    def _batch(self) -> Blocks:
        """A mini-batch with its labels."""
        loader = self._loader(self._seeds(self._options.batch))
        return next(iter(loader))[2]

    def _loader(self, seeds: torch.Tensor) -> DataLoader:
        return DataLoader(
            self._graph,
            {"paper": seeds},
            self._sampler,
            device=self._device,
            batch_size=self._options.batch,
        )

    @property
    def _sizes(self) -> tuple[Any, ...]:
        options = self._options
        return options.width, options.classes, options.hidden, LAYERS, HEADS, DROPOUT

    def _new_model(self) -> RGAT:
        torch.manual_seed(0)
        return RGAT(NODE_TYPES, self._graph.canonical_etypes, "paper", *self._sizes)

    def _new_reference(self) -> DglRGAT:
        return DglRGAT(self._graph.canonical_etypes, *self._sizes)

    # -- checks ----------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        blocks = self._batch()
        require_samples(self._data, blocks, FANOUTS)
        require_rows(self._data, blocks, self._rows.of(blocks[0]))

    def _check_model(self) -> None:
        sampler = NeighborSampler([CHECKED_FANOUT] * LAYERS)
        blocks = sampler.sample(self._graph, {"paper": self._seeds(CHECKED)})[2]
        count = sum(blocks[0].num_src_nodes(ntype) for ntype in NODE_TYPES)
        draw = torch.Generator(self._device).manual_seed(0)
        rows = torch.randn(
            count, self._options.width, generator=draw, device=self._device, dtype=torch.float64
        )
        theirs = self._new_reference().to(self._device)
        ours = self._new_model().to(self._device)
        logits = require_same(ours, theirs, blocks, rows)
        if self._dtype != torch.float32:
            require_near(ours, self._dtype, blocks, rows, logits)

    # -- parts -----------------------------------------------------------------------------------

    def _timed(self, call: Callable[[], Any], count: int) -> list[float]:
        """Milliseconds of a call in each of some turns, after one that warms up."""
        found = []
        for _ in range(TURNS + 1):
            self._wait()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            self._wait()
            found.append(1e3 * (time.perf_counter() - begin) / count)
        return found[1:]

    def _sample(self) -> None:
        """Milliseconds of a mini-batch without features."""
        batch, steps = self._options.batch, self._options.steps
        pool = iter(self._seeds(batch * steps * (TURNS + 1)).split(batch))
        spent = self._timed(lambda: self._sampler.sample(self._graph, {"paper": next(pool)}), steps)
        blocks = self._batch()
        self._figures.add(
            "sample",
            "ms",
            float(np.median(spent)),
            each_ms=spent,
            blocks=[
                {
                    "sources": {ntype: each.num_src_nodes(ntype) for ntype in NODE_TYPES},
                    "edges": {str(etype): each.num_edges(etype) for etype in each.canonical_etypes},
                }
                for each in blocks
            ],
        )

    def _gather(self) -> None:
        """Milliseconds for the rows of a mini-batch."""
        block = self._batch()[0]
        spent = self._timed(lambda: self._rows.of(block), self._options.steps)
        median = float(np.median(spent))
        count = sum(block.num_src_nodes(ntype) for ntype in NODE_TYPES)
        read = count * self._options.width * self._stored.itemsize
        self._figures.add(
            "gather", "ms", median, rows=count, read_gb_per_s=read / median / 1e6, each_ms=spent
        )

    def _model(self) -> None:
        self._time_model("model", self._new_model())

    def _reference(self) -> None:
        self._time_model("model of DGL's modules", self._new_reference())

    def _time_model(self, name: str, model: torch.nn.Module) -> None:
        """Milliseconds of forward, backward and update on one batch, and what the host takes."""
        blocks = self._batch()
        rows = self._rows.of(blocks[0])
        train = partial(Training(model, self._device, self._dtype).step, blocks, rows)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = self._timed(train, self._options.steps)
        host = []
        for _ in range(WARM_UP):
            self._wait()
            begin = time.perf_counter()
            train()
            host.append(1e3 * (time.perf_counter() - begin))
        self._wait()
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None
        self._figures.add(
            name,
            "ms",
            float(np.median(spent)),
            host_ms=float(np.median(host)),
            peak_bytes=peak,
            each_ms=spent,
        )

    def _batches(self, steps: int, ahead: str, turn: int = 0) -> Iterator[Blocks]:
        seeds = self._seeds(self._options.batch * steps, turn)
        for _, _, blocks in batches_of(self._loader(seeds), ahead):
            yield blocks

    def _train(self, training: Training, blocks: Blocks) -> torch.Tensor:
        with stage("gather"):
            rows = self._rows.of(blocks[0])
        return training.step(blocks, rows)

    def _step(self) -> None:
        """Milliseconds of a step, with all that belongs to it."""
        batch, steps = self._options.batch, self._options.steps
        training = Training(self._new_model(), self._device, self._dtype)
        spent: dict[str, list[float]] = {"one by one": [], "ahead": []}
        losses: list[torch.Tensor] = []
        for turn in range(TURNS):
            for way, ahead in (("one by one", "0"), ("ahead", "1")):
                begin = 0.0
                batches = self._batches(steps + WARM_UP, ahead, turn)
                for number, blocks in enumerate(batches):
                    losses.append(self._train(training, blocks))
                    if number == WARM_UP - 1:
                        self._wait()
                        begin = time.perf_counter()
                self._wait()
                spent[way].append(1e3 * (time.perf_counter() - begin) / steps)
        curve = torch.stack(losses).float()
        if not curve.isfinite().all():
            raise ValueError("a loss is not finite")
        median = {way: float(np.median(each)) for way, each in spent.items()}
        rate = 1e3 * batch / median["ahead"]
        self._figures.add(
            "step",
            "ms",
            median["ahead"],
            1e3 * batch / AIM,
            one_by_one_ms=median["one by one"],
            seeds_per_second=rate,
            first_loss=float(curve[:WARM_UP].mean()),
            last_loss=float(curve[-WARM_UP:].mean()),
            each_ms=spent,
        )
        print(f"  {rate:,.0f} seeds a second", flush=True)

    def _profile(self) -> None:
        """The trace of some steps, in a folder."""
        if self._options.profile is None:
            return
        training = Training(self._new_model(), self._device, self._dtype)
        with Profile(PROFILED, self._options.profile) as profile:
            for blocks in self._batches(UNPROFILED + PROFILED + 1, ahead="1"):
                self._train(training, blocks)
                profile.step()


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--scale", type=float, help="of IGBH's size; by default what fits --memory")
    found.add_argument("--memory", type=float, default=80.0, help="GiB for graph and features")
    found.add_argument("--features", choices=tuple(FEATURE_TYPES), default="float8")
    found.add_argument("--dtype", choices=tuple(COMPUTED_TYPES), default="bfloat16")
    found.add_argument("--batch", type=int, default=1024, help="seeds")
    found.add_argument("--width", type=int, default=1024, help="features")
    found.add_argument("--hidden", type=int, default=512)
    found.add_argument("--classes", type=int, default=2983)
    found.add_argument("--steps", type=int, default=60, help="timed steps")
    found.add_argument("--no-reference", action="store_true", help="leave DGL's modules out")
    found.add_argument(
        "--profile", type=Path, help="write a profile of some steps into this folder"
    )
    found.add_argument("--out", type=Path, help="write the figures here, as JSON")
    return found


def main() -> None:
    found = parser()
    options = found.parse_args()
    if options.width * FEATURE_TYPES[options.features].itemsize % 16:
        found.error("rows of features have to be a multiple of 16 bytes")
    # Without a GPU, enough to see that the program works.
    with tensor_backed_graphs() if this_device().type == "cpu" else contextlib.nullcontext():
        sys.exit(not Bench(options).run())


if __name__ == "__main__":
    main()
