"""Checkpoints with sound sums and odd contents: refused by field, or as good as they were."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from dgl_mgpu.cli import main
from dgl_mgpu.errors import CheckpointError, DGLMGPUError
from dgl_mgpu.machine import preset
from dgl_mgpu.machine.topology import Topology
from dgl_mgpu.placement import Plan, TableSpec, solve
from dgl_mgpu.train.checkpoint.checkpoint import Checkpoint, checkpoints
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.run import make_trainer
from dgl_mgpu.train.trained_run import load_run
from tests.train.epochs import train_epoch

SMALL = [
    "data=generated", "model=gcn", "data.options.num_nodes=300", "data.options.num_edges=900",
    "trainer.batch_size=64", "store.device=cpu", "model.hidden=4",
]  # fmt: skip
ODD = [
    None, True, -1, 10**6, 10**400, float("nan"), float("inf"), "", "x", "${oc.env:HOME}", [], [0],
    [[]], {}, {"x": 0}, torch.zeros(3), torch.zeros(0), torch.zeros(2, 2, dtype=torch.int8),
]  # fmt: skip
_JSON = ("reports", "config", "plan", "parts", "captured")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trainer of a small run, to be given other states, and its checkpoint after an epoch."""
    folder = tmp_path_factory.mktemp("run")
    config = compose([*SMALL, f"data.root={folder / 'data'}", "trainer.epochs=2"])
    trainer = make_trainer(config)
    train_epoch(trainer)
    yield trainer, trainer.checkpoint(dataclasses.asdict(config)).save(folder / "checkpoints")
    trainer.finish(folder)


def change(path, to, **fields) -> None:
    """Write a checkpoint with other fields; its sums are right."""
    content = torch.load(path, weights_only=True)
    for name, value in fields.items():
        content[name] = json.dumps(value) if name in _JSON else value
    torch.save(content, to)


def optimizer(path, **parts):
    state = torch.load(path, weights_only=True)["optimizer"]
    state["state"][0].update(parts)
    return state


def model(path, change):
    return {k: change(v) for k, v in torch.load(path, weights_only=True)["model"].items()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batches": 10**6, "parts": [{}]}, "1000000 batches are done of an epoch that has"),
        ({"batches": 10**6}, "field parts has 0 entries for 1000000 batches"),
        ({"epoch": 7}, "field reports are of 1 epochs, and 7 are done"),
        ({"epoch": True}, "field epoch is True"),
        ({"random": [torch.zeros(9)]}, "field random has an entry that is no tensor of bytes"),
        ({"plan": {"format": 1}}, "field plan does not do: read a plan"),
        ({"model": {"x": "y"}}, "field model has 'x', a str"),
        ({"optimizer": []}, "field optimizer cannot be read"),
        ({"model": lambda path: model(path, torch.Tensor.double)}, "torch.float64, and torch.flo"),
        ({"model": lambda path: model(path, lambda v: v[:1])}, "not this run's"),
        ({"optimizer": lambda path: optimizer(path, exp_avg=torch.zeros(7))}, r"has shape \(7,\)"),
        (
            {"optimizer": lambda path: optimizer(path, step=torch.tensor(-2.0))},
            r"took -2\.0 steps|took tensor\(-2",
        ),
        ({"optimizer": lambda path: optimizer(path, more=torch.zeros(1))}, "'more'"),
    ],
)
def test_a_field_that_does_not_do_is_named(run, tmp_path, fields, message):
    trainer, path = run
    fields = {name: value(path) if callable(value) else value for name, value in fields.items()}
    change(path, tmp_path / "other.pt", **fields)
    with pytest.raises(CheckpointError, match=message):
        trainer.resume(Checkpoint.load(tmp_path / "other.pt"))


def places(value, path=()):
    """All places of a nested value."""
    yield path
    items = (
        enumerate(value)
        if isinstance(value, list)
        else (value.items() if isinstance(value, dict) else ())
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_other(value, path, other):
    """A copy with another value at a place."""
    if not path:
        return other
    value = copy.copy(value)
    value[path[0]] = with_other(value[path[0]], path[1:], other)
    return value


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):  # a count of steps may have been a number
        return torch.equal(one, torch.as_tensor(other, dtype=one.dtype))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def finite(value):
    """A field as it is, or as JSON that has no word for infinity."""
    if _has_tensors(value):
        return value
    return json.loads(json.dumps(value), parse_constant=lambda word: None)


