"""Checks of arguments that several operators share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError

ID_DTYPES = (torch.int32, torch.int64)
#: What operators compute with; half types in float32.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Bytes that a row of operands of products has less than.
MAX_ROW_BYTES = 1 << 32
_MAX_INT64 = torch.iinfo(torch.int64).max


def check_ids(ids: Tensor, action: str, device: torch.device | None = None) -> Tensor:
    """Return ``ids`` contiguous; raise InvalidInputError if they are not a vector of ids on
    ``device``."""
    if not isinstance(ids, Tensor):
        raise InvalidInputError(
            action, f"the ids are of type {type(ids).__name__}", "pass a tensor of int32 or int64"
        )
    if ids.dtype not in ID_DTYPES:
        raise InvalidInputError(
            action,
            f"the ids have dtype {ids.dtype}",
            "pass ids of dtype torch.int32 or torch.int64",
        )
    if ids.dim() != 1:
        raise InvalidInputError(
            action, f"the ids have shape {tuple(ids.shape)}", "pass a tensor of one dimension"
        )
    if device is not None and ids.device != device:
        raise InvalidInputError(
            action,
            f"the ids are on '{ids.device}', but the data is on '{device}'",
            f"move them: ids.to('{device}')",
        )
    return ids.contiguous()


def check_tensor(
    tensor: Tensor,
    name: str,
    action: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
    *,
    contiguous: bool = False,
) -> Tensor:
    """Return ``tensor``; raise InvalidInputError if it is of another dtype or shape, on another
    device, or not contiguous where it has to be."""
    if not isinstance(tensor, Tensor):
        found = f"{name} is of type {type(tensor).__name__}"
    elif (
        tensor.dtype == dtype
        and tensor.shape == shape
        and tensor.device == device
        and (not contiguous or tensor.is_contiguous())
    ):
        return tensor
    else:
        strided = "" if tensor.is_contiguous() else ", not contiguous"
        found = (
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} on"
            f" '{tensor.device}'{strided}"
        )
    wanted = f"pass {name} of shape {tuple(shape)} and dtype {dtype} on '{device}'"
    raise InvalidInputError(action, found, wanted + (", contiguous" if contiguous else ""))


_MAX_EDGES = {torch.int32: (1 << 31) - 1, torch.int64: (1 << 63) - 1}


def narrow_indptr(indptr: Tensor, num_edges: int, idtype: torch.dtype, action: str) -> Tensor:
    """Cast a hop's ``indptr`` to ``idtype``; raise InvalidInputError if it cannot count the
    edges."""
    # Not while torch compiles a graph: the number is unknown then.
    if not torch.compiler.is_compiling() and num_edges > _MAX_EDGES[idtype]:
        raise InvalidInputError(
            action,
            f"one hop has {num_edges} edges, more than {idtype} can count",
            "pass fewer seeds at a time, lower the fanouts, or make the graph with int64 ids",
        )
    return indptr.to(idtype)


def raise_at_bad_id(places: list[int], ids: Tensor, num_rows: int, action: str) -> None:
    """Raise IdOutOfRangeError for the first bad id that a kernel found, if any.

    ``places`` has, for each range of ids in order, the index of its first bad id, or -1.
    """
    for place in places:
        if place >= 0:
            raise IdOutOfRangeError(
                action,
                f"id {int(ids[place])} at place {place} is not among the {num_rows} rows",
                f"pass ids in [0, {num_rows})",
            )


def raise_at_id_outside(ids: Tensor, num_rows: int, action: str) -> None:
    """Raise IdOutOfRangeError for the first id that is not in [0, num_rows), if any."""
    outside = (ids < 0) | (ids >= num_rows)
    raise_at_bad_id(outside.nonzero()[:1, 0].tolist(), ids, num_rows, action)


def check_types(known: Collection[Any], action: str, **by_type: Mapping[Any, Any] | None) -> None:
    """Raise InvalidInputError if a mapping names a node or edge type that is not known."""
    for name, values in by_type.items():
        if unknown := [label for label in values or () if label not in known]:
            raise InvalidInputError(
                action, f"{name} names the unknown type {unknown[0]!r}", f"use one of {list(known)}"
            )


def fanout_of(fanout: int | Mapping[Any, int], etype: Any, action: str) -> int:
    """The fanout of an edge type, or InvalidInputError if it has none."""
    of_type = fanout.get(etype) if isinstance(fanout, Mapping) else fanout
    if of_type is None:
        raise InvalidInputError(
            action,
            f"there is no fanout for edge type {etype!r}",
            "give each edge type a fanout; 0 leaves it out",
        )
    return check_integer(of_type, "fanout", -1, action)


def check_integer(value: int, name: str, smallest: int, action: str) -> int:
    """Return ``value``; raise InvalidInputError if it is not an int64 of at least ``smallest``."""
    if type(value) is int and smallest <= value <= _MAX_INT64:
        return value  # the common case, without the slower check of the abstract class
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not smallest <= value <= _MAX_INT64:
        most = f" and at most {_MAX_INT64}" if is_integer and value > _MAX_INT64 else ""
        raise InvalidInputError(
            action, f"{name} is {value!r}", f"pass an integer {name} of at least {smallest}{most}"
        )
    return int(value)
