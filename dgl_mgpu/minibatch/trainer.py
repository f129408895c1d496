"""Training on mini-batches: DGL's DataLoader over the store, DDP over the model."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.distributed as dist
from dgl.dataloading import DataLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgl_mgpu.backend.storage import Traffic
from dgl_mgpu.backend.store import GlobalStore
from dgl_mgpu.minibatch.seeds import SeedBatches
from dgl_mgpu.pipeline.stage import stage
from dgl_mgpu.report import EpochReport, StageSeconds, TierTraffic
from dgl_mgpu.training.models import NodeModel
from dgl_mgpu.training.trainer import StepCallback, Trainer


@dataclass
class Split:
    """What one split is iterated with: its seed nodes and the sampler of its blocks."""

    batches: SeedBatches
    sampler: dgl.dataloading.Sampler


@dataclass
class _Sums:
    """Sums over an epoch's seeds so far, the seconds they took, and what was read for them."""

    loss: float = 0.0
    correct: int = 0
    seeds: int = 0
    steps: int = 0
    loading: float = 0.0
    gather: float = 0.0
    compute: float = 0.0
    total: float = 0.0
    #: Rows and bytes of each table and memory.
    tiers: list[tuple[str, str, int, int]] = field(default_factory=list)

    def join(self, other: _Sums) -> None:
        """Add what was done before, or by another rank."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def add_traffic(self, traffic: Traffic) -> None:
        self.gather += traffic.seconds
        for (table, memory), rows in sorted(traffic.rows.items()):
            self.tiers.append((table, memory, rows, traffic.nbytes[table, memory]))

    def tier_traffic(self) -> tuple[TierTraffic, ...]:
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for table, memory, rows, nbytes in self.tiers:
            before = totals.get((table, memory), (0, 0))
            totals[table, memory] = before[0] + rows, before[1] + nbytes
        return tuple(TierTraffic(memory, table, *sums) for (table, memory), sums in totals.items())

    def add(self, loss: float, correct: int, seeds: int) -> None:
        self.loss += loss * seeds
        self.correct += correct
        self.seeds += seeds
        self.steps += 1

    @property
    def mean_loss(self) -> float:
        return self.loss / self.seeds if self.seeds else float("nan")

    @property
    def accuracy(self) -> float:
        return self.correct / self.seeds if self.seeds else float("nan")


class MiniBatchTrainer(Trainer):
    """Trains a model on mini-batches of a store's graph.

    Parameters
    ----------
    model : NodeModel
    optimizer : torch.optim.Optimizer
    store : GlobalStore
    train, valid, test : Split
    num_workers : int
        Processes that sample, for each rank.
    eval_every : int
        Epochs between validations; the last epoch is always validated.
    count_accesses : bool
        Whether to count how often training reads each node.

    Attributes
    ----------
    accesses : Accesses or None
        These counts.
    """

    def __init__(
        self,
        model: NodeModel,
        optimizer: torch.optim.Optimizer,
        store: GlobalStore,
        train: Split,
        valid: Split,
        test: Split,
        *,
        num_workers: int = 0,
        eval_every: int = 1,
        count_accesses: bool = False,
    ) -> None:
        super().__init__(model, optimizer, torch.device("cpu"), eval_every)
        self.store = store
        self.accesses = store.count_accesses() if count_accesses else None
        self._train, self._valid, self._test_split = train, valid, test
        self._num_workers = num_workers
        self._distributed = dist.is_initialized()
        self._ddp: nn.Module = DistributedDataParallel(model) if self._distributed else model
        self._loader = self._make_loader(train)
        self._sums = _Sums()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._train.batches.rounds())

    def _part(self) -> dict[str, Any]:
        return asdict(self._sums)

    def _take_parts(self, parts: list[dict[str, Any]]) -> None:
        self._sums = _Sums()
        for part in parts:
            self._sums.join(_Sums(**part))

    def _run_epoch(self, number: int, validate: bool, on_step: StepCallback) -> EpochReport | None:
        begin = time.perf_counter()
        sums = self._sums
        with self.accesses or contextlib.nullcontext():
            is_whole = self._train_epoch(sums, on_step)
        sums.add_traffic(self.store.graph.traffic.take())
        evaluate = time.perf_counter()
        sums.total += evaluate - begin
        if not is_whole:
            return None
        self._sums = _Sums()
        with stage("evaluate"):
            valid = self.evaluate(self._valid) if validate else None
        end = time.perf_counter()
        self.store.graph.traffic.take()  # evaluation's is no part of the epoch's
        return EpochReport(
            epoch=number,
            steps=sums.steps,
            seeds=sums.seeds,
            loss=sums.mean_loss,
            train_accuracy=sums.accuracy,
            valid_accuracy=valid,
            test_accuracy=None,
            seconds=StageSeconds(
                sample=max(0.0, sums.loading - sums.gather),
                gather=sums.gather,
                compute=sums.compute,
                evaluate=end - evaluate,
                total=sums.total + end - evaluate,
            ),
            tiers=sums.tier_traffic(),
            ranks=1,
        )

    def _test(self) -> float:
        return self.evaluate(self._test_split)

    def finish(self, folder: Path) -> None:
        """Write ``accesses.npz``, where they were counted, and close the store."""
        if self.accesses is not None:
            self.accesses.save(folder / "accesses.npz")
        self.store.close()

    def _plan(self) -> dict[str, Any]:
        return self.store.plan.to_dict()

    @torch.no_grad()
    def evaluate(self, split: Split) -> float:
        """Share of a split's nodes that the model classifies rightly, over all ranks."""
        self.model.eval()
        self.store.graph.set_epoch(0)
        counts = torch.zeros(2, dtype=torch.int64)
        for _, seeds, blocks in self._make_loader(split):
            logits = self.model(blocks, dict(blocks[0].srcdata))
            counts[0] += int((logits.argmax(1) == blocks[-1].dstdata["label"]).sum())
            counts[1] += len(seeds)
        if self._distributed:
            dist.all_reduce(counts)
        return float(counts[0]) / float(counts[1])

    def _train_epoch(self, sums: _Sums, on_step: StepCallback) -> bool:
        """Train on what is left of the epoch; whether that was all of it."""
        self.model.train()
        self.store.graph.set_epoch(self.epoch)
        self._train.batches.set_epoch(self.epoch, self._batches)
        batches = iter(self._loader)
        for round_size in self._train.batches.rounds():
            start = time.perf_counter()
            batch = next(batches, None)
            loaded = time.perf_counter()
            sums.loading += loaded - start
            if batch is None:
                # The last round has no batch for this rank: it answers the others' all-reduce
                # with zeros, and its optimizer steps with theirs.
                loss = self._ddp([], {}).sum()
            else:
                _, seeds, blocks = batch
                labels = blocks[-1].dstdata["label"]
                with stage("forward"):
                    logits = self._ddp(blocks, dict(blocks[0].srcdata))
                    mean = nn.functional.cross_entropy(logits, labels)
                # DDP averages over ranks; this makes it the mean over the seeds of the round.
                loss = mean * (len(seeds) * self._train.batches.num_ranks / round_size)
                sums.add(mean.item(), int((logits.argmax(1) == labels).sum()), len(seeds))
            self.optimizer.zero_grad()
            with stage("backward"):
                loss.backward()
            with stage("update"):
                self.optimizer.step()
            sums.compute += time.perf_counter() - loaded
            on_step(sums.steps, sums.mean_loss, sums.accuracy, sums.seeds)
            self._batches += self._train.batches.num_ranks
            if self.should_stop():
                return False
        return True

    def _make_loader(self, split: Split) -> DataLoader:
        return _QuietLoader(
            self.store.graph,
            split.batches,
            split.sampler,
            num_workers=self._num_workers,
            persistent_workers=split is self._train and self._num_workers > 0,
            # To make an iterator draws a number, which a run that resumes does once more.
            generator=torch.Generator(),
        )


class _QuietLoader(DataLoader):
    """DGL's DataLoader without its advice on CPU affinity at every epoch."""

    def __iter__(self) -> Iterator:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Dataloader CPU affinity opt")
            return super().__iter__()
