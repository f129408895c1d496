"""All hops of a mini-batch, uniformly, of edges that several machines have, on CUDA.

Nothing waits between hops.  Each is these kernels, launched for as many ids as there may be: ids go
to the machines that have their edges (:mod:`dgl_mgpu.ops.requests`); each machine samples what it
was asked for and what it has itself, and answers; a machine joins what it receives, in the order
of its ids, and numbers the nodes.  How many there are kernels read from the heads of messages,
where kernels before them have left it.

Messages have room for a number of ids, and of edges.  If some have too little, kernels stay within
it, the hops have other results than they should, and the heads tell all machines how much room was
needed.  An answer to so many ids is, behind its head::

    starts: where each id's edges begin, and the last ones end | neighbors | edge ids
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type
from dgl_mgpu.ops.edges import HopOptions
from dgl_mgpu.ops.requests import (
    NOTES,
    Owners,
    RequestMessages,
    RequestOptions,
    launch_requests,
    messages_struct,
)
from dgl_mgpu.ops.sample import HopOutputs, sample_hop
from dgl_mgpu.ops.unique import number_nodes
from dgl_mgpu.ops.view import GraphView, tiered_rows
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning

_THREADS, _LANES = 256, 8
#: Edges that a thread copies.
_COPIES = 4
#: Words of a report: the first bad seed and end of a sample, and those of numbering, the first bad
#: place, overflow and nodes.
_SAMPLED, _NUMBERED, _NODES = 2, 3, 2
#: Edges of all hops up to which room for the largest possible sample is made in advance.
MAX_EDGES = 1 << 25


class Room(NamedTuple):
    """What a hop's messages have room for: even numbers."""

    ids: int
    edges: int

    @property
    def starts(self) -> int:
        """Of where edges begin."""
        return self.ids + 2


class MachineHop(NamedTuple):
    """How a hop is sampled: for each machine that asks, by its key."""

    by_machine: Sequence[HopOptions]
    room: Room

    @property
    def fanout(self) -> int:
        return self.by_machine[0].fanout


@dataclass(frozen=True)
class Network:
    """How messages of a store's machines look, and what sends them."""

    owners: Owners
    head_words: int
    dtype: torch.dtype  # of ids as they are sent
    num_machines: int
    #: Sends each machine its message, and gives those that machines send here.
    exchange: Callable[[Tensor], Tensor]

    @property
    def head_elements(self) -> int:
        """Elements of a message that its head takes."""
        return self.head_words * torch.int64.itemsize // self.dtype.itemsize

    def heads(self, messages: Tensor) -> Tensor:
        """int64, shape (machines, head_words)."""
        return messages.view(torch.int64)[:, : self.head_words]

    def new_messages(self, elements: int, device: torch.device) -> Tensor:
        """Messages to all machines, with heads and so many elements."""
        shape = self.num_machines, self.head_elements + elements
        return torch.empty(shape, dtype=self.dtype, device=device)


class Edges(NamedTuple):
    """Edges of ids; ``neighbors`` become their numbers among the nodes."""

    indptr: Tensor
    neighbors: Tensor
    eids: Tensor


class MachineHops(NamedTuple):
    """The hops of a mini-batch; those before hop ``h`` are the first ``sizes[h]`` of ``nodes``."""

    nodes: Tensor
    edges: list[Edges]
    sizes: list[int]


def most_nodes(num_seeds: int, fanouts: Sequence[int], num_nodes: int) -> list[int] | None:
    """The most nodes before each hop and after the last; None if there may be too many edges."""
    most, edges = [num_seeds], 0
    for fanout in fanouts:
        edges += most[-1] * fanout
        most.append(min(most[-1] * (1 + fanout), num_seeds + num_nodes))
    return most if edges <= MAX_EDGES else None


