"""Append-unique on CUDA; see ``kernels/unique.cu`` and ``kernels/node_table.cuh``."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.ops import device
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.unique import op  # noqa: F401  (defines the schema)
from dgl_mgpu.ops.workspace import Workspace, workspace

_THREADS = 512


@functools.cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("unique.cu", f"dgl_mgpu::append_unique<{c_type(dtype)}>", cooperative=True)


def hash_table(space: Workspace, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Room for a hash table of so many nodes: its words, and the mask of its slots."""
    slots = 1 << max(4, (nodes + nodes // 2).bit_length())
    words = slots * (1 if dtype == torch.int32 else 2)
    return space.buffer("table", words, torch.int64), slots - 1


@torch.library.impl(library, "append_unique", "CUDA")
def _append_unique(
    seeds: torch.Tensor, neighbors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where, num_seeds, num_neighbors = seeds.device, seeds.numel(), neighbors.numel()
    kernel, space = _kernel(seeds.dtype), workspace(where)
    blocks = device.blocks_within(kernel, _THREADS, -(-num_neighbors // _THREADS), where)
    total = num_seeds + num_neighbors
    nodes = torch.empty(total, dtype=seeds.dtype, device=where)
    room, full = total, True
    while full:
        nodes[:num_seeds] = seeds
        local = neighbors.clone()
        with space.lock:
            table, mask = hash_table(space, room, seeds.dtype)
            kernel(
                blocks,
                _THREADS,
                num_seeds,
                num_neighbors,
                nodes,
                local,
                space.buffer("slots", num_neighbors, torch.int32),
                space.buffer("numbers", num_neighbors, torch.int32),
                space.control(blocks),
                table,
                mask,
                space.report,
                device=where,
            )
            bad, overflow, count = space.read_report(3)
        full = overflow == 0 and bad < 0
        room *= 4
    if bad >= 0:
        id = int(seeds[bad] if bad < num_seeds else neighbors[bad - num_seeds])
        raise IdOutOfRangeError(
            "append unique neighbors to seeds",
            f"the negative id {id} at place {bad} of seeds and neighbors",
            "pass non-negative ids",
        )
    return nodes[:count], local
