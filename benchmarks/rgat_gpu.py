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
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip
from dgl.nn import GATConv, HeteroGraphConv  # isort: skip

from benchmarks.gpu import this_device
from benchmarks.minibatch_gpu import Figures
from dgl_mgpu.backend.capi.ours import graphs_on_tensors
from dgl_mgpu.data.igbh import NODE_TYPES, Igbh, IgbhSpec, generate_igbh, largest_scale
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.pipeline.stage import stage
from dgl_mgpu.report.profile import WARM_UP as UNPROFILED
from dgl_mgpu.report.profile import Profile
from dgl_mgpu.training.hetero import RGAT

#: From the seeds on.
FANOUTS = (15, 10, 5)
LAYERS, HEADS, DROPOUT, LEARNING_RATE = len(FANOUTS), 4, 0.2, 2e-3
#: Seeds a second and GPU.
AIM = 25_000
#: Steps before those that are timed, and those that are traced.
WARM_UP, PROFILED = 10, 10
#: Times that each way is timed.
TURNS = 3
#: Seeds, and edges of a node and relation, of the batch that the model is checked on.
CHECKED, CHECKED_FANOUT = 16, 3
#: Most that logits in mixed precision may be off, of their norm.
MIXED_ERROR = 0.03
#: Rows of a node type that are compared.
ROWS_CHECKED = 1 << 16
FEATURE_TYPES = {"float8": torch.float8_e4m3fn, "float16": torch.float16}
COMPUTED_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

Blocks = Sequence[dgl.DGLGraph]


