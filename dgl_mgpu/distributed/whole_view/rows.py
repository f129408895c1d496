"""What torch's functions do with partitioned rows: those that make each row of the same row.

They run on a rank's own rows.  So do indices, which select rows where they are.  Functions that
make numbers of all rows are in `reductions`; others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dgl_mgpu.distributed.whole_view.layout import RowLayout
from dgl_mgpu.distributed.whole_view.tensor import (
    HANDLERS,
    Handler,
    PartitionedTensor,
    align,
    layout_of,
    leaves,
    make_wrapper,
    refuse,
    select,
    spread,
    whole,
    wrap,
)

_OPERATORS = "add sub mul truediv div floordiv mod pow and or xor lshift rshift"
_PLACES = (
    torch.Tensor,
    torch,
    F,
    torch.special,
    torch.linalg,
    torch._C._nn,
    torch._C._VariableFunctions,
)


def named(names: str) -> Iterator[Any]:
    """Functions of these names, wherever torch has them, and those that work in place."""
    for name in names.split():
        for place in _PLACES:
            for spelled in (name, f"{name}_"):
                function = getattr(place, spelled, None)
                if callable(function):
                    yield function


def methods(names: str, spelled: str = "__{}__") -> Iterator[Any]:
    """Methods of tensors of these names, with something round each."""
    for name in names.split():
        method = getattr(torch.Tensor, spelled.format(name), None)
        if method is not None:
            yield method


def _attributes(names: str) -> Iterator[Any]:
    """What torch calls to read attributes of tensors."""
    return (getattr(torch.Tensor, name).__get__ for name in names.split())


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


_COPY = "it would write to a copy of the rows that were selected, not to these"


def run_on_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Any, broadcasts: bool = False
) -> Any:
    """Run a function on this rank's rows.

    ``rows`` are those of its arguments that have rows, as its result has; the others are the same
    on every rank.  If it broadcasts, only those have rows that have all dimensions of the result.
    """
    layout = layout_of(rows)
    if layout is None:
        refuse(func, "rows would not be the first dimension of its result")
    operands = {id(tensor): tensor.dim() for tensor in leaves(rows)}
    if sum(id(tensor) in operands for tensor in leaves([args, kwargs])) > len(list(leaves(rows))):
        refuse(func, "the same rows are an operand that all rows meet, as in x @ x.T")
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

    if _writes(func):
        target = args[0]
        if not isinstance(target, PartitionedTensor):
            return func(*whole(args), **whole(kwargs))
        if target.row_layout is not layout:
            refuse(func, "it writes rows to others")
        if target.is_copy:
            refuse(func, _COPY)
    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    return args[0] if _writes(func) else wrap(result, layout, func)


@handles(
    [
        *named(
            """
            abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
            arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
            bitwise_or bitwise_right_shift bitwise_xor bfloat16 bool byte ceil celu clamp clamp_max
            clamp_min clip clone complex conj contiguous copysign cos cosh deg2rad detach digamma
            div divide double elu eq erf erfc erfinv exp exp2 expit expm1 fix float float_power
            floor floor_divide fmax fmin fmod frac full_like gelu greater greater_equal gt ge half
            hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 imag int isclose isfinite
            isinf isnan isneginf isposinf isreal ldexp leaky_relu le lerp less less_equal
            lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
            logical_xor logit logsigmoid long lt masked_fill maximum minimum mish mul multiply
            nan_to_num ne neg negative nextafter not_equal ones_like positive pow rad2deg real
            reciprocal relu relu6 remainder round rsqrt rsub selu sgn short sigmoid sign
            signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan
            tanh tanhshrink threshold to true_divide trunc type_as xlogy zero zeros_like empty_like
            fill copy
            """
        ),
        torch.where,
        torch.Tensor.where,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.type,
        *_attributes("data"),
        *methods(_OPERATORS),
        *methods(_OPERATORS, "__r{}__"),
        *methods(_OPERATORS, "__i{}__"),
        *methods("eq ne lt le gt ge neg pos abs invert"),
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
handles(named("linear prelu group_norm"))(of_first)
handles(named("isin"))(rows_first(1, "elements"))
handles(named("gru_cell rnn_tanh_cell rnn_relu_cell"))(rows_first(2, "input", "hx"))
handles(named("pairwise_distance"))(rows_first(2, "x1", "x2"))
handles(named("bilinear"))(rows_first(2, "input1", "input2"))


@handles(named("embedding"))
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
    if bound.get("max_norm") is not None or bound.get("scale_grad_by_freq"):
        refuse(func, "max_norm and scale_grad_by_freq look at all rows")
    return of_first(func, args, kwargs)


@handles(named("one_hot"))
def _one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, classes = args[0], argument_of(args, kwargs, 1, "num_classes", -1)
    return of_first(func, (rows, int(rows.max()) + 1 if classes < 0 else classes), {})


@handles(named("layer_norm rms_norm"))
def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args[1]) >= args[0].dim():
        refuse(func, "it normalises all rows together")
    return of_first(func, args, kwargs)


@handles([*named("matmul mm bmm mv"), torch.Tensor.__matmul__, torch.Tensor.__rmatmul__])
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.Tensor.__rmatmul__:
        func, args = torch.matmul, args[::-1]
    left, right = args
    # Where a side has two dimensions or less, its first one is no dimension of the other's.
    rows = [side for side in args if side.dim() > 2]
    if left.dim() == 2 and isinstance(left, PartitionedTensor) and right.dim() <= 2:
        rows = [left]
    return run_on_rows(func, args, kwargs, rows)


@handles(named("einsum"))
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


# -- along dimensions ------------------------------------------------------------------------------


def dims_of(rows: torch.Tensor, dim: Any) -> list[int]:
    """Dimensions as numbers from 0; all of them for None."""
    if dim is None or dim == () or dim == []:
        return list(range(rows.dim()))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    most = max(rows.dim(), 1)
    if any(not -most <= d < most for d in dims):  # torch's own words
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got"
            f" {dim})"
        )
    return [d % most for d in dims]


def argument_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any
) -> Any:
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else default


def on_all_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a function for which the rows are brought together on every rank."""
    return func(*whole(args), **whole(kwargs))


