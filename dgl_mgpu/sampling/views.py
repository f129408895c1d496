"""Relations and edge features as operators take them (`dgl_mgpu.ops.view`), without a copy."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.graph.pinning.pinning import host_view, pin_memory_inplace
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.ops.device import current_stream
from dgl_mgpu.ops.view import GraphView, RowView

#: The widest load of a kernel, to which segments are aligned.
_ALIGNMENT = 16


def edges_view(relation: Relation, name: str, device: torch.device) -> GraphView:
    """A relation's edges by destination ("csc") or by source ("csr") for operators of a device.

    Kept with the relation, which is on ``device`` or in pinned memory of the host.
    """
    views = relation.kept_with(name)
    view = views.get(device)
    if view is None:
        matrix: Compressed = getattr(relation, name)()
        rows, cols = relation.num_src, relation.num_dst
        if name == "csc":
            rows, cols = cols, rows
        view = compressed_view(matrix, rows, cols, device)
        if name in relation.formats:
            views[device] = view
    return view


def compressed_view(
    matrix: Compressed, num_rows: int, num_cols: int, device: torch.device
) -> GraphView:
    """A view of a matrix in the memory of ``device`` or the host; it keeps the tensors.

    Those in the host's memory it pins: a pinned graph makes a format when it is first sampled by.
    """
    # Kernels count edges in 64 bits. Of a matrix in the host's memory the bounds of rows are copied
    # to the device: half of the places that sampling reads, for 8 bytes a node.
    indptr = _aligned(matrix.indptr.to(device, torch.int64), device)
    indices = _aligned(matrix.indices, device)
    eids = None if matrix.eids is None else _aligned(matrix.eids, device)
    owner = [
        array if array.device == device else pin_memory_inplace(array)
        for array in (indptr, indices, eids)
        if array is not None
    ]
    addresses = [indptr.data_ptr(), indices.data_ptr(), 0 if eids is None else eids.data_ptr()]
    return GraphView(
        tiers=torch.tensor([[0, num_rows, 1, 0]]).to(device),
        pointers=torch.tensor([addresses]).to(device),
        num_rows=num_rows,
        num_cols=num_cols,
        num_edges=indices.numel(),
        idtype=indices.dtype,
        position=torch.empty(0, dtype=torch.int64, device=device),
        owner=owner,
        host_share=float(indices.device != device),
    )


def _aligned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, or if kernels cannot read it as it lies, a copy on ``device``."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def scalars_view(values: torch.Tensor, device: torch.device) -> RowView:
    """A vector in the memory of ``device``, or pinned, as rows of scalars; else PinningError."""
    if values.device != device:
        return host_view(values, device)
    values = _aligned(values, device)
    stream = current_stream(device) if device.type == "cuda" else 0
    tiers, pointers, position = _scalars(values.data_ptr(), len(values), device, stream)
    return RowView(tiers, pointers, len(values), (), values.dtype, position, owner=values)


# A view consists of numbers alone: for whatever vector has these, it is the right one.
@functools.lru_cache(maxsize=256)
def _scalars(
    address: int, count: int, device: torch.device, stream: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([[0, count, 1, 0]]).to(device),
        torch.tensor([address]).to(device),
        torch.empty(0, dtype=torch.int64, device=device),
    )
