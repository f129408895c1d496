"""Products of tall matrices, against ``einsum`` in float64."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from dgl_mgpu.ops import tall
from dgl_mgpu.ops.tall import product_over_rows, tall_product

#: Rows that are fewer than a piece, some pieces, and some more.
COUNTS = (0, 1, 6, 35, 41)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall, "_LEAST_PIECE", 7)
    monkeypatch.setattr(tall, "_MOST_NUMBERS", 4 * 3 * 5 * 2)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_product_over_rows(count, heads, dtype):
    torch.manual_seed(0)
    shape = (count,) if heads is None else (count, heads)
    left, right = torch.randn(*shape, 5).to(dtype), torch.randn(*shape, 2).to(dtype)
    found = product_over_rows(left, right)
    wanted = torch.einsum("n...k,n...w->...kw", left.double(), right.double())
    assert found.dtype == dtype
    tolerances = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(found.double(), wanted, **tolerances)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("heads", [None, 3])
def test_gradients(count, heads):
    torch.manual_seed(0)
    shape = () if heads is None else (heads,)
    rows = torch.randn(count, *shape, 5, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(*shape, 5, 2, dtype=torch.float64, requires_grad=True)
    found = tall_product(rows, matrix)
    wanted = torch.einsum("n...k,...kw->n...w", rows, matrix)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    pairs = (torch.autograd.grad(it, (rows, matrix), grad) for it in (found, wanted))
    torch.testing.assert_close(*pairs)
    if count:
        assert torch.autograd.gradgradcheck(tall_product, (rows, matrix))
    # Only what is asked for.
    assert torch.autograd.grad(tall_product(rows.detach(), matrix), matrix, grad)[0].shape
    (d_rows,) = torch.autograd.grad(tall_product(rows, matrix.detach()), rows, grad)
    torch.testing.assert_close(d_rows, torch.einsum("n...w,...kw->n...k", grad, matrix))


class Noted(torch.Tensor):
    """A subclass that notes which functions of torch see it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(("heads", "name"), [(None, "matmul"), (3, "einsum")])
def test_subclasses_see_a_product_of_torchs(heads, name):
    """Partitioned rows add up the gradient of a matrix over all ranks."""
    shape = () if heads is None else (heads,)
    rows, matrix = torch.randn(4, *shape, 5), torch.randn(*shape, 5, 2)
    Noted.seen.clear()
    found = tall_product(rows.as_subclass(Noted), matrix)
    assert type(found) is Noted and any(name in it for it in Noted.seen)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), tall_product(rows, matrix))


def test_autocast_leaves_dtypes_as_they_are():
    rows = torch.randn(9, 5, requires_grad=True)
    matrix = torch.randn(5, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tall_product(rows, matrix)
    torch.testing.assert_close(found, rows @ matrix)
    found.sum().backward()
    assert rows.grad is not None and rows.grad.dtype == torch.float32
    torch.testing.assert_close(matrix.grad, rows.detach().t() @ torch.ones(9, 2))
