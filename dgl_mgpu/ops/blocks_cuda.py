"""All hops of a mini-batch in one CUDA kernel; see ``sample_hops`` in ``kernels/sample.cu``.

A small mini-batch takes the GPU a tenth of a millisecond, no longer than the host needs to prepare
it.  So what is the same for every batch of a size is prepared once, in a :class:`_Prepared`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.blocks import Hops, hop_by_hop, sample_hops_op
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.device import Kernel, c_type, position_pointer, position_type
from dgl_mgpu.ops.edges import LOOK_UP, HopsOptions
from dgl_mgpu.ops.padded_blocks import MAX_HOPS, PaddedHops, max_sizes, sample_hops_padded_op
from dgl_mgpu.ops.sample import NO_ORDER, range_buffers, seed_order
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.unique import hash_table, table_size
from dgl_mgpu.ops.view import TieredGraph
from dgl_mgpu.ops.workspace import Report, Workspace, cut_to_size, workspace

_THREADS = 256
#: Edges of all hops up to which room for the largest possible sample is made in advance.
_MAX_EDGES = 1 << 28
#: Places in the kernel's struct ``Hops`` of what differs from batch to batch.
_SEEDS, _NODES, _INDPTR, _SOURCES, _EIDS, _REPORT, _KEYS = 0, 9, 10, 11, 12, 22, 30


def _launch(
    idtype: torch.dtype,
    position: Tensor,
    edges: int,
    device: torch.device,
    sms: int,
    *,
    padded: bool = False,
    ordered: bool = False,
) -> tuple[Kernel, int]:
    """The kernel, and how many of its blocks to launch."""
    flags = ", ".join(str(flag).lower() for flag in (padded, ordered))
    types = f"{c_type(idtype)}, {position_type(position)}, {flags}"
    kernel = Kernel("sample.cu", f"dgl_mgpu::sample_hops<{types}>", cooperative=True)
    return kernel, gpu.blocks_within(kernel, _THREADS, -(-edges // _THREADS), device, sms)


def _scratch(
    buffer: Callable[[str, int, torch.dtype], Tensor], seeds: int, edges: int
) -> tuple[Tensor, ...]:
    """Working memory for hops of a number of seeds and edges."""
    return (
        *range_buffers(buffer, seeds),
        buffer("slots", edges, torch.int32),
        buffer("numbers", edges, torch.int32),
    )


def _arguments(
    seeds: tuple[Tensor | None, int],
    graph: TieredGraph,
    options: HopsOptions,
    outputs: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    table: tuple[Tensor, int],
    report: Tensor | None,
    fault: Tensor | None,
    order: Sequence[Tensor | int] = NO_ORDER,
) -> np.ndarray:
    """The kernel's struct ``Hops``.

    ``outputs`` are nodes, indptr, sources and edge ids; the last of ``scratch`` is the control
    block of the grid; ``order`` is the struct's ``SeedOrder``.
    """
    tiers, pointers, position, num_rows, num_cols, _ = graph
    fanouts, replace, keys, _ = options
    padding = [0] * (MAX_HOPS - len(fanouts))
    return gpu.struct(
        *seeds, tiers, len(tiers), pointers, position_pointer(position), num_rows,
        seeds[1] + num_cols, int(replace), *outputs, *scratch, *table, report, len(fanouts),
        *fanouts, *padding, *keys, *padding, fault, *order,
    )  # fmt: skip


@sample_hops_op.start
def sample_hops_async(
    seeds: Tensor, graph: TieredGraph, options: HopsOptions, ordered_from: int
) -> SampleFuture[Hops]:
    """Launch ``sample_hops`` without waiting for it."""
    tiers, pointers, position, num_rows, num_cols, idtype = graph
    fanouts, replace, keys, sms = options
    device, count = seeds.device, seeds.numel()
    gpu.raise_faults(device, wait=False)
    call = (
        tiers.data_ptr(), pointers.data_ptr(), position.data_ptr(), num_rows, num_cols, idtype,
        count, *fanouts, replace, sms, ordered_from,
    )  # fmt: skip
    space = workspace(device)
    with space.lock:
        prepared: _Prepared | None = space.prepared(call)
        if prepared is None or not prepared.is_for(tiers, pointers, position):
            prepared = _Prepared(device, count, graph, options, ordered_from)
            space.keep(call, prepared)
        one_by_one = partial(hop_by_hop, seeds, *graph, *options)
        if prepared.fits:
            try:
                batch = _BatchInFlight(prepared, space, seeds, keys, one_by_one)
                return SampleFuture(batch.finish)
            except torch.cuda.OutOfMemoryError:
                space.release()
    return SampleFuture(one_by_one)


@sample_hops_op.cuda
def _sample_hops(*arguments: Any) -> Hops:
    nodes, *parts = sample_hops_async(*arguments).result()
    # What an operator returns must not share memory.
    indptrs, sources, eids = ([tensor.clone() for tensor in of_hops] for of_hops in parts)
    return nodes.clone(), indptrs, sources, eids


class _Prepared:
    """What is the same for every batch of ``count`` seeds and some fanouts.

    ``fits`` says whether the kernel can do it and the largest possible sample is not too large.
    The hash table has room for ``capacity`` nodes.  Earlier samples say more of the next than what
    fanouts allow, and a table that stays in the cache is filled several times as fast; one that
    turns out too small is made larger.
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        graph: TieredGraph,
        options: HopsOptions,
        ordered_from: int,
    ) -> None:
        fanouts, num_cols = options.fanouts, graph.num_cols
        # Not held: a store that is given up takes them along. What has their addresses later is
        # told apart by is_for.
        self._tensors = [weakref.ref(tensor) for tensor in graph[:3]]
        self._sizes = (graph.num_rows, num_cols, graph.idtype)
        # The keys are another batch's; launch replaces them.
        self._device, self._count, self._options = device, count, options
        self.hops, self.num_rows, self.idtype = len(fanouts), graph.num_rows, graph.idtype
        self._seeds, self._edges = max_sizes(count, fanouts, num_cols)
        self._all_edges = sum(self._edges)
        # 0 where every hop has fewer nodes.
        self._ordered_from = ordered_from if ordered_from <= max(self._seeds[:-1], default=0) else 0
        # Of the results in the tensor that has them: nodes, sources, edge ids and indptrs.
        starts = [count + 1 for count in self._seeds[:-1]]
        self._max_sizes = [self._seeds[-1], *self._edges, *self._edges, *starts]
        self._all_elements = sum(self._max_sizes)
        self.capacity = self._seeds[-1]
        self.fits = (
            0 < self.hops <= MAX_HOPS and min(fanouts) >= 0 and self._all_edges <= _MAX_EDGES
        )
        # Of the workspace whose buffers are in the arguments; none at first.
        self._generation = -1

    def is_for(self, tiers: Tensor, pointers: Tensor, position: Tensor) -> bool:
        """Whether it was made for these."""
        kept = self._tensors
        return kept[0]() is tiers and kept[1]() is pointers and kept[2]() is position

    def _prepare(self, space: Workspace) -> None:
        tiers, pointers, position = (kept() for kept in self._tensors)
        assert tiers is not None and pointers is not None and position is not None  # the caller's
        launch = _launch(
            self.idtype, position, self._all_edges, self._device, self._options.sms,
            ordered=self._ordered_from > 0,
        )  # fmt: skip
        self._kernel, self._blocks = launch
        most = self._seeds[-2]
        scratch = _scratch(space.buffer, most, max(self._edges))
        order: Sequence[Tensor | int] = NO_ORDER
        if self._ordered_from:
            order = seed_order(space.buffer, most, self._sizes[0], self._ordered_from)
        self._arguments = _arguments(
            (None, self._count),
            TieredGraph(tiers, pointers, position, *self._sizes),
            self._options,
            (None,) * 4,
            (*scratch, space.control(self._blocks)),
            hash_table(space, self.capacity, self.idtype),
            None,
            None,
            order,
        )
        self._words = self._arguments.data.cast("B").cast("q")
        self._generation = space.generation

    def launch(self, sample: _BatchInFlight) -> None:
        """Launch a sample, with a hash table of the size that is taken for enough now."""
        space = sample.space
        if self._generation != space.generation:
            self._prepare(space)
        nodes, item = sample.results.data_ptr(), self.idtype.itemsize
        sources = nodes + self._seeds[-1] * item
        eids = sources + self._all_edges * item
        words = self._words
        words[_SEEDS] = sample.seeds.data_ptr()
        words[_NODES], words[_INDPTR] = nodes, eids + self._all_edges * item
        words[_SOURCES], words[_EIDS] = sources, eids
        words[_REPORT] = sample.report.words.data_ptr()
        for hop, key in enumerate(sample.keys, _KEYS):
            words[hop] = key
        sample.capacity = self.capacity
        self._kernel(self._blocks, _THREADS, self._arguments, device=self._device)
        sample.report.expect(self._device)

    def new_results(self) -> Tensor:
        """Memory for nodes, sources, edge ids and indptrs."""
        return torch.empty(self._all_elements, dtype=self.idtype, device=self._device)

    def split(self, results: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Results of these sizes, each at the beginning of its buffer."""
        # At once: views one by one would take the host several times as long.
        parts = ((size, most - size) for size, most in zip(sizes, self._max_sizes, strict=True))
        return results.split_with_sizes([*itertools.chain.from_iterable(parts)])[::2]

    def set_capacity(self, nodes: int) -> None:
        """Use a hash table of another size from now on."""
        self.capacity = nodes
        # Since the last launch others may have had buffers made anew: the next one looks at all.
        self._generation = -1


class _BatchInFlight:
    """A sample that has been launched.

    Others may be launched on its stream before it is finished, or it may be given up.  The hash
    table of the launch has room for ``capacity`` nodes.
    """

    def __init__(
        self,
        prepared: _Prepared,
        space: Workspace,
        seeds: Tensor,
        keys: Sequence[int],
        one_by_one: Callable[[], Hops],
    ) -> None:
        self._prepared, self.space, self.seeds, self.keys = prepared, space, seeds, keys
        # Also holds on to what the kernel reads.
        self._one_by_one = one_by_one
        self.report = space.reports.pop() if space.reports else Report()
        self.results = prepared.new_results()
        self.capacity = 0
        prepared.launch(self)

    def __del__(self) -> None:
        self.space.reports.append(self.report)

    def finish(self) -> Hops:
        """Wait for it, on the stream where it began; once.  Raises IdOutOfRangeError."""
        prepared, space = self._prepared, self.space
        while True:
            bad, overflow, *sizes = self.report.read(2 + 2 * prepared.hops)
            raise_at_bad_id([bad], self.seeds, prepared.num_rows, LOOK_UP)
            if overflow:
                break
            try:
                with space.lock:
                    if prepared.capacity <= self.capacity:
                        prepared.set_capacity(4 * self.capacity)
                    prepared.launch(self)
            except torch.cuda.OutOfMemoryError:
                space.release()
                return self._one_by_one()
        if prepared.capacity > 2 * sizes[-1]:
            with space.lock:
                prepared.set_capacity(sizes[-1])
        edges, known = sizes[0::2], sizes[1::2]
        starts = [count + 1 for count in (self.seeds.shape[0], *known[:-1])]
        pieces = prepared.split(self.results, (known[-1], *edges, *edges, *starts))
        nodes, *parts = cut_to_size(self.results, pieces)
        hops = prepared.hops
        return nodes, parts[2 * hops :], parts[:hops], parts[hops : 2 * hops]


@sample_hops_padded_op.cuda
def _sample_hops_padded(seeds: Tensor, graph: TieredGraph, options: HopsOptions) -> PaddedHops:
    idtype, fanouts = graph.idtype, options.fanouts
    device, count = seeds.device, seeds.numel()
    gpu.raise_faults(device, wait=False)
    max_nodes, max_edges = max_sizes(count, fanouts, graph.num_cols)
    edges = sum(max_edges)
    kernel, blocks = _launch(idtype, graph.position, edges, device, options.sms, padded=True)

    def new(name: str, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    nodes = torch.zeros(max_nodes[-1], dtype=idtype, device=device)
    indptr = new("indptr", sum(max_nodes[:-1]) + len(fanouts), idtype)
    sources = torch.zeros(edges, dtype=idtype, device=device)
    eids = torch.zeros_like(sources)
    counts = new("counts", 2 + 2 * len(fanouts), torch.int64)
    words, mask = table_size(max_nodes[-1], idtype)
    # Not a Workspace's: a CUDA graph of this may be replayed on another stream. The struct has
    # addresses alone, so the names keep what they name until the launch.
    scratch = (
        *_scratch(new, max_nodes[-2], max(max_edges)),
        torch.full((4 + 2 * blocks,), -1, dtype=torch.int64, device=device),
    )
    table = new("table", words, torch.int64)
    arguments = _arguments(
        (seeds, count),
        graph,
        options,
        (nodes, indptr, sources, eids),
        scratch,
        (table, mask),
        counts,
        gpu.fault_record(device),
    )
    kernel(blocks, _THREADS, arguments, device=device)
    return nodes, indptr, sources, eids, counts
