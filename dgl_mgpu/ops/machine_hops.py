"""All hops of a mini-batch, uniformly, of edges that several machines have, on CUDA.

Nothing waits between hops.  Each is these kernels, launched for as many ids as there may be: ids go
to the machines that have their edges (:mod:`dgl_mgpu.ops.requests`); each machine samples what it
was asked for and what it has itself, and answers; a machine joins what it receives, in the order
of its ids, and numbers the nodes.  How many there are kernels read from the heads of messages,
where kernels before them have left it.  What is the same for every mini-batch is prepared once, in
:class:`PreparedHops`: the launches, and the memory of all that is no result.

Messages have room for a number of ids, and of edges.  If some have too little, kernels stay within
it, the hops have other results than they should, and the heads tell all machines how much room was
needed.  An answer to so many ids is, behind its head::

    starts: where each id's edges begin, and the last ones end | neighbors | edge ids
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, Launch, c_type
from dgl_mgpu.ops.edges import HopOptions
from dgl_mgpu.ops.requests import (
    NOTES,
    REQUESTED,
    Owners,
    RequestMessages,
    RequestOptions,
    message_words,
    requests_launch,
)
from dgl_mgpu.ops.sample import HOP_KEY, HopOutputs, hop_launch
from dgl_mgpu.ops.unique import NUMBERED, numbering_launch
from dgl_mgpu.ops.view import GraphView, tiered_rows
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, cut_to_size

_THREADS, _LANES = 256, 8
#: Edges that a thread copies.
_COPIES = 4
#: Words of a hop's report.  For each machine the first bad seed and the end of what was sampled for
#: it; then the hop's edges, the most ids and edges that any machine sent another, and what
#: numbering reports: the first bad place, overflow and nodes.
_SAMPLED, _TOTAL, _IDS, _EDGES, _NUMBERED, _NODES = 2, -6, -5, -4, -3, -1
#: Edges of all hops up to which room for the largest possible sample is made in advance.
MAX_EDGES = 1 << 25
#: Notes of requests of all hops but the first, whose own have told everything.
_NO_NOTES = (0,) * NOTES
#: Places in the kernels' structs of what differs from batch to batch.
_ASKED = 0  # of ``Sampled``
_PLACES, _INDPTR, _NEIGHBORS, _EIDS = 0, 15, 16, 17  # of ``Joined``


class Room(NamedTuple):
    """What a hop's messages have room for: even numbers."""

    ids: int
    edges: int

    @property
    def starts(self) -> int:
        """Of where edges begin."""
        return self.ids + 2


class Hop(NamedTuple):
    """How a hop is sampled."""

    fanout: int
    replace: bool
    room: Room


@dataclass(frozen=True)
class Network:
    """How messages of a store's machines look, and what sends them."""

    owners: Owners
    head_words: int
    dtype: torch.dtype  # of ids as they are sent
    num_machines: int
    #: Sends each machine its message, into the second tensor those that machines send here.
    exchange: Callable[[Tensor, Tensor], object]

    @property
    def head_elements(self) -> int:
        """Elements of a message that its head takes."""
        return self.head_words * torch.int64.itemsize // self.dtype.itemsize

    def new_messages(self, elements: int, device: torch.device) -> Tensor:
        """Messages to all machines, with heads and so many elements."""
        shape = self.num_machines, self.head_elements + elements
        return torch.empty(shape, dtype=self.dtype, device=device)


class Requests(NamedTuple):
    """What machines ask each other of a hop.

    ``places`` are where the answers of this machine's ids will be, and ``own`` its ids that are
    here, as :func:`dgl_mgpu.ops.requests.write_requests` gives them; ``received`` are the messages
    of all machines.
    """

    places: Tensor
    own: Tensor
    received: Tensor


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


