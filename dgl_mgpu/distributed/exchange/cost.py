"""How long each strategy to exchange rows should take: an analytical model.

MGG's (section 4), of the work of its warps, extended to the other strategies.  It says what is
worth trying; which is fastest is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dgl_mgpu.distributed.exchange.by_machine import rounds_of_machine
from dgl_mgpu.distributed.exchange.collectives import num_rounds, portions_of
from dgl_mgpu.distributed.exchange.strategies import (
    BROADCAST,
    HALO_BLOCKING,
    HALO_BY_MACHINE,
    ExchangeStrategy,
    Rows,
    RowsOfPlace,
    rows_in_flight,
)
from dgl_mgpu.distributed.local_part import Part
from dgl_mgpu.machine import probe
from dgl_mgpu.machine.topology import GB
from dgl_mgpu.ops import device
from dgl_mgpu.ops.spmm_remote import Pipeline

#: Seconds from one round's beginning to its first rows, between GPUs and over gloo.
_LATENCY, _LATENCY_OF_GLOO = 20e-6, 200e-6
#: Bytes of an edge beside ids, while tiles and transposes are made.
_BYTES_OF_EDGE = 24


class Rates(NamedTuple):
    """What each of a machine's GPUs does; a CPU counts as one multiprocessor."""

    link: float  # bytes a second that it takes in from the others of its machine
    network: float  # and from other machines
    memory: float  # bytes a second that it reads of its own memory
    latency: float  # seconds before a round's rows begin to come
    multiprocessors: int

    @classmethod
    def of_this_machine(cls, where: torch.device) -> Rates:
        """As far as they are known without timing anything."""
        machine = probe(free_memory=False)
        link = float(machine.ports().min())
        # A network card is reached as the host's memory is.
        network = min(link, float(machine.host_bandwidth.min()))
        if not machine.fully_linked or math.isinf(link):
            link = network
        memory = float(machine.link_bandwidth.diagonal().min())
        is_gpu = where.type == "cuda"
        latency, sms = (_LATENCY, device.driver.num_sms(where)) if is_gpu else (_LATENCY_OF_GLOO, 1)
        return cls(link * GB, network * GB, memory * GB, latency, sms)


class RankLoad(NamedTuple):
    """The work that sums give one rank."""

    own_src: int
    own_dst: int
    edges: list[int]  # by the rank that owns their sources
    wanted: list[int]  # rows of each other rank
    sending: int  # rows that others want of it

    @classmethod
    def of(cls, part: Part) -> RankLoad:
        _, indices, _ = part.relation.csc()
        reads = torch.bincount(indices, minlength=part.relation.num_src)
        of_owner = reads[part.num_own_src :].split_with_sizes(part.wanted)
        edges = torch.stack([of_rank.sum() for of_rank in of_owner])
        edges[part.rank] = reads[: part.num_own_src].sum()
        return cls(
            part.num_own_src, part.num_own_dst, edges.tolist(), list(part.wanted), sum(part.sending)
        )


class _Round(NamedTuple):
    """What a rank does in a round: the edges that it adds up, and rows that come before that.

    ``near`` are those of ranks of its own machine, ``far`` those of others.
    """

    edges: int
    near: int = 0
    far: int = 0

    def more(self, edges: int, rows: int, is_near: bool) -> _Round:
        near, far = (rows, 0) if is_near else (0, rows)
        return _Round(self.edges + edges, self.near + near, self.far + far)


