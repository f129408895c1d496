"""The functions of GraphBolt's C++ library: what is called as ``torch.ops.graphbolt.…``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph, load_from_shared_memory
from dgl_mgpu.dgl.graphbolt.keys import keys
from dgl_mgpu.dgl.graphbolt.picking import check_rows, index_select
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.pinning.gpu_cache import GPUCache
from dgl_mgpu.ops import append_unique


def set_max_uva_threads(count: int) -> None:
    """Accept a limit that kernels have no use for: they share a GPU by multiprocessors."""


def isin(elements: Tensor, test_elements: Tensor) -> Tensor:
    """Whether each element is among others."""
    return torch.isin(elements, test_elements)


def expand_indptr(
    indptr: Tensor,
    dtype: torch.dtype,
    node_ids: Tensor | None = None,
    output_size: int | None = None,
) -> Tensor:
    """The row of each element of a CSC matrix, or the id that a row has."""
    if node_ids is None:
        node_ids = torch.arange(len(indptr) - 1, dtype=dtype, device=indptr.device)
    lengths = indptr.diff()
    return node_ids.to(dtype).repeat_interleave(lengths, output_size=output_size)


def index_select_csc(
    indptr: Tensor, indices: Tensor, nodes: Tensor, output_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a CSC matrix, or of anything else that lies as its elements do.

    Returns
    -------
    indptr : Tensor, shape (n + 1,)
        Where the elements of each row begin in what follows.
    elements : Tensor
    """
    check_rows(nodes, len(indptr) - 1, "select rows of a CSC matrix")
    first = index_select(indptr, nodes)
    lengths = index_select(indptr, nodes + 1) - first
    begin = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(indptr.dtype)
    places = torch.arange(
        int(begin[-1]) if output_size is None else output_size, device=begin.device
    )
    places += (first - begin[:-1]).repeat_interleave(lengths, output_size=len(places))
    return begin, index_select(indices, places)


def unique_and_compact(
    src_ids: Tensor, dst_ids: Tensor, unique_dst_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Number nodes: destinations first, then the other sources.

    These are in the order in which they come, on a GPU in that of their ids: as in GraphBolt.

    Returns
    -------
    unique_ids : Tensor
        The id of each number.
    compacted_src_ids, compacted_dst_ids : Tensor
        The numbers of sources and of destinations.

    Raises
    ------
    InvalidInputError
        If a destination is not in ``unique_dst_ids``.
    """
    dtype = src_ids.dtype
    is_served = dtype in (torch.int32, torch.int64)
    ids = [it if is_served else it.long() for it in (src_ids, dst_ids, unique_dst_ids)]
    unique, numbers = append_unique(ids[2], torch.cat(ids[:2]))
    if unique.is_cuda:
        unique, numbers = _in_order_of_ids(unique, numbers, len(unique_dst_ids))
    src, dst = numbers.split([len(src_ids), len(dst_ids)])
    if len(dst) and bool((dst >= len(unique_dst_ids)).any()):
        wrong = dst_ids[(dst >= len(unique_dst_ids)).nonzero()[0, 0]]
        raise InvalidInputError(
            "compact nodes",
            f"destination {int(wrong)} is not in unique_dst_ids",
            "pass every destination once in unique_dst_ids",
        )
    return unique.to(dtype), src.to(dtype), dst.to(dtype)


def _in_order_of_ids(unique: Tensor, numbers: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Ids and numbers, of which those from ``first`` on become those of ascending ids."""
    ids, order = unique[first:].sort()
    renumbered = torch.arange(len(unique), dtype=numbers.dtype, device=numbers.device)
    renumbered[order + first] = renumbered[first:].clone()
    return torch.cat([unique[:first], ids]), renumbered[numbers.long()]


class _GPUCache:
    """Rows of a feature in GPU memory, by key: torch's tensors in and out."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = tuple(shape[1:]), dtype
        self._cache = GPUCache(shape[0], math.prod(self._shape))

    def query(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the places of those that are missing, and their keys."""
        rows, places, missing = self._cache.query(ids)
        return rows.to(self._dtype).view(-1, *self._shape), places, missing

    def replace(self, ids: Tensor, values: Tensor) -> None:
        """Keep rows, in the place of those that were used least recently."""
        self._cache.replace(ids, values.flatten(1))


#: In place of ``torch.ops.graphbolt``.
OPERATORS: Any = SimpleNamespace(
    set_seed=keys.set_seed,
    set_max_uva_threads=set_max_uva_threads,
    isin=isin,
    index_select=index_select,
    index_select_csc=index_select_csc,
    expand_indptr=expand_indptr,
    unique_and_compact=unique_and_compact,
    fused_csc_sampling_graph=FusedCSCSamplingGraph,
    load_from_shared_memory=load_from_shared_memory,
    gpu_cache=_GPUCache,
)
