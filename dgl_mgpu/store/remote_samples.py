"""What machines answer each other that are asked for samples, and what is made of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dgl_mgpu.comm.messages import Messages
from dgl_mgpu.ops import BlockEdges, EtypeBlock, GraphView, SampledNeighbors
from dgl_mgpu.ops.machine_hops import Hop, MachineHops, Network, PreparedHops, Requests, Room
from dgl_mgpu.ops.workspace import Workspace
from dgl_mgpu.store.rounds import Arrived, Asked
from dgl_mgpu.utils.types import CanonicalEtype

#: Sampled edges of each type, and of it by machine.
Edges = list[list[SampledNeighbors]]


@dataclass(frozen=True)
class Samples:
    """The edges that machines ask for, of all types one after the other.

    Messages are as those of :mod:`dgl_mgpu.ops.machine_hops`; this machine's own edges stay here.
    """

    asked: Asked
    edges: Edges
    sends_own: ClassVar[bool] = False

    @property
    def ends(self) -> list[list[int]]:
        """As of :class:`dgl_mgpu.store.rounds.Parts`."""
        sizes = [[len(edges.eids) for edges in of_type] for of_type in self.edges]
        by_machine = [itertools.accumulate(of_machine) for of_machine in zip(*sizes, strict=True)]
        return [list(of_type) for of_type in zip(*by_machine, strict=True)]

    def write(self, messages: torch.Tensor) -> None:
        """As of :class:`dgl_mgpu.store.rounds.Parts`."""
        starts, neighbors, eids = _split(messages, self.asked)
        for number, (of_type, ends) in enumerate(zip(self.edges, self.ends, strict=True)):
            ids = self.asked.received(number)
            for machine, (edges, first, last, end) in enumerate(
                zip(of_type, ids.begins, ids.ends, ends, strict=True)
            ):
                if machine == self.asked.rank:
                    continue
                begin, end = end - len(edges.eids), min(end, neighbors.shape[1])
                starts[machine, first : last + 1] = edges.indptr + begin
                if begin < end:
                    neighbors[machine, begin:end] = edges.neighbors[: end - begin]
                    eids[machine, begin:end] = edges.eids[: end - begin]


def _split(messages: torch.Tensor, asked: Asked) -> tuple[torch.Tensor, ...]:
    """Where each id's edges begin, neighbors, and edge ids."""
    starts = num_starts(asked)
    room = (messages.shape[1] - starts) // 2
    return tuple(messages.split([starts, room, room], 1))


def num_starts(asked: Asked) -> int:
    """Elements of a message that say where edges begin."""
    return Room(asked.data.shape[1], 0).starts


def joined(
    asked: Asked, answers: Arrived, own: Sequence[SampledNeighbors], none: torch.Tensor
) -> list[SampledNeighbors]:
    """The edges of all ids of each type, of those that machines have sent and of this one's own.

    ``none`` are no ids.
    """
    starts, neighbors, eids = _split(answers.data, asked)
    num_ids = asked.data.shape[1]
    # Where each id's edges begin in those of all machines, and then the own ones, and how many
    # there are.
    starts = starts[:, : num_ids + 1].long()
    of_machine = torch.arange(len(starts), device=none.device)[:, None] * neighbors.shape[1]
    begins = [(starts[:, :-1] + of_machine).flatten()]
    degrees = [starts.diff(dim=1).flatten()]
    places, num_own, num_edges = [], 0, neighbors.numel()
    for of_type, edges in zip(asked.places, own, strict=True):
        # They count their own ids by type.
        is_own = of_type >= starts.shape[0] * num_ids
        places.append(of_type + is_own * num_own if num_own else of_type)
        begins.append(edges.indptr[:-1] + num_edges)
        degrees.append(edges.indptr.diff())
        num_own += len(degrees[-1])
        num_edges += len(edges.eids)
    of_ids = torch.cat(places)
    lengths = torch.cat(degrees)[of_ids]
    shift = torch.cat(begins)[of_ids] - lengths.cumsum(0) + lengths
    numbers = [sum(answers.received(n).lengths) for n in range(len(places))]
    total = sum(numbers)
    shift = shift.repeat_interleave(lengths, output_size=total)
    at = torch.arange(total, device=none.device) + shift
    all_neighbors = torch.cat([neighbors.flatten().to(none.dtype), *(of.neighbors for of in own)])
    all_eids = torch.cat([eids.flatten().to(none.dtype), *(of.eids for of in own)])
    parts = zip(
        lengths.split([len(of_type) for of_type in places]),
        all_neighbors[at].split(numbers),
        all_eids[at].split(numbers),
        strict=True,
    )
    return [
        SampledNeighbors(torch.cat([of_type.new_zeros(1), of_type.cumsum(0)]), *edges)
        for of_type, *edges in parts
    ]