def along(
    place: int, default: Any = None, over_rows: Handler | None = None, name: str = "dim"
) -> Handler:
    """Of a function with a dimension as an argument, and another handler along the rows."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else kwargs.get("input")
        rows = next(leaves(first))
        if 0 not in dims_of(rows, argument_of(args, kwargs, place, name, default)):
            return run_on_rows(func, args, kwargs, [*args, kwargs], broadcasts=True)
        if over_rows is None:
            refuse(func, "it works along the rows, which are on several ranks")
        return over_rows(func, args, kwargs)

    return handler


handles(named("softmax log_softmax softmin logsumexp cumsum cumprod cummax"))(
    along(1, over_rows=on_all_rows)
)
handles(named("normalize cosine_similarity"))(along(2, 1))
handles(named("argmax argmin argsort msort median nanmedian mode unique_consecutive"))(
    along(1, over_rows=on_all_rows)
)
handles(named("sort"))(along(1, -1, on_all_rows))
handles(named("topk kthvalue"))(along(2, -1, on_all_rows))
handles(named("gather scatter scatter_add"))(along(1, 0))
handles(named("glu"))(along(1, -1))
handles(named("narrow select"))(along(1, 0))
handles(named("chunk split tensor_split"))(along(2, 0))
handles(named("unbind"))(along(1, 0, on_all_rows))
handles(named("repeat_interleave"))(along(2))


@handles(named("flip"))
def _flip(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dims = kwargs["dims"] if "dims" in kwargs else args[1] if len(args) == 2 else args[1:]
    return along(1, name="dims")(func, (args[0], dims), {})


@handles(named("stack"))
def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces = args[0] if args else kwargs["tensors"]
    if argument_of(args, kwargs, 1, "dim", 0) in (0, -pieces[0].dim() - 1):
        return StackedRows(run_on_rows(func, (pieces, 1), {}, pieces))
    return run_on_rows(func, args, kwargs, pieces)


_REDUCTIONS = set(named("sum mean max min amax amin var std norm prod logsumexp"))


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
        dim = argument_of(args, kwargs, 1, "dim", None)
        if func is torch.Tensor.squeeze and dim == 0 and rows.shape[1] == 1:
            return rows[:, 0]
        if func in _REDUCTIONS and len(args) < 3 and dims_of(args[0], dim) == [0]:
            return func(rows, **{**kwargs, "dim": 1})
        refuse(func, "rows are not the first dimension of what torch.stack made")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse(func, "it is called where torch does not ask whose rows they are")


@handles(named("cat concat concatenate hstack"))
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces = args[0] if args else kwargs["tensors"]
    dim = argument_of(args, kwargs, 1, "dim", 0)
    if func is torch.hstack:
        dim = 1 if pieces[0].dim() > 1 else 0
    if 0 not in dims_of(pieces[0], dim):
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


@handles(named("lstm gru"))
def _recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of sequences, one a row; the states between have the rows in their second dimension."""
    rows, states, *_, dropout, train, _, batch_first = args
    if not isinstance(rows, PartitionedTensor) or not batch_first or (dropout and train):
        refuse(func, "sequences are not its first dimension, or it draws random numbers")
    layout = rows.row_layout

    def of_rank(state: torch.Tensor) -> torch.Tensor:
        if isinstance(state, StackedRows):
            return align(state.rows, layout).transpose(0, 1).contiguous()
        return spread(state)[:, layout.positions]

    is_one = isinstance(states, torch.Tensor)
    states = of_rank(states) if is_one else list(map(of_rank, states))
    weights = list(map(spread, args[2]))
    out, *after = func(rows.local, states, weights, *args[3:], **kwargs)
    stacked = [StackedRows(wrap(state.transpose(0, 1), layout, func)) for state in after]
    return (wrap(out, layout, func), *stacked)