class MachineBatch:
    """A mini-batch on its way through the hops.

    Parameters
    ----------
    space : Workspace
        Of the current stream.  Hold its lock from the first call to the last.
    view : GraphView
        What this machine has of the graph.
    seeds : Tensor, the graph's idtype, shape (n,)
    most : sequence of int
        As :func:`most_nodes` gives them for these seeds.
    network : Network
    """

    def __init__(
        self,
        space: Workspace,
        view: GraphView,
        seeds: Tensor,
        most: Sequence[int],
        network: Network,
    ) -> None:
        self._space, self._view, self._network, self._most = space, view, network, most
        self._device, self._num_seeds = seeds.device, len(seeds)
        self._nodes = seeds.new_empty(most[-1])
        self._nodes[: len(seeds)] = seeds
        #: How many nodes there are, on the device; None where the host knows it.
        self._known: Tensor | None = None
        self._edges: list[Edges] = []
        self._reports: list[Tensor] = []

    def ask(self, room: int, notes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Ask for edges of the nodes so far.

        Returns where the answers will be, the nodes whose edges are here, and what other machines
        ask for.
        """
        size, network = self._network.num_machines, self._network
        messages = network.new_messages(room, self._device)
        counts = torch.zeros(1, size + 2, dtype=torch.int64, device=self._device)
        ids = self._ids
        own = torch.empty(ids.most, dtype=network.dtype, device=self._device)
        places = launch_requests(
            RequestMessages(messages, counts, network.head_words),
            ids,
            self._view.position,
            self._view.num_rows,
            network.owners,
            RequestOptions(notes, 0),
            own,
        )
        asked = network.exchange(messages)
        self._reports.append(network.heads(asked))
        return places, own, asked

    def sample(
        self,
        hop: MachineHop,
        places: Tensor,
        own: Tensor,
        asked: Tensor,
        notes: Sequence[int],
    ) -> None:
        """Sample what is asked here, and number the nodes of that and of what others answer.

        Parameters are the hop, what :meth:`ask` has returned, and notes of the answers' heads.
        """
        network, room, ids, size = self._network, hop.room, self._ids, len(asked)
        rooms = gpu.struct(room.ids, room.starts, room.edges)
        report = torch.empty(
            _SAMPLED * size + 1 + _NUMBERED, dtype=torch.int64, device=self._device
        )
        ends, total = report[1:], report[_SAMPLED * size : _SAMPLED * size + 1]
        samples, mine = self._sample_asked(hop, own, asked, report)
        answers = network.new_messages(room.starts + 2 * room.edges, self._device)
        write = _kernel("write_samples", self._nodes.dtype, network.dtype)
        wanted = -(-room.edges // (_COPIES * _THREADS))
        write(
            gpu.blocks_within(write, _THREADS, wanted, self._device), _THREADS,
            messages_struct(asked, network.head_words), size, network.owners.machine,
            samples.indptr, ends, samples.neighbors, samples.eids,
            messages_struct(answers, network.head_words), rooms, gpu.packed(notes),
            device=self._device,
        )  # fmt: skip
        received = network.exchange(answers)

        joined = self._new_edges(ids.most + 1, ids.most * hop.fanout)
        join = _kernel("join_samples", self._nodes.dtype, network.dtype)
        blocks = gpu.blocks_within(join, _THREADS, -(-_LANES * ids.most // _THREADS), self._device)
        join(
            blocks, _THREADS, places, ids.most, ids.exact,
            messages_struct(received, network.head_words), gpu.struct(*mine), size, rooms,
            hop.fanout, self._view.num_cols, *joined, self._space.control(blocks), total,
            device=self._device,
        )  # fmt: skip
        numbered, most = report[-_NUMBERED:], self._most[len(self._edges) + 1]
        number_nodes(self._space, ids, joined.neighbors, total, most, numbered)
        self._known = numbered[_NODES:]
        self._edges.append(joined)
        self._reports += network.heads(received), report[_SAMPLED * size :]

    @property
    def _ids(self) -> NodePrefix:
        most = self._most[len(self._edges)]
        return NodePrefix(self._nodes, most, self._known)

    def _new_edges(self, num_starts: int, num_edges: int) -> Edges:
        neighbors = self._nodes.new_empty(num_edges)
        indptr = torch.empty(num_starts, dtype=torch.int64, device=self._device)
        return Edges(indptr, neighbors, torch.empty_like(neighbors))

    def _sample_asked(
        self, hop: MachineHop, own: Tensor, asked: Tensor, report: Tensor
    ) -> tuple[Edges, Edges]:
        """Samples for the other machines, one after the other, and for this one.

        They end where ``report`` says.
        """
        network, size, most = self._network, len(asked), hop.room.ids
        samples = self._new_edges(size * (most + 1), (size - 1) * most * hop.fanout)
        mine = self._new_edges(len(own) + 1, len(own) * hop.fanout)
        ids = asked[:, network.head_elements :]
        counts = network.heads(asked)[:, NOTES + network.owners.machine]
        start = None
        for machine, options in enumerate(hop.by_machine):
            words = report[_SAMPLED * machine :]
            if machine == network.owners.machine:
                seeds = NodePrefix(own, len(own), counts[machine:])
                out = HopOutputs(mine.indptr, None, mine.neighbors, mine.eids)
            else:
                seeds = NodePrefix(ids[machine], most, counts[machine:])
                indptr = samples.indptr[machine * (most + 1) :]
                out = HopOutputs(indptr, start, samples.neighbors, samples.eids)
                start = words[1:]
            sample_hop(
                self._space,
                seeds,
                tiered_rows(self._view),
                options,
                out,
                words,
                self._view.ordered_from,
            )
        return samples, mine

    def expect_reports(self) -> None:
        """Queue the copy of all reports to the host, after the last hop."""
        on_device = torch.cat([report.flatten() for report in self._reports])
        self._host_report = gpu.driver.host_buffer(len(on_device))
        self._host_report.copy_(on_device, non_blocking=True)
        self._reported = gpu.driver.mark(self._device)

    def finish(self) -> tuple[list[list[list[int]]], MachineHops]:
        """Wait for the GPU: heads of all that was received, and what was sampled.

        The heads are those of what was asked of all hops but the first, and of all answers, in the
        order in which they came.
        """
        self._reported.synchronize()
        parts = self._host_report.split([report.numel() for report in self._reports])
        heads, sizes, edges = [], [self._num_seeds], []
        launched = iter(self._edges)
        for report, numbers in zip(self._reports, parts, strict=True):
            if report.dim() == 2:
                heads.append(numbers.view(report.shape).tolist())
                continue
            total, *_, count = numbers.tolist()
            of_hop = next(launched)
            edges.append(
                Edges(
                    beginning(of_hop.indptr, sizes[-1] + 1),
                    beginning(of_hop.neighbors, total),
                    beginning(of_hop.eids, total),
                )
            )
            sizes.append(count)
        return heads, MachineHops(beginning(self._nodes, sizes[-1]), edges, sizes)


@functools.cache
def _kernel(name: str, ids: torch.dtype, sent: torch.dtype) -> Kernel:
    cooperative = name == "join_samples"
    return Kernel("answers.cu", f"dgl_mgpu::{name}<{c_type(ids)}, {c_type(sent)}>", cooperative)
