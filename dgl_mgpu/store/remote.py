"""Rows and neighbours that other machines keep, asked of them in rounds of all ranks.

In a round each rank sends the ids that it misses to their owners, the rank at its own place of each
machine; it answers what it is asked, and puts the answers where they belong.  A hop is a round, of
all edge types, and so are the rows of a mini-batch's features.  Every rank takes part in every
round and asks for the same: one that misses nothing, or has no seeds at all, asks for no ids.  A
rank that cannot ask says so in its place.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.messages import to_device
from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
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
from dgl_mgpu.ops.edges import to_idtype
from dgl_mgpu.ops.machine_hops import MachineHops, most_nodes
from dgl_mgpu.ops.workspace import workspace
from dgl_mgpu.sampling.side_stream import may_prefetch
from dgl_mgpu.store.remote_rows import ReceivedRows, by_machine, num_bytes
from dgl_mgpu.store.remote_samples import (
    Edges,
    HopsOverMachines,
    Samples,
    blocks,
    joined,
    num_starts,
)
from dgl_mgpu.store.rounds import Asked, Rounds, Vectors, Wanted
from dgl_mgpu.utils.types import CanonicalEtype

T = TypeVar("T")
P = ParamSpec("P")

#: Nodes whose weights are looked at together.
_CHECKED = 1 << 20
#: Kinds of mini-batches whose hops are kept prepared, each with the memory that it takes.
_PREPARED = 4
#: Tables that machines ask each other for at a time, at least.
_TABLES = 4
_CLOSED = (
    "StoreClosedError: it has closed the store, which all ranks are to do when none reads it any "
    "more"
)
_LET_GO = (
    "StoreClosedError: it has ended, as its own output may explain, or has let go of the store, "
    "which all ranks are to keep while one reads it"
)


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


def _part_from(machines: Communicator, process: int, reason: str = _LET_GO) -> None:
    if os.getpid() == process:  # a fork has no connections
        machines.close(reason)


def _told_of_errors(method: Callable[P, T]) -> Callable[P, T]:
    """A collective method, of whose errors others are told, so that they do not wait for it."""

    @functools.wraps(method)
    def told(*arguments: P.args, **options: P.kwargs) -> T:
        others: Any = arguments[0]
        with others.told_of_errors():
            return method(*arguments, **options)

    return told


class OtherMachines:
    """The machines that have a store together, as one rank of one of them reads the others.

    ``machines`` are the ranks at this one's place of each, on CPUs over connections that go with
    the store, and ``bounds`` the first node of each machine, by node type
    (:mod:`dgl_mgpu.store.span`).  ``largest`` is the most that an id of a node or edge can be, and
    ``max_types`` how many types of edges are sampled together.
    """

    def __init__(
        self,
        machines: Communicator,
        bounds: Mapping[str, list[int]],
        largest: int,
        max_types: int,
        device: torch.device,
    ) -> None:
        self.machines, self._device = machines, device
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
        #: Whether all ranks make mini-batches ahead: then they ask each other in the same order.
        self.may_prefetch = all(machines.all_gather(may_prefetch()))
        #: Prepared by what is sampled, number of seeds and stream, the one used last behind others.
        self._hops: dict[tuple[str, int, int], HopsOverMachines] = {}
        self._received = ReceivedRows()
        self._process = os.getpid()
        # Also at exit: gloo's thread, where it frees a message while Python ends, aborts that.
        self._finalizer = weakref.finalize(self, _part_from, machines, self._process)

    def close(self, reason: str = _CLOSED) -> None:
        """Part from the others, which raise that where they ask this rank for anything more."""
        if self._finalizer.detach():
            _part_from(self.machines, self._process, reason)

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
            ids = checked_ids_of_owners(what, rows, ids, owned, int(owners.bounds[-1]))
            ids = ids.to(self._device)
        # Machines are to send what others have room for.
        what += f", of shape {tuple(rows.shape[1:])} and {rows.dtype}"
        machine = torch.searchsorted(owners.bounds[1:-1], ids.long(), right=True)
        order = machine.argsort(stable=True)
        counts = machine.bincount(minlength=self.machines.size).tolist()
        vectors = Vectors(ids[order].to(self._rounds.dtype), counts)
        asked = self._rounds.ask_vectors(what, vectors)
        places = asked.joined().to(rows.device, torch.int64) - owned.start
        answer = rows.index_select(0, places).to(self._device)
        received = self.machines.all_to_all(answer, asked.received().lengths, counts)
        found = torch.empty_like(received)
        found[order] = received
        return found

    def told(self, what: str) -> AbstractContextManager[None]:
        """Have all ranks told of an error before this one asks others for anything."""
        return self._rounds.told(what)

    def told_of_errors(self) -> AbstractContextManager[None]:
        """Have others end what they wait for if this rank fails alone, between collectives."""
        return self.machines.told_of_errors()

    @_told_of_errors
    def agree(self, what: str) -> None:
        """Have all raise unless all ranks are to do the same together; collective."""
        self._rounds.agree(what)

    @_told_of_errors
    def run_all(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` on all ranks, or have all raise where one does; collective."""
        with self._rounds.told(what):
            result = step()
        self._rounds.agree(what)
        return result

    @_told_of_errors
    def sum_over_machines(self, what: str, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the machines' tensors of integers, on the store's device; collective."""
        self._rounds.agree(what)
        (every,) = self.machines.all_gather_cat(what, [numbers[None]])
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
        if asked.is_needed:
            return self._exchanged(reads, asked)
        return [
            GatheredRows(
                gather_rows(read.view, read.ids, out=read.out, dtype=read.dtype),
                read.view,
                read.ids,
                0,
            )
            for read in reads
        ]

    def _exchanged(self, reads: Sequence[TableRead], asked: Asked) -> list[GatheredRows]:
        """The rows of tables that machines have asked each other for, which all send at once."""
        views, rank = [read.view for read in reads], self.machines.rank
        answers, sending = [], []
        for number, view in enumerate(views):
            ids, counts = asked.of_others(number)
            answers.append(gather_rows(view, ids, dtype=view.dtype))
            sending.append(counts)
        sent = [asked.sent(number) for number in range(len(reads))]
        receiving = [spans.lengths for spans in sent]
        for counts in receiving:
            counts[rank] = 0
        received = self.machines.all_to_all(
            by_machine(answers, sending), num_bytes(sending, views), num_bytes(receiving, views)
        )
        # Kernels cannot read what is on disk: such rows are read before.
        listed = [
            None if own is None else own[: asked.received(number).lengths[rank]]
            for number, own in enumerate(asked.own)
        ]
        here = [
            view if own is None else _all_of(gather_rows(view, own, dtype=view.dtype), view)
            for view, own in zip(views, listed, strict=True)
        ]
        tables, room = [read.table for read in reads], asked.data.shape[1]
        both = self._received.views(tables, here, received, sent, receiving, room)
        gathered = []
        for read, view, places, own, counts in zip(
            reads, both, asked.places, listed, receiving, strict=True
        ):
            rows = gather_rows(view, places, out=read.out, dtype=read.dtype)
            read_here = (view, places) if own is None else (read.view, own)
            gathered.append(GatheredRows(rows, *read_here, sum(counts)))
        return gathered

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
            mine = [of_type[self.machines.rank] for of_type in edges]
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

    @_told_of_errors
    def sample_hops_async(
        self,
        views: Mapping[CanonicalEtype, GraphView],
        seeds: torch.Tensor,
        fanouts: Sequence[Mapping[CanonicalEtype, int]],
        key: SampleKey,
        *,
        replace: bool,
        one_by_one: Callable[[], list[EtypeBlock]],
    ) -> SampleFuture[list[EtypeBlock]]:
        """Start to sample all hops, uniformly, of one edge type; collective.

        What is asked of the first hop is sent at once.  The host waits for it, which tells whether
        all ranks do the same, when the hops are launched: when the future goes on.  ``one_by_one``
        samples them where some rank's may have more edges than there is room for.
        """
        ((etype, view),) = views.items()
        of_hops = [fanout[etype] for fanout in reversed(fanouts)]
        what = f"sample hops of {', '.join(map(str, of_hops))} neighbors"
        what += ", with replacement" * replace
        with self._rounds.told(what):
            seeds = to_idtype(seeds, view, view.num_rows)
            raise_faults(self._device, wait=False)
        first = self._rounds.start(what, [Wanted(seeds, view, etype[2])], key)
        finish: Callable[[], MachineHops | None] | None = None

        def launch() -> None:
            nonlocal finish
            with self.told_of_errors():
                asked = first.result()
                # Samples take room for as many ids as messages have.
                num_seeds = max(asked.data.shape[1], *map(sum, asked.sent_by_all(1)))
                most_of_all = most_nodes(num_seeds, of_hops, view.num_rows)
                most = most_nodes(len(seeds), of_hops, view.num_rows)
                if most is None or most_of_all is None:
                    return
                hops = self._hops_of(what, view, of_hops, replace, len(seeds))
                space, network = workspace(self._device), self._rounds.network(etype[2])
                finish = hops.launch(space, network, seeds, (most, most_of_all), asked)

        def result() -> list[EtypeBlock]:
            if finish is None:
                first.result()  # raises if it failed
                return one_by_one()
            with self.told_of_errors():
                sampled = finish()
            if sampled is not None:
                return blocks(etype, sampled)
            again = self.sample_hops_async(
                views, seeds, fanouts, key, replace=replace, one_by_one=one_by_one
            )
            return again.result()

        return SampleFuture(result, launch)

    def _hops_of(
        self, what: str, view: GraphView, fanouts: Sequence[int], replace: bool, num_seeds: int
    ) -> HopsOverMachines:
        """What samples hops of mini-batches of as many seeds, on the current stream."""
        key = what, num_seeds, current_stream(self._device)
        hops = self._hops.pop(key, None)
        if hops is None or hops.view is not view:
            hops = HopsOverMachines(what, fanouts, replace, self._rounds.messages, view)
        self._hops[key] = hops  # the one used last
        if len(self._hops) > _PREPARED:
            del self._hops[next(iter(self._hops))]
        return hops

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
        counts = owners.bincount(minlength=self.machines.size).tolist()
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

        self.run_all("check sampling weights", check)


def checked_ids_of_owners(
    action: str, rows: torch.Tensor, ids: torch.Tensor, owned: range, num_nodes: int
) -> torch.Tensor:
    """The ids of nodes; or InvalidInputError if they are none, or ``rows`` not those of the
    ``owned`` nodes."""
    if not isinstance(rows, torch.Tensor) or not rows.dim() or len(rows) != len(owned):
        found = f"of type {type(rows).__name__}"
        if isinstance(rows, torch.Tensor):
            found = f"of shape {tuple(rows.shape)}"
        raise InvalidInputError(
            action,
            f"the rows are {found}, and this machine owns {len(owned):,} nodes",
            "pass a tensor with a row for each of own_nodes()",
        )
    ids = check_ids(ids, action)
    raise_at_id_outside(ids, num_nodes, action)
    return ids


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
