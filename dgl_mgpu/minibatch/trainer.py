"""Training on mini-batches: DGL's DataLoader over the store, DDP over the model."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Sums over the seeds of an epoch."""

    loss: float = 0.0
    correct: int = 0
    seeds: int = 0
    steps: int = 0

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

    @property
    def steps_per_epoch(self) -> int:
        return len(self._train.batches.rounds())

    def _run_epoch(self, number: int, validate: bool, on_step: StepCallback) -> EpochReport:
        begin = time.perf_counter()
        with self.accesses or contextlib.nullcontext():
            sums, loading, compute = self._train_epoch(on_step)
        traffic = self.store.graph.traffic.take()
        evaluate = time.perf_counter()
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
                sample=max(0.0, loading - traffic.seconds),
                gather=traffic.seconds,
                compute=compute,
                evaluate=end - evaluate,
                total=end - begin,
            ),
            tiers=_tier_traffic(traffic),
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

    def _train_epoch(self, on_step: StepCallback) -> tuple[_Sums, float, float]:
        self.model.train()
        self.store.graph.set_epoch(self.epoch)
        self._train.batches.set_epoch(self.epoch)
        sums, loading, compute = _Sums(), 0.0, 0.0
        batches = iter(self._loader)
        for round_size in self._train.batches.rounds():
            start = time.perf_counter()
            batch = next(batches, None)
            loaded = time.perf_counter()
            loading += loaded - start
            if batch is None:
                # The last round has no batch for this rank: it answers the others' all-reduce
                # with zeros, and its optimizer steps with theirs.
                loss = self._ddp([], {}).sum()
            else:
                _, seeds, blocks = batch
                labels = blocks[-1].dstdata["label"]
                logits = self._ddp(blocks, dict(blocks[0].srcdata))
                mean = nn.functional.cross_entropy(logits, labels)
                # DDP averages over ranks; this makes it the mean over the seeds of the round.
                loss = mean * (len(seeds) * self._train.batches.num_ranks / round_size)
                sums.add(mean.item(), int((logits.argmax(1) == labels).sum()), len(seeds))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            compute += time.perf_counter() - loaded
            on_step(sums.steps, sums.mean_loss, sums.accuracy, sums.seeds)
        return sums, loading, compute

    def _make_loader(self, split: Split) -> DataLoader:
        return _QuietLoader(
            self.store.graph,
            split.batches,
            split.sampler,
            num_workers=self._num_workers,
            persistent_workers=split is self._train and self._num_workers > 0,
        )


class _QuietLoader(DataLoader):
    """DGL's DataLoader without its advice on CPU affinity at every epoch."""

    def __iter__(self) -> Iterator:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Dataloader CPU affinity opt")
            return super().__iter__()


def _tier_traffic(traffic: Traffic) -> tuple[TierTraffic, ...]:
    return tuple(
        TierTraffic(name=memory, table=table, rows=rows, bytes=traffic.nbytes[table, memory])
        for (table, memory), rows in sorted(traffic.rows.items())
    )
