"""Append-unique on CUDA; see ``kernels/unique.cu`` and ``kernels/node_table.cuh``."""

from __future__ import annotations

import functools

import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.unique.op import append_unique_op
from dgl_mgpu.ops.workspace import Workspace, beginning, workspace

_THREADS = 512
#: Nodes in the largest hash table whose entries 32-bit integers number.
_MOST_NODES = (1 << 32) // 3


@functools.cache
def _kernel(dtype: torch.dtype, ample: bool) -> Kernel:
    types = f"{c_type(dtype)}, {'true' if ample else 'false'}"
    return Kernel("unique.cu", f"dgl_mgpu::append_unique<{types}>", cooperative=True)


def table_size(nodes: int, dtype: torch.dtype) -> tuple[int, int]:
    """Number of words of a hash table for a number of nodes, and the mask of its slots.

    Raises
    ------
    InvalidInputError
        If there are too many.
    """
    if nodes > _MOST_NODES:
        raise InvalidInputError(
            "number the nodes of a sample on a GPU",
            f"there may be {nodes} nodes, and its hash table has room for {_MOST_NODES}",
            "pass fewer seeds and neighbors",
        )
    slots = 1 << max(4, (nodes + nodes // 2).bit_length())
    return slots * (1 if dtype == torch.int32 else 2), slots - 1


def hash_table(space: Workspace, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Allocate a hash table for a number of nodes: its words, and the mask of its slots."""
    words, mask = table_size(nodes, dtype)
    return space.buffer("table", words, torch.int64), mask


def number_nodes(
    space: Workspace,
    nodes: torch.Tensor,
    num_seeds: int,
    exact_seeds: torch.Tensor | None,
    local: torch.Tensor,
    exact_neighbors: torch.Tensor | None,
    room: int,
    report: torch.Tensor,
) -> None:
    """Launch the numbering of ``local``, with a hash table for at most this many nodes.

    See ``kernels/unique.cu``.
    """
    device, num_neighbors = nodes.device, local.numel()
    kernel = _kernel(nodes.dtype, exact_neighbors is not None)
    blocks = gpu.blocks_within(kernel, _THREADS, -(-num_neighbors // _THREADS), device)
    table, mask = hash_table(space, room, nodes.dtype)
    kernel(
        blocks,
        _THREADS,
        num_seeds,
        exact_seeds,
        num_neighbors,
        exact_neighbors,
        nodes,
        local,
        space.buffer("slots", num_neighbors, torch.int32),
        space.buffer("numbers", num_neighbors, torch.int32),
        space.control(blocks),
        table,
        mask,
        report,
        device=device,
    )


def raise_at_negative_id(id: int, place: int) -> None:
    """Raise IdOutOfRangeError for an id among seeds and neighbors."""
    raise IdOutOfRangeError(
        "append unique neighbors to seeds",
        f"there is the negative id {id} at place {place} of seeds and neighbors",
        "pass non-negative ids",
    )


@append_unique_op.cuda
def _append_unique(
    seeds: torch.Tensor, neighbors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    device, num_seeds, space = seeds.device, seeds.numel(), workspace(seeds.device)
    gpu.raise_faults(device, wait=False)
    total = num_seeds + neighbors.numel()
    table_size(total, seeds.dtype)  # raises before anything is allocated
    nodes = torch.empty(total, dtype=seeds.dtype, device=device)
    room, full = total, True
    while full:
        nodes[:num_seeds] = seeds
        local = neighbors.clone()
        with space.lock:
            number_nodes(space, nodes, num_seeds, None, local, None, room, space.report)
            bad, overflow, count = space.read_report(3)
        full = overflow == 0 and bad < 0
        room *= 4
    if bad >= 0:
        id = seeds[bad] if bad < num_seeds else neighbors[bad - num_seeds]
        raise_at_negative_id(int(id), bad)
    return beginning(nodes, count), local
