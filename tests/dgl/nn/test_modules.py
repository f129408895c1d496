"""Modules of `dgl.nn.pytorch` on graphs made of tensors against the same on DGL's C++.

Results, gradients of inputs and parameters, and parameters over some optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import pytest
import torch
from torch import nn

from dgl_mgpu.graph.index import TensorIndex
from tests.dgl.nn.cases import CASES, seed, tensors
from tests.dgl.nn.devices import NO_GPU, SameDraws, close, floats, on_tensors

STEPS = 3
#: Device, dtype of features and of ids.
SETTINGS = [
    pytest.param("cpu", torch.float64, torch.int64, id="cpu"),
    pytest.param("cpu", torch.float32, torch.int32, id="cpu-int32"),
    pytest.param("cuda", torch.float32, torch.int64, marks=NO_GPU, id="cuda"),
    pytest.param("cuda", torch.float32, torch.int32, marks=NO_GPU, id="cuda-int32"),
]


def train(
    name: str, device: str, dtype: torch.dtype, idtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """What some steps of gradient descent with one module give, by name."""
    case = CASES[name]
    with floats(dtype), SameDraws():
        module, inputs = case.make(device, idtype)
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        leaves = [x for x in tensors(inputs) if x.requires_grad] + parameters
        optimizer = torch.optim.SGD(leaves, lr=0.05) if leaves else None
        for step in range(STEPS):
            seed()
            results = list(tensors(case.call(module, *inputs)))
            for i, result in enumerate(results):
                yield f"result {i} of step {step}", result.detach().clone()
            if optimizer is None:
                continue
            optimizer.zero_grad()
            differentiable = [result for result in results if result.requires_grad]
            if differentiable:
                sum(map(loss, differentiable)).backward()
            for i, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    yield f"gradient {i} of step {step}", leaf.grad.to_dense().clone()
            optimizer.step()
        if isinstance(module, nn.Module):
            for key, value in module.state_dict().items():
                yield key, value.clone()


def loss(result: torch.Tensor) -> torch.Tensor:
    """A number that depends on every element in its own way."""
    factors = torch.arange(1, 1 + result.numel(), dtype=result.dtype, device=result.device).cos()
    return (result.flatten() * factors).sum()


@pytest.mark.parametrize(("device", "dtype", "idtype"), SETTINGS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*lambda_max is not provided")
def test_trains_as_on_dgls_own_graphs(name, device, dtype, idtype):
    dtype = dtype if CASES[name].doubles else torch.float32
    spread = CASES[name].spread if device == "cuda" else 1.0
    expected = list(train(name, "cpu", dtype, idtype))
    with on_tensors(device):
        found = list(train(name, device, dtype, idtype))
    assert [what for what, _ in found] == [what for what, _ in expected]
    assert found
    for (what, result), (_, wanted) in zip(found, expected, strict=True):
        close(result, wanted, what, dtype, spread)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.graph])
def test_graphs_of_the_table_are_made_of_tensors(name):
    with on_tensors("cpu"):
        _, (graph, *_) = CASES[name].make()
    assert isinstance(graph._graph, TensorIndex)


def test_losses_tell_results_apart():
    result: Any = torch.rand(5)
    assert loss(result) != loss(result.flip(0))
