"""Batch normalisation over the rows that all ranks have of a partitioned graph.

Torch's modules normalise by the mean and the variance of the rows that they are given, of which
each rank has its own.  Within a module that is called with a partitioned graph they are all ranks'.
Elsewhere nothing says whether rows are a graph's: those that are as many as a graph has here raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from dgl import DGLGraph
from torch import nn
from torch.nn import functional
from torch.nn.modules import batchnorm

from dgl_mgpu.distributed.index import PartitionedRelation
from dgl_mgpu.errors import UnsupportedByPartitionError
from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.utils.modules import module_with

#: Relations that are shared by several ranks.
_relations: WeakSet[PartitionedRelation] = WeakSet()
_torchs_call = nn.Module._call_impl


class _Thread(threading.local):
    #: Whose ranks' rows are normalised together, if any's.
    index: DistributedGraphIndex | None = None


_thread = _Thread()


def normalise_over_ranks(relation: PartitionedRelation) -> None:
    """Have torch's modules normalise the rows of a relation that several ranks share."""
    _relations.add(relation)
    if nn.Module._call_impl is _call:
        return
    # Not __call__, which is replaced to capture models; forward hooks see no keyword arguments.
    nn.Module._call_impl = _call  # type: ignore[method-assign,assignment]
    batchnorm.F = module_with(functional, batch_norm=_batch_norm)  # type: ignore[attr-defined]


@contextlib.contextmanager
def rows_of_all_ranks(index: DistributedGraphIndex) -> Iterator[None]:
    """A context in which batch normalisation is over all ranks' rows; collective."""
    before, _thread.index = _thread.index, index
    try:
        yield
    finally:
        _thread.index = before


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """In place of ``nn.Module._call_impl``."""
    index = None if _thread.index is not None else _shared_index((*args, *kwargs.values()))
    if index is None:
        return _torchs_call(self, *args, **kwargs)
    with rows_of_all_ranks(index):
        return _torchs_call(self, *args, **kwargs)


def _shared_index(arguments: Iterable[Any]) -> DistributedGraphIndex | None:
    for argument in arguments:
        if isinstance(argument, DGLGraph):
            if isinstance(argument._graph, DistributedGraphIndex):
                return argument._graph
        elif isinstance(argument, (list, tuple)):
            index = _shared_index(argument)
            if index is not None:
                return index
    return None


def _batch_norm(
    rows: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None, training: bool, momentum: float,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """In place of ``torch.nn.functional.batch_norm``."""
    if training and _thread.index is not None:
        # Channels are the second dimension, or the only one.
        last = rows.movedim(1, -1)
        normalised = _normalised(
            _thread.index, last.flatten(0, -2), running_mean, running_var, weight, bias, momentum,
            eps,
        )  # fmt: skip
        return normalised.view(last.shape).movedim(-1, 1)
    if training and any(_may_be_rows_of(relation, rows) for relation in _relations):
        raise UnsupportedByPartitionError(
            f"normalise {len(rows)} rows by their own mean and variance",
            "this rank has as many of a partitioned graph, and other ranks have more of them",
            "call a module with the graph that has the batch normalisation in it, or normalise"
            " within graph.sync_batch_norm()",
        )
    return functional.batch_norm(
        rows, running_mean, running_var, weight, bias, training, momentum, eps
    )


def _may_be_rows_of(relation: PartitionedRelation, rows: torch.Tensor) -> bool:
    """Whether rows are as many as there are nodes or edges of a relation here, on its device."""
    part = relation.part
    counts = part.num_own_src, part.num_own_dst, part.relation.num_edges
    return rows.device == part.relation.device and len(rows) in counts


def _normalised(
    index: DistributedGraphIndex, rows: torch.Tensor, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    momentum: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """As ``torch.nn.functional.batch_norm`` while training, of rows of shape (n, channels)."""
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    own = torch.full((), len(rows), dtype=torch.float64, device=rows.device)
    count = index.all_gather(own).sum()
    # The host reads it only where it may be too small, which it then is on every rank.
    if len(rows) < 2 and count < 2:  # torch's own words, which a rank without rows would not have
        raise ValueError(f"Expected more than 1 value per channel when training, got {count:g}")
    mean = (index.all_gather(wide.sum(0)).sum(0) / count).to(wide.dtype)
    centred = wide - mean
    variance = (index.all_gather(centred.square().sum(0)).sum(0) / count).to(wide.dtype)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(rows.dtype)