# -- shapes ----------------------------------------------------------------------------------------


@handles(named("view reshape view_as reshape_as flatten unflatten"))
def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    if not isinstance(rows, PartitionedTensor):  # of the other one only the shape matters
        return rows.reshape(tuple(args[1].shape))
    layout: RowLayout | None = rows.row_layout
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        return run_on_rows(func, args, kwargs, [rows])
    # What the shape would be is found without any memory.
    meta = [
        torch.empty(x.shape, device="meta") if x is not rows and isinstance(x, torch.Tensor) else x
        for x in args[1:]
    ]
    shape = func(torch.empty(rows.shape, device="meta"), *meta, **kwargs).shape
    if not shape or shape[0] != len(rows):
        layout = _blocks(rows.row_layout, rows.shape, shape)
    if layout is None:
        refuse(func, f"of shape {tuple(rows.shape)} it makes {tuple(shape)}, and rows do not stay")
    return PartitionedTensor(rows.local.reshape(layout.count, *shape[1:]), layout)


def _blocks(layout: RowLayout, before: torch.Size, after: torch.Size) -> RowLayout | None:
    """The layout of rows that are cut into some each, or put together again."""
    if not after or not before[0] or not after[0]:
        return None
    if after[0] % before[0] == 0 and before[1:].numel() % max(after[1:].numel(), 1) == 0:
        return layout.in_blocks(after[0] // before[0])
    if layout.made_of is not None and layout.made_of[0].length == after[0]:
        return layout.made_of[0]
    return None


@handles(named("unsqueeze"))
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], argument_of(args, kwargs, 1, "dim", 0)
    if dim in (0, -rows.dim() - 1):
        refuse(func, "rows would not be its first dimension")
    return of_first(func, args, kwargs)


@handles(named("squeeze"))
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], argument_of(args, kwargs, 1, "dim", None)
    dims = [d for d in dims_of(rows, dim) if d and rows.shape[d] == 1]
    if len(rows) == 1 and 0 in dims_of(rows, dim):
        refuse(func, "rows would not be its first dimension")
    return wrap(rows.local.squeeze(dims), rows.row_layout, func)


@handles([*named("transpose permute swapaxes swapdims movedim moveaxis"), *_attributes("mT")])
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    marked = torch.empty(rows.dim() * (1,), device="meta").as_strided(
        (1,) * rows.dim(), tuple(range(1, rows.dim() + 1))
    )
    if func(marked, *args[1:], **kwargs).stride(0) != 1:
        refuse(func, "rows would not be its first dimension")
    return of_first(func, args, kwargs)


@handles(named("expand expand_as repeat tile broadcast_to"))
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, sizes = args[0], args[1:]
    if not isinstance(rows, PartitionedTensor):  # of the other one only the shape matters
        return rows.expand(tuple(sizes[0].shape))
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


@handles(named("pad"))
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(argument_of(args, kwargs, 1, "pad", ())) >= 2 * args[0].dim():
        refuse(func, "it adds rows")
    return of_first(func, args, kwargs)


