"""The two strategies: one call of the model, or calls for batches of nodes, layer by layer."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import torch
from dgl import DGLGraph
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.distributed.memory import free_bytes
from dgl_mgpu.errors import DeviceMemoryError, InvalidInputError, OutputError
from dgl_mgpu.graph.pinning.pinning import pin_memory_inplace
from dgl_mgpu.layerwise_inference.blocks import Blocks
from dgl_mgpu.layerwise_inference.group import InferenceGroup, share
from dgl_mgpu.layerwise_inference.plan import (
    ASKED_LAYERS,
    AT_ONCE,
    CallEnded,
    InferencePlan,
    ProbeGraph,
    TracedBlocks,
    intercept_calls,
)
from dgl_mgpu.layerwise_inference.rows import (
    Column,
    Graph,
    Outline,
    OwnColumn,
    Tree,
    leaves,
    map_tree,
)
from dgl_mgpu.machine.shared_memory import free_host_bytes
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.utils.stages import stage

#: Tensors as wide as the widest rows that a layer is taken to have at the same time.
_TENSORS_AT_ONCE = 4
#: What a batch may take on a CPU at most, where more has no use.
_BATCH_BYTES_ON_CPU = 2 << 30
#: Smaller tensors are not worth being registered with a GPU.
_PINNED_BYTES = 1 << 20


@dataclass(frozen=True)
class AtOnce:
    """One call of the model, on the whole graph."""

    model: nn.Module
    g: Graph
    columns: Tree
    num_layers: int
    device: torch.device

    def run(self) -> Tree:
        graph = self.g
        if not isinstance(graph, PartitionedGraph):
            graph = Blocks(graph, self.device).whole()
        inputs = map_tree(lambda column: column.all_rows(self.device), self.columns)
        return self.model(TracedBlocks([graph] * self.num_layers), inputs)

    def fits(self, row_bytes: int) -> bool:
        """Whether half of the memory that is free is likely to be enough."""
        edges = sum(self.g.num_edges(etype) for etype in self.g.canonical_etypes)
        # Ends of edges, in the order they have and by destination.
        needed = _TENSORS_AT_ONCE * row_bytes * self.g.num_nodes() + 32 * edges
        return needed <= _free_memory(self.device) // 2


@dataclass(frozen=True)
class _Batch:
    """A call of the model for a layer's batch of nodes."""

    layer: int
    output: Tree  # of Column: the model's result, in the last layer
    ranges: Mapping[str, range]
    sources: Mapping[str, torch.Tensor]
    blocks: list[DGLGraph]  # of each layer
    inputs: Tree
    #: What each call of earlier layers gave for the sources; outlines of what nobody reads.
    earlier: list[Tree]


