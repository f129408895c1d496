"""Random walks and PinSAGE's neighbour selection on CUDA; see ``kernels/walk.cu``."""

from __future__ import annotations

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.walk import op  # noqa: F401  (defines the schemas)

_THREADS = 128


def _launch(kernel: Kernel, items: int, *arguments: object, where: torch.device) -> None:
    """Launch with a thread an item."""
    blocks = blocks_within(kernel, _THREADS, -(-items // _THREADS), where) if items else 0
    kernel(blocks, _THREADS, *arguments, device=where)


def _start_walks(
    starts: torch.Tensor,
    numbers: torch.Tensor | None,
    each: int,
    tiers: list[torch.Tensor],
    pointers: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_rows: list[int],
    idtype: torch.dtype,
    stops: list[int],
    key: int,
    edges: torch.Tensor | None,
    bad: torch.Tensor,
) -> torch.Tensor:
    """Launch the walks, ``each`` of them from every start; the traces."""
    where = starts.device
    words = list(stops)
    for view_tiers, view_pointers, position in zip(tiers, pointers, positions, strict=True):
        words += [
            view_tiers.data_ptr(),
            len(view_tiers),
            view_pointers.data_ptr(),
            position.data_ptr(),
            position.element_size(),
        ]
    host_table = device.driver.host_buffer(len(words)).copy_(torch.tensor(words))
    table = host_table.to(where, non_blocking=True)
    traces = torch.empty((starts.numel() * each, len(stops) + 1), dtype=torch.int64, device=where)
    _launch(
        Kernel("walk.cu", f"dgl_mgpu::walk<{c_type(starts.dtype)}, {c_type(idtype)}>"),
        len(traces),
        starts,
        starts.numel(),
        numbers,
        each,
        table,
        len(stops),
        table[len(stops) :],
        len(tiers),
        num_rows[0],
        key,
        traces,
        edges,
        bad,
        where=where,
    )
    return traces


@torch.library.impl(library, "random_walk", "CUDA")
def _random_walk(
    starts: torch.Tensor,
    walks: torch.Tensor,
    tiers: list[torch.Tensor],
    pointers: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_rows: list[int],
    idtype: torch.dtype,
    stops: list[int],
    key: int,
    edges: torch.Tensor | None = None,
) -> torch.Tensor:
    where = starts.device
    device.raise_faults(where, wait=False)
    bad = torch.full((1,), -1, dtype=torch.int64, device=where)
    traces = _start_walks(
        starts, walks, 1, tiers, pointers, positions, num_rows, idtype, stops, key, edges, bad
    )
    report = device.driver.host_buffer(1).copy_(bad, non_blocking=True)
    device.driver.synchronize(where)
    raise_at_bad_id(report.tolist(), starts, num_rows[0], "walk")
    return traces


@torch.library.impl(library, "pinsage_neighbors", "CUDA")
def _pinsage_neighbors(
    seeds: torch.Tensor,
    tiers: list[torch.Tensor],
    pointers: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_rows: list[int],
    idtype: torch.dtype,
    stops: list[int],
    num_walks: int,
    num_neighbors: int,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where, count = seeds.device, seeds.numel()
    device.raise_faults(where, wait=False)
    # The first bad place, then indptr: what the host reads are its ends.
    control = torch.zeros(count + 2, dtype=torch.int64, device=where)
    bad, indptr = control[:1].fill_(-1), control[1:]
    traces = _start_walks(
        seeds, None, num_walks, tiers, pointers, positions, num_rows, idtype, stops, key, None, bad
    )
    visits = num_walks * (len(stops) // len(tiers))
    walked = (traces, count, num_walks, len(stops) + 1, len(tiers))
    visit_counts = torch.empty(count * visits, dtype=torch.int32, device=where)
    distinct = torch.zeros(count, dtype=torch.int64, device=where)
    _launch(
        Kernel("walk.cu", "dgl_mgpu::count_visits"),
        count * visits,
        *walked,
        visit_counts,
        distinct,
        where=where,
    )
    torch.cumsum(distinct.clamp_(max=num_neighbors), dim=0, out=indptr[1:])
    report = device.driver.host_buffer(2)
    report[:1].copy_(bad, non_blocking=True)
    report[1:].copy_(indptr[-1:], non_blocking=True)
    device.driver.synchronize(where)
    bad_place, total = report.tolist()
    raise_at_bad_id([bad_place], seeds, num_rows[0], "walk")
    neighbors = torch.empty(total, dtype=idtype, device=where)
    counts = torch.empty(total, dtype=torch.int64, device=where)
    _launch(
        Kernel("walk.cu", f"dgl_mgpu::select_visited<{c_type(idtype)}>"),
        count * visits,
        *walked,
        visit_counts,
        indptr,
        neighbors,
        counts,
        where=where,
    )
    return indptr, neighbors, counts
