"""The optimizer's state on one rank, or shared by several, and from one to the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint
from dgl_mgpu.train.optimizer import full_state_dict, load_full_state
from dgl_mgpu.train.trainer import Trainer
from tests.train import jobs
from tests.train.jobs import equal_states

pytestmark = pytest.mark.usefixtures("forked_ranks")

MODES = ("minibatch", "fullgraph")
SHARED = "trainer.shard_optimizer=true"


def train(folder: Path, num_ranks: int, *overrides: str, held: Path | None = None) -> Checkpoint:
    """What a run ended with; each of its ranks writes to ``held`` which states it had."""
    hook = None if held is None else partial(_note_states, held)
    return Checkpoint.load(jobs.train(folder, num_ranks, *overrides, hook=hook))


def _note_states(folder: Path, trainer: Trainer) -> None:
    def note(*arguments: object) -> None:
        local = getattr(trainer.optimizer, "optim", trainer.optimizer)
        count = sum(state["exp_avg"].numel() for state in local.state.values())
        (folder / str(dist.get_rank())).write_text(str(count))

    trainer.optimizer.register_step_post_hook(note)


def require_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert equal_states(found.model, expected.model)
    states: list[dict[int, dict[str, Any]]] = [
        each.optimizer["state"] for each in (found, expected)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(equal_states(states[0][key], states[1][key]) for key in states[1])


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_share_states_learn_the_same(tmp_path, data, mode):
    options = [f"mode={mode}", data]
    expected = train(tmp_path / "whole", 2, *options)
    states = tmp_path / "states"
    states.mkdir()
    found = train(tmp_path / "shared", 2, *options, SHARED, held=states)
    require_same(found, expected)
    parameters = sum(state["exp_avg"].numel() for state in expected.optimizer["state"].values())
    held = [int((states / str(rank)).read_text()) for rank in range(2)]
    assert sum(held) == parameters
    assert max(held) < 0.8 * parameters


def _unpickle_nothing(trainer: Trainer) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("a rank unpickles what another has sent")

    torch.load = load  # of this rank's process


def test_shared_states_are_not_pickled(tmp_path, data):
    jobs.train(tmp_path, 3, "mode=fullgraph", data, SHARED, hook=_unpickle_nothing)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first_is_shared", [False, True])
def test_a_resumed_run_may_share_states_or_not(tmp_path, data, mode, first_is_shared):
    options = [f"mode={mode}", data, "model.dropout=0"]
    first, rest = ([SHARED], []) if first_is_shared else ([], [SHARED])
    expected = train(tmp_path / "whole", 2, *options)
    train(tmp_path / "half", 2, *options, *first, "trainer.epochs=1")
    resume = f"trainer.resume={tmp_path / 'half'}"
    require_same(train(tmp_path / "rest", 2, *options, *rest, resume), expected)


def test_shared_states_go_to_any_number_of_ranks(tmp_path, data):
    options = ["mode=fullgraph", "fullgraph.by=order", data, "model.dropout=0", SHARED]
    expected = train(tmp_path / "whole", 1, *options)
    train(tmp_path / "half", 3, *options, "trainer.epochs=1")
    found = train(tmp_path / "rest", 2, *options, f"trainer.resume={tmp_path / 'half'}")
    for name, value in expected.model.items():
        torch.testing.assert_close(found.model[name], value, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_is_never_fused_takes_its_state():
    layer = torch.nn.Linear(3, 2)
    saved, other = (
        torch.optim.Adadelta(layer.parameters()),
        torch.optim.Adadelta(layer.parameters()),
    )
    layer(torch.ones(1, 3)).sum().backward()
    saved.step()
    load_full_state(other, full_state_dict(saved))
    assert all(equal_states(other.state[each], saved.state[each]) for each in layer.parameters())
