"""The main job: from a configuration to a trained model and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler, Sampler
from rich.console import Console

from dgl_mgpu.backend.store import GlobalStore, machine
from dgl_mgpu.data import Dataset, load
from dgl_mgpu.errors import ConfigError
from dgl_mgpu.minibatch.checkpoint import Checkpoint
from dgl_mgpu.minibatch.config import Config
from dgl_mgpu.minibatch.launch import launch
from dgl_mgpu.minibatch.models import INV_SQRT_DEGREES, BlockModel, build_model
from dgl_mgpu.minibatch.seeds import SeedBatches
from dgl_mgpu.minibatch.trainer import Split, Trainer
from dgl_mgpu.minibatch.walks import RandomWalkSampler
from dgl_mgpu.report import EpochReport, MetricsLog, TrainProgress, best_epoch, summary_table
from dgl_mgpu.store import Ranks

if TYPE_CHECKING:
    from dgl_mgpu.minibatch.trainer import StepCallback


def train(config: Config, folder: Path) -> None:
    """Train as configured; metrics, curves and checkpoints go to ``folder``.

    Raises
    ------
    DGLMGPUError
        Whatever is wrong, before work starts where that can be known.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun made the ranks
        config.trainer.ranks = int(os.environ["WORLD_SIZE"])
    config.check()
    machine(config.topology, config.trainer.ranks)  # raises if it has fewer GPUs than ranks
    launch(_train_rank, config.trainer.ranks, config, folder)