class PreparedHops:
    """The launches of the hops of mini-batches of as many seeds.

    The memory that they share is free for the next mini-batch of the same stream once this one is
    launched.  Make and use it with the workspace's lock held.

    Parameters
    ----------
    space : Workspace
        Of the current stream.
    view : GraphView
        What this machine has of the graph.
    most : sequence of int
        As :func:`most_nodes` gives them.
    hops : sequence of Hop
    network : Network
    """

    def __init__(
        self,
        space: Workspace,
        view: GraphView,
        most: Sequence[int],
        hops: Sequence[Hop],
        network: Network,
    ) -> None:
        self.hops = hops
        self._space, self._view, self._device = space, view, view.tiers.device
        edges = [count * hop.fanout for count, hop in zip(most, hops, strict=False)]
        #: Of the results: nodes, and neighbors and edge ids of each hop; and where edges begin.
        self._id_sizes = [most[-1], *itertools.chain.from_iterable(zip(edges, edges, strict=True))]
        self._start_sizes = [count + 1 for count in most[:-1]]
        words = _SAMPLED * network.num_machines - _TOTAL
        self._reports = torch.empty(len(hops), words, dtype=torch.int64, device=self._device)
        self._generation = -1
        # Until no buffer of the workspace was still too small.
        while not self.is_valid:
            self._generation, self._launches = space.generation, []
            nodes, *of_hops = self._new_results()[0]
            known = None
            for number, hop in enumerate(hops):
                seeds, report = NodePrefix(nodes, most[number], known), self._reports[number]
                neighbors = of_hops[2 * number]
                self._launches.append(
                    _Launches(space, view, network, hop, seeds, neighbors, most[number + 1], report)
                )
                known = report[_NODES:]

    @property
    def is_valid(self) -> bool:
        """Whether the workspace still has the buffers that it was made for."""
        return self._generation == self._space.generation

    def launch(self, first: Requests, seeds: Tensor, keys: Sequence[Sequence[int]]) -> HopsInFlight:
        """Launch all hops of a mini-batch; its results are this batch's alone.

        Parameters
        ----------
        first : Requests
            Of the first hop.
        seeds : Tensor, the graph's idtype, shape (n,)
        keys : sequence of sequence of int
            Folded keys of each hop, by machine that asks.
        """
        (nodes, *of_hops), starts, buffers = self._new_results()
        nodes[: len(seeds)] = seeds
        for number, (hop, of_machines) in enumerate(zip(self._launches, keys, strict=True)):
            asked = hop.ask(nodes) if number else first
            edges = Edges(starts[number], *of_hops[2 * number : 2 * number + 2])
            hop.launch(asked, nodes, edges, of_machines)
        report = gpu.driver.host_buffer(self._reports.numel())
        report.view(self._reports.shape).copy_(self._reports, non_blocking=True)
        reported = gpu.driver.mark(self._device)
        sizes = self._id_sizes, self._start_sizes
        return HopsInFlight(buffers, sizes, len(seeds), report, reported)

    def _new_results(self) -> tuple[Sequence[Tensor], Sequence[Tensor], tuple[Tensor, Tensor]]:
        ids = torch.empty(sum(self._id_sizes), dtype=self._view.idtype, device=self._device)
        starts = torch.empty(sum(self._start_sizes), dtype=torch.int64, device=self._device)
        parts = ids.split_with_sizes(self._id_sizes), starts.split_with_sizes(self._start_sizes)
        return *parts, (ids, starts)


