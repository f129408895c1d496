"""Training on mini-batches: DGL's DataLoader over the store, one model on all ranks."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import torch
from dgl.dataloading import DataLoader
from torch import nn

from dgl_mgpu.config.schema import Config
from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.layerwise_inference import inference
from dgl_mgpu.layerwise_inference.group import InferenceGroup
from dgl_mgpu.models.homogeneous import NodeModel
from dgl_mgpu.placement import Plan
from dgl_mgpu.report import EpochReport, StageSeconds, TierTraffic
from dgl_mgpu.report.epoch import require_int, require_number, require_str
from dgl_mgpu.store.embedding.optimizers import EmbeddingOptimizer
from dgl_mgpu.store.feature_storage import Traffic
from dgl_mgpu.store.global_store import GlobalStore
from dgl_mgpu.train.capture import CapturedStep, normalised_batch
from dgl_mgpu.train.launch.preemption import blocked, outlive_sigterm
from dgl_mgpu.train.minibatch.evaluation import AllNodes
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler, SeedBatches
from dgl_mgpu.train.minibatch.task import LOOKUP, LearnedRows
from dgl_mgpu.train.objectives import MetricAccumulator, Objective
from dgl_mgpu.train.optimizer import average_gradients, broadcast_from_first
from dgl_mgpu.train.trainer import Progress, Trainer
from dgl_mgpu.utils.interrupts import STOPPING
from dgl_mgpu.utils.stages import StageTimes, stage

#: Of :class:`~dgl_mgpu.report.StageSeconds`, those measured here.
_STAGES = ("sample", "gather", "forward", "backward", "update")
_CAPTURED_STAGES = ("sample", "gather", "compute", "update")


@dataclass
class Split:
    """The seeds of a split and the sampler of their mini-batches."""

    batches: SeedBatches
    sampler: dgl.dataloading.Sampler
    #: Evaluates it layer by layer, where that is cheaper than blocks.
    all_nodes: AllNodes | None = None


@dataclass
class _Sums:
    """Sums over an epoch's steps so far: metrics, seconds, and the rows and bytes read."""

    loss: float = 0.0
    correct: float = 0.0
    seeds: int = 0
    steps: int = 0
    #: By stage, as :class:`~dgl_mgpu.report.StageSeconds` has them.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Rows and bytes of each table and memory.
    tiers: list[tuple[str, str, int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, part: dict[str, Any]) -> _Sums:
        """Read sums of a checkpoint. Raises TypeError, ValueError or KeyError if there are none."""
        return cls(
            loss=require_number(part["loss"]),
            correct=require_number(part["correct"]),
            seeds=require_int(part["seeds"]),
            steps=require_int(part["steps"]),
            seconds={name: require_number(spent) for name, spent in part["seconds"].items()},
            tiers=[
                (require_str(table), require_str(memory), require_int(rows), require_int(nbytes))
                for table, memory, rows, nbytes in part["tiers"]
            ],
        )

    def join(self, other: _Sums) -> None:
        """Add sums of earlier steps, or of another rank."""
        self.loss += other.loss
        self.correct += other.correct
        self.seeds += other.seeds
        self.steps += other.steps
        self.tiers += other.tiers
        self.add_seconds(**other.seconds)

    def add_seconds(self, **seconds: float) -> None:
        """Add to the seconds of stages."""
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def add_traffic(self, traffic: Traffic) -> None:
        for (table, memory), rows in sorted(traffic.rows.items()):
            self.tiers.append((table, memory, rows, traffic.nbytes[table, memory]))

    def tier_traffic(self) -> tuple[TierTraffic, ...]:
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for table, memory, rows, nbytes in self.tiers:
            before = totals.get((table, memory), (0, 0))
            totals[table, memory] = before[0] + rows, before[1] + nbytes
        return tuple(TierTraffic(memory, table, *sums) for (table, memory), sums in totals.items())

    def add_steps(self, accumulator: MetricAccumulator) -> None:
        loss, correct, seeds = accumulator.sums()
        self.join(_Sums(loss=loss, correct=correct, seeds=seeds, steps=accumulator.steps))

    def mean(self, total: float) -> float:
        """Mean over the seeds; NaN if there are none."""
        return total / self.seeds if self.seeds else float("nan")


class MiniBatchTrainer(Trainer):
    """Trains a model on mini-batches of a store's graph, where the model and the store are.

    ``model``, called with the blocks of a mini-batch and the data of its input nodes, gives a row
    for each node that these end with; of nothing, no row and gradients of zeros.  ``splits`` are
    those of training, validation and test.  ``embeddings`` trains the store's rows that the model
    looks up.

    On a GPU the host never waits for a step's result: it queues one step after the other, batches
    are made ahead of the model, and the progress shown is some steps old.

    Raises InvalidInputError if workers are to read a store on GPUs, or steps cannot be captured.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: GlobalStore,
        splits: Sequence[Split],
        objective: Objective,
        embeddings: EmbeddingOptimizer | None = None,
    ) -> None:
        options, num_workers = config.trainer, config.sampler.num_workers
        super().__init__(model, optimizer, store.device, options.eval_every, objective.criterion)
        self._on_gpu = store.device.type == "cuda"
        if num_workers and self._on_gpu:
            raise InvalidInputError(
                f"have {num_workers} workers sample",
                "the store is on GPUs, which sample faster than processes on the CPU",
                "use sampler.num_workers=0, or store.device=cpu",
            )
        if options.cuda_graphs is True and embeddings is not None:
            raise InvalidInputError(
                "capture training steps",
                "the model learns rows, which the ranks look up and train together at every step",
                "use trainer.cuda_graphs=false",
            )
        if options.cuda_graphs is True and store.graph.spans_machines:
            raise UnsupportedByStoreError(
                "capture training steps",
                "machines send each other rows at every step (store.span=job)",
                "use trainer.cuda_graphs=false",
            )
        self.store = store
        #: How often training reads each node, where that is counted.
        self.accesses = store.count_accesses() if options.count_accesses else None
        self._train, self._valid, self._test_split = splits
        self._objective = objective
        self._embeddings = embeddings
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._num_workers = num_workers
        self._precision = getattr(torch, options.precision)
        self._captured: CapturedStep | None = None
        can_be_captured = (
            self._on_gpu
            and objective.can_be_captured
            and embeddings is None
            and not store.graph.spans_machines
            and normalised_batch(model) is None
        )
        #: Of the last step, written by its CUDA graph.
        self._num_correct = torch.zeros((), dtype=torch.float64, device=store.device)
        if options.cuda_graphs is True or (options.cuda_graphs == "auto" and can_be_captured):
            self._captured = CapturedStep(
                model,
                lambda blocks: self._outputs((blocks,)),
                self._loss_and_num_correct,
                lambda blocks: objective.targets((blocks,)),
                required=options.cuda_graphs is True,
            )
        else:
            broadcast_from_first((*model.parameters(), *model.buffers()))
        self._loader = self._make_loader(self._train)
        self._sums = _Sums()

    @property
    def plan(self) -> Plan:
        return self.store.plan

    @property
    def steps_per_epoch(self) -> int:
        return len(self._train.batches.rounds())

    @property
    def _batches_per_epoch(self) -> int:
        return self._train.batches.num_batches

    def _part(self) -> dict[str, Any]:
        return asdict(self._sums)

    def _load_parts(self, parts: list[dict[str, Any]]) -> None:
        self._sums = _Sums()
        for part in parts:
            self._sums.join(_Sums.read(part))
        # Ranks work at the same time: their steps and seconds do not add up.
        self._sums.steps = max((part["steps"] for part in parts), default=0)
        self._sums.seconds = {name: s / len(parts) for name, s in self._sums.seconds.items()}

    def _captured_state(self) -> dict[str, Any]:
        return {} if self._captured is None else self._captured.state_dict()

    def _load_captured_state(self, state: dict[str, Any]) -> None:
        if self._captured is not None and state:
            self._captured.load_state_dict(state)

    def _run_epoch(
        self, number: int, validate: bool
    ) -> Generator[Progress, None, EpochReport | None]:
        begin = time.perf_counter()
        sums = self._sums
        with self.accesses or contextlib.nullcontext():
            yield from self._train_epoch(sums)
        evaluate = time.perf_counter()
        sums.add_seconds(total=evaluate - begin)
        if self._is_stopping:
            return None
        self._sums = _Sums()
        with stage("evaluate"):
            valid = self.evaluate(self._valid) if validate else None
        end = time.perf_counter()
        self.store.graph.traffic.take()  # that of the evaluation is not counted
        sums.add_seconds(total=end - evaluate, evaluate=end - evaluate)
        return EpochReport(
            epoch=number,
            steps=sums.steps,
            seeds=sums.seeds,
            loss=sums.mean(sums.loss),
            train_accuracy=sums.mean(sums.correct),
            valid_accuracy=valid,
            test_accuracy=None,
            seconds=StageSeconds(**sums.seconds),
            tiers=sums.tier_traffic(),
            ranks=1,
            metric_name=self.criterion.metric_name,
        )

    def _test(self) -> float:
        return self.evaluate(self._test_split)

    def finish(self, folder: Path) -> None:
        """Write ``accesses.npz``, where they were counted, and close the store."""
        if self.accesses is not None:
            self.accesses.save(folder / "accesses.npz")
        self.store.close()

    @torch.no_grad()
    def evaluate(self, split: Split) -> float:
        """The metric of a split's seeds, over all ranks."""
        self.model.eval()
        self.store.graph.set_epoch(0)
        with self._autocast():
            predictions = (
                None if split.all_nodes is None else split.all_nodes.predictions(split.batches)
            )
        if predictions is None:
            with _starting_workers():
                batches = iter(self._make_loader(split))
            predictions = self._evaluated(batches)
        return self.criterion.score(predictions, self._device)

    def _evaluated(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Outputs and targets of mini-batches that have seeds."""
        for batch in batches:
            targets = self._objective.targets(batch)
            if len(targets):
                yield self._evaluated_outputs(batch), targets
            else:
                self._look_up_nothing()

    def _evaluated_outputs(self, batch: Any) -> torch.Tensor:
        with stage("forward"):
            return self._outputs(batch)

    @torch.no_grad()
    def predict(self) -> torch.Tensor:
        """As the base class; a machine's ranks share the memory of the result."""
        self.model.eval()
        graph, split = self.store.graph, self._test_split
        draws = isinstance(split.sampler, RandomWalkSampler)
        if isinstance(self.model, NodeModel) and not draws:
            with self._autocast():
                rows = inference(self.model, graph, device=self._device).float()
            if not graph.spans_machines:
                return rows
            group = InferenceGroup.of_job()
            return group.of_all(rows, graph.own_nodes().start, graph.num_nodes())
        nodes = torch.arange(graph.num_nodes(split.batches.ntype), dtype=graph.idtype)
        graph.set_epoch(0)
        seeds = split.batches.in_order(nodes)
        with _starting_workers():
            batches = iter(self._make_loader(replace(split, batches=seeds)))
        return InferenceGroup.of_job().collected(self._rows(batches), len(nodes), seeds.batch_size)

    def _rows(self, batches: Iterator[Any]) -> Iterator[torch.Tensor]:
        """Outputs of mini-batches that have seeds."""
        for batch in batches:
            _, output_nodes, _ = batch
            by_type = output_nodes if isinstance(output_nodes, Mapping) else {"": output_nodes}
            if any(map(len, by_type.values())):
                yield self._evaluated_outputs(batch).float()
            else:
                self._look_up_nothing()

    def _train_epoch(self, sums: _Sums) -> Iterator[Progress]:
        """Train on what is left of the epoch."""
        self.model.train()
        self.store.graph.set_epoch(self.epoch)
        self._train.batches.set_epoch(self.epoch, self._batches)
        accumulator = MetricAccumulator(self._device)
        with StageTimes(self._device) as times:
            yield from self._train_rounds(sums, accumulator)
        sums.add_steps(accumulator)
        traffic = self.store.graph.traffic.take()
        sums.add_traffic(traffic)
        spent = times.seconds()
        looked_up = spent.get(LOOKUP, 0.0)
        if self._on_gpu:
            spent["gather"] = spent.get("gather", 0.0) + looked_up
        else:
            # Workers may have sampled: then this is the time of waiting for them.
            loading = spent.get("load", 0.0) - (traffic.seconds - looked_up)
            spent.update(gather=traffic.seconds, sample=max(0.0, loading))
        stages = _STAGES if self._captured is None else _CAPTURED_STAGES
        sums.add_seconds(**{name: spent.get(name, 0.0) for name in stages})

    def _train_rounds(self, sums: _Sums, accumulator: MetricAccumulator) -> Iterator[Progress]:
        captured = self._captured
        num_seeds = self._batches * self._train.batches.batch_size
        begin = iter if captured is None else captured.batches
        with _starting_workers():
            batches = begin(self._loader)
        for round_size in self._train.batches.rounds():
            with stage("load"):
                batch = next(batches, None)
            if captured is None:
                with stage("forward"):
                    loss = self._loss(batch, round_size, accumulator)
                self.optimizer.zero_grad()
                with stage("backward"):
                    loss.backward()
                    average_gradients(self._parameters)
                    # Running statistics of batch normalisation differ between ranks.
                    broadcast_from_first(self.model.buffers())
            else:
                with stage("compute"):
                    self._compute_captured(captured, batch, round_size, accumulator)
            with stage("update"):
                self.optimizer.step()
                if self._embeddings is not None:
                    self._embeddings.step()
            self._batches += self._train.batches.num_ranks
            num_seeds += round_size
            yield Progress(sums.steps + accumulator.steps, *accumulator.latest(), num_seeds)
            if self._is_stopping:
                return

    def _loss(self, batch: Any, round_size: int, accumulator: MetricAccumulator) -> torch.Tensor:
        """This rank's share of the mean loss over the ``round_size`` seeds of all ranks."""
        targets = None if batch is None else self._objective.targets(batch)
        if targets is None or not len(targets):
            # The last round has no batch for this rank, or none with seeds: it takes part in the
            # collective lookups of the others, and in their optimizer step.
            self._look_up_nothing()
            return self.model([], {}).sum()
        outputs = self._outputs(batch)
        mean = self._mean_loss(outputs, targets)
        accumulator.add(mean, self.criterion.num_correct(outputs.detach(), targets), len(targets))
        return mean * self._weight(len(targets), round_size)

    def _look_up_nothing(self) -> None:
        """Take part in what the models of other ranks look up in a store over machines."""
        if self.store.graph.spans_machines:
            for rows in self.model.modules():
                if isinstance(rows, LearnedRows):
                    rows(torch.empty(0, dtype=torch.int64, device=self._device))

    def _compute_captured(
        self, captured: CapturedStep, batch: Any, round_size: int, accumulator: MetricAccumulator
    ) -> None:
        """Set the parameters' gradients to those of :meth:`_loss`, over all ranks."""
        if batch is None:
            captured.without_batch()
            return
        seeds = captured.num_seeds(batch)
        mean = captured(batch, self._weight(seeds, round_size))
        accumulator.add(mean, self._num_correct, seeds)

    def _loss_and_num_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss; the number correct is computed in the same CUDA graph, if there is one."""
        self._num_correct.copy_(self.criterion.num_correct(outputs.detach(), targets))
        return self._mean_loss(outputs, targets)

    def _weight(self, seeds: int, round_size: int) -> float:
        """The weight with which the mean of ranks' mean losses is that over the round's seeds."""
        return seeds * self._train.batches.num_ranks / round_size

    def _outputs(self, batch: Sequence[Any]) -> torch.Tensor:
        with self._autocast():
            return self._objective.outputs(self.model, batch)

    def _mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            return self.criterion.loss(outputs, targets)

    def _autocast(self) -> torch.autocast:
        enabled = self._precision != torch.float32
        return torch.autocast(self._device.type, self._precision, enabled=enabled)

    def _make_loader(self, split: Split) -> DataLoader:
        return DataLoader(
            self.store.graph,
            split.batches,
            split.sampler,
            device=self._device,
            num_workers=self._num_workers,
            worker_init_fn=partial(outlive_sigterm, os.getpid()),
            persistent_workers=split is self._train and self._num_workers > 0,
            # Making an iterator draws a number; a resumed run draws it once more.
            generator=torch.Generator(),
        )


@contextlib.contextmanager
def _starting_workers() -> Iterator[None]:
    """Start a DataLoader's workers with signals blocked, without DGL's advice on CPU affinity."""
    with warnings.catch_warnings(), blocked(*STOPPING):
        warnings.filterwarnings("ignore", message="Dataloader CPU affinity opt")
        yield
