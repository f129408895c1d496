"""Graph indexes from arrays and from each other: C functions of DGL's ``heterograph_index``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dgl import backend as F
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.graph_index import GraphIndex
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import FORMATS, Compressed, Coo, Relation, Unnumbered


def _single(relation: Relation, num_ntypes: int, formats: Sequence[str]) -> TensorIndex:
    wanted = {name.strip() for name in formats}
    if not wanted.issuperset(FORMATS):
        relation = relation.with_formats(tuple(name for name in FORMATS if name in wanted))
    return TensorIndex.single(relation, num_ntypes)


def create_from_coo(
    num_ntypes: int,
    num_src: int,
    num_dst: int,
    row: torch.Tensor,
    col: torch.Tensor,
    formats: Sequence[str],
    row_sorted: bool,
    col_sorted: bool,
) -> TensorIndex:
    """An index of one relation from its edges; formats are sorted when they are made."""
    _check_ids(row, col)
    return _single(Relation(num_src, num_dst, coo=Coo(row, col)), num_ntypes, formats)


def create_from_csr(
    num_ntypes: int,
    num_src: int,
    num_dst: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    eids: torch.Tensor,
    formats: Sequence[str],
    transpose: bool,
) -> TensorIndex:
    """An index of one relation from its CSR, or with ``transpose`` from its CSC."""
    _check_ids(indptr, indices)
    rows = num_dst if transpose else num_src
    if indptr.numel() != rows + 1:
        raise InvalidCallError(
            "make a graph of a CSR or CSC",
            f"indptr has {indptr.numel()} elements, but there are {rows} nodes",
            "pass an indptr with one element more than there are nodes",
        )
    ids = as_tensor(eids)
    matrix = Compressed(indptr, indices, ids) if ids.numel() else Unnumbered(indptr, indices, None)
    held = {"csc" if transpose else "csr": matrix}
    relation = Relation(num_src, num_dst, **held)  # type: ignore[arg-type]
    return _single(relation, num_ntypes, formats)


def _check_ids(first: torch.Tensor, second: torch.Tensor) -> None:
    alike = first.device == second.device and first.dtype == second.dtype
    if not alike or first.dtype not in (torch.int32, torch.int64):
        raise InvalidCallError(
            "make a graph of two tensors of ids",
            f"one is {first.dtype} on {first.device}, and the other {second.dtype} on"
            f" {second.device}",
            "give both the same device, and int32 or int64 as dtype",
        )


def create_heterograph(
    metagraph: GraphIndex, relations: Sequence[TensorIndex], num_nodes: Any = None
) -> TensorIndex:
    """An index of several relations; without ``num_nodes`` the relations say how many there are."""
    schema = GraphSchema(metagraph)
    parts = [index.relations[0] for index in relations]
    if num_nodes is not None:
        return TensorIndex(schema, as_tensor(num_nodes).tolist(), parts)
    counts = [0] * schema.num_ntypes
    for part, (src, dst) in zip(parts, schema.ends, strict=True):
        counts[src], counts[dst] = part.num_src, part.num_dst
    return TensorIndex(schema, counts, parts)


def copy_to(index: HeteroGraphIndex, device_type: int, device_id: int) -> HeteroGraphIndex:
    """Copy an index to a device."""
    if isinstance(index, TensorIndex):
        return index.copy_to(DGLContext(device_type, device_id))
    device = F.to_backend_ctx(DGLContext(device_type, device_id))
    return TensorIndex.from_dgl(index, device)


def adjacency(
    index: TensorIndex, etype: int, transpose: bool, fmt: str
) -> Callable[[int], torch.Tensor]:
    """The arrays of a relation's matrix, by number; of COO one, rows and then columns."""
    arrays = index.adjacency_matrix_tensors(etype, transpose, fmt)[2:]
    if fmt == "coo":
        arrays = (torch.cat(arrays),)
    return arrays.__getitem__


# Attributes of an index, as functions.


def metagraph(index: TensorIndex) -> GraphIndex:
    return index.metagraph


def context(index: TensorIndex) -> DGLContext:
    return index.ctx


def dtype(index: TensorIndex) -> str:
    return index.dtype
