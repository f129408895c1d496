"""The training loop of one rank: DGL's DataLoader over the store, DDP over the model."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import dgl
import torch
import torch.distributed as dist
from dgl.dataloading import DataLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgl_mgpu.backend.storage import Traffic
from dgl_mgpu.backend.store import GlobalStore
from dgl_mgpu.errors import CheckpointError
from dgl_mgpu.minibatch.checkpoint import Checkpoint
from dgl_mgpu.minibatch.models import BlockModel
from dgl_mgpu.minibatch.seeds import SeedBatches
from dgl_mgpu.report import EpochReport, StageSeconds, TierTraffic, merge

#: Called after each step with step, loss, accuracy and seeds so far in the epoch.
StepCallback = Callable[[int, float, float, int], None]


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


class Trainer:
    """Trains a model on a store's graph, epoch by epoch.

    Parameters
    ----------
    model : BlockModel
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
        model: BlockModel,
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
        self.model = model
        self.optimizer = optimizer
        self.store = store
        self.accesses = store.count_accesses() if count_accesses else None
        self.reports: list[EpochReport] = []
        self.best_model: dict[str, torch.Tensor] = copy.deepcopy(model.state_dict())
        self._train, self._valid, self._test = train, valid, test
        self._num_workers = num_workers
        self._eval_every = eval_every
        self._distributed = dist.is_initialized()
        self._ddp: nn.Module = DistributedDataParallel(model) if self._distributed else model
        self._loader = self._make_loader(train)

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.reports)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return len(self._train.batches.rounds())

    def run_epoch(self, last: bool, on_step: StepCallback) -> EpochReport:
        """Train one epoch, validate, and return the report of all ranks together.

        Parameters
        ----------
        last : bool
            Whether this is the last epoch of the run.
        on_step : callable
        """
        begin = time.perf_counter()
        with self.accesses or contextlib.nullcontext():
            sums, loading, compute = self._train_epoch(on_step)
        traffic = self.store.graph.traffic.take()
        number = self.epoch + 1
        valid = None
        evaluate = time.perf_counter()
        if last or number % self._eval_every == 0:
            valid = self.evaluate(self._valid)
        end = time.perf_counter()
        self.store.graph.traffic.take()  # evaluation's is no part of the epoch's
        report = EpochReport(
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
        report = self._merge(report)
        if valid is not None and valid > self._best_valid():
            self.best_model = copy.deepcopy(self.model.state_dict())
        self.reports.append(report)
        return report

    def test(self) -> float:
        """Test accuracy of the model of the epoch that validated best."""
        current = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.best_model)
        try:
            return self.evaluate(self._test)
        finally:
            self.model.load_state_dict(current)

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

    def checkpoint(self, config: dict) -> Checkpoint:
        """The state after the epochs done so far; collective."""
        random = [torch.get_rng_state()]
        if self._distributed:
            random = [torch.empty(0, dtype=torch.uint8)] * dist.get_world_size()
            dist.all_gather_object(random, torch.get_rng_state())
        return Checkpoint(
            epoch=self.epoch,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            best_model=self.best_model,
            random=random,
            reports=[report.to_dict() for report in self.reports],
            config=config,
            plan=self.store.plan.to_dict(),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        CheckpointError
            If its states are not those of this model and optimizer.
        """
        try:
            self.model.load_state_dict(checkpoint.best_model)
            self.model.load_state_dict(checkpoint.model)
            self.optimizer.load_state_dict(checkpoint.optimizer)
            self.reports = [EpochReport.from_dict(report) for report in checkpoint.reports]
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "resume from a checkpoint",
                f"its states are not this run's ({str(error).splitlines()[0]})",
                "resume with the configuration of the run, or start a new run",
            ) from error
        self.best_model = checkpoint.best_model
        rank = dist.get_rank() if self._distributed else 0
        # A rank that the saved run did not have keeps the generator it was seeded with.
        if rank < len(checkpoint.random):
            torch.set_rng_state(checkpoint.random[rank])

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

    def _merge(self, report: EpochReport) -> EpochReport:
        if not self._distributed:
            return report
        reports: list[EpochReport | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return merge([each for each in reports if each is not None])

    def _best_valid(self) -> float:
        validated = [r.valid_accuracy for r in self.reports if r.valid_accuracy is not None]
        return max(validated, default=-1.0)


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
