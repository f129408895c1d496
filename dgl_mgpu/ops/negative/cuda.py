"""Negative sampling on CUDA; see ``kernels/negative.cu``."""

from __future__ import annotations

import torch

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, blocks_within, c_type, position_pointer, position_type
from dgl_mgpu.ops.negative.op import negative_destinations_op, negative_edges_op
from dgl_mgpu.ops.view import TieredGraph
from dgl_mgpu.ops.workspace import workspace

_THREADS = 256
_WARPS = _THREADS // 32


@negative_edges_op.cuda
def _negative_edges(
    graph: TieredGraph, num: int, replace: bool, exclude_self_loops: bool, max_tries: int, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    device = tiers.device
    gpu.raise_faults(device, wait=False)
    kernel = Kernel(
        "negative.cu",
        f"dgl_mgpu::negative_edges<{c_type(idtype)}, {position_type(position)}>",
        cooperative=True,
    )
    space = workspace(device)
    blocks = blocks_within(kernel, _THREADS, -(-num // _WARPS), device)
    drawn = torch.empty((2, num), dtype=idtype, device=device)
    slots = torch.empty(num, dtype=torch.int64, device=device)
    # Not one piece: what an operator returns must not share memory.
    sources, destinations = (torch.empty(num, dtype=idtype, device=device) for _ in range(2))
    table_slots = 0 if replace else 1 << (2 * num).bit_length()
    with space.lock:
        kernel(
            blocks,
            _THREADS,
            num,
            tiers,
            len(tiers),
            pointers,
            position_pointer(position),
            num_rows,
            num_cols,
            exclude_self_loops,
            max_tries,
            key,
            drawn[0],
            drawn[1],
            slots,
            None if replace else space.buffer("table", table_slots, torch.int64),
            table_slots - 1,
            space.control(blocks),
            sources,
            destinations,
            space.report,
            device=device,
        )
        (total,) = space.read_report(1)
    return sources[:total], destinations[:total]


@negative_destinations_op.cuda
def _negative_destinations(
    sources: torch.Tensor,
    numbers: torch.Tensor,
    graph: TieredGraph,
    k: int,
    avoid_existing: bool,
    exclude_self_loops: bool,
    max_tries: int,
    key: int,
) -> torch.Tensor:
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    device, count = sources.device, sources.numel()
    gpu.raise_faults(device, wait=False)
    destinations = torch.empty((count, k), dtype=idtype, device=device)
    bad = torch.full((1,), -1, dtype=torch.int64, device=device)
    kernel = Kernel(
        "negative.cu",
        f"dgl_mgpu::negative_destinations<{c_type(sources.dtype)}, {c_type(idtype)}, "
        f"{position_type(position)}>",
    )
    items = count * k
    kernel(
        blocks_within(kernel, _THREADS, -(-items // _WARPS), device) if items else 0,
        _THREADS,
        sources,
        count,
        numbers,
        k,
        tiers,
        len(tiers),
        pointers,
        position_pointer(position),
        num_rows,
        num_cols,
        avoid_existing,
        exclude_self_loops,
        max_tries,
        key,
        destinations,
        bad,
        device=device,
    )
    report = gpu.driver.host_buffer(1).copy_(bad, non_blocking=True)
    gpu.driver.synchronize(device)
    raise_at_bad_id(report.tolist(), sources, num_cols, "sample negative destinations")
    return destinations
