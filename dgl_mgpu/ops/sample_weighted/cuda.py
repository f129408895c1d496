"""Neighbour sampling by edge weight and by time on CUDA; see ``kernels/sample_weighted.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type, position_pointer, position_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.sample_weighted.op import raise_bad_weight

_THREADS = 512
#: Of what the kernels know of a seed, ``Found``: the int64 in it, and which is ``positive``.
_FOUND, _POSITIVE = 5, 3
#: Of what they tell the host, ``Control``: the int64 in it, and how many of them are read.
_CONTROL, _REPORTED = 7, 4
#: Edges that a block looks at together, bytes of a candidate, and memory for those of all blocks.
_EDGES_TOGETHER, _CANDIDATE, _MOST_CANDIDATES = 1024, 16, 1 << 28
#: Nodes checked at a time by ``check_weights``, to bound its memory.
_CHECKED_TOGETHER = 1 << 20
#: ``Stored``: how a kernel knows a type of weights or times.
_STORED = {
    torch.bool: 1,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.float32: 4,
    torch.float64: 5,
}


def _values(view: list[torch.Tensor], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Scalars of edges as a kernel takes them."""
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


@dataclass(frozen=True)
class _Weighed:
    """What the second kernel leaves behind."""

    found: torch.Tensor
    hubs: torch.Tensor
    indptr: torch.Tensor
    control: torch.Tensor
    total: int
    #: Whether a block needs more room for candidates than its shared memory.
    far: bool


def _weigh(
    seeds: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    idtype: torch.dtype,
    weights: tuple[Any, ...],
    fanout: int,
    replace: bool,
) -> _Weighed:
    where, count = seeds.device, seeds.numel()
    found = torch.empty((count, _FOUND), dtype=torch.int64, device=where)
    hubs = torch.empty(count, dtype=torch.int64, device=where)
    indptr = torch.zeros(count + 1, dtype=torch.int64, device=where)
    control = torch.zeros(_CONTROL, dtype=torch.int64, device=where)
    types = f"{c_type(seeds.dtype)}, {c_type(idtype)}, {position_type(position)}"
    find = Kernel("sample_weighted.cu", f"dgl_mgpu::find<{types}>")
    find(
        blocks_within(find, _THREADS, -(-count // _THREADS), where),
        _THREADS,
        *(seeds, count, tiers, len(tiers), pointers, position_pointer(position), num_rows),
        *(fanout, replace, found, hubs, control),
        device=where,
    )
    weigh = Kernel("sample_weighted.cu", f"dgl_mgpu::weigh<{c_type(idtype)}>")
    weigh(
        blocks_within(weigh, _THREADS, -(-32 * count // _THREADS), where),
        _THREADS,
        *(count, pointers, *weights, fanout, replace, found, hubs, indptr, control),
        device=where,
    )
    indptr.cumsum_(0)
    report = device.driver.host_buffer(_REPORTED)
    report.copy_(control[:_REPORTED], non_blocking=True)
    device.driver.synchronize(where)
    bad_seed, bad_weight, total, far = report.tolist()
    if bad_seed:
        raise_at_bad_id([count - bad_seed], seeds, num_rows, "look up the edges of nodes")
    if bad_weight:
        place = count - bad_weight
        raise_bad_weight(int(seeds[place]), -2 - int(found[place, _POSITIVE]))
    return _Weighed(found, hubs, indptr, control, total, bool(far))


@torch.library.impl(library, "sample_neighbors_weighted", "CUDA")
def _sample_neighbors_weighted(
    seeds: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    idtype: torch.dtype,
    weights: list[torch.Tensor],
    weight_dtype: torch.dtype | None,
    times: list[torch.Tensor],
    time_dtype: torch.dtype | None,
    until: torch.Tensor | None,
    fanout: int,
    replace: bool,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where, count = seeds.device, seeds.numel()
    device.raise_faults(where, wait=False)
    replace = replace and fanout >= 0
    values = (*_values(weights, weight_dtype), *_values(times, time_dtype), until)
    weighed = _weigh(seeds, tiers, pointers, position, num_rows, idtype, values, fanout, replace)
    neighbors = torch.empty(weighed.total, dtype=idtype, device=where)
    eids = torch.empty_like(neighbors)
    if weighed.total == 0:
        return weighed.indptr, neighbors, eids
    fill = Kernel("sample_weighted.cu", f"dgl_mgpu::fill<{c_type(seeds.dtype)}, {c_type(idtype)}>")
    blocks = blocks_within(fill, _THREADS, -(-32 * count // _THREADS), where)
    far, room = None, 0
    if weighed.far:
        room = 1 << (fanout + _EDGES_TOGETHER - 1).bit_length()
        blocks = max(1, min(blocks, _MOST_CANDIDATES // (room * _CANDIDATE)))
        far = torch.empty(blocks * room * _CANDIDATE, dtype=torch.uint8, device=where)
    fill(
        blocks,
        _THREADS,
        *(seeds, count, pointers, *values, fanout, replace, key, weighed.found, weighed.hubs),
        *(weighed.indptr, far, room, neighbors, eids, weighed.control),
        device=where,
    )
    return weighed.indptr, neighbors, eids


@torch.library.impl(library, "check_weights", "CUDA")
def _check_weights(
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    idtype: torch.dtype,
    weights: list[torch.Tensor],
    weight_dtype: torch.dtype,
) -> None:
    values = (*_values(weights, weight_dtype), *_values([], None), None)
    for start in range(0, num_rows, _CHECKED_TOGETHER):
        stop = min(start + _CHECKED_TOGETHER, num_rows)
        nodes = torch.arange(start, stop, device=tiers.device)
        _weigh(nodes, tiers, pointers, position, num_rows, idtype, values, -1, False)
