"""What torch's functions do with partitioned rows: those that make numbers of all rows.

They are put together of all ranks' results, and are the same on every rank.  Of few numbers, and
where the order of rows matters, all rows are gathered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ReduceOp

from dgl_mgpu.distributed.whole_view.layout import Sum, all_reduce
from dgl_mgpu.distributed.whole_view.rows import (
    along,
    argument_of,
    dims_of,
    handles,
    methods,
    named,
    of_first,
    on_all_rows,
    run_on_rows,
)
from dgl_mgpu.distributed.whole_view.tensor import Handler, PartitionedTensor, align, wrap

# -- numbers of all rows ---------------------------------------------------------------------------


def _reduced(reduce: Callable[..., Any]) -> Handler:
    """Of a function ``f(input, dim=None, keepdim=False, dtype=None)``."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = args[0] if args else kwargs.pop("input")
        dims = dims_of(rows, argument_of(args, kwargs, 1, "dim", None))
        keepdim = argument_of(args, kwargs, 2, "keepdim", False)
        if kwargs.get("dtype") is not None:
            rows = rows.to(kwargs["dtype"])
        if 0 not in dims:
            return wrap(
                func(rows.local, dims if len(dims) > 1 else dims[0], keepdim=keepdim),
                rows.row_layout,
                func,
            )
        return reduce(rows, dims, keepdim)

    return handler


def _count(rows: torch.Tensor, dims: list[int]) -> int:
    """Of how many numbers of all ranks a reduction makes one."""
    return math.prod(rows.shape[dim] for dim in dims)


def _sum(rows: Any, dims: list[int], keepdim: bool) -> torch.Tensor:
    return Sum.apply(rows.local.sum(dims, keepdim=keepdim))


