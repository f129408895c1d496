"""Tensors whose rows are dealt out over ranks, and that look like whole ones.

A script that was written for one process sees the size of the whole tensor, and every rank runs the
same program.  `PartitionedTensor` holds this rank's rows; torch's functions on it come here
(``__torch_function__``) and work on these rows.  What is not partitioned is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.whole_view.layout import Gather, RowLayout, Selection, Spread
from dgl_mgpu.errors import InvalidInputError, PartitionedRowsError

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: What a function of torch does with partitioned rows; `functions` fills it.
HANDLERS: dict[Any, Handler] = {}

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
#: Parameters that are known to be the same on all ranks.
_matched = WeakIdKeyDictionary()


class PartitionedTensor(torch.Tensor):
    """A tensor whose rows (its first dimension) are on several ranks.

    Attributes
    ----------
    local : Tensor
        This rank's rows, with their gradients.
    row_layout : RowLayout
        Which rows of the whole tensor they are.
    """

    local: torch.Tensor
    row_layout: RowLayout
    #: Whether they are copies of rows that a script may take for a view of them.
    is_copy = False

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: RowLayout) -> PartitionedTensor:
        shape = layout.length, *local.shape[1:]
        self = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        self.row_layout = layout.on(local.device)
        return self

    def __init__(self, local: torch.Tensor, layout: RowLayout) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        # As NumPy calls them, and torch, too.
        kwargs = {_ALIASES.get(name, name): value for name, value in (kwargs or {}).items()}
        if handler is None or kwargs.get("out") is not None:
            refuse(func, "it is not known to make each row of the same row of what it is given")
        return handler(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            return PartitionedTensor(args[0].local.detach(), args[0].row_layout)
        refuse(func, "it is called where torch does not ask whose rows they are")

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank; collective."""
        return Gather.apply(self.row_layout, self.local)


def refuse(func: Any, found: str) -> NoReturn:
    """Raise for a function that cannot take partitioned rows."""
    name = resolve_name(func) or getattr(func, "__qualname__", repr(func))
    raise PartitionedRowsError(
        f"call {name} with rows of a partitioned graph",
        found,
        "call it before the graph is moved to its device; or run without --partition",
    )


# -- operands --------------------------------------------------------------------------------------


def leaves(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in lists and dictionaries too."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, Mapping):
        yield from leaves(list(values.values()))


def layout_of(values: Any) -> RowLayout | None:
    """The layout of the first partitioned tensor among arguments."""
    found = (value.row_layout for value in leaves(values) if isinstance(value, PartitionedTensor))
    return next(found, None)


def align(rows: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """This rank's rows by a layout, of a tensor with all rows, partitioned or not."""
    if isinstance(rows, PartitionedTensor):
        if rows.row_layout is layout or rows.row_layout.same_as(layout):
            return rows.local
        rows = rows.full_tensor()
    return spread(rows)[layout.on(rows.device).positions]


def spread(everywhere: torch.Tensor) -> torch.Tensor:
    """What every rank has, to be met by its rows: gradients are of all ranks' rows."""
    if not (everywhere.requires_grad and torch.is_grad_enabled()):
        return everywhere
    if everywhere.is_leaf:
        _require_same(everywhere)
    return Spread.apply(everywhere)


def _require_same(parameter: torch.Tensor) -> None:
    """Raise unless a parameter is the same on all ranks; it is looked at once."""
    if parameter in _matched:
        return
    _matched[parameter] = True
    if differs_over_ranks(parameter):
        raise InvalidInputError(
            "train one model on a partitioned graph",
            f"ranks have different values of a parameter of shape {tuple(parameter.shape)}",
            "initialise it by random numbers that are the same on every rank (torch.manual_seed), "
            "not by a rank's number, the time or files of one rank",
        )


def differs_over_ranks(everywhere: torch.Tensor) -> bool:
    """Whether ranks have other values of what should be the same on all; collective."""
    bits = everywhere.detach().contiguous().flatten().view(torch.uint8).long()
    mark = int((bits * (torch.arange(len(bits), device=bits.device) * 7919 % 104729 + 1)).sum())
    return len(set(Communicator.of_all_machines().all_gather((tuple(everywhere.shape), mark)))) > 1


def wrap(result: Any, layout: RowLayout, func: Any) -> Any:
    """Rows that a function made of a layout's rows, as partitioned tensors."""
    if isinstance(result, torch.Tensor):
        if result.dim() == 0 or len(result) != layout.count:
            refuse(func, f"of {layout.count} rows it makes a tensor of shape {result.shape}")
        return PartitionedTensor(result, layout)
    if isinstance(result, list | tuple):
        return type(result)([wrap(item, layout, func) for item in result])
    return result


# -- indices ---------------------------------------------------------------------------------------


def ids_of(index: Any, length: int) -> torch.Tensor:
    """The numbers of the rows that an index selects, on every rank; collective if partitioned."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(length))
    if not isinstance(index, torch.Tensor):
        index = torch.as_tensor(index)
    if isinstance(index, PartitionedTensor):
        index = index.full_tensor()
    if index.dim() != 1:
        raise PartitionedRowsError(
            f"select rows of a partitioned graph by an index of shape {tuple(index.shape)}",
            "rows stay on their ranks, and are selected by one number each",
            "index by a mask or by ids of one dimension",
        )
    if differs_over_ranks(index):
        raise InvalidInputError(
            "select rows of a partitioned graph",
            "ranks have different masks or ids",
            "draw them by torch, numpy.random or random after seeding these alike, not by a "
            "generator with a seed of each process",
        )
    if index.dtype not in (torch.bool, torch.uint8):
        return index
    if len(index) != length:
        raise InvalidInputError(
            f"select among {length} rows", f"the mask has {len(index)} elements", "pass one a row"
        )
    return index.nonzero().squeeze(1)


def select(layout: RowLayout, index: Any) -> Selection:
    """What an index selects of a layout's rows."""
    if isinstance(index, torch.Tensor) and not index.is_inference():
        return layout.select(index, lambda: ids_of(index, layout.length))
    return layout.select_ids(ids_of(index, layout.length))


def whole(values: Any) -> Any:
    """Arguments with all rows of those that are partitioned."""
    return tree_map(
        lambda value: value.full_tensor() if isinstance(value, PartitionedTensor) else value, values
    )
