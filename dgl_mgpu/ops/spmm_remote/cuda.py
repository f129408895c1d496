"""Sums of rows that lie in several memories, on CUDA; see ``kernels/spmm_remote.cu``."""

from __future__ import annotations

import math

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.spmm.layout import ELEMENTS, VECTOR_BYTES, joining_blocks
from dgl_mgpu.ops.spmm_remote import op as contract
from dgl_mgpu.ops.spmm_remote.op import LocalEntries, RemoteEntries, spmm_remote_op

_WARP = 32
_JOINING_THREADS = 256


@spmm_remote_op.cuda
def _spmm_remote(
    local: LocalEntries,
    remote: RemoteEntries,
    rows: torch.Tensor,
    bases: torch.Tensor,
    starts: torch.Tensor,
    pairs: torch.Tensor,
    num_pairs: int,
    ps: int,
    dist: int,
    wpb: int,
    alignment: int,
) -> torch.Tensor:
    local_indptr, local_columns, local_weights = local
    remote_indptr, remote_columns, remote_weights = remote
    out = contract.output(local_indptr, rows)
    if out.numel() == 0:
        return out
    number = torch.float64 if rows.dtype == torch.float64 else torch.float32
    rows, width, device = rows.contiguous(), rows.shape[1], rows.device
    num_weights = 1 if local_weights is None else local_weights.shape[1]
    per_weight = width // num_weights
    vector = math.gcd(
        VECTOR_BYTES,
        alignment,
        rows.data_ptr(),
        per_weight * rows.element_size(),
    ) // rows.element_size()  # fmt: skip
    lanes = min(_WARP, 1 << (width // vector - 1).bit_length())
    tiles = -(-width // (vector * lanes))
    num_runs = -(-num_pairs // dist)
    # Of a run two parts of rows and the row that it ends in.
    room = torch.empty(
        num_runs * (8 + 2 * width * number.itemsize), dtype=torch.uint8, device=device
    )
    open_rows = room.data_ptr()
    tensors = [
        None if tensor is None else tensor.contiguous()
        for tensor in (
            pairs,
            local_indptr,
            local_columns,
            None if local_weights is None else local_weights.to(number),
            remote_indptr,
            remote_columns,
            None if remote_weights is None else remote_weights.to(number),
            rows,
            bases,
            starts,
        )
    ]
    request = gpu.struct(
        *tensors,
        out,
        open_rows + 8 * num_runs,
        open_rows,
        len(bases),
        len(out),
        num_pairs,
        num_runs,
        ps,
        dist,
        width,
        tiles,
        num_weights,
        per_weight,
    )
    types = f"{c_type(local_indptr.dtype)}, {ELEMENTS[rows.dtype]}"
    weighted = "false" if local_weights is None else "true"
    sums = Kernel(
        "spmm_remote.cu",
        f"dgl_mgpu::spmm_remote<{types}, {weighted}, {vector}, {lanes}, {wpb}>",
    )
    sums(-(-num_runs * tiles // wpb), wpb * _WARP, request, device=device)
    join = Kernel("spmm_remote.cu", f"dgl_mgpu::join_remote_parts<{types}>")
    blocks = joining_blocks(num_runs, width, _JOINING_THREADS)
    join(blocks, _JOINING_THREADS, request, device=device)
    return out