class _Launches:
    """The launches of a hop, and the memory that they share.

    ``seeds`` are the nodes of the mini-batch so far, and ``neighbors`` its results; those of each
    batch take their places.
    """

    def __init__(
        self,
        space: Workspace,
        view: GraphView,
        network: Network,
        hop: Hop,
        seeds: NodePrefix,
        neighbors: Tensor,
        most_after: int,
        report: Tensor,
    ) -> None:
        self._network, self._room = network, hop.room
        size, machine, device = network.num_machines, network.owners.machine, view.tiers.device
        room, fanout, most = hop.room, hop.fanout, seeds.most
        ends, total = report[1:], report[_TOTAL:]

        def words(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int64, device=device)

        def new_edges(num_starts: int, num_edges: int) -> Edges:
            ids = torch.empty(2, num_edges, dtype=view.idtype, device=device)
            return Edges(words(num_starts), *ids)

        def messages(elements: int) -> Tensor:
            return network.new_messages(elements, device)

        self._sent, received = messages(room.ids), messages(room.ids)
        own = torch.empty(most, dtype=network.dtype, device=device)
        self._asked = Requests(words(most), own, received)
        answer = room.starts + 2 * room.edges
        self._answers, self._answered = messages(answer), messages(answer)
        self._samples = new_edges(size * (room.ids + 1), (size - 1) * room.ids * fanout)
        self._mine = mine = new_edges(most + 1, most * fanout)

        self._request = requests_launch(
            space, RequestMessages(self._sent, network.head_words), seeds, view.position,
            view.num_rows, network.owners, RequestOptions(_NO_NOTES, 0), own, self._asked.places,
        )  # fmt: skip
        options = HopOptions(fanout, hop.replace, 0, view.sms)
        self._sample: list[Launch] = []
        start = None
        for other, ids in enumerate(self._ids_by_machine(self._asked)):
            of_other = report[_SAMPLED * other :]
            out = HopOutputs(mine.indptr, None, mine.neighbors, mine.eids)
            if other != machine:
                indptr = self._samples.indptr[other * (room.ids + 1) :]
                out = HopOutputs(indptr, start, self._samples.neighbors, self._samples.eids)
                start = of_other[1:]
            self._sample.append(
                hop_launch(space, ids, tiered_rows(view), options, out, of_other, view.ordered_from)
            )
        rooms = room.ids, room.starts, room.edges
        kernel = _kernel("write_samples", view.idtype, network.dtype)
        wanted = -(-room.edges // (_COPIES * _THREADS))
        sampled = gpu.struct(
            *message_words(received, network.head_words), size, machine, self._samples.indptr,
            ends, self._samples.neighbors, self._samples.eids,
            *message_words(self._answers, network.head_words), *rooms, report[_IDS:],
        )  # fmt: skip
        blocks = gpu.blocks_within(kernel, _THREADS, wanted, device)
        self._write = Launch(kernel, blocks, _THREADS, sampled, device=device)
        kernel = _kernel("join_samples", view.idtype, network.dtype)
        blocks = gpu.blocks_within(kernel, _THREADS, -(-_LANES * most // _THREADS), device)
        joined = gpu.struct(
            None, most, seeds.exact, *message_words(self._answered, network.head_words), *mine,
            size, *rooms, fanout, view.num_cols, None, None, None, space.control(blocks), total,
            report[_EDGES:],
        )  # fmt: skip
        self._join = Launch(kernel, blocks, _THREADS, joined, device=device)
        self._number = numbering_launch(
            space, seeds, neighbors, total, most_after, report[_NUMBERED:]
        )

    def ask(self, nodes: Tensor) -> Requests:
        """Ask for edges of the nodes so far."""
        self._request.words[REQUESTED] = nodes.data_ptr()
        self._request()
        self._network.exchange(self._sent, self._asked.received)
        return self._asked

    def launch(self, asked: Requests, nodes: Tensor, edges: Edges, keys: Sequence[int]) -> None:
        """Sample what is asked here, and number the nodes of that and of what others answer."""
        if asked is not self._asked:
            for sample, ids in zip(self._sample, self._ids_by_machine(asked), strict=True):
                sample.arguments[: len(ids)] = ids
        for sample, key in zip(self._sample, keys, strict=True):
            sample.arguments[HOP_KEY] = key
            sample()
        self._write.words[_ASKED] = asked.received.data_ptr()
        self._write()
        self._network.exchange(self._answers, self._answered)
        words = self._join.words
        words[_PLACES], words[_INDPTR] = asked.places.data_ptr(), edges.indptr.data_ptr()
        words[_NEIGHBORS], words[_EIDS] = edges.neighbors.data_ptr(), edges.eids.data_ptr()
        self._join()
        self._number.arguments[NUMBERED] = nodes, edges.neighbors
        self._number()

    def _ids_by_machine(self, asked: Requests) -> list[NodePrefix]:
        """The ids that each machine asks for, this one of itself those that are here."""
        network, elements = self._network, asked.received.view(-1)
        message = asked.received.shape[1]
        heads = elements.view(torch.int64)
        found = []
        for machine in range(network.num_machines):
            begin = machine * message
            head = begin * self._network.dtype.itemsize // torch.int64.itemsize
            exact = heads[head + NOTES + network.owners.machine :]
            if machine == network.owners.machine:
                found.append(NodePrefix(asked.own, len(asked.own), exact))
            else:
                ids = elements[begin + network.head_elements :]
                found.append(NodePrefix(ids, self._room.ids, exact))
        return found


class HopsInFlight:
    """The hops of a mini-batch that have been launched."""

    def __init__(
        self,
        results: tuple[Tensor, Tensor],
        most_sizes: tuple[Sequence[int], Sequence[int]],
        num_seeds: int,
        report: Tensor,
        reported: gpu.Event,
    ) -> None:
        self._results, self._most_sizes, self._num_seeds = results, most_sizes, num_seeds
        self._report, self._reported = report, reported

    def finish(self) -> tuple[list[Room], MachineHops]:
        """Wait for the GPU: what each hop's messages needed room for, and what was sampled."""
        self._reported.synchronize()
        (ids, starts), (most_ids, most_starts) = self._results, self._most_sizes
        reports = self._report.view(len(most_starts), -1).tolist()
        needed = [Room(report[_IDS], report[_EDGES]) for report in reports]
        sizes = [self._num_seeds, *(report[_NODES] for report in reports)]
        totals = [report[_TOTAL] for report in reports]
        pairs = itertools.chain.from_iterable((total, total) for total in totals)
        nodes, *edges = _beginnings(ids, most_ids, [sizes[-1], *pairs])
        indptrs = _beginnings(starts, most_starts, [size + 1 for size in sizes[:-1]])
        of_hops = zip(indptrs, edges[0::2], edges[1::2], strict=True)
        return needed, MachineHops(nodes, [Edges(*of_hop) for of_hop in of_hops], sizes)


def _beginnings(buffer: Tensor, most: Sequence[int], sizes: Sequence[int]) -> Sequence[Tensor]:
    """The first elements of each part of a buffer, whose parts are of the sizes ``most``."""
    parts = ((size, of - size) for of, size in zip(most, sizes, strict=True))
    pieces = buffer.split_with_sizes([*itertools.chain.from_iterable(parts)])[::2]
    return cut_to_size(buffer, pieces)


@functools.cache
def _kernel(name: str, ids: torch.dtype, sent: torch.dtype) -> Kernel:
    cooperative = name == "join_samples"
    return Kernel("answers.cu", f"dgl_mgpu::{name}<{c_type(ids)}, {c_type(sent)}>", cooperative)
