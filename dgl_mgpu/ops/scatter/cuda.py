"""Writing and training rows of tables over tiers on CUDA; see ``kernels/scatter.cu``.

What earlier calls found wrong is not raised here, as it is by other operators: ranks change rows
together, and one that did not would have other rows from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer, position_type
from dgl_mgpu.ops.scatter import op
from dgl_mgpu.ops.scatter.op import WrittenRows, scatter_rows_op, update_rows_op

_THREADS = 256
_WARPS = _THREADS // 32
_VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
_RULES = {op.SGD.number: "SGD", op.Adagrad.number: "Adagrad", op.Adam.number: "Adam"}
#: Numbers that every rule's kernel takes; the last ones are those of Adam alone.
_NUM_SETTINGS = 4


@scatter_rows_op.cuda
def _scatter_rows(ids: torch.Tensor, rows: torch.Tensor, table: WrittenRows) -> None:
    count = ids.numel()
    row_bytes = 0 if count == 0 else rows.numel() // count * rows.element_size()
    if row_bytes == 0:
        return
    vector = _VECTORS[math.gcd(row_bytes, rows.data_ptr(), 16)]
    _launch(
        f"scatter<{c_type(ids.dtype)}, {position_type(table.position)}, {vector}>",
        ids,
        rows,
        table,
        row_bytes,
    )


@update_rows_op.cuda
def _update_rows(
    ids: torch.Tensor,
    gradients: torch.Tensor,
    table: WrittenRows,
    rule: int,
    settings: Sequence[float],
) -> None:
    count = ids.numel()
    if gradients.numel() == 0:
        return
    _launch(
        f"update<{c_type(ids.dtype)}, {position_type(table.position)}, dgl_mgpu::{_RULES[rule]}>",
        ids,
        gradients,
        table,
        gradients.numel() // count,
        *settings,
        *[0.0] * (_NUM_SETTINGS - len(settings)),
    )


def _launch(
    expression: str,
    ids: torch.Tensor,
    rows: torch.Tensor,
    table: WrittenRows,
    *arguments: float,
) -> None:
    tiers, pointers, position, shares, num_rows = table
    device, count = ids.device, ids.numel()
    found, order = torch.sort(ids, stable=True)
    kernel = Kernel("scatter.cu", f"dgl_mgpu::{expression}")
    kernel(
        gpu.blocks_within(kernel, _THREADS, -(-count // _WARPS), device),
        _THREADS,
        found,
        order,
        count,
        rows,
        tiers,
        len(tiers),
        pointers,
        position_pointer(position),
        shares if len(shares) else None,
        num_rows,
        gpu.fault_record(device),
        *arguments,
        device=device,
    )