def _mean(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    if not (rows.is_floating_point() or rows.is_complex()):
        return rows.full_tensor().mean(dims, keepdim=keepdim)  # which torch refuses
    # A half type could not hold a large sum.
    local = rows.local.float() if rows.itemsize < 4 else rows.local
    total = Sum.apply(local.sum(dims, keepdim=keepdim))
    return (total / _count(rows, dims)).to(rows.dtype)


def _variance(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    centred = rows - _mean(rows, dims, True)
    total = _sum(centred * centred, dims, keepdim)
    return total / max(_count(rows, dims) - 1, 0)


handles(named("sum"))(_reduced(_sum))
handles(named("mean"))(_reduced(_mean))


@handles(named("var std"))
def _spread_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1:] or kwargs:  # of many forms
        return along(1, over_rows=on_all_rows)(func, args, kwargs)
    variance = _variance(args[0], dims_of(args[0], None), False)
    return _root(variance) if func.__name__ == "std" else variance


def _root(squares: torch.Tensor) -> torch.Tensor:
    """The square root, whose gradient is 0 at 0, as that of torch's norms is."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


@handles(named("all any"))
def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op = ReduceOp.MIN if func.__name__ == "all" else ReduceOp.MAX

    def reduce(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
        return all_reduce(func(rows.local, dims, keepdim=keepdim), op)

    return _reduced(reduce)(func, args, kwargs)


@handles(named("max min amax amin aminmax"))
def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    other = argument_of(args, kwargs, 1, "other", None)
    if isinstance(other, torch.Tensor):
        return run_on_rows(func, args, kwargs, [*args, kwargs], broadcasts=True)
    rows, name = args[0], func.__name__
    dim = argument_of(args, kwargs, 1, "dim", None)
    dims = dims_of(rows, dim)
    if 0 not in dims:
        return of_first(func, args, kwargs)
    is_boolean = rows.dtype == torch.bool
    has_index = dim is not None and name in ("max", "min")
    if rows.requires_grad or name == "aminmax" or is_boolean or has_index:
        return on_all_rows(func, args, kwargs)  # a gradient and an index go to one row
    keepdim = argument_of(args, kwargs, 2, "keepdim", False)
    highest = name.endswith("max")
    local = rows.local
    if not len(local):
        bounds = (torch.finfo if local.is_floating_point() else torch.iinfo)(local.dtype)
        worst = -torch.inf if local.is_floating_point() else bounds.min
        best = torch.inf if local.is_floating_point() else bounds.max
        local = local.new_full((1, *local.shape[1:]), worst if highest else best)
    if not len(rows):
        return on_all_rows(func, args, kwargs)
    reduce = torch.amax if highest else torch.amin
    op = ReduceOp.MAX if highest else ReduceOp.MIN
    found = all_reduce(reduce(local, dims, keepdim=keepdim), op)
    if not local.is_floating_point():
        return found
    # Ranks' extremes are compared without regard to NaN.
    of_rank = local.isnan().sum(dims, keepdim=keepdim)
    return found.masked_fill(all_reduce(of_rank) > 0, torch.nan)


@handles(named("norm vector_norm"))
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], argument_of(args, kwargs, 2, "dim", None)
    if 0 not in dims_of(rows, dim):
        return of_first(func, args, kwargs)
    order = argument_of(args, kwargs, 1, "ord" if "ord" in kwargs else "p", None)
    # Of a matrix torch.linalg has another norm by this number.
    if order not in (None, "fro") and (order != 2 or func is torch.linalg.norm):
        return on_all_rows(func, args, kwargs)
    keepdim = argument_of(args, kwargs, 3, "keepdim", False)
    return _root(_sum(rows * rows, dims_of(rows, dim), keepdim))


@handles(named("count_nonzero"))
def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reduced(_sum)(torch.sum, ((args[0] != 0).long(), *args[1:]), kwargs)


@handles(named("dot"))
def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] * args[1]).sum()


# -- few numbers, or all of them -------------------------------------------------------------------

handles(
    [
        *named("nonzero unique bincount histc quantile equal allclose argwhere item tolist numpy"),
        *named("masked_select searchsorted bucketize"),
        *methods("array bool float int index complex repr format iter contains reduce_ex dlpack"),
    ]
)(on_all_rows)


@handles([torch.Tensor.__deepcopy__])
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach().clone()


# -- losses and normalisation ----------------------------------------------------------------------


@handles(
    named(
        """
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
        binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss hinge_embedding_loss poisson_nll_loss
        gaussian_nll_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss
        """
    )
)
def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of each row, and what its ``reduction`` makes of all ranks' rows."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    old = given.pop("size_average", None), given.pop("reduce", None)
    if old != (None, None):
        reduction = torch.nn._reduction.legacy_get_string(*old)
    given["reduction"] = "none"
    # Weights of cross entropy are of classes; those of others are of rows, as all operands are.
    by_class = "ignore_index" in given
    operands = [given["input"], given["target"]] if by_class else list(given.values())
    each = run_on_rows(func, (), given, operands, broadcasts=not by_class)
    if reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / len(each)
    if reduction == "mean" and func in (F.mse_loss, F.l1_loss) and given.get("weight") is not None:
        return each.sum() / (torch.ones_like(each) * given["weight"]).sum()
    if reduction == "sum" or not by_class:
        return getattr(each, reduction)()
    return each.sum() / _weight_of(align(given["target"], each.row_layout), given, each)


def _weight_of(
    target: torch.Tensor, given: dict[str, Any], each: PartitionedTensor
) -> torch.Tensor | int:
    """What cross entropy's mean divides by: the weights of the targets that count."""
    if target.is_floating_point():
        return each.numel()
    counts = target != given["ignore_index"]
    weight = given["weight"]
    if weight is None:
        return all_reduce(counts.sum())
    return all_reduce((weight[target.masked_fill(~counts, 0)] * counts).sum())


@handles(named("batch_norm"))
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rows, mean, variance = given["input"], given["running_mean"], given["running_var"]
    if not given["training"]:
        return run_on_rows(F.batch_norm, (), given, [rows])
    dims = [dim for dim in range(rows.dim()) if dim != 1]
    dtype, rows = rows.dtype, rows.float() if rows.itemsize < 4 else rows
    count = _count(rows, dims)
    if count < 2:  # torch's own words
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {rows.shape}"
        )
    of_all = _mean(rows, dims, True)
    centred = rows - of_all
    spread_of_all = _mean(centred * centred, dims, True)
    if mean is not None:
        with torch.no_grad():
            momentum = given["momentum"]
            mean.lerp_(of_all.flatten().to(mean.dtype), momentum)
            unbiased = spread_of_all.flatten() * (count / (count - 1))
            variance.lerp_(unbiased.to(variance.dtype), momentum)
    result = centred * torch.rsqrt(spread_of_all + given["eps"])
    shape = of_all.shape
    if given["weight"] is not None:
        result = result * given["weight"].view(shape)
    if given["bias"] is not None:
        result = result + given["bias"].view(shape)
    return result.to(dtype)
