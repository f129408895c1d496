"""Gradients that have none themselves: right as they are, and never silently without a part."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.autograd import differentiable_once


class _Product(torch.autograd.Function):
    """``x * w``, and ``x`` by the way."""

    @staticmethod
    def forward(ctx, x, w, unused):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @differentiable_once("a product", "multiply by hand")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x, None


@pytest.fixture
def given() -> list[torch.Tensor]:
    return [torch.tensor([float(n), 3.0], requires_grad=True) for n in (2, 5)]


def _first(x: torch.Tensor, w: torch.Tensor, power: int) -> tuple[torch.Tensor, ...]:
    out = _Product.apply(x, w, None) ** power
    return torch.autograd.grad(out.sum(), [x, w], create_graph=True)


@pytest.mark.parametrize("power", [1, 2])
def test_first_derivatives_are_right_whether_there_is_a_graph_or_not(given, power):
    x, w = given
    expected = torch.autograd.grad(((x * w) ** power).sum(), given)
    out = _Product.apply(x, w, None) ** power
    for found in (_first(x, w, power), torch.autograd.grad(out.sum(), given)):
        for gradient, wanted in zip(found, expected, strict=True):
            assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("power", [1, 2])
def test_a_second_derivative_is_refused_whatever_it_is_of(given, power):
    """Also of ``x``'s gradient by ``w``, where torch's own goes past its error."""
    for of in range(2):
        for by in ([given[0]], [given[1]], None):
            total = _first(*given, power)[of].sum()
            with pytest.raises(InvalidInputError, match=r"differentiate a product twice.*by hand"):
                total.backward() if by is None else torch.autograd.grad(total, by)


def test_others_may_have_a_second_derivative_beside_it(given):
    x, w = given
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    _first(x, w, 1)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x)


def test_gradients_may_be_changed_in_place(given):
    x, w = given
    of_x, of_w = _first(x, w, 1)
    of_x.mul_(2)
    assert torch.equal(of_x, 2 * w)
    assert torch.equal(of_w, x)


def test_what_depends_on_nothing_has_no_graph():
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    (first,) = torch.autograd.grad(_Product.apply(x, w, None).sum(), x, create_graph=True)
    assert torch.equal(first, w)
