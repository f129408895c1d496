"""Neighbour sampling by edge weight and by time on CUDA; see ``kernels/weighted.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type, position_pointer, position_type
from dgl_mgpu.ops.edges import LOOK_UP, HopOptions
from dgl_mgpu.ops.sample_weighted import (
    CHECKED_TOGETHER,
    Weighting,
    check_weights_op,
    raise_bad_weight,
    sample_neighbors_weighted_op,
)
from dgl_mgpu.ops.view import TieredRows
from dgl_mgpu.ops.workspace import NodePrefix

_THREADS = 512
#: Of what the kernels know of a seed, ``SeedEdges``: the int64 in it, and which is ``positive``.
_SEED_EDGES, _POSITIVE = 7, 5
#: Of what they tell each other and the host, ``Control``: the int64 in it, and which is what.
CONTROL, _TOTAL, _FAR, END = 8, 2, 3, 7
#: Edges that a block looks at together, bytes of a candidate, and memory for those of all blocks.
_EDGES_TOGETHER, _CANDIDATE, _MAX_CANDIDATES = 1024, 16, 1 << 28
#: Edges selected of a seed for which a block's shared memory has room.
MAX_PICKS = 2048 - _EDGES_TOGETHER
#: ``Stored``: how a kernel knows a type of weights or times.
_STORED = {
    torch.bool: 1,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.float32: 4,
    torch.float64: 5,
}


def edge_weights(weighting: Weighting) -> np.ndarray:
    """The kernels' struct ``EdgeWeights``: of two views of scalars, and the times of seeds.

    It has their addresses, so the tensors must be kept until the launch.
    """
    weights, weight_dtype, times, time_dtype, until = weighting
    values = (*_edge_values(weights, weight_dtype), *_edge_values(times, time_dtype))
    return gpu.struct(*values, until)


def _edge_values(view: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """The struct ``EdgeValues`` in it, of a view's tiers, pointers and position."""
    if dtype is None:
        return None, 0, None, None, 0, 0
    tiers, pointers, position = view
    return (
        tiers,
        len(tiers),
        pointers,
        position_pointer(position),
        position.element_size(),
        _STORED[dtype],
    )