class Rows:
    """Features of all node types, read together and cast on the way."""

    def __init__(self, data: Igbh, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._views = {ntype: _rows_view(data.features_of(ntype)) for ntype in NODE_TYPES}

    def of(self, block: dgl.DGLGraph) -> torch.Tensor:
        """Those of a block's source nodes, one type after the other."""
        ids = [block.srcnodes[ntype].data[dgl.NID] for ntype in NODE_TYPES]
        counts = [len(each) for each in ids]
        (width,) = next(iter(self._views.values())).row_shape
        found = torch.empty(sum(counts), width, dtype=self._dtype, device=ids[0].device)
        for view, some, part in zip(self._views.values(), ids, found.split(counts), strict=True):
            gather_rows(view, some, part, dtype=self._dtype)
        return found


def _rows_view(rows: torch.Tensor) -> RowView:
    device = rows.device
    return RowView(
        tiers=torch.tensor([[0, len(rows), 1, 0]]).to(device),
        pointers=torch.tensor([rows.data_ptr()]).to(device),
        num_rows=len(rows),
        row_shape=tuple(rows.shape[1:]),
        dtype=rows.dtype,
        position=torch.empty(0, dtype=torch.int64, device=device),
        owner=rows,
    )


class DglRGAT(torch.nn.Module):
    """The same model of DGL's modules, as MLPerf's."""

    def __init__(self, graph: dgl.DGLGraph, width: int, num_classes: int, hidden: int) -> None:
        super().__init__()
        widths = [width, *[hidden] * (LAYERS - 1)]
        self.layers = torch.nn.ModuleList(
            HeteroGraphConv(
                {
                    etype: GATConv(given, hidden // HEADS, HEADS, allow_zero_in_degree=True)
                    for etype in graph.canonical_etypes
                }
            )
            for given in widths
        )
        self.linear = torch.nn.Linear(hidden, num_classes)
        self.dropout = torch.nn.Dropout(DROPOUT)

    def forward(self, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the seeds."""
        counts = [blocks[0].num_src_nodes(ntype) for ntype in NODE_TYPES]
        hidden = dict(zip(NODE_TYPES, rows.split(counts), strict=True))
        for layer, block in zip(self.layers, blocks, strict=True):
            hidden = {ntype: each.flatten(1) for ntype, each in layer(block, hidden).items()}
            if layer is not self.layers[-1]:
                hidden = {
                    ntype: self.dropout(functional.leaky_relu(each))
                    for ntype, each in hidden.items()
                }
        return self.linear(hidden["paper"])


class Training:
    """A model, its optimizer and a step."""

    def __init__(self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self._device, self._dtype = model.to(device), device, dtype
        self._optimizer = torch.optim.Adam(
            model.parameters(), LEARNING_RATE, fused=device.type == "cuda"
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(self, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
        """The loss of a mini-batch, before the model learns from it."""
        labels = blocks[-1].dstnodes["paper"].data["label"]
        mixed = self._dtype != torch.float32
        with stage("forward"), torch.autocast(self._device.type, self._dtype, enabled=mixed):
            loss = functional.cross_entropy(self.model(blocks, rows), labels)
        with stage("backward"):
            self._optimizer.zero_grad()
            self._scaler.scale(loss).backward()
        with stage("update"):
            self._scaler.step(self._optimizer)
            self._scaler.update()
        return loss.detach()


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

    def _new_model(self) -> RGAT:
        torch.manual_seed(0)
        return RGAT(
            NODE_TYPES,
            self._graph.canonical_etypes,
            "paper",
            self._options.width,
            self._options.classes,
            self._options.hidden,
            LAYERS,
            HEADS,
            DROPOUT,
        )

    def _new_reference(self) -> DglRGAT:
        options = self._options
        return DglRGAT(self._graph, options.width, options.classes, options.hidden)

    # -- checks ----------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        blocks = self._batch()
        for block, fanout in zip(reversed(blocks), FANOUTS, strict=True):
            for etype, (indptr, indices) in self._data.edges.items():
                wrong = _wrong(block, etype, indptr, indices, fanout)
                if wrong:
                    raise ValueError(f"{etype}, fanout {fanout}: wrong {wrong}")
        rows = self._rows.of(blocks[0])
        for ntype in NODE_TYPES:
            ids = blocks[0].srcnodes[ntype].data[dgl.NID].long()
            found, rows = rows[: len(ids)], rows[len(ids) :]
            # As bytes: not all indexing operators know float8.
            stored = self._data.features_of(ntype).view(torch.uint8)[ids[:ROWS_CHECKED]]
            if not torch.equal(found[:ROWS_CHECKED], stored.view(self._stored).to(self._dtype)):
                raise ValueError(f"wrong rows of type {ntype}")
        labels = blocks[-1].dstnodes["paper"].data
        if not torch.equal(labels["label"], self._data.labels[labels[dgl.NID].long()]):
            raise ValueError("wrong labels")

    def _check_model(self) -> None:
        """Forward and backward in float64 against DGL's modules."""
        sampler = NeighborSampler([CHECKED_FANOUT] * LAYERS)
        blocks = sampler.sample(self._graph, {"paper": self._seeds(CHECKED)})[2]
        count = sum(blocks[0].num_src_nodes(ntype) for ntype in NODE_TYPES)
        draw = torch.Generator(self._device).manual_seed(0)
        rows = torch.randn(
            count, self._options.width, generator=draw, device=self._device, dtype=torch.float64
        )
        theirs = self._new_reference().to(self._device).double().eval()
        ours = self._new_model().to(self._device).double().eval()
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            mine.copy_from({each: other.mods[str(each)] for each in mine.canonical_etypes})
        ours.linear.load_state_dict(theirs.linear.state_dict())
        found, expected = ours(blocks, rows), theirs(blocks, rows)
        torch.testing.assert_close(found, expected)
        for logits in (found, expected):
            logits.square().sum().backward()
        for parameter in theirs.parameters():  # of relations that lead to no seeds
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            for relation, etype in enumerate(mine.canonical_etypes):
                conv = other.mods[str(etype)]
                attention = torch.cat([conv.attn_l.grad, conv.attn_r.grad]).transpose(0, 1)
                for grad, wanted in (
                    (mine.weight.grad, conv.fc.weight.grad),
                    (mine.attention.grad, attention),
                    (mine.bias.grad, conv.bias.grad),
                ):
                    torch.testing.assert_close(grad[relation].flatten(), wanted.flatten())
        if self._dtype == torch.float32:
            return
        with torch.no_grad(), torch.autocast(self._device.type, self._dtype):
            mixed = ours.float()(blocks, rows.float())
        expected = expected.detach()
        error = float((mixed - expected).norm() / expected.norm())
        if not error < MIXED_ERROR:
            raise ValueError(f"logits in {self._dtype} are off by {error:.2g} of their norm")

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

    def _batches(self, steps: int, ahead: bool, turn: int = 0) -> Iterator[Blocks]:
        seeds = self._seeds(self._options.batch * steps, turn)
        with patch.dict(os.environ, DGL_MGPU_PREFETCH="1" if ahead else "0"):
            batches = iter(self._loader(seeds))
        for _, _, blocks in batches:
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
            for way, ahead in (("one by one", False), ("ahead", True)):
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
            for blocks in self._batches(UNPROFILED + PROFILED + 1, ahead=True):
                self._train(training, blocks)
                profile.step()


def graph_of(data: Igbh) -> dgl.DGLGraph:
    """The graph, with labels; features stay aside."""
    edges: Mapping[Any, Any] = {
        etype: ("csc", (indptr, indices, indices[:0]))  # places are ids
        for etype, (indptr, indices) in data.edges.items()
    }
    graph = dgl.heterograph(edges, data.num_nodes)
    graph.nodes["paper"].data["label"] = data.labels
    return graph


def _wrong(
    block: dgl.DGLGraph,
    etype: tuple[str, str, str],
    indptr: torch.Tensor,
    indices: torch.Tensor,
    fanout: int,
) -> str:
    """What is wrong with a relation's sample without replacement, if anything is."""
    bounds, sources, _ = block.adj_tensors("csc", etype)
    dst = block.dstnodes[etype[2]].data[dgl.NID].long()
    src = block.srcnodes[etype[0]].data[dgl.NID]
    eids = block.edges[etype].data[dgl.EID].long()
    sizes = bounds.long().diff()
    first, degrees = indptr[dst].long(), (indptr[dst + 1] - indptr[dst]).long()
    if not torch.equal(sizes, degrees.clamp(max=fanout)):
        return "number of edges"
    row = torch.repeat_interleave(sizes)
    within = eids - first[row]
    if not ((within >= 0) & (within < degrees[row])).all() or len(eids.unique()) != len(eids):
        return "edge ids"
    if not torch.equal(indices[eids], src[sources.long()]):
        return "sources"
    return ""


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
    with graphs_on_tensors() if this_device().type == "cpu" else contextlib.nullcontext():
        sys.exit(not Bench(options).run())


if __name__ == "__main__":
    main()
