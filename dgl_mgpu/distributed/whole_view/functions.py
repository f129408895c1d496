"""What torch's functions do with partitioned rows, by the kind of function.

A function that makes each row of the same row of its operands runs on a rank's own rows.  One that
makes numbers of all rows is put together of all ranks' results, and these are the same on every
rank.  Of few numbers, and where order matters, all rows are gathered.  Others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ReduceOp
from torch.nn import _reduction

from dgl_mgpu.distributed.whole_view.layout import RowLayout, Sum, all_reduce
from dgl_mgpu.distributed.whole_view.tensor import (
    HANDLERS,
    Handler,
    PartitionedTensor,
    align,
    ids_of,
    layout_of,
    leaves,
    make_wrapper,
    num_elements,
    refuse,
    select,
    spread,
    whole,
    wrap,
)

_PLACES = (torch.Tensor, torch, F, torch.special, torch._C._nn, torch._C._VariableFunctions)


def _named(names: str) -> Iterator[Any]:
    """Functions of these names, wherever torch has them, and those that work in place."""
    for name in names.split():
        for place in _PLACES:
            for spelled in (name, f"{name}_"):
                function = getattr(place, spelled, None)
                if callable(function):
                    yield function


def handles(functions: Iterable[Any]) -> Callable[[Handler], Handler]:
    """Decorates what torch's functions are with partitioned rows."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _writes(func: Any) -> bool:
    name: str = func.__name__
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return is_operator or (name.endswith("_") and not name.endswith("__"))


# -- row by row ------------------------------------------------------------------------------------


