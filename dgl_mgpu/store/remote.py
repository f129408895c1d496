"""Rows and neighbours that other machines keep, asked of them in rounds of all ranks.

In a round each rank sends the ids that it misses to their owners, the rank at its own place of each
machine; it answers what it is asked, and puts the answers where they belong.  A hop is a round, of
all edge types, and so are the rows of a mini-batch's features.  Every rank takes part in every
round and asks for the same: one that misses nothing, or has no seeds at all, asks for no ids.  A
rank that cannot ask says so in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.messages import to_device
from dgl_mgpu.errors import UnsupportedByStoreError
from dgl_mgpu.ops import (
    EtypeBlock,
    GraphView,
    RowView,
    SampledNeighbors,
    SampleFuture,
    SampleKey,
    gather_rows,
    sample_neighbors,
)
from dgl_mgpu.ops.check import check_ids, fanout_of, raise_at_id_outside
from dgl_mgpu.ops.device import current_stream, raise_faults
from dgl_mgpu.ops.edges import HopOptions, to_idtype
from dgl_mgpu.ops.machine_hops import MachineBatch, most_nodes
from dgl_mgpu.ops.workspace import workspace
from dgl_mgpu.store.remote_samples import Edges, Hops, Samples, blocks, joined, num_starts
from dgl_mgpu.store.rounds import Asked, Rounds, Spans, Vectors, Wanted, notes_of
from dgl_mgpu.utils.types import CanonicalEtype

T = TypeVar("T")
P = ParamSpec("P")

#: Nodes whose weights are looked at together.
_CHECKED = 1 << 20
#: Tables that machines ask each other for at a time, at least.
_TABLES = 4


class GatheredRows(NamedTuple):
    """Rows of nodes, wherever they were."""

    rows: torch.Tensor
    #: Where those that this machine had were read: the last segments of a view, and ids there.
    view: RowView
    ids: torch.Tensor
    num_received: int  # that other machines sent


@dataclass(frozen=True)
class RemoteTable:
    """A feature of nodes, of which ``others`` have rows as well."""

    others: OtherMachines
    name: str
    ntype: str


class TableRead(NamedTuple):
    """Rows of a table to gather; see :func:`dgl_mgpu.ops.gather_rows`."""

    table: RemoteTable
    view: RowView  # those that this machine has
    ids: torch.Tensor
    dtype: torch.dtype
    out: torch.Tensor | None = None


def _told_of_errors(method: Callable[P, T]) -> Callable[P, T]:
    """A collective method, of whose errors others are told, so that they do not wait for it."""

    @functools.wraps(method)
    def told(*arguments: P.args, **options: P.kwargs) -> T:
        others: Any = arguments[0]
        with others._machines.told_of_errors():
            return method(*arguments, **options)

    return told


class OtherMachines:
    """The machines that have a store together, as one rank of one of them reads the others.

    ``machines`` are the ranks at this one's place of each, and ``bounds`` the first node of each
    machine, by node type (:mod:`dgl_mgpu.store.span`).  ``largest`` is the most that an id of a
    node or edge can be, and ``max_types`` how many types of edges are sampled together.
    """

    def __init__(
        self,
        machines: Communicator,
        bounds: Mapping[str, list[int]],
        largest: int,
        max_types: int,
        device: torch.device,
    ) -> None:
        self._machines, self._device = machines, device
        #: Of edges, or tables, that machines ask each other for at a time.
        self._most_types = max(max_types, _TABLES)
        # Of ids as they are sent.
        dtype = torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64
        self._rounds = Rounds(machines, bounds, dtype, self._most_types, device)
        self._owned = {
            ntype: range(*firsts[machines.rank : machines.rank + 2])
            for ntype, firsts in bounds.items()
        }
        #: Whether all ranks have a GPU, on which hops are sampled without waits between them.
        self._have_gpus = all(machines.all_gather(device.type == "cuda"))
        #: By table and stream, its tiers, for how much room, and these behind those of what is
        #: received.
        self._tiers: dict[tuple[str, str, int], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __reduce__(self) -> NoReturn:
        raise UnsupportedByStoreError(
            "read a store of several machines in another process",
            "the ranks of the job alone take part in what machines send each other",
            "use num_workers=0",
        )

    def table(self, name: str, ntype: str) -> RemoteTable:
        """A feature of nodes of a type."""
        return RemoteTable(self, name, ntype)

    def owned(self, ntype: str) -> range:
        """The nodes of a type that this machine owns."""
        return self._owned[ntype]

    @_told_of_errors
    def gather_owned(
        self, name: str, ntype: str, rows: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Rows of nodes, of which each machine has those of the nodes that it owns; collective.

        ``rows``, of this one, are anywhere; the result is on the store's device.
        """
        what, owned, owners = f"gather {name}", self._owned[ntype], self._rounds.owners[ntype]
        with self._rounds.told(what):
            ids = check_ids(ids, what, self._device)
            raise_at_id_outside(ids, int(owners.bounds[-1]), what)
        machine = torch.searchsorted(owners.bounds[1:-1], ids.long(), right=True)
        order = machine.argsort(stable=True)
        counts = machine.bincount(minlength=self._machines.size).tolist()
        vectors = Vectors(ids[order].to(self._rounds.dtype), counts)
        asked = self._rounds.ask_vectors(what, vectors)
        places = asked.joined().to(rows.device, torch.int64) - owned.start
        answer = rows.index_select(0, places).to(self._device)
        received = self._machines.all_to_all(answer, asked.received().lengths, counts)
        found = torch.empty_like(received)
        found[order] = received
        return found

    def told(self, what: str) -> AbstractContextManager[None]:
        """Have all ranks told of an error before this one asks others for anything."""
        return self._rounds.told(what)

    def run_all(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` on all ranks, or have all raise where one does; collective."""
        return self._machines.run_all(what, step)

    def sum_over_machines(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the machines' tensors of integers, on the store's device; collective."""
        (every,) = self._machines.all_gather_cat("add up numbers of machines", [numbers[None]])
        return every.sum(0, dtype=numbers.dtype)

    @_told_of_errors
    def gather(self, reads: Sequence[TableRead]) -> list[GatheredRows]:
        """Rows of nodes, wherever they are, of some tables; collective.

        The machines ask each other once for as many tables as heads have words for.
        """
        found: list[GatheredRows] = []
        for first in range(0, len(reads), self._most_types):
            found += self._gather(reads[first : first + self._most_types])
        return found

    def _gather(self, reads: Sequence[TableRead]) -> list[GatheredRows]:
        what = f"gather rows of {', '.join(repr(read.table.name) for read in reads)}"
        with self._rounds.told(what):
            wanted = [
                Wanted(
                    check_ids(read.ids, what, read.view.tiers.device),
                    read.view,
                    read.table.ntype,
                    lists_own=read.view.disk is not None,
                )
                for read in reads
            ]
        asked = self._rounds.ask(what, wanted)
        if not asked.is_needed:
            return [
                GatheredRows(
                    gather_rows(read.view, read.ids, out=read.out, dtype=read.dtype),
                    read.view,
                    read.ids,
                    0,
                )
                for read in reads
            ]
        return [self._received(read, asked, number) for number, read in enumerate(reads)]

    def _received(self, read: TableRead, asked: Asked, number: int) -> GatheredRows:
        """The rows of a table, one of those that machines have asked each other for."""
        view, places = read.view, asked.places[number]
        received, sent, rank = asked.received(number), asked.sent(number), self._machines.rank
        ids = received.of(asked.data)
        ids[rank] = ids[rank][:0]
        lengths = [list(of.lengths) for of in (received, sent)]
        lengths[0][rank] = lengths[1][rank] = 0
        answer = gather_rows(view, torch.cat(ids), dtype=view.dtype)
        rows = self._machines.all_to_all(answer, *lengths)
        here, own = view, asked.own[number]
        if own is not None:
            # Kernels cannot read what is on disk: such rows are read before.
            own = own[: received.lengths[rank]]
            here = _all_of(gather_rows(view, own, dtype=view.dtype), view)
        both = self._with_received(read.table, here, rows, sent, lengths[1], asked.data.shape[1])
        found = gather_rows(both, places, out=read.out, dtype=read.dtype)
        if own is not None:
            return GatheredRows(found, view, own, len(rows))
        return GatheredRows(found, both, places, len(rows))

    def _with_received(
        self,
        table: RemoteTable,
        view: RowView,
        rows: torch.Tensor,
        sent: Spans,
        lengths: list[int],
        room: int,
    ) -> RowView:
        """Rows received of machines, each in a tier, and then those of a view.

        They are those of as many ids as ``lengths`` says, from where ``sent`` begins in the message
        to each, which has this room.
        """
        device, size = view.tiers.device, len(lengths)
        first = size * room
        # What one stream has made, another might read too early.
        key = table.name, table.ntype, current_stream(device) if device.type == "cuda" else 0
        known = self._tiers.get(key)
        if known is not None and known[0] is view.tiers and known[1] == room:
            tiers = known[2]
        else:
            of_machines = [[n * room, (n + 1) * room, 1, n] for n in range(size)]
            here = view.tiers + to_device([first, first, 0, size], device)
            tiers = torch.cat([to_device(of_machines, device), here])
            self._tiers[key] = view.tiers, room, tiers
        addresses, address = [], rows.data_ptr()
        for begin, length in zip(sent.begins, lengths, strict=True):
            addresses.append(address - begin * view.row_bytes)
            address += length * view.row_bytes
        return with_fields(
            view,
            tiers=tiers,
            pointers=torch.cat([to_device(addresses, device), view.pointers]),
            num_rows=first + view.num_rows,
            position=view.position[:0],
            owner=(view.owner, rows),
            host_start=view.host_start if view.host_start < 0 else first + view.host_start,
            disk=None,
            address=0,
        )

    @_told_of_errors
    def sample_etype_neighbors(
        self,
        prob: str | None,
        is_numbered: bool,
        views: Mapping[CanonicalEtype, GraphView],
        seeds: Mapping[CanonicalEtype, torch.Tensor],
        fanouts: Mapping[CanonicalEtype, int],
        key: SampleKey,
        *,
        replace: bool,
        weights: Mapping[CanonicalEtype, RowView],
    ) -> dict[CanonicalEtype, SampledNeighbors]:
        """As :func:`dgl_mgpu.ops.sample_etype_neighbors` of the whole graph; collective.

        ``weights`` are those of feature ``prob``, of all edges.  ``is_numbered`` says whether the
        key's hop is the same on all ranks, which then tells rounds apart: a call for one hop takes
        its own from its seeds, which are a rank's own.
        """
        etypes = list(views)
        none = torch.empty(0, dtype=next(iter(views.values())).idtype, device=self._device)
        what = f"sample hop {key.hop}" if is_numbered else "sample a hop"
        what += "" if prob is None else f" by '{prob}'"
        with self._rounds.told(what):
            ids = [check_ids(seeds.get(etype, none), what, self._device) for etype in etypes]
            wanted = [fanout_of(fanouts, etype, what) if etype in seeds else 0 for etype in etypes]
        what += f": {', '.join(map(str, wanted))} neighbors" + (", with replacement" * replace)
        asked = self._rounds.ask(
            what,
            [
                Wanted(of_type, view, etype[2])
                for (etype, view), of_type in zip(views.items(), ids, strict=True)
            ],
            key,
        )

        def sample(keys: Sequence[SampleKey], ids: Sequence[Sequence[torch.Tensor]]) -> Edges:
            """The edges of each type and of the ids of each machine, by its key."""
            return [
                [
                    sample_neighbors(
                        view,
                        of_machine,
                        fanout,
                        with_fields(of, etype=number),
                        replace=replace,
                        weights=weights.get(etype),
                    )
                    for of, of_machine in zip(keys, of_type, strict=True)
                ]
                for number, ((etype, view), of_type, fanout) in enumerate(
                    zip(views.items(), ids, wanted, strict=True)
                )
            ]

        if asked.is_needed:
            by_machine = [asked.ids(number) for number in range(len(etypes))]

            def answer() -> tuple[Edges, Samples]:
                edges = sample(asked.keys, by_machine)
                return edges, Samples(asked, edges)

            edges, answers = self._rounds.answer(what, answer, num_starts(asked), 2)
            mine = [of_type[self._machines.rank] for of_type in edges]
            found = joined(asked, answers, mine, none)
        else:
            found = [edges for (edges,) in sample([key], [[of_type] for of_type in ids])]
        return {
            etype: sampled for etype, sampled in zip(etypes, found, strict=True) if etype in seeds
        }

    def can_start_hops(
        self,
        views: Mapping[CanonicalEtype, GraphView],
        fanouts: Sequence[Mapping[CanonicalEtype, int]],
    ) -> bool:
        """Whether :meth:`sample_hops_async` samples such hops; the same on all ranks."""
        (source, _, target), *others = etypes = list(views)
        is_bounded = all(fanout[etypes[0]] >= 0 for fanout in fanouts)
        return self._have_gpus and source == target and is_bounded and bool(fanouts) and not others

    def sample_hops_async(
        self,
        views: Mapping[CanonicalEtype, GraphView],
        seeds: torch.Tensor,
        fanouts: Sequence[Mapping[CanonicalEtype, int]],
        key: SampleKey,
        *,
        replace: bool,
    ) -> SampleFuture[list[EtypeBlock]] | None:
        """Start to sample all hops, uniformly, of one edge type; collective.

        The host waits for what is asked of the first hop, which tells whether all ranks do the
        same.  None is returned to all if some may have more edges than there is room for.
        """
        ((etype, view),) = views.items()
        of_hops = [fanout[etype] for fanout in reversed(fanouts)]
        what = f"sample hops of {', '.join(map(str, of_hops))} neighbors"
        what += ", with replacement" * replace
        with self._rounds.told(what):
            seeds = to_idtype(seeds, view, view.num_rows)
            raise_faults(self._device, wait=False)
        asked = self._rounds.ask(what, [Wanted(seeds, view, etype[2])], key)
        # Samples take room for as many ids as messages have.
        num_seeds = max(asked.data.shape[1], *map(sum, asked.sent_by_all(1)))
        most_of_all = most_nodes(num_seeds, of_hops, view.num_rows)
        most = most_nodes(len(seeds), of_hops, view.num_rows)
        if most_of_all is None or most is None:
            return None
        options = [
            [
                HopOptions(fanout, replace, with_fields(of, hop=key.hop + number).fold(), view.sms)
                for of in asked.keys
            ]
            for number, fanout in enumerate(of_hops)
        ]
        space = workspace(self._device)
        batch = MachineBatch(space, view, seeds, most, self._rounds.network(etype[2]))
        hops = Hops(what, notes_of(what, key), self._rounds.messages, options, most_of_all)

        def launch() -> None:
            with self._machines.told_of_errors(), space.lock:
                hops.launch(batch, asked)

        def finish() -> list[EtypeBlock]:
            with self._machines.told_of_errors():
                heads, sampled = batch.finish()
            if hops.had_room(heads):
                return blocks(etype, sampled)
            again = self.sample_hops_async(views, seeds, fanouts, key, replace=replace)
            assert again is not None  # as the first time
            return again.result()

        return SampleFuture(finish, launch)

    def walk_step(
        self,
        what: str,
        view: GraphView,
        ntype: str,
        nodes: torch.Tensor,
        draws: torch.Tensor,
        step: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of walks, each where its node's edges are; collective.

        ``nodes``, int64 and of a type, are -1 for walks that have ended.  ``step(nodes, draws)``
        gives where walks go and along which edges, of nodes whose edges this machine has, of
        ``view``.  Returns the same of all nodes.
        """
        position = view.position
        is_here = position[nodes.clamp(min=0)] >= 0 if len(position) else nodes >= 0
        here = (is_here & (nodes >= 0)).nonzero()[:, 0]
        there = (~is_here & (nodes >= 0)).nonzero()[:, 0]
        bounds = self._rounds.owners[ntype].bounds
        owners = torch.searchsorted(bounds[1:-1], nodes[there], right=True)
        there = there[owners.argsort(stable=True)]
        counts = owners.bincount(minlength=self._machines.size).tolist()
        # A draw has 64 bits, which are two elements where ids have 32.
        dtype = self._rounds.dtype
        picks = draws[there][:, None].view(dtype)
        rows = torch.cat([nodes[there].to(dtype)[:, None], picks], 1)
        width = rows.shape[1]
        lengths = [count * width for count in counts]
        asked = self._rounds.ask_vectors(what, Vectors(rows.flatten(), lengths))

        def taken() -> Vectors:
            of_others = asked.joined().view(-1, width)
            picks = of_others[:, 1:].clone(memory_format=torch.contiguous_format)
            answer = torch.stack(step(of_others[:, 0].long(), picks.view(torch.int64)[:, 0]), 1)
            return Vectors(
                answer.to(dtype).flatten(), [2 * n // width for n in asked.received().lengths]
            )

        mine, answers = self._rounds.answer(what, lambda: (step(nodes[here], draws[here]), taken()))
        to, along = torch.full_like(nodes, -1), torch.full_like(nodes, -1)
        to[here], along[here] = mine
        to[there], along[there] = answers.joined().view(-1, 2).long().T
        return to, along

    def check_weights(self, view: GraphView, weights: RowView) -> None:
        """Check the weights of edges, each machine those that it has; collective.

        Raises
        ------
        InvalidWeightError
            If a weight is NaN, infinite or negative, or all are zero at some node.
        RankFailedError
            If another rank has found one.
        """

        def check() -> None:
            position = view.position
            nodes = torch.arange(view.num_rows, device=self._device)
            for some in (nodes[position >= 0] if len(position) else nodes).split(_CHECKED):
                sample_neighbors(view, some, 1, SampleKey(0), weights=weights)

        self._machines.run_all("check sampling weights", check)


def _all_of(rows: torch.Tensor, like: RowView) -> RowView:
    """Rows in the order of their positions, as a table like another one."""
    tiers = to_device([[0, len(rows), 1, 0]], rows.device)
    return RowView(
        tiers=tiers,
        pointers=to_device([rows.data_ptr()], rows.device),
        num_rows=len(rows),
        row_shape=like.row_shape,
        dtype=like.dtype,
        owner=rows,
    )