# -- what a tensor says of itself ------------------------------------------------------------------


@handles(
    [
        *named("size dim ndimension numel nelement is_floating_point is_complex is_signed"),
        *named("element_size get_device stride is_same_size result_type"),
        *_attributes("shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_sparse"),
        *_attributes("is_meta is_quantized is_nested is_mkldnn is_xpu is_mps"),
        *methods("len hash"),
    ]
)
def _of_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@handles(
    [
        *_attributes("requires_grad is_leaf grad_fn _version _backward_hooks"),
        *named("is_contiguous is_inference is_pinned is_conj is_neg record_stream"),
        # These are the same on every rank.
        *named("new_zeros new_ones new_full new_empty new_tensor"),
    ]
)
def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


# -- indices ---------------------------------------------------------------------------------------


def _is_all(index: Any, length: int) -> bool:
    return isinstance(index, slice) and index.indices(length) == (0, length, 1)


@handles([torch.Tensor.__getitem__])
def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, index = args
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(rows, PartitionedTensor):
        layout = layout_of(index)
        if (first is not index and rest) or first.dtype in (torch.bool, torch.uint8):
            return func(rows, whole(index))
        assert layout is not None  # else this is torch's own
        # A row for each number, as of a table of weights.
        return PartitionedTensor(spread(rows)[first.local], layout)
    rest = [_as_index(i) for i in rest]
    if first is Ellipsis and sum(i is not None for i in rest) < rows.dim():
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
    found = wrap(picked, layout, func)
    found.is_copy = isinstance(first, slice)
    return found


def _as_index(index: Any) -> Any:
    """Numbers in any form as a tensor."""
    if isinstance(index, np.ndarray | list | tuple | range):
        return torch.as_tensor(list(index) if isinstance(index, range) else index)
    return index


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
    if rows.is_copy:
        refuse(func, _COPY)
    first, *rest = index if isinstance(index, tuple) else (index,)
    rest = [_as_index(i) for i in rest]
    if isinstance(first, torch.Tensor) and first.dtype == torch.bool and first.dim() > 1:
        refuse(func, "a mask of several dimensions does not select rows")
    chosen: Any = slice(None)
    layout = rows.row_layout
    if _is_all(first, len(rows)):
        pass
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
    is_all = isinstance(chosen, slice)  # then further indices are of columns
    rows.local[(chosen, *rest) if is_all else _pairs(rest, layout, chosen)] = value
    return None


@handles(named("index_select"))
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    dim = argument_of(args, kwargs, 1, "dim", 0)
    index = argument_of(args, kwargs, 2, "index", None)
    if 0 in dims_of(rows, dim):
        return rows[index]
    return of_first(func, args, kwargs)


# -- random numbers --------------------------------------------------------------------------------


def _generator(device: torch.device) -> torch.Generator:
    """A source of random numbers for one call, of this rank alone.

    It follows on torch's numbers for the CPU, which are the same on every rank: after
    ``torch.manual_seed`` the numbers are the same again.
    """
    seed = int(torch.randint(2**62, ()))
    rank = torch.distributed.get_rank()
    return torch.Generator(device).manual_seed((seed + rank * 0x632BE59BD9B4E019) % 2**63)


@handles(named("dropout"))
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0] if args else kwargs["input"]
    p = argument_of(args, kwargs, 1, "p", 0.5)
    if not argument_of(args, kwargs, 2, "training", True) or p == 0:
        return rows
    local = rows.local
    kept = torch.empty(local.shape, dtype=torch.bool, device=local.device)
    kept.bernoulli_(1 - p, generator=_generator(local.device))
    dropped = local * kept * (1 / (1 - p) if p < 1 else 0.0)
    if argument_of(args, kwargs, 3, "inplace", False):
        local.copy_(dropped)
        return rows
    return PartitionedTensor(dropped, rows.row_layout)


@handles(
    getattr(torch.Tensor, name)
    for name in ["bernoulli_", "uniform_", "normal_", "exponential_", "random_", "log_normal_"]
)
def _random_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    local = args[0].local
    func(local, *args[1:], **{**kwargs, "generator": _generator(local.device)})
    return args[0]


@handles(named("rand_like randn_like"))
def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = torch.empty_like(args[0], **kwargs)
    return rows.uniform_() if func is torch.rand_like else rows.normal_()
