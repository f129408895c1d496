"""What machines answer each other that are asked for samples, and what is made of it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dgl_mgpu.comm.messages import Messages
from dgl_mgpu.ops import BlockEdges, EtypeBlock, SampledNeighbors
from dgl_mgpu.ops.edges import HopOptions
from dgl_mgpu.ops.machine_hops import MachineBatch, MachineHop, MachineHops, Room
from dgl_mgpu.ops.requests import NOTES
from dgl_mgpu.store.rounds import Arrived, Asked, longest_of
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


@dataclass(frozen=True)
class Hops:
    """The rounds of hops that are launched without waits between them.

    ``options`` are by hop and by machine that asks, and ``most`` the most nodes of any rank before
    each hop.
    """

    what: str
    notes: tuple[int, ...]
    messages: Messages
    options: list[list[HopOptions]]
    most: list[int]
    #: What messages of each round but the first are like, and their room.
    rooms: list[tuple[Hashable, int]] = field(default_factory=list)

    def launch(self, batch: MachineBatch, asked: Asked) -> None:
        """Launch all hops; ``asked`` is what machines ask each other of the first one."""
        (places,), (own,), received = asked.places, asked.own, asked.messages
        num_ids = asked.data.shape[1]
        for number, options in enumerate(self.options):
            if number:
                # At first it is taken that machines are asked for much the same.
                guess = min(self.most[number], 2 * self.most[number] // len(options))
                num_ids = self._room("ids", number, guess)
                places, own, received = batch.ask(num_ids, self.notes)
            num_edges = self._room("edges", number, num_ids * options[0].fanout)
            hop = MachineHop(options, Room(num_ids, num_edges))
            assert own is not None
            batch.sample(hop, places, own, received, self.notes)
        batch.expect_reports()

    def had_room(self, heads_of: Sequence[list[list[int]]]) -> bool:
        """Whether there was room for all; ``heads_of`` each round but the first."""
        for heads, (like, room) in zip(heads_of, self.rooms, strict=True):
            needed = longest_of([head[NOTES : NOTES + len(heads)] for head in heads])
            if not self.messages.learn(like, needed, room):
                return False  # and what came after is not true
        return True

    def _room(self, what: str, number: int, guess: int) -> int:
        like = self.what, what, number
        self.rooms.append((like, self.messages.room(like, guess)))
        return self.rooms[-1][1]


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