class Weighed:
    """Seeds whose edges have been weighed; all results are on the device.

    ``rows`` are the topology's, ``weights`` what :func:`edge_weights` returns.  ``num_nodes`` is 0
    but for seeds that are nodes at a time (``kernels/weighted.cuh``).  ``control``, int64, shape
    (CONTROL,), has zeros, which the kernels change.
    """

    def __init__(
        self,
        seeds: NodePrefix,
        rows: TieredRows,
        idtype: torch.dtype,
        weights: np.ndarray,
        num_nodes: int,
        options: HopOptions,
        control: Tensor,
    ) -> None:
        tiers, pointers, position, num_rows = rows
        nodes, count, exact = seeds
        fanout, replace, _, sms = options
        device = nodes.device
        self._seeds, self._num_nodes, self._options = seeds, num_nodes, options
        self._pointers, self._weights, self._control = pointers, weights, control
        self.ranges = torch.empty((count, _SEED_EDGES), dtype=torch.int64, device=device)
        self._hubs = torch.empty(count, dtype=torch.int64, device=device)
        self.indptr = torch.zeros(count + 1, dtype=torch.int64, device=device)
        types = f"{c_type(nodes.dtype)}, {c_type(idtype)}, {position_type(position)}"
        find = Kernel("weigh.cu", f"dgl_mgpu::find<{types}>")
        find(
            blocks_within(find, _THREADS, -(-count // _THREADS), device, sms), _THREADS,
            *(*seeds, num_nodes, tiers, len(tiers), pointers),
            *(position_pointer(position), num_rows, fanout, replace, self.ranges, self._hubs),
            control, device=device,
        )  # fmt: skip
        weigh = Kernel("weigh.cu", f"dgl_mgpu::weigh<{c_type(idtype)}>")
        weigh(
            blocks_within(weigh, _THREADS, -(-32 * count // _THREADS), device, sms), _THREADS,
            *(count, exact, pointers, weights, fanout, replace, self.ranges, self._hubs),
            *(self.indptr, control), device=device,
        )  # fmt: skip
        self.indptr.cumsum_(0)

    def fill(
        self, far: bool, num_sources: int, start: Tensor | None, neighbors: Tensor, eids: Tensor
    ) -> None:
        """Write the samples, from the place on that ``start`` has.

        ``far`` says whether a block may need more room for candidates than its shared memory.
        """
        nodes, count, _ = self._seeds
        fanout, replace, key, sms = self._options
        device = nodes.device
        types = ", ".join(map(c_type, (nodes.dtype, eids.dtype, neighbors.dtype)))
        fill = Kernel("sample_weighted.cu", f"dgl_mgpu::fill<{types}>")
        blocks = blocks_within(fill, _THREADS, -(-32 * count // _THREADS), device, sms)
        candidates, capacity = None, 0
        if far:
            capacity = 1 << (fanout + _EDGES_TOGETHER - 1).bit_length()
            blocks = max(1, min(blocks, _MAX_CANDIDATES // (capacity * _CANDIDATE)))
            candidates = torch.empty(
                blocks * capacity * _CANDIDATE, dtype=torch.uint8, device=device
            )
        fill(
            blocks, _THREADS, *self._seeds, self._num_nodes, num_sources, self._pointers,
            self._weights, fanout, replace, key, self.ranges, self._hubs, self.indptr, candidates,
            capacity, start, neighbors, eids, self._control, device=device,
        )  # fmt: skip


def raise_if_bad(
    control: list[int], count: int, seeds: Tensor, num_rows: int, ranges: Tensor
) -> None:
    """Raise the error that the kernels reported for one of at most ``count`` seeds."""
    bad_seed, bad_weight = control[:2]
    if bad_seed:
        raise_at_bad_id([count - bad_seed], seeds, num_rows, LOOK_UP)
    if bad_weight:
        place = count - bad_weight
        raise_bad_weight(int(seeds[place]), -2 - int(ranges[place, _POSITIVE]))


def _weigh(
    seeds: Tensor, rows: TieredRows, idtype: torch.dtype, weights: np.ndarray, options: HopOptions
) -> tuple[Weighed, int, bool]:
    """Weigh the edges of seeds, and wait for the size of the sample and whether it is far."""
    device, count = seeds.device, seeds.numel()
    control = torch.zeros(CONTROL, dtype=torch.int64, device=device)
    weighed = Weighed(NodePrefix(seeds, count), rows, idtype, weights, 0, options, control)
    report = gpu.driver.host_buffer(CONTROL)
    report.copy_(control, non_blocking=True)
    gpu.driver.synchronize(device)
    words = report.tolist()
    raise_if_bad(words, count, seeds, rows.num_rows, weighed.ranges)
    return weighed, words[_TOTAL], bool(words[_FAR])


@sample_neighbors_weighted_op.cuda
def _sample_neighbors_weighted(
    seeds: Tensor,
    rows: TieredRows,
    idtype: torch.dtype,
    weighting: Weighting,
    options: HopOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    gpu.raise_faults(seeds.device, wait=False)
    options = options._replace(replace=options.replace and options.fanout >= 0)
    values = edge_weights(weighting)
    weighed, total, far = _weigh(seeds, rows, idtype, values, options)
    neighbors = torch.empty(total, dtype=idtype, device=seeds.device)
    eids = torch.empty_like(neighbors)
    if total:
        weighed.fill(far, 0, None, neighbors, eids)
    return weighed.indptr, neighbors, eids


@check_weights_op.cuda
def _check_weights(
    rows: TieredRows, idtype: torch.dtype, weights: Sequence[Tensor], weight_dtype: torch.dtype
) -> None:
    device = rows.tiers.device
    gpu.raise_faults(device, wait=False)
    values = edge_weights(Weighting(weights, weight_dtype, [], None, None))
    for start in range(0, rows.num_rows, CHECKED_TOGETHER):
        stop = min(start + CHECKED_TOGETHER, rows.num_rows)
        nodes = torch.arange(start, stop, device=device)
        _weigh(nodes, rows, idtype, values, HopOptions(-1, False, 0))
