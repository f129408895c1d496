"""Forms in which scripts call torch's functions on partitioned rows, against one process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_mgpu.distributed.whole_view import reductions, rows  # noqa: F401  of torch's functions
from dgl_mgpu.distributed.whole_view.layout import RowLayout
from dgl_mgpu.distributed.whole_view.tensor import PartitionedTensor
from dgl_mgpu.errors import InvalidInputError, PartitionedRowsError
from tests.distributed.both import random_rows, same

COUNT, WIDTH = 23, 4
_IDS, _COLUMNS = np.array([3, 20, 7, 3]), np.array([0, 3, 1, 2])


def _views(values: Tensor) -> PartitionedTensor:
    """A rank has every third row."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    positions = torch.arange(rank, len(values), size)
    return PartitionedTensor(values[positions], RowLayout(len(values), positions))


def _set_columns(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, torch.tensor([0, 2])] = 0.0
    changed[torch.arange(COUNT), torch.arange(COUNT).numpy() % WIDTH] = 5.0
    return changed.square().sum()


def _penalised(x: Tensor) -> Tensor:
    """A gradient within a loss: of sums over all rows and of what every rank has."""
    loss = F.cross_entropy(x, torch.arange(COUNT) % WIDTH) + (x**2).sum() ** 2 * 1e-3
    (gradient,) = torch.autograd.grad(loss, _weight, create_graph=True)
    return loss + gradient.pow(2).sum()


_weight = random_rows(WIDTH, WIDTH, seed=9)
_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "axis": lambda x: (x**2).sum(axis=1).mean() + x.mean(axis=1).pow(2).sum(),
    "keepdims": lambda x: (x - x.sum(0, keepdims=True)).pow(2).sum(),
    "cat along an axis": lambda x: (torch.cat([x, 2 * x], axis=1).tanh()).sum(1).pow(2).mean(),
    "arrays as indices": lambda x: x[_IDS, _COLUMNS].pow(2).sum(),
    "lists as indices": lambda x: x[[3, 20, 7], [0, 1, 2]].pow(2).sum(),
    "columns that are set": _set_columns,
    "the norm of a dead column": lambda x: F.relu(x * torch.tensor([0.0, 1, 1, 1])).norm(),
    "a standard deviation of 0": lambda x: (0 * x).std() + x.std(),
    "a mean by weights": lambda x: F.mse_loss(x, 0 * x, weight=(x.detach() > 0).double() + 1),
    "class weights and an index that is ignored": lambda x: F.cross_entropy(
        x,
        torch.where(torch.arange(COUNT) % 5 == 0, 255, torch.arange(COUNT) % WIDTH),
        weight=torch.arange(1.0, WIDTH + 1).double(),
        ignore_index=255,
    ),
    "a gradient penalty": _penalised,
}  # fmt: skip


def _same_as_one(name: str) -> None:
    values = random_rows(COUNT, WIDTH)
    results = []
    for x in (values, _views(values)):
        _weight.requires_grad_()
        result = _FORMS[name](x @ _weight)
        (gradient,) = torch.autograd.grad(result, _weight)
        results.append((result.detach(), gradient))
    for one, other in zip(*results, strict=True):
        same(other, one, name)


@pytest.mark.parametrize("name", _FORMS)
def test_forms_of_calls(ranks, name):
    ranks.run(_same_as_one, name)


def _maxima() -> None:
    values = random_rows(COUNT, WIDTH)
    values[4, 2] = torch.nan
    view = _views(values)
    assert view.max().isnan() and torch.equal(view.amax(0).isnan(), values.amax(0).isnan())
    mask = _views(values > 0)
    assert (
        mask.max() == (values > 0).max() and mask[torch.tensor([1])].max() == (values > 0)[1].max()
    )


def test_maxima_of_nan_and_of_masks(ranks):
    ranks.run(_maxima)


_REFUSED = {
    "products of rows with each other": lambda x: torch.einsum("nd,md->nm", x, x),
    "linear": lambda x: F.linear(x, x),
    "writing to some rows": lambda x: x[:3].zero_(),
    "setting some rows": lambda x: x[:3].__setitem__(0, 1.0),
    "flip": lambda x: x.flip(1, 0),
}


def _refused(name: str) -> None:
    with pytest.raises(PartitionedRowsError):
        _REFUSED[name](_views(random_rows(COUNT, WIDTH)))


@pytest.mark.parametrize("name", _REFUSED)
def test_what_would_be_wrong_is_refused(ranks, name):
    ranks.run(_refused, name)


def _other_ids() -> None:
    view = _views(random_rows(COUNT, WIDTH))
    ids = torch.arange(5) + torch.distributed.get_rank()
    with pytest.raises(InvalidInputError, match="ranks have different masks or ids"):
        view[ids]


def test_ids_that_differ_over_ranks_are_refused(ranks):
    ranks.run(_other_ids)