def run_on_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Any, broadcasts: bool = False
) -> Any:
    """Run a function on this rank's rows.

    ``rows`` are those of its arguments that have rows, as its result has; the others are the same
    on every rank.  If it broadcasts, only those have rows that have all dimensions of the result.
    """
    layout = layout_of(rows)
    operands = {id(tensor): tensor.dim() for tensor in leaves(rows)}
    dim = max(operands.values(), default=0)

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([local(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return value
        is_partitioned = isinstance(value, PartitionedTensor)
        has_rows = id(value) in operands and value.dim() and (not broadcasts or value.dim() == dim)
        if has_rows and len(value) == layout.length:
            return align(value, layout)
        if is_partitioned or (has_rows and not (broadcasts and len(value) == 1)):
            refuse(func, "its operands do not have the same rows")
        return spread(value)

    if layout is None:
        refuse(func, "rows would not be the first dimension of its result")
    if _writes(func):
        target = args[0]
        if not isinstance(target, PartitionedTensor) or target.row_layout is not layout:
            refuse(func, "it writes rows of a partitioned graph to a tensor that is not")
        func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
        return target
    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    return wrap(result, layout, func)


@handles(
    [
        *_named(
            """
            abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
            arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
            bitwise_or bitwise_right_shift bitwise_xor bfloat16 bool byte ceil celu clamp clamp_max
            clamp_min clip clone complex conj contiguous copysign cos cosh deg2rad detach digamma
            div divide double elu eq erf erfc erfinv exp exp2 expit expm1 fix float float_power
            floor floor_divide fmax fmin fmod frac full_like gelu greater greater_equal gt ge half
            hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 imag int isclose isfinite
            isin isinf isnan isneginf isposinf isreal ldexp leaky_relu le lerp less less_equal
            lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
            logical_xor logit logsigmoid long lt masked_fill maximum minimum mish mul multiply
            nan_to_num ne neg negative nextafter not_equal ones_like positive pow rad2deg real
            reciprocal relu relu6 remainder rrelu_eval round rsqrt rsub selu sgn short sigmoid sign
            signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan
            tanh tanhshrink threshold to true_divide trunc type_as xlogy zero zeros_like empty_like
            fill copy
            """
        ),
        torch.where,
        torch.Tensor.where,
        torch.Tensor.data.__get__,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.type,
        *(
            getattr(torch.Tensor, f"__{sign}{name}__")
            for name in (
                "add sub mul truediv div floordiv mod pow and or xor lshift rshift eq ne lt le gt "
                "ge neg pos abs invert"
            ).split()
            for sign in ("", "r", "i")
            if hasattr(torch.Tensor, f"__{sign}{name}__")
        ),
    ]
)
def _element_by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in (torch.where, torch.Tensor.where) and len(args) + len(kwargs) == 1:
        return func(whole(args[0]))  # the places of what is true
    if func is torch.Tensor.type and not (args[1:] or kwargs):
        return args[0].local.type()
    if func in (torch.Tensor.to, torch.Tensor.type_as):  # of the other tensor only the kind matters
        kind = [a.local if isinstance(a, PartitionedTensor) else a for a in args]
        if not isinstance(args[0], PartitionedTensor):
            return func(*kind, **kwargs)
        return wrap(func(*kind, **kwargs), args[0].row_layout, func)
    return run_on_rows(func, args, kwargs, [*args, kwargs], broadcasts=True)


def rows_first(count: int, *names: str) -> Handler:
    """Of a function whose first operands, or those of some names, have rows."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = [*args[:count], *(kwargs[name] for name in names if name in kwargs)]
        return run_on_rows(func, args, kwargs, rows)

    return handler


#: Of what is made of rows and of weights for all of them.
of_first = rows_first(1, "input")
handles(
    [
        *_named("linear embedding one_hot prelu group_norm"),
        torch.nn.functional.linear,
    ]
)(of_first)
handles(_named("gru_cell rnn_tanh_cell rnn_relu_cell"))(rows_first(2, "input", "hx"))
handles(_named("cosine_similarity pairwise_distance bilinear"))(rows_first(2, "x1", "x2"))


@handles(_named("layer_norm rms_norm"))
def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args[1]) >= args[0].dim():
        refuse(func, "it normalises all rows together")
    return of_first(func, args, kwargs)


@handles([*_named("matmul mm bmm mv"), torch.Tensor.__matmul__, torch.Tensor.__rmatmul__])
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.Tensor.__rmatmul__:
        func, args = torch.matmul, args[::-1]
    left, right = args
    # Where a side has two dimensions or less, its first one is no dimension of the other's.
    rows = [side for side in args if side.dim() > 2]
    if left.dim() == 2 and isinstance(left, PartitionedTensor) and right.dim() <= 2:
        rows = [left]
    return run_on_rows(func, args, kwargs, rows)


@handles(_named("einsum"))
def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, operands = args[0].replace(" ", ""), args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, arrow, output = equation.partition("->")
    rows = [x for x, of in zip(operands, inputs.split(","), strict=True) if of[0] == output[:1]]
    elsewhere = any(output[:1] in of[1:] for of in inputs.split(","))
    if not arrow or "." in equation or elsewhere or not all(x.dim() == rows[0].dim() for x in rows):
        refuse(func, f"{equation!r} does not keep its first letter first")
    return run_on_rows(func, (equation, *operands), kwargs, rows)


# -- along dimensions -------------------------------------------------------------------------------


def _dims(rows: torch.Tensor, dim: Any) -> list[int]:
    """Dimensions as numbers from 0; all of them for None."""
    if dim is None or dim == () or dim == []:
        return list(range(rows.dim()))
    return [d % max(rows.dim(), 1) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any
) -> Any:
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else default


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a function for which the rows are brought together on every rank."""
    return func(*whole(args), **whole(kwargs))


def _along(
    place: int, default: Any = None, over_rows: Handler | None = None, name: str = "dim"
) -> Handler:
    """Of a function with a dimension as an argument, and another handler along the rows."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else kwargs.get("input")
        rows = next(leaves(first))
        if 0 not in _dims(rows, _argument(args, kwargs, place, name, default)):
            return run_on_rows(func, args, kwargs, [*args, kwargs], broadcasts=True)
        if over_rows is None:
            refuse(func, "it works along the rows, which are on several ranks")
        return over_rows(func, args, kwargs)

    return handler


handles(_named("softmax log_softmax softmin logsumexp cumsum cumprod cummax"))(
    _along(1, over_rows=_gathered)
)
handles(_named("normalize"))(_along(2, 1))
handles(_named("argmax argmin argsort msort median nanmedian mode unique_consecutive"))(
    _along(1, over_rows=_gathered)
)
handles(_named("sort"))(_along(1, -1, _gathered))
handles(_named("topk kthvalue"))(_along(2, -1, _gathered))
handles(_named("gather take_along_dim scatter scatter_add glu narrow select index_add"))(
    _along(1, -1)
)
handles(_named("chunk split tensor_split unbind"))(_along(2, 0))
handles([torch.Tensor.unbind, torch.unbind])(_along(1, 0))
handles(_named("repeat_interleave"))(_along(2, 0))
handles(_named("flip roll"))(_along(1, 0))


@handles(_named("stack"))
def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces = args[0] if args else kwargs["tensors"]
    if _argument(args, kwargs, 1, "dim", 0) in (0, -pieces[0].dim() - 1):
        return StackedRows(run_on_rows(func, (pieces, 1), {}, pieces))
    return run_on_rows(func, args, kwargs, pieces)


_REDUCTIONS = set(_named("sum mean max min amax amin var std norm prod logsumexp"))


class StackedRows(torch.Tensor):
    """Partitioned tensors behind one another, as ``torch.stack`` makes them, to be reduced to one.

    Attributes
    ----------
    rows : PartitionedTensor
        The same with its first two dimensions swapped.
    """

    rows: PartitionedTensor

    @staticmethod
    def __new__(cls, rows: PartitionedTensor) -> StackedRows:
        shape = rows.shape[1], rows.shape[0], *rows.shape[2:]
        self = make_wrapper(cls, shape, dtype=rows.dtype, device=rows.device)
        self.rows = rows
        return self

    def __init__(self, rows: PartitionedTensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if HANDLERS.get(func) is _of_wrapper:
            return _of_wrapper(func, args, kwargs)
        rows = args[0].rows
        if func is torch.Tensor.__iter__:
            return iter(rows.unbind(1))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], int):
            return rows[:, args[1]]
        dim = _argument(args, kwargs, 1, "dim", None)
        if func in _REDUCTIONS and len(args) < 3 and _dims(args[0], dim) == [0]:
            return func(rows, **{**kwargs, "dim": 1})
        refuse(func, "rows are not the first dimension of what torch.stack made")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(func, "it is called where torch does not ask whose rows they are")


@handles(_named("cat concat concatenate hstack"))
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces = args[0] if args else kwargs["tensors"]
    dim = _argument(args, kwargs, 1, "dim", 0)
    if func is torch.hstack:
        dim = 1 if pieces[0].dim() > 1 else 0
    if 0 not in _dims(pieces[0], dim):
        return run_on_rows(func, args, kwargs, pieces)
    # Each piece's rows stay where they are; of one that is everywhere, the first rank's do.
    local, positions, length = [], [], 0
    for piece in pieces:
        if not isinstance(piece, PartitionedTensor):
            piece = PartitionedTensor(*_dealt_out(piece))
        local.append(piece.local)
        positions.append(piece.row_layout.positions + length)
        length += len(piece)
    return PartitionedTensor(torch.cat(local), RowLayout(length, torch.cat(positions)))


def _dealt_out(rows: torch.Tensor) -> tuple[torch.Tensor, RowLayout]:
    """A range a rank, of rows that every rank has."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    first, last = len(rows) * rank // size, len(rows) * (rank + 1) // size
    positions = torch.arange(first, last, device=rows.device)
    return spread(rows)[first:last], RowLayout(len(rows), positions)


# -- shapes ------------------------------------------------------------------------------------------


@handles(_named("view reshape view_as reshape_as flatten unflatten"))
def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    layout = rows.row_layout
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        return run_on_rows(func, args, kwargs, [rows])
    # What the shape would be is found without any memory.
    meta = [torch.empty(x.shape, device="meta") if x is not rows and isinstance(x, torch.Tensor)
            else x for x in args[1:]]
    shape = func(torch.empty(rows.shape, device="meta"), *meta, **kwargs).shape
    if not shape or shape[0] != len(rows):
        layout = _blocks(layout, rows.shape, shape)
    if layout is None:
        refuse(func, f"of shape {tuple(rows.shape)} it makes {tuple(shape)}, and rows do not stay")
    return PartitionedTensor(rows.local.reshape(layout.count, *shape[1:]), layout)


def _blocks(
    layout: RowLayout, before: torch.Size, after: torch.Size
) -> RowLayout | None:
    """The layout of rows that are cut into some each, or put together again."""
    if not after or not before[0] or not after[0]:
        return None
    if after[0] % before[0] == 0 and before[1:].numel() % max(after[1:].numel(), 1) == 0:
        return layout.in_blocks(after[0] // before[0])
    if layout.made_of is not None and layout.made_of[0].length == after[0]:
        return layout.made_of[0]
    return None


@handles(_named("unsqueeze"))
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], _argument(args, kwargs, 1, "dim", 0)
    if dim in (0, -rows.dim() - 1):
        refuse(func, "rows would not be its first dimension")
    return of_first(func, args, kwargs)


@handles(_named("squeeze"))
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], _argument(args, kwargs, 1, "dim", None)
    dims = [d for d in _dims(rows, dim) if d and rows.shape[d] == 1]
    if len(rows) == 1 and 0 in _dims(rows, dim):
        refuse(func, "rows would not be its first dimension")
    return wrap(rows.local.squeeze(dims), rows.row_layout, func)


@handles([*_named("transpose permute swapaxes swapdims movedim moveaxis"), torch.Tensor.mT.__get__])
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    marked = torch.empty(rows.dim() * (1,), device="meta").as_strided(
        (1,) * rows.dim(), tuple(range(1, rows.dim() + 1))
    )
    if func(marked, *args[1:], **kwargs).stride(0) != 1:
        refuse(func, "rows would not be its first dimension")
    return of_first(func, args, kwargs)


@handles(_named("expand expand_as repeat tile broadcast_to"))
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, sizes = args[0], args[1:]
    if not isinstance(rows, PartitionedTensor):
        rows = PartitionedTensor(align(rows, args[1].row_layout), args[1].row_layout)
    if isinstance(sizes[0], torch.Tensor):
        sizes = tuple(sizes[0].shape)
    elif not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    repeats = func.__name__ in ("repeat", "tile")
    if len(sizes) != rows.dim() or sizes[0] not in ((1,) if repeats else (-1, len(rows))):
        refuse(func, f"rows of shape {tuple(rows.shape)} would not stay the first dimension")
    if repeats:
        return wrap(rows.local.repeat(*sizes), rows.row_layout, func)
    return wrap(rows.local.expand(rows.row_layout.count, *sizes[1:]), rows.row_layout, func)


@handles(_named("pad"))
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(_argument(args, kwargs, 1, "pad", ())) >= 2 * args[0].dim():
        refuse(func, "it adds rows")
    return of_first(func, args, kwargs)


# -- numbers of all rows ------------------------------------------------------------------------------


def _reduction(reduce: Callable[..., Any]) -> Handler:
    """Of a function ``f(input, dim=None, keepdim=False, dtype=None)``."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = args[0] if args else kwargs.pop("input")
        dims = _dims(rows, _argument(args, kwargs, 1, "dim", None))
        keepdim = _argument(args, kwargs, 2, "keepdim", False)
        if kwargs.get("dtype") is not None:
            rows = rows.to(kwargs["dtype"])
        if 0 not in dims:
            return wrap(func(rows.local, dims if len(dims) > 1 else dims[0], keepdim=keepdim),
                        rows.row_layout, func)
        return reduce(rows, dims, keepdim)

    return handler


def _sum(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return Sum.apply(rows.local.sum(dims, keepdim=keepdim))


def _mean(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    if not (rows.is_floating_point() or rows.is_complex()):
        return rows.full_tensor().mean(dims, keepdim=keepdim)  # which torch refuses
    # A half type could not hold a large sum.
    local = rows.local.float() if rows.itemsize < 4 else rows.local
    total = Sum.apply(local.sum(dims, keepdim=keepdim))
    return (total / num_elements(rows, dims)).to(rows.dtype)


def _variance(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    centred = rows - _mean(rows, dims, True)
    total = _sum(centred * centred, dims, keepdim)
    return total / max(num_elements(rows, dims) - 1, 0)


handles(_named("sum"))(_reduction(_sum))
handles(_named("mean"))(_reduction(_mean))


@handles(_named("var std"))
def _spread_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1:] or kwargs:  # of many forms
        return _along(1, over_rows=_gathered)(func, args, kwargs)
    variance = _variance(args[0], _dims(args[0], None), False)
    return variance.sqrt() if func.__name__ == "std" else variance


@handles(_named("all any"))
def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op = ReduceOp.MIN if func.__name__ == "all" else ReduceOp.MAX

    def reduce(rows: PartitionedTensor, dims: list[int], keepdim: bool) -> torch.Tensor:
        return all_reduce(func(rows.local, dims, keepdim=keepdim), op)

    return _reduction(reduce)(func, args, kwargs)


@handles(_named("max min amax amin aminmax"))
def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    other = _argument(args, kwargs, 1, "other", None)
    if isinstance(other, torch.Tensor):
        return run_on_rows(func, args, kwargs, [*args, kwargs], broadcasts=True)
    rows, name = args[0], func.__name__
    dim = _argument(args, kwargs, 1, "dim", None)
    dims = _dims(rows, dim)
    if 0 not in dims:
        return of_first(func, args, kwargs)
    if rows.requires_grad or name == "aminmax" or (dim is not None and name in ("max", "min")):
        return _gathered(func, args, kwargs)  # a gradient and an index go to one row
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    highest = name.endswith("max")
    local = rows.local
    if not len(local):
        bounds = (torch.finfo if local.is_floating_point() else torch.iinfo)(local.dtype)
        worst = -torch.inf if local.is_floating_point() else bounds.min
        best = torch.inf if local.is_floating_point() else bounds.max
        local = local.new_full((1, *local.shape[1:]), worst if highest else best)
    if not len(rows):
        return _gathered(func, args, kwargs)
    reduce = torch.amax if highest else torch.amin
    op = ReduceOp.MAX if highest else ReduceOp.MIN
    return all_reduce(reduce(local, dims, keepdim=keepdim), op)


@handles(_named("norm"))
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], _argument(args, kwargs, 2, "dim", None)
    if 0 not in _dims(rows, dim):
        return of_first(func, args, kwargs)
    if _argument(args, kwargs, 1, "p", "fro") not in ("fro", 2, 2.0):
        return _gathered(func, args, kwargs)
    keepdim = _argument(args, kwargs, 3, "keepdim", False)
    return _sum(rows * rows, _dims(rows, dim), keepdim).sqrt()


@handles(_named("count_nonzero"))
def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reduction(_sum)(torch.sum, ((args[0] != 0).long(), *args[1:]), kwargs)


@handles(_named("dot"))
def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] * args[1]).sum()


# -- few numbers, or all of them -------------------------------------------------------------------

handles(
    [
        *_named(
            """
            nonzero unique bincount histc quantile equal allclose argwhere item tolist numpy
            masked_select searchsorted bucketize
            """
        ),
        *(
            getattr(torch.Tensor, f"__{name}__")
            for name in (
                "array bool float int index complex repr format iter contains reduce_ex dlpack"
            ).split()
        ),
    ]
)(_gathered)


@handles([torch.Tensor.__deepcopy__])
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach().clone()


# -- what a tensor says of itself ------------------------------------------------------------------


@handles(
    [
        *_named(
            """
            size dim ndimension numel nelement is_floating_point is_complex is_signed element_size
            get_device stride is_same_size result_type
            """
        ),
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_sparse is_meta "
                "is_quantized is_nested is_mkldnn is_xpu is_mps"
            ).split()
        ),
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
    ]
)
def _of_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@handles(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in "requires_grad is_leaf grad_fn _version _backward_hooks".split()
        ),
        *_named("is_contiguous is_inference is_pinned is_conj is_neg record_stream"),
    ]
)
def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


@handles(_named("new_zeros new_ones new_full new_empty new_tensor"))
def _everywhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


# -- indices ------------------------------------------------------------------------------------------


def _is_all(index: Any, length: int) -> bool:
    return isinstance(index, slice) and index.indices(length) == (0, length, 1)


@handles([torch.Tensor.__getitem__])
def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, index = args
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(rows, PartitionedTensor):
        layout = layout_of(index)
        if first is not index and rest or first.dtype in (torch.bool, torch.uint8):
            return func(rows, whole(index))
        # A row for each number, as of a table of weights.
        return PartitionedTensor(spread(rows)[first.local], layout)
    if first is Ellipsis and len(rest) < rows.dim():
        return wrap(rows.local[(first, *rest)], rows.row_layout, func)
    if first is None or first is Ellipsis or isinstance(first, bool):
        refuse(func, "rows would not be its first dimension")
    if _is_all(first, len(rows)):
        return wrap(rows.local[(slice(None), *rest)], rows.row_layout, func) if rest else rows
    if isinstance(first, int) or (isinstance(first, torch.Tensor) and not first.dim()):
        one = _getitem(func, (rows, ([int(first)], *rest)), kwargs)
        return one.full_tensor()[0]
    chosen, layout = select(rows.row_layout, first)
    picked = rows.local[chosen]
    if rest:
        picked = picked[_pairs(rest, layout, slice(None))]
    return wrap(picked, layout, func)


def _pairs(rest: list[Any], layout: RowLayout, every: Any) -> tuple[Any, ...]:
    """Further indices of selected rows: those with one element a row go with the rows."""
    if not any(isinstance(index, torch.Tensor | list) for index in rest):
        return (every, *rest)
    aligned = [align(i, layout) if isinstance(i, torch.Tensor) else i for i in rest]
    rows = torch.arange(layout.count, device=layout.device) if isinstance(every, slice) else every
    return (rows, *aligned)


@handles([torch.Tensor.__setitem__])
def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, index, value = args
    if not isinstance(rows, PartitionedTensor):
        return func(rows, whole(index), whole(value))
    first, *rest = index if isinstance(index, tuple) else (index,)
    if isinstance(first, torch.Tensor) and first.dtype == torch.bool and first.dim() > 1:
        refuse(func, "a mask of several dimensions does not select rows")
    if _is_all(first, len(rows)):
        chosen, layout = slice(None), rows.row_layout
    else:
        if first is None or first is Ellipsis or isinstance(first, bool):
            refuse(func, "it does not say which rows")
        chosen, layout = select(rows.row_layout, [first] if isinstance(first, int) else first)
    if isinstance(value, torch.Tensor):
        has_rows = isinstance(value, PartitionedTensor) or (
            value.dim() == rows.dim() - sum(isinstance(i, int) for i in rest)
            and len(value) == layout.length
        )
        value = align(value, layout) if has_rows else spread(value)
    rows.local[_pairs(rest, layout, chosen)] = value
    return None


@handles(_named("index_select"))
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    dim = _argument(args, kwargs, 1, "dim", 0)
    index = _argument(args, kwargs, 2, "index", None)
    if 0 in _dims(rows, dim):
        return rows[index]
    return of_first(func, args, kwargs)


# -- random numbers -----------------------------------------------------------------------------------


def _generator(device: torch.device) -> torch.Generator:
    """A source of random numbers for one call, of this rank alone.

    It follows on torch's numbers for the CPU, which are the same on every rank: after
    ``torch.manual_seed`` the numbers are the same again.
    """
    seed = int(torch.randint(2**62, ()))
    rank = torch.distributed.get_rank()
    return torch.Generator(device).manual_seed((seed + rank * 0x632BE59BD9B4E019) % 2**63)


@handles(_named("dropout"))
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0] if args else kwargs["input"]
    p = _argument(args, kwargs, 1, "p", 0.5)
    if not _argument(args, kwargs, 2, "training", True) or p == 0:
        return rows
    local = rows.local
    kept = torch.empty(local.shape, dtype=torch.bool, device=local.device)
    kept.bernoulli_(1 - p, generator=_generator(local.device))
    dropped = local * kept * (1 / (1 - p) if p < 1 else 0.0)
    if _argument(args, kwargs, 3, "inplace", False):
        local.copy_(dropped)
        return rows
    return PartitionedTensor(dropped, rows.row_layout)


@handles(
    getattr(torch.Tensor, name)
    for name in "bernoulli_ uniform_ normal_ exponential_ random_ log_normal_".split()
)
def _random_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    local = args[0].local
    func(local, *args[1:], **{**kwargs, "generator": _generator(local.device)})
    return args[0]


@handles(_named("rand_like randn_like"))
def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = torch.empty_like(args[0], **kwargs)
    return rows.uniform_() if func is torch.rand_like else rows.normal_()


# -- losses and normalisation --------------------------------------------------------------------------


@handles(
    _named(
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
        reduction = _reduction_name(*old)
    given["reduction"] = "none"
    # Weights of cross entropy are of classes; those of others are of rows, as all operands are.
    by_class = "ignore_index" in given
    operands = [given["input"], given["target"]] if by_class else list(given.values())
    each = run_on_rows(func, (), given, operands, broadcasts=not by_class)
    if reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / len(each)
    if reduction == "sum" or not by_class:
        return getattr(each, reduction)()
    return each.sum() / _weight_of(align(given["target"], each.row_layout), given, each)


def _reduction_name(*old: bool | None) -> str:
    return _reduction.legacy_get_string(*old)


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
    return all_reduce((weight[target.clamp(min=0)] * counts).sum())


@handles(_named("batch_norm"))
def _batch_norm(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rows, mean, variance = given["input"], given["running_mean"], given["running_var"]
    if not given["training"]:
        return run_on_rows(F.batch_norm, (), given, [rows])
    dims = [dim for dim in range(rows.dim()) if dim != 1]
    count = num_elements(rows, dims)
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
    return result if given["bias"] is None else result + given["bias"].view(shape)