def _train_rank(config: Config, folder: Path) -> None:
    ranks, everyone = Ranks.of_this_machine(), Ranks.of_all_machines()
    first = everyone.rank == 0
    # Under torchrun each rank was given a folder of its own: the first one's is the run's.
    folder = everyone.from_first("choose the run's folder", lambda: folder)
    checkpoint = everyone.together("read the checkpoint", partial(_checkpoint, config))
    dataset = ranks.together("load the data", lambda: _load(config) if ranks.rank == 0 else None)
    splits, num_classes = ranks.from_first("read the split", partial(_splits, dataset))
    store = GlobalStore.from_dataset(
        dataset,
        seed=config.trainer.seed,
        topology=config.topology,
        batch_size=config.trainer.batch_size,
        fanouts=config.sampler.fanouts,
        **asdict(config.store),
    )
    del dataset  # all of it is in the store

    torch.manual_seed(config.trainer.seed)
    model = build_model(
        config.model,
        store.graph.get_node_storage("feat").shape[1],
        num_classes,
        len(config.sampler.fanouts),
    )
    # Ranks begin with the same model and go on with dropout of their own.
    torch.manual_seed(config.trainer.seed * 1_000_003 + _global_rank())
    trainer = Trainer(
        model,
        torch.optim.Adam(
            model.parameters(), lr=config.trainer.lr, weight_decay=config.trainer.weight_decay
        ),
        store,
        *(_split(config, model, name, splits[name]) for name in ("train", "valid", "test")),
        num_workers=config.sampler.num_workers,
        eval_every=config.trainer.eval_every,
        count_accesses=config.trainer.count_accesses,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
        if trainer.epoch >= config.trainer.epochs:
            raise ConfigError(
                f"resume up to epoch {config.trainer.epochs}",
                f"the checkpoint is of epoch {trainer.epoch}",
                "raise trainer.epochs",
            )
    with _Report(config, folder, trainer) if first else contextlib.nullcontext() as report:
        for epoch in range(trainer.epoch + 1, config.trainer.epochs + 1):
            on_step: StepCallback = report.on_step if report else _no_report
            done = trainer.run_epoch(epoch == config.trainer.epochs, on_step)
            state = trainer.checkpoint(asdict(config))
            everyone.from_first("write a checkpoint", partial(_save, state, folder))
            if report:
                report.epoch(done)
        if trainer.accesses is not None:
            trainer.accesses.save(folder / "accesses.npz")
        test_accuracy = trainer.test()
        if report:
            report.finish(trainer.reports, test_accuracy)
    store.close()


def _save(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.save(folder / "checkpoints")


class _Report:
    """What the first rank shows and writes."""

    def __init__(self, config: Config, folder: Path, trainer: Trainer) -> None:
        self._config = config
        self._folder = folder
        self._console = Console()
        # A run that resumes in its own folder writes its epochs anew.
        self._log = MetricsLog(folder, resume_epoch=0 if trainer.epoch else None)
        for earlier in trainer.reports:
            self._log.append(earlier)
        self._progress = TrainProgress(
            config.trainer.epochs,
            trainer.steps_per_epoch,
            self._console,
            first_epoch=trainer.epoch + 1,
        )
        self._shown = contextlib.ExitStack()
        self.on_step = self._progress.update

    def __enter__(self) -> _Report:
        self._shown.enter_context(self._progress)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._shown.close()
        self._log.close()

    def epoch(self, report: EpochReport) -> None:
        self._progress.epoch_done(report)
        self._log.append(report)

    def finish(self, reports: list[EpochReport], test_accuracy: float) -> None:
        from dgl_mgpu.report.plots import plot_curves  # matplotlib takes a second to import

        self._shown.close()  # the bars, so that they do not stand below the table
        title = f"{self._config.model.name} on {self._config.data.name}"
        best = best_epoch(reports)
        self._log.summary(
            {
                "test_accuracy": test_accuracy,
                "best_epoch": None if best is None else best.epoch,
                "valid_accuracy": None if best is None else best.valid_accuracy,
            }
        )
        curves = self._folder / "curves.png"
        plot_curves(reports, curves, title)
        self._console.print(summary_table(reports, title, test_accuracy))
        self._console.print(
            f"metrics, checkpoint and curves: {self._folder}",
            highlight=False,
            soft_wrap=True,
        )


def _no_report(step: int, loss: float, accuracy: float, seeds: int) -> None:
    pass


def _load(config: Config) -> Dataset:
    options = dict(config.data.options)
    if config.model.self_loops:
        options["self_loops"] = True
    dataset = load(config.data.name, config.data.root, **options)
    features = dict(dataset.node_features)
    if config.model.name == "gcn":
        features[INV_SQRT_DEGREES] = _inv_sqrt_degrees(dataset)
    return dataclasses.replace(dataset, node_features=features, checked=True)


def _inv_sqrt_degrees(dataset: Dataset) -> np.ndarray:
    """1 / sqrt of every node's out-degree and in-degree, float32, shape (num_nodes, 2)."""
    outgoing = np.bincount(dataset.indices, minlength=dataset.num_nodes)
    degrees = np.stack([outgoing, np.diff(dataset.indptr)], 1)
    return (1 / np.sqrt(np.maximum(degrees, 1))).astype(np.float32)


def _checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint to go on from, if any."""
    if config.trainer.resume is None:
        return None
    checkpoint = Checkpoint.load(Path(config.trainer.resume))
    checkpoint.require_same_run(asdict(config))
    return checkpoint


def _splits(dataset: Dataset | None) -> tuple[dict[str, torch.Tensor], int]:
    """Seed nodes of each split, in the graph's id type, and the number of classes."""
    assert dataset is not None  # the first rank has it
    dtype = dataset.indices.dtype
    seeds = {
        name: torch.from_numpy(np.asarray(getattr(dataset, name)).astype(dtype))
        for name in ("train", "valid", "test")
    }
    return seeds, dataset.num_classes


def _split(config: Config, model: BlockModel, name: str, seeds: torch.Tensor) -> Split:
    sampler = config.sampler
    training = name == "train"
    batches = SeedBatches(
        seeds,
        config.trainer.batch_size,
        shuffle=training,
        seed=config.trainer.seed,
        rank=_global_rank(),
        num_ranks=dist.get_world_size() if dist.is_initialized() else 1,
    )
    fanouts = list(sampler.fanouts if training else sampler.eval_fanouts)
    return Split(batches, _make_sampler(config, model, fanouts))


def _make_sampler(config: Config, model: BlockModel, fanouts: list[int]) -> Sampler:
    prefetch = {"prefetch_node_feats": list(model.inputs), "prefetch_labels": ["label"]}
    if config.sampler.name == "random_walk":
        return RandomWalkSampler(
            len(fanouts),
            config.sampler.num_neighbors,
            config.sampler.num_walks,
            config.sampler.walk_length,
            **prefetch,
        )
    return NeighborSampler(fanouts, replace=config.sampler.replace, **prefetch)


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