class LayerByLayer:
    """Calls of the model for batches of nodes, for one layer after the other.

    A batch has ``batch_size`` nodes of all types together.  The ranks of ``group`` take batches in
    turn; all of them make and run the same one.  Results are kept in ``folder``, if not in memory.
    Where a store is spread over machines, each one infers and keeps the nodes that it owns, and
    asks the others for rows.
    """

    def __init__(
        self,
        model: nn.Module,
        g: Graph,
        columns: Tree,
        plan: InferencePlan,
        device: torch.device,
        batch_size: int | None,
        folder: str | os.PathLike | None,
        group: InferenceGroup | None = None,
    ) -> None:
        self.model, self.g, self.columns, self.plan = model, g, columns, plan
        self.device, self.folder, self.group = device, folder, group or InferenceGroup()
        self.blocks = Blocks(g, device)
        everyone, peers = self.group.everyone, self.group.peers
        #: The nodes that this machine infers.
        self.own = {
            ntype: range(g.num_nodes(ntype)) if peers is None else g.own_nodes(ntype)
            for ntype in g.ntypes
        }
        #: Batches are ranges of it, and of every type the same share.
        self.length = max(everyone.all_gather(max(map(len, self.own.values()))))
        self.may_shrink = batch_size is None
        # The same batches on every rank, and some for each.
        nodes = everyone.run_all(ASKED_LAYERS, lambda: batch_size or self._suitable_batch_size())
        step = nodes * self.length // max(sum(map(len, self.own.values())), 1)
        step = min(everyone.all_gather(step))
        self.dealt = max(1, min(step, -(-self.length // self.group.sharing.size)))
        #: Less, where memory has turned out to be too small.
        self.step = self.dealt
        #: What calls have given: columns while somebody is to read them.
        self.kept: list[Tree] = [call.outline for call in plan.calls]

    def run(self) -> Tree:
        output, run_all = None, self.group.everyone.run_all
        if self.group.peers is not None:
            with self.group.peers.told_of_errors():
                self.blocks.count_degrees(self.plan.degrees)
        for layer in range(self.plan.num_layers):
            output = run_all(ASKED_LAYERS, partial(self._make_room, layer))
            run_all(ASKED_LAYERS, partial(self._run_layer, layer, output))
            run_all(ASKED_LAYERS, partial(self._bring, layer, output))
        return map_tree(Column.own_rows, output)

    def _make_room(self, layer: int) -> Tree:
        """Allocate the results of a layer's calls and, for the last, the model's, which is
        returned.

        What no later layer reads is given up.
        """
        for number, call in enumerate(self.plan.calls):
            readers = self.plan.call_readers[number]
            if call.layer == layer and readers:
                allocate = partial(self._allocate, f"what call {number} of the model gave")
                self.kept[number] = map_tree(allocate, call.outline)
            elif all(reader < layer for reader in readers):
                self.kept[number] = call.outline
        last = layer == self.plan.num_layers - 1
        allocate = partial(self._allocate, "what the model gave")
        return map_tree(allocate, self.plan.output) if last else None

    def _run_layer(self, layer: int, output: Tree) -> None:
        """Do this rank's batches."""
        try:
            for low, high in self.group.batches(self.length, self.dealt):
                self._run_range(layer, output, low, high)
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # rows are on their way to the host

    def _run_range(self, layer: int, output: Tree, low: int, end: int) -> None:
        if self.group.peers is not None:
            self._run_range_together(self.group.peers, layer, output, low, end)
            return
        while low < end:
            high = min(low + self.step, end)
            batch = partial(self._run_batch, layer, output, low, high)
            if not self.may_shrink:
                batch()
            elif unless_out_of_memory(batch) is None:
                self._shrink()
                continue
            low = high

    def _run_range_together(
        self, peers: Communicator, layer: int, output: Tree, low: int, end: int
    ) -> None:
        """The same, batch by batch with the ranks of other machines, which have the same range.

        They ask each other for rows: so a rank whose machine has no nodes in it infers its last
        ones once more.
        """
        while True:
            high = min(low + self.step, end)
            ranges = self._ranges(low, high)
            is_kept = any(map(len, ranges.values()))
            if not is_kept:
                ranges = self._ranges(self.length - 1, self.length)
            with peers.told_of_errors():
                batch = self._fetch(layer, output, ranges)
            call = partial(self._call, batch, is_kept)
            done = peers.run_all(
                ASKED_LAYERS, partial(unless_out_of_memory, call) if self.may_shrink else call
            )
            if all(peers.all_gather(done is not None)):
                low = high
                if low >= end:
                    return
            else:
                self._shrink()

    def _shrink(self) -> None:
        if self.step == 1:
            raise DeviceMemoryError(
                ASKED_LAYERS,
                f"'{self.device}' has too little memory for one node and its neighbours",
                "free some, or compute on the CPU",
            )
        self.step = (self.step + 1) // 2

    def _ranges(self, low: int, high: int) -> dict[str, range]:
        """The nodes of each type that belong to a batch."""
        ranges = {}
        for ntype, own in self.own.items():
            begin, end = share(len(own), low, high, self.length)
            ranges[ntype] = own[begin:end]
        return ranges

    def _bring(self, layer: int, output: Tree) -> None:
        """Have on every machine the results that a layer's calls and the model had on any."""
        given = [self.kept[n] for n, call in enumerate(self.plan.calls) if call.layer == layer]
        for column in leaves([*given, output]):
            if not isinstance(column, Outline):
                self.group.bring(column.rows, self.length, self.dealt)

    def _run_batch(self, layer: int, output: Tree, low: int, high: int) -> bool:
        return self._call(self._fetch(layer, output, self._ranges(low, high)), True)

    def _fetch(self, layer: int, output: Tree, ranges: Mapping[str, range]) -> _Batch:
        """What the model is called with for a batch, and what its calls of earlier layers gave."""
        plan, last = self.plan, self.plan.last_call(layer)
        block = self.blocks.of_in_edges(ranges)
        sources = {ntype: block.srcnodes[ntype].data[dgl.NID] for ntype in self.own}
        targets = {ntype: block.dstnodes[ntype].data[dgl.NID] for ntype in self.own}
        before, after = self.blocks.without_edges(sources), self.blocks.without_edges(targets)
        of_layers = [before] * layer + [block] + [after] * (plan.num_layers - layer - 1)
        columns = iter(plan.readers)
        inputs = map_tree(
            lambda column: (column if layer in next(columns) else column.outline).take(
                sources[column.ntype]
            ),
            self.columns,
        )

        def taken(rows: Column | Outline) -> torch.Tensor | Outline:
            return rows if isinstance(rows, Outline) else rows.take(sources[rows.ntype])

        calls = plan.calls if output is not None else plan.calls[: last + 1]
        earlier = [
            map_tree(taken, kept) if call.layer < layer else None
            for call, kept in zip(calls, self.kept, strict=False)
        ]
        return _Batch(layer, output, ranges, sources, of_layers, inputs, earlier)

    def _call(self, batch: _Batch, is_kept: bool) -> bool:
        """Call the model for a batch, and keep what a layer's calls and it give."""
        plan, layer, output = self.plan, batch.layer, batch.output
        last, number = plan.last_call(layer), -1

        def keep(kept: Tree, given: Tree) -> None:
            if is_kept:
                self._keep(kept, given, batch.ranges)

        def unread(rows: torch.Tensor | Outline) -> torch.Tensor:
            return rows.take(batch.sources[rows.ntype]) if isinstance(rows, Outline) else rows

        def handle(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
            nonlocal number
            number += 1
            if plan.calls[number].layer < layer:
                return map_tree(unread, batch.earlier[number])
            given = run()
            keep(self.kept[number], given)
            if number == last and output is None:
                raise CallEnded
            return given

        with intercept_calls(handle), stage("forward"):
            try:
                result = self.model(
                    TracedBlocks(map(self.blocks.for_layer, batch.blocks, range(plan.num_layers))),
                    batch.inputs,
                )
                keep(output, result)
            except CallEnded:
                pass
        return True

    def _keep(self, kept: Tree, given: Tree, ranges: Mapping[str, range]) -> None:
        """Copy a batch's rows to where they are kept, if they are."""
        for column, rows in zip(leaves(kept), leaves(given), strict=True):
            if not isinstance(column, Outline):
                ids, first = ranges[column.ntype], self.own[column.ntype].start
                own = column.rows[ids.start - first : ids.stop - first]
                own.copy_(rows, non_blocking=column.pin is not None)

    def _allocate(self, name: str, outline: Outline) -> Column:
        """Room for a row of each own node, in memory or in a file without a name."""
        shape = (len(self.own[outline.ntype]), *outline.row_shape)
        size, memory = math.prod(shape), None
        if self.group.machine.size > 1:
            memory = self.group.room(size * outline.dtype.itemsize, self.folder)
            rows = torch.from_numpy(memory.bytes).view(outline.dtype).view(shape)
        elif self.folder is None or not size:
            rows = torch.empty(shape, dtype=outline.dtype)
        else:
            rows = _in_nameless_file(self.folder, size, outline.dtype).view(shape)
        # A file's pages are not to stay in memory.
        pin = None
        if self.device.type != "cpu" and self.folder is None and rows.nbytes >= _PINNED_BYTES:
            pin = self.group.machine.run_all(ASKED_LAYERS, lambda: pin_memory_inplace(rows))
        if self.group.peers is None:
            return Column(outline.ntype, rows, pin, memory)
        assert isinstance(self.g, StoreGraph)
        return OwnColumn(outline.ntype, rows, pin, memory, g=self.g, name=name)

    def _suitable_batch_size(self) -> int:
        """As many nodes as are likely to fit in half of the memory that is free."""
        outlines = [call.outline for call in self.plan.calls] + [self.plan.output]
        inputs = map_tree(lambda column: column.outline, self.columns)
        widest_row_bytes = max(
            sum(outline.row_bytes for outline in leaves(tree)) for tree in (inputs, *outlines)
        )
        nodes = max(self.g.num_nodes(), 1)
        edges = sum(self.g.num_edges(etype) for etype in self.g.canonical_etypes)
        # A row for each destination and, at most, a source for each edge.
        per_node = _TENSORS_AT_ONCE * max(widest_row_bytes, 1) * (1 + edges / nodes)
        free = _free_memory(self.device) // 2
        if self.device.type == "cpu":
            free = min(free // self.group.machine.size, _BATCH_BYTES_ON_CPU)
        return max(1, int(free / per_node))


def _in_nameless_file(folder: str | os.PathLike, size: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        with tempfile.NamedTemporaryFile(dir=Path(folder)) as file:
            # Reserved at once: a full disk would be a bus error at a write.
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype)
    except OSError as error:
        raise OutputError(
            f"keep results in {folder}", str(error), "choose another folder, or free space there"
        ) from error


def unless_out_of_memory(run: Callable[[], Any]) -> Any:
    """What a function gives, or None if a GPU's memory is too small for it."""
    try:
        return run()
    except torch.cuda.OutOfMemoryError:
        pass  # what it had is only given up when the exception is
    torch.cuda.empty_cache()
    return None


def _free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a GPU, or in the host's memory."""
    return int(free_bytes(device)) if device.type == "cuda" else free_host_bytes()


def checked_plan(model: nn.Module, pattern: ProbeGraph, num_layers: int) -> InferencePlan:
    """A plan whose result on the probe graph is the model's at once; raises if there is none.

    What the model itself raises on the way comes out as it is, with a note.
    """
    plan = InferencePlan.of(model, pattern, num_layers)
    device = pattern.blocks.device
    fix = f"move message passing into modules that are called with a block, or {AT_ONCE}"
    runner = LayerByLayer(model, pattern.graph, pattern.columns, plan, device, 2, None)
    try:
        result = runner.run()
    except Exception as error:
        error.add_note(
            "Raised by the model while dgl_mgpu.inference did it layer by layer on a few nodes, of "
            f"which it did all layers at once. If it passes messages by itself, {fix}."
        )
        raise
    for expected, rows in zip(leaves(plan.expected), leaves(result), strict=True):
        expected = expected.cpu()
        if not _close(expected, rows):
            raise InvalidInputError(
                ASKED_LAYERS,
                "on a few nodes this gives other results than computing all layers at once",
                fix,
            )
    plan.degrees = runner.blocks.asked_degrees
    return plan


def _close(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    finite = expected[expected.isfinite()].abs()
    tolerance = torch.finfo(expected.dtype).eps ** (1 / 3)
    scale = float(finite.max()) if len(finite) else 1.0
    return torch.allclose(expected, actual, tolerance, tolerance * scale, equal_nan=True)
