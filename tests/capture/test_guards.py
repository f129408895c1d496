"""What changes between calls of a captured model is noticed."""

from __future__ import annotations

import copy
import math
import operator
from argparse import Namespace
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import pytest
import torch
from dgl.nn import SAGEConv
from torch import nn

from dgl_mgpu.capture import check
from dgl_mgpu.capture import model as captured_model
from dgl_mgpu.capture.call import inside
from dgl_mgpu.errors import InvalidInputError
from tests.capture.scripts import (
    CLASSES,
    HOOKS,
    Model,
    Normalised,
    graph,
    here,
    kinds_of,
    loader_of,
    made,
    of,
    replays_of,
    run,
    seeded,
    two_batches,
)


@dataclass
class Settings:
    scale: object = 1.0


class Reading(Model):
    """Scales its outputs by what it finds in all places where a module can keep something."""

    def __init__(self):
        super().__init__(SAGEConv(6, 8, "mean"), SAGEConv(8, CLASSES, "mean"))
        self.last = nn.Sequential(nn.Linear(CLASSES, CLASSES))
        self.last.scales = [1.0]
        self.register_buffer("buffer", torch.ones(()))
        self.activation = torch.tanh
        self.temporary = 1.0
        self.first, self.second = [0.5, 0.5], [1.0]
        self.table = {"a": 1.0}
        self.chosen = {1.0}
        self.pair = ([1.0], 1.0)
        self.options = SimpleNamespace(scale=1.0)
        self.arguments = Namespace(scale=1.0)
        self.settings = Settings()
        self.nested = {"scales": [1.0]}
        self.deep = Settings(SimpleNamespace(tables={"scales": [1.0]}))

    def forward(self, blocks, x):
        scales = (
            self.buffer,
            self.last.scales[0],
            getattr(self, "temporary", 2.0),
            getattr(self, "added", 1.0),
            sum(self.first),
            self.second[0],
            sum(len(name) * scale for name, scale in self.table.items()),
            sum(self.chosen),
            self.pair[0][0] * self.pair[1],
            self.options.scale,
            self.arguments.scale,
            self.settings.scale,
            self.nested["scales"][0],
            self.deep.scale.tables["scales"][0],
        )
        return self.activation(self.last(super().forward(blocks, x))) * math.prod(scales)


def ones(*shape):
    return torch.ones(shape, device=here.device)


def thrice(model, blocks, x):
    return type(model).forward(model, blocks, x) * 3


CHANGES = {
    # parameters and buffers
    "freeze": lambda model: model.layers[0].fc_neigh.weight.requires_grad_(False),
    "replace_parameter": lambda model: setattr(
        model.layers[1].fc_neigh, "weight", nn.Parameter(ones(CLASSES, 8))
    ),
    "replace_memory": lambda model: setattr(
        model.layers[1].fc_neigh.weight, "data", ones(CLASSES, 8)
    ),
    "replace_buffer": lambda model: setattr(model, "buffer", ones() * 3),
    "replace_memory_of_buffer": lambda model: setattr(model.buffer, "data", ones() * 3),
    # attributes
    "scale": lambda model: setattr(model, "scale", 3.0),
    "scale_of_other_type": lambda model: setattr(model, "scale", 1),
    "add_attribute": lambda model: setattr(model, "added", 3.0),
    "delete_attribute": lambda model: delattr(model, "temporary"),
    "change_dropout": lambda model: setattr(model.dropout, "p", 0.9999999),
    "replace_function": lambda model: setattr(model, "activation", torch.sin),
    "replace_forward": lambda model: setattr(model, "forward", MethodType(thrice, model)),
    "replace_tuple": lambda model: setattr(model, "pair", ([1.0], 3.0)),
    # what is in containers
    "change_list": lambda model: operator.setitem(model.first, 0, 3.0),
    "append_to_list": lambda model: model.first.append(3.0),
    "move_from_list_to_list": lambda model: model.second.insert(0, model.first.pop()),
    "change_dict": lambda model: operator.setitem(model.table, "a", 3.0),
    "add_to_dict": lambda model: operator.setitem(model.table, "b", 3.0),
    "rename_in_dict": lambda model: operator.setitem(model.table, "aaa", model.table.pop("a")),
    "add_to_set": lambda model: model.chosen.add(3.0),
    "replace_in_set": lambda model: (model.chosen.remove(1.0), model.chosen.add(3.0)),
    "change_list_in_tuple": lambda model: operator.setitem(model.pair[0], 0, 3.0),
    "change_option": lambda model: setattr(model.options, "scale", 3.0),
    "change_argument": lambda model: setattr(model.arguments, "scale", 3.0),
    "change_dataclass": lambda model: setattr(model.settings, "scale", 3.0),
    "change_nested": lambda model: operator.setitem(model.nested["scales"], 0, 3.0),
    "change_deep": lambda model: operator.setitem(model.deep.scale.tables["scales"], 0, 3.0),
    "change_list_of_submodule": lambda model: operator.setitem(model.last.scales, 0, 3.0),
    # submodules
    "replace_layer": lambda model: operator.setitem(
        model.layers, 1, SAGEConv(8, CLASSES, "mean").to(here.device)
    ),
    "add_layer": lambda model: model.last.append(nn.Linear(CLASSES, CLASSES).to(here.device)),
    "remove_layer": lambda model: model.last.pop(0),
}