class HopsOverMachines:
    """Hops of one edge type that are launched without waits between them.

    They are for mini-batches of as many seeds on one stream.  How much room messages need is
    learned from those of the mini-batches before; ``what`` tells what is like them.
    """

    def __init__(
        self, what: str, fanouts: Sequence[int], replace: bool, messages: Messages, view: GraphView
    ) -> None:
        self._what, self._fanouts, self._replace = what, fanouts, replace
        self._messages, self.view = messages, view
        self._prepared: PreparedHops | None = None

    def launch(
        self,
        space: Workspace,
        network: Network,
        seeds: torch.Tensor,
        most: tuple[Sequence[int], Sequence[int]],
        asked: Asked,
    ) -> Callable[[], MachineHops | None]:
        """Launch all hops.

        ``most`` are the most nodes of this rank and of any rank before each hop, and ``asked`` is
        what machines ask each other of the first one.  Returns what waits for the hops, which are
        None if a message had too little room; then later ones have more.
        """
        most_here, most_of_all = most
        (places,), (own,) = asked.places, asked.own
        assert own is not None
        hops = self._hops(asked.data.shape[1], most_of_all, network.num_machines)
        with space.lock:
            prepared = self._prepared
            if prepared is None or prepared.hops != hops or not prepared.is_valid:
                self._prepared = prepared = None  # whose memory may be needed
                prepared = PreparedHops(space, self.view, most_here, hops, network)
                self._prepared = prepared
            first = Requests(places, own, asked.messages)
            by_machine = [key.fold_hops(len(hops)) for key in asked.keys]
            in_flight = prepared.launch(first, seeds, [*zip(*by_machine, strict=True)])

        def finish() -> MachineHops | None:
            needed, sampled = in_flight.finish()
            return sampled if self._had_room(hops, needed) else None

        return finish

    def _hops(self, num_ids: int, most: Sequence[int], num_machines: int) -> list[Hop]:
        """How hops are sampled, the first one of so many ids from each machine."""
        hops = []
        for number, fanout in enumerate(self._fanouts):
            if number:
                # At first it is taken that machines are asked for much the same.
                guess = min(most[number], 2 * most[number] // num_machines)
                num_ids = self._messages.room((self._what, "ids", number), guess)
            num_edges = self._messages.room((self._what, "edges", number), num_ids * fanout)
            hops.append(Hop(fanout, self._replace, Room(num_ids, num_edges)))
        return hops

    def _had_room(self, hops: Sequence[Hop], needed: Sequence[Room]) -> bool:
        """Whether there was room for all that was sent."""
        for number, (hop, of_hop) in enumerate(zip(hops, needed, strict=True)):
            for what, room, used in zip(("ids", "edges"), hop.room, of_hop, strict=True):
                if what == "ids" and not number:
                    continue  # known before
                if not self._messages.learn((self._what, what, number), used, room):
                    return False  # and what came after is not true
        return True


def blocks(etype: CanonicalEtype, hops: MachineHops) -> list[EtypeBlock]:
    """Hops of an edge type as blocks, that of the input nodes first."""
    ntype = etype[2]
    ends = itertools.pairwise(hops.sizes)
    return [
        EtypeBlock(
            {etype: BlockEdges(edges.indptr, edges.neighbors, edges.eids)},
            {ntype: hops.nodes[:num_src]},
            {ntype: num_dst},
        )
        for edges, (num_dst, num_src) in zip(hops.edges, ends, strict=True)
    ][::-1]
