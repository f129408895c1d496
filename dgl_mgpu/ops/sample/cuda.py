"""Uniform neighbour sampling on CUDA; see ``kernels/sample.cu``."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer, position_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.sample import op  # noqa: F401  (defines the schema)
from dgl_mgpu.ops.workspace import workspace

_THREADS = 256
#: Edges up to which room for the largest possible sample is made in advance.
_MOST_EDGES = 1 << 27


@functools.cache
def _kernel(name: str, types: str) -> Kernel:
    return Kernel("sample.cu", f"dgl_mgpu::{name}<{types}>", cooperative=name != "fill_edges")


@torch.library.impl(library, "sample_neighbors", "CUDA")
def _sample_neighbors(
    seeds: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    idtype: torch.dtype,
    fanout: int,
    replace: bool,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where, count, space = seeds.device, seeds.numel(), workspace(seeds.device)
    device.raise_faults(where, wait=False)
    in_advance = 0 <= count * fanout <= _MOST_EDGES and fanout >= 0
    types = f"{c_type(seeds.dtype)}, {c_type(idtype)}, {position_type(position)}"
    kernel = _kernel("sample_hop" if in_advance else "count_edges", types)
    # A few lanes a seed.
    blocks = device.blocks_within(kernel, _THREADS, -(-8 * count // _THREADS), where)
    indptr = torch.empty(count + 1, dtype=torch.int64, device=where)
    graph = (seeds, count, tiers, len(tiers), pointers, position_pointer(position), num_rows)
    with space.lock:
        found = (
            space.buffer("first", count, torch.int64),
            space.buffer("degree", count, torch.int64),
            space.buffer("segment", count, torch.int32),
            indptr,
        )
        shared = (space.control(blocks), space.report)
        neighbors = torch.empty(count * fanout if in_advance else 0, dtype=idtype, device=where)
        eids = torch.empty_like(neighbors)
        if in_advance:
            kernel(
                blocks, _THREADS, *graph, fanout, replace, key, *found, neighbors, eids, *shared,
                device=where,
            )  # fmt: skip
        else:
            kernel(blocks, _THREADS, *graph, fanout, replace, *found, *shared, device=where)
        bad, total = space.read_report(2)
        raise_at_bad_id([bad], seeds, num_rows, "look up the edges of nodes")
        if not in_advance:
            neighbors = torch.empty(total, dtype=idtype, device=where)
            eids = torch.empty_like(neighbors)
            _kernel("fill_edges", types)(
                blocks, _THREADS, seeds, count, pointers, fanout, replace, key, *found, neighbors,
                eids, device=where,
            )  # fmt: skip
    return indptr, neighbors[:total], eids[:total]