def _has_tensors(value) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, torch.Tensor) or any(map(_has_tensors, inner))


def contents_of(path):
    """All fields of a checkpoint, as if within an epoch."""
    content = torch.load(path, weights_only=True)
    content = {k: json.loads(v) if k in _JSON else v for k, v in content.items()}
    content["batches"], content["parts"] = 1, [
        {"loss": 0.5, "correct": 1.0, "seeds": 64, "steps": 1, "seconds": {"total": 1.0},
         "tiers": [["feat", "host", 5, 80]]}
    ]  # fmt: skip
    return content


def refused_or_taken(trainer, path, to, name, place, other) -> bool | None:
    """Have a field hold something else at a place: whether that is taken, or refused.

    What has no say comes out as it was.  None where a checkpoint cannot have it.
    """
    if name in _JSON and isinstance(other, torch.Tensor):
        return None
    content = contents_of(path)
    value = with_other(content[name], place, copy.copy(other))
    change(path, to, **{**content, name: value})
    try:
        trainer.resume(checkpoint := Checkpoint.load(to))
        checkpoint.require_same_run(content["config"])
    except CheckpointError:
        return False
    state = trainer.checkpoint(checkpoint.config)
    for field in ("epoch", "batches", "parts", "reports", "model", "best_model", "random"):
        after, before = finite(getattr(state, field)), finite(content[field])
        assert same(after, before) or (field == name and same(after, finite(value))), (
            name,
            place,
            other,
        )
    moments = state.optimizer["state"]
    assert same(moments, content["optimizer"]["state"]) or same(moments, value["state"])
    return True


def test_a_field_with_another_value_is_refused_or_taken_as_it_is(run, tmp_path):
    """At any place of any field."""
    trainer, path = run
    content = contents_of(path)
    rng = np.random.default_rng(0)
    came = []
    for name in content:
        found = list(places(content[name]))
        for _ in range(15):
            place, other = found[rng.integers(len(found))], ODD[rng.integers(len(ODD))]
            came.append(refused_or_taken(trainer, path, tmp_path / "other.pt", name, place, other))
    assert came.count(False) > 80 and came.count(True) > 10


@pytest.mark.parametrize("read", [Topology.from_dict, Plan.from_dict])
def test_a_machines_or_a_plans_numbers(read):
    """Any of them is another: a typed error, or what is written is what was read."""
    machine = preset("dgx1", 2)
    table = TableSpec.features("feat", 1000, 400, 1 / np.arange(1, 1001), 100.0)
    of = machine if read.__self__ is Topology else solve(machine, [table], gpu_budget_bytes=60_000)
    written = of.to_dict()
    rng = np.random.default_rng(0)
    found = [place for place in places(written) if place]
    odd = [each for each in ODD if not isinstance(each, torch.Tensor)]
    refused = 0
    for _ in range(600):
        place, other = found[rng.integers(len(found))], odd[rng.integers(len(odd))]
        value = with_other(written, place, other)
        try:
            again = read(value).to_dict()
        except DGLMGPUError:
            refused += 1
            continue
        assert read(again).to_dict() == again
    assert refused > 200


def test_a_damaged_checkpoint_of_a_run_is_told_at_once(run, tmp_path, capsys):
    change(run[1], tmp_path / "epoch-1.pt", config={"trainer": {"lr": 10**400}})
    assert main(["train", f"trainer.resume={tmp_path}"]) == 1
    assert "field config does not do" in capsys.readouterr().err
    assert checkpoints(tmp_path)


def test_a_best_model_of_another_dtype_is_not_loaded(run, tmp_path):
    change(run[1], tmp_path / "other.pt", best_model=model(run[1], torch.Tensor.double))
    with pytest.raises(CheckpointError, match=r"torch\.float64"):
        load_run(tmp_path / "other.pt")
