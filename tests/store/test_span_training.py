"""Training with one copy over machines, against a copy on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    UnsupportedByStoreError,
)
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.run import make_trainer
from tests.ranks import RankProcesses, machines_on_gpus_too, on_machines
from tests.train.jobs import SMALL


def _trained(span: str, data: str, *overrides: str) -> list[tuple[float, ...]]:
    options = f"store.span={span}", "store.replica_ratio=0.1", "store.device=auto"
    config = compose([data, *SMALL, *overrides, *options])
    trainer = make_trainer(config)
    for _ in range(2):
        for _ in trainer.run_epoch(last=True):
            pass
    test = trainer.test()
    trainer.store.close()
    return [(r.loss, r.train_accuracy, r.valid_accuracy, test) for r in trainer.reports]


def _trained_alike(data: str, *overrides: str) -> None:
    found, expected = (_trained(span, data, *overrides) for span in ("job", "machine"))
    # GPUs add gradients up in any order.
    on_gpu = torch.cuda.is_available()
    for epoch, other in zip(found, expected, strict=True):
        assert epoch == (pytest.approx(other, rel=2e-3, abs=2e-2) if on_gpu else other)


# The last round of training and validation has no batch for some ranks.


@machines_on_gpus_too
@pytest.mark.parametrize("model", ["model=graphsage", "model=rgcn", "model.inputs=learned"])
def test_training_is_as_with_a_copy_on_each_machine(
    ranks: RankProcesses, data: str, model: str
) -> None:
    options = data, model, "trainer.batch_size=80", f"trainer.ranks={ranks.size}"
    ranks.run(on_machines, "abc", _trained_alike, *options)


def _refused_in_training(data: str, *overrides: str) -> None:
    with pytest.raises(UnsupportedByStoreError, match="span"):
        _trained("job", data, *overrides)


@pytest.mark.parametrize("other", ["task=link_prediction", "model=pinsage"])
def test_training_that_machines_do_not_serve_raises(
    ranks: RankProcesses, data: str, other: str
) -> None:
    ranks.run(on_machines, "abc", _refused_in_training, data, "trainer.ranks=3", other)


def _begun(folder: Path, *overrides: str) -> None:
    """One epoch, of which a checkpoint is left."""
    trainer = make_trainer(compose([*SMALL, *overrides, "store.span=job"]))
    for _ in trainer.run_epoch(last=False):
        pass
    checkpoint = trainer.checkpoint({})
    everyone = Communicator.of_all_machines()
    everyone.broadcast_from_rank0("write a checkpoint", lambda: checkpoint.save(folder))
    trainer.finish(folder)


def _gone_on(folder: Path, *overrides: str) -> list[tuple[float, ...]]:
    """The reports of two epochs, of which the first is a checkpoint's, and the test accuracy."""
    trainer = make_trainer(compose([*SMALL, *overrides, "store.span=job"]))
    everyone = Communicator.of_all_machines()
    trainer.resume(everyone.broadcast_from_rank0("read", lambda: Checkpoint.load(folder)))
    assert trainer.epoch == 1
    for _ in trainer.run_epoch(last=True):
        pass
    test = trainer.test()
    trainer.finish(folder)
    return [(r.loss, r.train_accuracy, r.valid_accuracy, test) for r in trainer.reports]


def test_fewer_machines_go_on_to_the_same_bits(
    four_ranks: RankProcesses, data: str, tmp_path: Path
) -> None:
    options = data, "model.inputs=learned", "store.replica_ratio=0.1", "trainer.ranks=4"
    expected = four_ranks.run(on_machines, "abcd", _trained, "job", *options)
    four_ranks.run(on_machines, "abcd", _begun, tmp_path, *options)
    for machines in "aabb", "aaaa":
        found = four_ranks.run(on_machines, machines, _gone_on, tmp_path, *options)
        assert found == expected