def captured_reading():
    """A model with its graphs, and mini-batches that fit them."""
    batches = two_batches() * 3
    seeded(5)
    model = Reading().to(here.device)
    run(model, batches)
    (kind,) = kinds_of(model)
    assert kind.graphs is not None and kind.graphs.num_replays == 2
    return model, kind.graphs, batches


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_noticed(change, capturing):
    model, before, batches = captured_reading()
    seeded(6)
    change(model)
    reference = copy.deepcopy(model)
    for blocks in batches:
        x = blocks[0].srcdata["feat"]
        model.zero_grad()
        reference.zero_grad()
        found = model(blocks, x)
        with inside():
            expected = reference(blocks, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert all(kind.graphs is not before for kind in kinds_of(model))
    assert replays_of(model) > 0


EQUAL = {
    "attribute": lambda model: setattr(model, "scale", float("1.0")),
    "list": lambda model: operator.setitem(model.second, 0, float("1.0")),
    "dict": lambda model: operator.setitem(model.table, "".join("a"), float("1.0")),
    "namespace": lambda model: setattr(model.options, "scale", float("1.0")),
}


@pytest.mark.parametrize("change", EQUAL.values(), ids=EQUAL)
def test_an_equal_value_is_no_change(change, capturing):
    """Schedulers assign a rate in every step, whether it changes or not."""
    model, before, batches = captured_reading()
    for blocks in batches:
        change(model)
        run(model, [blocks])
    (kind,) = kinds_of(model)
    assert kind.graphs is before
    assert before.num_replays == 2 + len(batches)


def test_a_buffer_that_is_written_in_place_is_read_by_replays(capturing):
    model, before, batches = captured_reading()
    expected = run(model, batches) * 3
    with torch.no_grad():
        model.buffer.mul_(3)
    torch.testing.assert_close(run(model, batches), expected, rtol=1e-4, atol=1e-5)
    (kind,) = kinds_of(model)
    assert kind.graphs is before


def test_replays_are_compared_again(capturing, monkeypatch):
    """A change that no guard sees: of a global, as the model reads it."""
    monkeypatch.setattr(captured_model, "FIRST_CHECK", 3)
    factor = [1.0]

    class Global(Model):
        def forward(self, blocks, x):
            return super().forward(blocks, x) * factor[0]

    checked = []
    compare = check.checked_result

    def noted(model, call, its):
        checked.append(its.num_replays)
        return compare(model, call, its)

    monkeypatch.setattr(captured_model, "checked_result", noted)
    model = of(Global)().to(here.device)
    for *_, blocks in loader_of(graph()):
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    assert len(checked) == 2
    assert checked[0] == 0


@pytest.mark.parametrize("calls_before", [3, 6])
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_are_registered_later_are_called(hook, is_global, calls_before, capturing):
    model, seen = made("mean"), []
    batches = two_batches() * 4
    run(model, batches[:calls_before])
    assert all((kind.graphs is None) == (calls_before == 3) for kind in kinds_of(model))
    register = (
        getattr(nn.modules.module, f"register_module_{hook}")
        if is_global
        else getattr(model.layers[0], f"register_{hook}")
    )
    handle = register(lambda module, *_: seen.append(module))
    reason = "for all modules" if is_global else r"'layers\.0' has hooks"
    try:
        with pytest.warns(UserWarning, match=reason):
            run(model, batches[calls_before:])
    finally:
        handle.remove()
    assert seen.count(model.layers[0]) == len(batches) - calls_before
    assert all(kind.graphs is None for kind in kinds_of(model))


def test_a_hook_of_a_parameter_that_is_registered_later_is_called(capturing):
    """By autograd, which replays leave gradients of parameters to."""
    model, before, batches = captured_reading()
    seen = []
    model.layers[0].fc_neigh.weight.register_hook(seen.append)
    run(model, batches)
    assert len(seen) == len(batches)
    assert before.num_replays == 2 + len(batches)


def test_a_model_that_is_compiled_later_runs_as_it_is_compiled(capturing):
    model, _, batches = captured_reading()
    compiled = []
    model._compiled_call_impl = lambda *args: (
        compiled.append(model._call_impl(*args)) or compiled[-1]
    )
    with pytest.warns(UserWarning, match="it is compiled"):
        run(model, batches)
    assert len(compiled) == len(batches)
    assert all(kind.graphs is None for kind in kinds_of(model))


def switch_to_training(norm):
    norm.train()


def use_statistics_of_batches(norm):
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None


@pytest.mark.parametrize("change", [switch_to_training, use_statistics_of_batches])
def test_batch_normalisation_that_looks_at_batches_later(change, capturing):
    batches = two_batches() * 4
    model = of(Normalised)().to(here.device)
    model.norm.eval()
    run(model, batches)
    assert replays_of(model) > 3
    change(model.norm)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="'norm' is batch normalisation"):
        found = run(model, batches)
    with inside():
        expected = run(twin, batches)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_parameter_that_changes_before_the_backward_pass_is_an_error(capturing):
    """As without capture; a replay would read the new values."""
    model = made("mean")
    batches = [blocks for *_, blocks in loader_of(graph())]
    for blocks in batches:
        model(blocks, blocks[0].srcdata["feat"]).sum().backward()
    loss = model(batches[0], batches[0][0].srcdata["feat"]).sum()
    assert replays_of(model) > 3
    with torch.no_grad():
        model.layers[1].fc_neigh.weight.mul_(2)
    with pytest.raises(InvalidInputError, match="changed in place after the forward pass"):
        loss.backward()


def test_a_backward_pass_after_another_call_is_refused(capturing):
    model, last = made("mean"), None
    with pytest.raises(InvalidInputError, match="holds another call by now"):
        for *_, blocks in loader_of(graph()):
            loss = model(blocks, blocks[0].srcdata["feat"]).sum()
            loss.backward(retain_graph=True)
            if last is not None and replays_of(model) > 3:
                last.backward()
            last = loss


def test_a_backward_pass_after_a_call_that_could_not_be_loaded_is_refused(capturing):
    """The load may have overwritten a part of what the backward pass reads."""
    model = made("weighted")
    batches = two_batches() * 3
    run(model, batches)
    assert replays_of(model) == 2
    loss = model(batches[0], batches[0][0].srcdata["feat"]).sum()
    loss.backward(retain_graph=True)
    edges = batches[1][0].edata
    weight = edges["weight"] = edges["weight"].clone().requires_grad_()
    with pytest.warns(UserWarning, match="'weight' requires a gradient"):
        run(model, batches[1:2])
    assert weight.grad is not None
    with pytest.raises(InvalidInputError, match="holds another call by now"):
        loss.backward()
