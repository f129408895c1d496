"""All hops of a mini-batch in one CUDA kernel; see ``sample_hops`` in ``kernels/sample.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dgl_mgpu.ops import device
from dgl_mgpu.ops.blocks import op  # noqa: F401  (defines the schema)
from dgl_mgpu.ops.blocks.cpu import hop_by_hop
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer
from dgl_mgpu.ops.library import library
from dgl_mgpu.ops.unique.cuda import hash_table
from dgl_mgpu.ops.workspace import workspace

_THREADS = 256
#: As many hops as the kernel has parameters for.
_MOST_HOPS = 6
#: Edges of all hops up to which room for the largest possible sample is made in advance.
_MOST_EDGES = 1 << 28

_Hops = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


@functools.cache
def _kernel(idtype: torch.dtype, position_dtype: torch.dtype) -> Kernel:
    types = f"{c_type(idtype)}, {c_type(position_dtype)}"
    return Kernel("sample.cu", f"dgl_mgpu::sample_hops<{types}>", cooperative=True)


@torch.library.impl(library, "sample_hops", "CUDA")
def _sample_hops(
    seeds: torch.Tensor,
    tiers: torch.Tensor,
    pointers: torch.Tensor,
    position: torch.Tensor,
    num_rows: int,
    num_cols: int,
    idtype: torch.dtype,
    fanouts: Sequence[int],
    replace: bool,
    keys: Sequence[int],
    sms: int = 0,
) -> _Hops:
    where, count, hops = seeds.device, seeds.numel(), len(fanouts)
    device.raise_faults(where, wait=False)
    # The most seeds and edges that each hop can have.
    most_seeds, most_edges = [count], []
    for fanout in fanouts:
        most_edges.append(most_seeds[-1] * fanout)
        most_seeds.append(min(most_seeds[-1] + most_edges[-1], count + num_cols))
    all_edges = sum(most_edges)
    if not 0 < hops <= _MOST_HOPS or min(fanouts) < 0 or all_edges > _MOST_EDGES:
        return hop_by_hop(
            seeds, tiers, pointers, position, num_rows, num_cols, idtype, fanouts, replace, keys
        )
    kernel, space = _kernel(idtype, position.dtype), workspace(where)
    blocks = device.blocks_within(kernel, _THREADS, -(-all_edges // _THREADS), where, sms)
    ids = torch.empty(most_seeds[-1] + 2 * all_edges, dtype=idtype, device=where)
    indptr = torch.empty(sum(most_seeds[:-1]) + hops, dtype=torch.int64, device=where)
    nodes = ids.data_ptr()
    sources = nodes + most_seeds[-1] * idtype.itemsize
    padding = [0] * (_MOST_HOPS - hops)
    # The last sample says more of this one than what fanouts allow, and a table that stays in the
    # cache is filled several times as fast. One that turns out too small is made larger.
    room = space.sizes.get((count, *fanouts), most_seeds[-1])
    with space.lock:
        while True:
            table, mask = hash_table(space, room, idtype)
            arguments = device.struct(
                seeds,
                count,
                tiers,
                len(tiers),
                pointers,
                position_pointer(position),
                num_rows,
                count + num_cols,
                int(replace),
                nodes,
                indptr,
                sources,
                sources + all_edges * idtype.itemsize,
                space.buffer("first", most_seeds[-2], torch.int64),
                space.buffer("degree", most_seeds[-2], torch.int64),
                space.buffer("segment", most_seeds[-2], torch.int32),
                space.buffer("slots", max(most_edges), torch.int32),
                space.buffer("numbers", max(most_edges), torch.int32),
                space.control(blocks),
                table,
                mask,
                space.report,
                hops,
                *fanouts,
                *padding,
                *keys,
                *padding,
            )
            kernel(blocks, _THREADS, arguments, device=where)
            device.driver.synchronize(where)
            bad, overflow, *sizes = space.report[: 2 + 2 * hops].tolist()
            if overflow or bad >= 0:
                break
            room *= 4
        raise_at_bad_id([bad], seeds, num_rows, "look up the edges of nodes")
        num_edges, num_nodes = sizes[0::2], [count, *sizes[1::2]]
        space.sizes[count, *fanouts] = num_nodes[-1]
    return _split(ids, indptr, most_seeds, most_edges, num_nodes, num_edges)


def _split(
    ids: torch.Tensor,
    indptr: torch.Tensor,
    most_seeds: Sequence[int],
    most_edges: Sequence[int],
    num_nodes: Sequence[int],
    num_edges: Sequence[int],
) -> _Hops:
    """The results as beginnings of the room that was made for them."""
    hops = len(num_edges)
    pieces = [num_nodes[-1], most_seeds[-1] - num_nodes[-1]]
    for found, most in zip((*num_edges, *num_edges), (*most_edges, *most_edges), strict=True):
        pieces += [found, most - found]
    nodes, *edges = ids.split_with_sizes(pieces)[::2]
    rows: list[int] = []
    for found, most in zip(num_nodes[:-1], most_seeds[:-1], strict=True):
        rows += [found + 1, most - found]
    return nodes, list(indptr.split_with_sizes(rows)[::2]), edges[:hops], edges[hops:]
