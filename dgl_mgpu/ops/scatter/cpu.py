"""Writing and training rows of tables over tiers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dgl_mgpu.ops import parallel
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.memory import (
    Rows,
    copy_bytes,
    inline,
    kernel,
    load_id,
    position_of,
    rows_argument,
    segment_of,
)
from dgl_mgpu.ops.scatter import op
from dgl_mgpu.ops.scatter.op import WrittenRows, scatter_rows_op, update_rows_op

#: Bytes written per range of ids that are worth waking a thread for.
_GRAIN_BYTES = 64 * 1024

_SGD, _ADAGRAD = op.SGD.number, op.Adagrad.number


@inline
def _find(row: int, rows: Rows, shares: np.ndarray) -> tuple[int, int]:
    """Segment of a row, or -1 where it is not this rank's to write; and its row there."""
    tiers, _, position, position_width = rows
    segment, local = segment_of(position_of(row, position, position_width), tiers)
    if len(shares) != 0:
        writers, place = shares[segment, 0], shares[segment, 1]
        if writers == 0 or (writers != 1 and local % writers != place):
            return -1, local
    return segment, local


@kernel
def _scatter(
    begin: int,
    end: int,
    ids: int,
    id_width: int,
    order: np.ndarray,
    source: int,
    rows: Rows,
    shares: np.ndarray,
    row_bytes: int,
) -> None:
    """Write the rows of the sorted ids ``[begin, end)`` that are the last of their id."""
    for place in range(begin, end):
        row = load_id(ids, place, id_width)
        if place + 1 < len(order) and load_id(ids, place + 1, id_width) == row:
            continue
        segment, local = _find(row, rows, shares)
        if segment >= 0:
            target = rows[1][segment, 0] + local * row_bytes
            copy_bytes(target, source + order[place] * row_bytes, row_bytes)


@kernel
def _update(
    begin: int,
    end: int,
    ids: int,
    id_width: int,
    order: np.ndarray,
    gradients: np.ndarray,
    rows: Rows,
    shares: np.ndarray,
    rule: int,
    settings: np.ndarray,
) -> None:
    """Take a step on the rows of the sorted ids ``[begin, end)`` that are the first of their id."""
    pointers = rows[1]
    tables, width = pointers.shape[1], gradients.shape[1]
    row_bytes = 4 * width
    values = np.empty((3, width), np.float32)
    param, first, second = values[0], values[1], values[2]
    total = np.empty(width, np.float32)
    for place in range(begin, end):
        row = load_id(ids, place, id_width)
        if place > 0 and load_id(ids, place - 1, id_width) == row:
            continue
        segment, local = _find(row, rows, shares)
        if segment < 0:
            continue
        total[:] = gradients[order[place]]
        other = place + 1
        while other < len(order) and load_id(ids, other, id_width) == row:
            for column in range(width):
                total[column] += gradients[order[other], column]
            other += 1
        for table in range(tables):
            address = pointers[segment, table] + local * row_bytes
            copy_bytes(values[table].ctypes.data, address, row_bytes)
        if rule == _SGD:
            for column in range(width):
                param[column] -= settings[0] * total[column]
        elif rule == _ADAGRAD:
            for column in range(width):
                gradient = total[column]
                first[column] += gradient * gradient
                ratio = gradient / (np.sqrt(first[column]) + settings[1])
                param[column] -= settings[0] * ratio
        else:
            for column in range(width):
                gradient = total[column]
                first[column] += (gradient - first[column]) * settings[1]
                second[column] += (gradient * gradient - second[column]) * settings[2]
                ratio = first[column] / (np.sqrt(second[column]) + settings[3])
                param[column] -= settings[0] * ratio
        for table in range(tables):
            address = pointers[segment, table] + local * row_bytes
            copy_bytes(address, values[table].ctypes.data, row_bytes)


def _sorted(ids: torch.Tensor, num_rows: int, asked: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in ascending order and the place of each, equal ones as they came."""
    found, order = torch.sort(ids, stable=True)
    if found[0] < 0 or found[-1] >= num_rows:
        bad = (ids < 0) | (ids >= num_rows)
        raise_at_bad_id([int(bad.nonzero()[0])], ids, num_rows, asked)
    return found, order


@scatter_rows_op.cpu
def _scatter_rows(ids: torch.Tensor, rows: torch.Tensor, table: WrittenRows) -> None:
    tiers, pointers, position, shares, num_rows = table
    count = ids.numel()
    if count == 0:
        return
    found, order = _sorted(ids, num_rows, "write rows")
    row_bytes = rows.numel() // count * rows.element_size()
    parallel.run(
        _scatter,
        count,
        max(1, _GRAIN_BYTES // max(row_bytes, 8)),
        found.data_ptr(),
        found.element_size(),
        order.numpy(),
        rows.data_ptr(),
        rows_argument(tiers, pointers[:, None], position),
        shares.numpy(),
        row_bytes,
    )


@update_rows_op.cpu
def _update_rows(
    ids: torch.Tensor,
    gradients: torch.Tensor,
    table: WrittenRows,
    rule: int,
    settings: Sequence[float],
) -> None:
    tiers, pointers, position, shares, num_rows = table
    count = ids.numel()
    if count == 0:
        return
    found, order = _sorted(ids, num_rows, "update rows")
    parallel.run(
        _update,
        count,
        max(1, _GRAIN_BYTES // max(4 * gradients.numel() // count, 8)),
        found.data_ptr(),
        found.element_size(),
        order.numpy(),
        gradients.reshape(count, -1).numpy(),
        rows_argument(tiers, pointers, position),
        shares.numpy(),
        rule,
        np.array(settings, np.float32),
    )