class Model:
    """Estimates for one part of a graph, from the loads of all ranks; the same on all ranks.

    ``machines`` has the ranks of each, one of all of them by default.
    """

    def __init__(
        self,
        loads: Sequence[RankLoad],
        rates: Rates,
        id_bytes: int,
        has_window: bool = False,
        machines: Sequence[Sequence[int]] = (),
    ) -> None:
        self._loads, self._rates, self._id_bytes = loads, rates, id_bytes
        self._rows = [Rows(load.own_src, load.wanted) for load in loads]
        self._has_window = has_window
        self._machines = [list(ranks) for ranks in machines or [range(len(loads))]]
        self._machine_of = {
            rank: number for number, ranks in enumerate(self._machines) for rank in ranks
        }

    def seconds(self, strategy: ExchangeStrategy, row_bytes: int) -> float:
        """How long sums should take the slowest rank; their transposes move as much."""
        of_rank = self._reading if strategy.pipeline is not None else self._in_rounds
        return max(of_rank(strategy, rank, row_bytes) for rank in range(len(self._loads)))

    def extra_bytes(self, strategy: ExchangeStrategy, row_bytes: int) -> int:
        """Memory that a strategy takes on a rank besides the part: tiles, and rows in flight.

        Also the parts of rows that a pipeline's warps share.
        """
        most = 0
        for rank, load in enumerate(self._loads):
            rounds = self._rounds(strategy, rank)
            # Tiles and their transposes; where the part is the only tile, its transpose.
            ids_of_edge = 1 if strategy == HALO_BLOCKING else 2
            tiles = (2 * ids_of_edge * self._id_bytes + _BYTES_OF_EDGE) * sum(load.edges)
            ends = 2 * self._id_bytes * (load.own_dst + load.own_src) * len(rounds)
            rows = 0
            if strategy.pipeline is not None:
                pairs = load.own_dst + sum(load.edges) // strategy.pipeline.ps
                rows = 2 * (1 + pairs // strategy.pipeline.dist)
            most = max(most, tiles + ends + row_bytes * rows)
        in_flight = rows_in_flight(strategy, self._rows, self._has_window, self._machines)
        return most + row_bytes * in_flight

    def fills(self, pipeline: Pipeline) -> bool:
        """Whether there is a block for each multiprocessor (MGG, equations 2 and 3)."""
        blocks = []
        for rank, load in enumerate(self._loads):
            remote = sum(load.edges) - load.edges[rank]
            # Pairs are of one row here, which has one at least.
            pairs = max(load.own_dst, max(load.edges[rank], remote) // pipeline.ps)
            blocks.append(pairs // (pipeline.dist * pipeline.wpb))
        return min(blocks) >= self._rates.multiprocessors

    def _reading(self, strategy: ExchangeStrategy, rank: int, row_bytes: int) -> float:
        load, rates = self._loads[rank], self._rates
        remote = sum(load.edges) - load.edges[rank]
        adding = (load.edges[rank] + load.own_dst) * row_bytes / rates.memory
        lending = 2 * load.own_src * row_bytes / rates.memory
        return rates.latency + lending + max(adding, remote * row_bytes / rates.link)

    def _in_rounds(self, strategy: ExchangeStrategy, rank: int, row_bytes: int) -> float:
        """While a round's rows are added up, the next one's arrive."""
        load, rates = self._loads[rank], self._rates
        rounds = self._rounds(strategy, rank)
        # Rows by machine are passed on when they have come.
        messages = 2 if strategy == HALO_BY_MACHINE else 1
        arriving = [
            messages * rates.latency
            + row_bytes * (part.near / rates.link + part.far / rates.network)
            if part.near or part.far
            else 0.0
            for part in rounds
        ]
        # Sums are written in the first round, read and written in the others.
        adding = [
            (part.edges + load.own_dst * (2 if number else 1)) * row_bytes / rates.memory
            for number, part in enumerate(rounds)
        ]
        lent = load.own_src if self._has_window else load.sending
        picked = 0 if strategy == BROADCAST else lent
        picked += load.own_src if strategy == HALO_BLOCKING else 0
        picking = 2 * picked * row_bytes / rates.memory
        overlapped = map(max, adding, [*arriving[1:], 0.0])
        return picking + arriving[0] + sum(overlapped)

    def _rounds(self, strategy: ExchangeStrategy, rank: int) -> list[_Round]:
        load, ranks = self._loads[rank], range(len(self._loads))
        is_near = [self._machine_of[owner] == self._machine_of[rank] for owner in ranks]
        if strategy == BROADCAST:
            return [
                _Round(load.edges[owner]).more(0, self._loads[owner].own_src, is_near[owner])
                for owner in ranks
            ]
        if strategy == HALO_BLOCKING:
            every = _Round(sum(load.edges))
            for owner in ranks:
                every = every.more(0, load.wanted[owner], is_near[owner])
            return [every]
        if strategy == HALO_BY_MACHINE:
            return self._rounds_by_machine(rank)
        size, chunks = len(ranks), strategy.chunks or 1
        rounds = [_Round(load.edges[rank])]
        rounds += [_Round(0)] * (num_rounds(size, chunks) - 1)
        for distance in range(1, size):
            owner = (rank + distance) % size
            wanted, edges = load.wanted[owner], load.edges[owner]
            for portion in portions_of(distance, wanted, size, chunks):
                rows, before = portion.size, rounds[portion.number]
                of_rows = edges * rows // max(wanted, 1)
                rounds[portion.number] = before.more(of_rows, rows, is_near[owner])
        return rounds

    def _rounds_by_machine(self, rank: int) -> list[_Round]:
        load, number = self._loads[rank], self._machine_of[rank]
        here = self._machines[number]
        rounds = [_Round(load.edges[rank])]
        rounds += [_Round(load.edges[other], load.wanted[other]) for other in here if other != rank]
        turns = rounds_of_machine(len(here))
        for there in self._machines[number + 1 :] + self._machines[:number]:
            rows = RowsOfPlace.of(self._rows, here, there, here.index(rank))
            edges = sum(load.edges[other] for other in there)
            each = _Round(*(count // turns for count in (edges, rows.coming, rows.arriving)))
            rounds += [each] * turns
        return rounds
