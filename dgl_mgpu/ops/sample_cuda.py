"""Uniform neighbour sampling on CUDA; see ``kernels/sample.cu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, buckets_of, c_type, position_pointer, position_type
from dgl_mgpu.ops.edges import HopOptions
from dgl_mgpu.ops.sample import sample_neighbors_op
from dgl_mgpu.ops.view import TieredRows
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

_THREADS = 256
#: Edges up to which the largest possible sample is allocated in advance.
_MAX_EDGES = 1 << 27


@functools.cache
def _kernel(name: str, types: str) -> Kernel:
    return Kernel("sample.cu", f"dgl_mgpu::{name}<{types}>", cooperative=name != "fill_edges")


def range_buffers(
    buffer: Callable[[str, int, torch.dtype], Tensor], count: int
) -> tuple[Tensor, ...]:
    """Buffers for the location of each seed's edges, the kernels' struct ``SeedEdges``."""
    return (
        buffer("first", count, torch.int64),
        buffer("degree", count, torch.int64),
        buffer("shift", count, torch.int64),
        buffer("segment", count, torch.int32),
    )


def seed_order(
    buffer: Callable[[str, int, torch.dtype], Tensor], count: int, num_rows: int, ordered_from: int
) -> tuple[Tensor | int, ...]:
    """Working memory for ``count`` seeds in order, the kernels' ``SeedOrder``: five words."""
    # One bucket at least, for seeds that are no nodes.
    shift, number = buckets_of(max(num_rows, 1))
    seeds, counts = buffer("order", count, torch.int32), buffer("buckets", number + 1, torch.int32)
    return seeds, shift, number, counts, ordered_from


#: The same for unordered seeds, and as a kernel parameter.
NO_ORDER = (0,) * 5
_NO_ORDER_STRUCT = gpu.struct(*NO_ORDER)


class HopOutputs(NamedTuple):
    """What a hop is written to: neighbors and edge ids from the place on that ``start`` has."""

    indptr: Tensor
    start: Tensor | None
    neighbors: Tensor
    eids: Tensor


def sample_hop(
    space: Workspace,
    seeds: NodePrefix,
    rows: TieredRows,
    options: HopOptions,
    out: HopOutputs,
    report: Tensor,
    ordered_from: int = 0,
) -> None:
    """Launch the sampling of one hop; see ``kernels/sample.cu``.

    From ``ordered_from`` seeds on, they are taken in the order of their edges' addresses; 0 for
    never.
    """
    tiers, pointers, position, num_rows = rows
    nodes, count, _ = seeds
    fanout, replace, key, sms = options
    device, ordered = nodes.device, 0 < ordered_from <= count
    types = f"{c_type(nodes.dtype)}, {c_type(out.eids.dtype)}, {position_type(position)}"
    types += f", {'true' if ordered else 'false'}"
    order = _NO_ORDER_STRUCT
    if ordered:
        order = gpu.struct(*seed_order(space.buffer, count, num_rows, ordered_from))
    kernel = _kernel("sample_hop", types)
    blocks = _blocks(kernel, count, device, sms)
    kernel(
        blocks, _THREADS, *seeds, tiers, len(tiers), pointers, position_pointer(position), num_rows,
        fanout, replace, key, *range_buffers(space.buffer, count), *out, space.control(blocks),
        report, order, device=device,
    )  # fmt: skip


def _blocks(kernel: Kernel, count: int, device: torch.device, sms: int) -> int:
    # A few lanes a seed.
    return gpu.blocks_within(kernel, _THREADS, -(-8 * count // _THREADS), device, sms)


@sample_neighbors_op.cuda
def _sample_neighbors(
    seeds: Tensor, rows: TieredRows, idtype: torch.dtype, options: HopOptions
) -> tuple[Tensor, Tensor, Tensor]:
    tiers, pointers, position, num_rows = rows
    fanout, replace, key, sms = options
    device, count, space = seeds.device, seeds.numel(), workspace(seeds.device)
    gpu.raise_faults(device, wait=False)
    indptr = torch.empty(count + 1, dtype=torch.int64, device=device)

    def new_edges(edges: int) -> tuple[Tensor, Tensor]:
        neighbors = torch.empty(edges, dtype=idtype, device=device)
        return neighbors, torch.empty_like(neighbors)

    def read_report() -> int:
        bad, total = space.read_report(2)
        raise_at_bad_id([bad], seeds, num_rows, "look up the edges of nodes")
        return total

    with space.lock:
        if fanout >= 0 and count * fanout <= _MAX_EDGES:
            try:
                neighbors, eids = new_edges(count * fanout)
            except torch.cuda.OutOfMemoryError:
                pass  # the sample itself may be much smaller
            else:
                out = HopOutputs(indptr, None, neighbors, eids)
                sample_hop(space, NodePrefix(seeds, count), rows, options, out, space.report)
                total = read_report()
                return indptr, beginning(neighbors, total), beginning(eids, total)
        types = f"{c_type(seeds.dtype)}, {c_type(idtype)}, {position_type(position)}"
        kernel = _kernel("count_edges", types)
        blocks = _blocks(kernel, count, device, sms)
        ranges = (*range_buffers(space.buffer, count), indptr)
        kernel(
            blocks, _THREADS, seeds, count, tiers, len(tiers), pointers, position_pointer(position),
            num_rows, fanout, replace, *ranges, space.control(blocks), space.report, device=device,
        )  # fmt: skip
        neighbors, eids = new_edges(read_report())
        _kernel("fill_edges", types)(
            blocks, _THREADS, seeds, count, pointers, fanout, replace, key, *ranges, neighbors,
            eids, device=device,
        )  # fmt: skip
    return indptr, neighbors, eids
