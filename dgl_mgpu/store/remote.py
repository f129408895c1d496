"""Rows and neighbours that other machines keep, asked of them in rounds of all ranks.

In a round each rank sends the ids that it misses to their owners, the rank at its own place of each
machine; it answers what it is asked, and puts the answers where they belong.  A hop is a round, of
all edge types, and so are the rows of a feature.  Every rank takes part in every round and asks for
the same: one that misses nothing, or has no seeds at all, asks for no ids.  A rank that cannot ask
says so in its place.

For a sample a rank asks itself, too: it is answered as the others are.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator, error_text, rank_failed
from dgl_mgpu.comm.messages import Messages, Received, head_elements, to_device
from dgl_mgpu.errors import (
    DGLMGPUError,
    IdOutOfRangeError,
    InvalidInputError,
    UnsupportedByStoreError,
)
from dgl_mgpu.ops import (
    BlockEdges,
    EtypeBlock,
    GraphView,
    RowView,
    SampledNeighbors,
    SampleFuture,
    SampleKey,
    gather_rows,
    sample_neighbors,
)
from dgl_mgpu.ops.check import check_ids, fanout_of, raise_at_bad_id, raise_at_id_outside
from dgl_mgpu.ops.device import current_stream, raise_faults
from dgl_mgpu.ops.edges import HopOptions, to_idtype
from dgl_mgpu.ops.machine_hops import (
    MachineBatch,
    MachineHop,
    MachineHops,
    Network,
    Room,
    most_nodes,
)
from dgl_mgpu.ops.requests import (
    NOTES,
    Owners,
    RequestMessages,
    RequestOptions,
    head_words,
    write_requests,
)
from dgl_mgpu.ops.workspace import workspace
from dgl_mgpu.utils.types import CanonicalEtype

T = TypeVar("T")

#: How a rank comes to a round: with what it asks for, or with an error.
_OK, _FAILED = 0, 1
#: Nodes whose weights are looked at together.
_CHECKED = 1 << 20
#: Tables that machines ask each other for at a time, at least.
_TABLES = 4
#: The first of the numbers that int64 does not have.
_TOP = 1 << 63


@dataclass(frozen=True)
class _Wanted:
    """Ids of a node type of which a round asks for something, and where what is here of it is."""

    ids: torch.Tensor
    view: RowView | GraphView
    ntype: str
    sends_own: bool = True  # what is here, too


class _Counts(NamedTuple):
    """Elements of messages by type of edges and by machine, of a type and of those before."""

    sent: list[list[int]]
    received: list[list[int]]
    to_others: int  # of what all machines send each other


@dataclass(frozen=True)
class _Asked:
    """What a round asks for: ``ids`` of each machine, (machines, room), are asked here.

    ``places`` are, for this machine's ids of each type, those of their answers, as
    :func:`dgl_mgpu.ops.requests.write_requests` gives them.
    """

    heads: list[list[int]]
    messages: torch.Tensor  # with their heads
    ids: torch.Tensor
    counts: _Counts
    places: Sequence[torch.Tensor]

    @property
    def keys(self) -> list[SampleKey]:
        """By machine: a sample depends on the key of whoever asks, and on the node."""
        return [
            SampleKey(*(number % (2 * _TOP) for number in head[2:NOTES])) for head in self.heads
        ]

    def of_type(self, number: int) -> list[torch.Tensor]:
        """The ids of a type that each machine asks for."""
        spans = zip(self.ids, *_span(self.counts.received, number), strict=True)
        return [ids[begin:end] for ids, begin, end in spans]

    def sent(self, number: int) -> tuple[list[int], list[int]]:
        """Where the ids of a type begin and end in this machine's message to each."""
        return _span(self.counts.sent, number)


#: Sampled edges of each type, and of it by machine.
_Edges = list[list[SampledNeighbors]]


def _span(ends: list[list[int]], number: int) -> tuple[list[int], list[int]]:
    return ends[number - 1] if number else [0] * len(ends[0]), ends[number]


class _Parts(Protocol):
    """What a rank sends to each machine, but for the heads of its messages."""

    @property
    def ends(self) -> list[list[int]]:
        """How many elements, by type of edges and by machine, of a type and of those before."""

    def write(self, messages: torch.Tensor) -> None:
        """Write what there is room for to the messages, (machines, elements)."""


@dataclass(frozen=True)
class _Vectors:
    """Elements for each machine, one after the other."""

    data: torch.Tensor
    lengths: list[int]

    @property
    def ends(self) -> list[list[int]]:
        return [self.lengths]

    def write(self, messages: torch.Tensor) -> None:
        for message, part in zip(messages, self.data.split(self.lengths), strict=True):
            message[: len(part)] = part[: len(message)]


@dataclass(frozen=True)
class _Samples:
    """Edges of each type for each machine: degrees of the ids, neighbors, and edge ids.

    There is room for the degrees of ``num_ids``, of all types, and for as many neighbors as edge
    ids.
    """

    asked: _Asked
    edges: _Edges

    @property
    def ends(self) -> list[list[int]]:
        sizes = ([len(edges.eids) for edges in of_type] for of_type in self.edges)
        return list(
            itertools.accumulate(sizes, lambda a, b: list(map(sum, zip(a, b, strict=True))))
        )

    def write(self, messages: torch.Tensor) -> None:
        degrees, neighbors, eids = _split(messages, self.asked.ids.shape[1])
        for machine in range(len(messages)):
            id_ends = [of[machine] for of in self.asked.counts.received]
            edge_ends = [of[machine] for of in self.ends]
            for edges, ids_end, end in zip(
                (of_type[machine] for of_type in self.edges), id_ends, edge_ends, strict=True
            ):
                begin, end = end - len(edges.eids), min(end, neighbors.shape[1])
                num_ids, count = len(edges.indptr) - 1, max(0, end - begin)
                degrees[machine, ids_end - num_ids : ids_end] = edges.indptr.diff()
                neighbors[machine, begin:end] = edges.neighbors[:count]
                eids[machine, begin:end] = edges.eids[:count]


def _split(messages: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, ...]:
    """Degrees, neighbors and edge ids."""
    room = (messages.shape[1] - num_ids) // 2
    return tuple(messages.split([num_ids, room, room], 1))


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
        #: Of ids as they are sent.
        self._dtype = torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64
        #: Of edges, or tables, that machines ask each other for at a time.
        self._most_types = max(max_types, _TABLES)
        self._head_words = head_words(machines.size, self._most_types)
        self._head_elements = head_elements(self._head_words, self._dtype)
        self._messages = Messages(machines, self._head_words)
        self._owned = {
            ntype: range(*firsts[machines.rank : machines.rank + 2])
            for ntype, firsts in bounds.items()
        }
        #: What the last round was for, which tells what the next is like.
        self._last = ""
        self._owners = {
            ntype: Owners(torch.tensor(firsts, device=device), machines.rank)
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

    def gather_owned(
        self, name: str, ntype: str, rows: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Rows of nodes, of which each machine has those of the nodes that it owns; collective.

        ``rows``, of this one, are anywhere; the result is on the store's device.
        """
        what, owned, owners = f"gather {name}", self._owned[ntype], self._owners[ntype]
        with self._told(what):
            ids = check_ids(ids, what, self._device)
            raise_at_id_outside(ids, int(owners.bounds[-1]), what)
        machine = torch.searchsorted(owners.bounds[1:-1], ids.long(), right=True)
        order = machine.argsort(stable=True)
        counts = machine.bincount(minlength=self._machines.size).tolist()
        asked, lengths = self._ask_vectors(what, _Vectors(ids[order].to(self._dtype), counts))
        places = asked.to(rows.device, torch.int64) - owned.start
        answer = rows.index_select(0, places).to(self._device)
        received = self._machines.all_to_all(answer, lengths, counts)
        found = torch.empty_like(received)
        found[order] = received
        return found

    def run_all(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` on all ranks, or have all raise where one does; collective."""
        return self._machines.run_all(what, step)

    def sum_over_machines(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the machines' tensors of integers, on the store's device; collective."""
        (every,) = self._machines.all_gather_cat("add up numbers of machines", [numbers[None]])
        return every.sum(0, dtype=numbers.dtype)

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
        with self._told(what):
            wanted = [
                # Kernels cannot read what is on disk: such rows are an answer to oneself.
                _Wanted(
                    check_ids(read.ids, what, read.view.tiers.device),
                    read.view,
                    read.table.ntype,
                    sends_own=read.view.disk is not None,
                )
                for read in reads
            ]
        asked = self._ask(what, wanted, None)
        if not asked.counts.to_others:
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

    def _received(self, read: TableRead, asked: _Asked, number: int) -> GatheredRows:
        """The rows of a table, one of those that machines have asked each other for."""
        view, places = read.view, asked.places[number]
        parts, (before, ends) = asked.of_type(number), asked.sent(number)
        answer = gather_rows(view, torch.cat(parts), dtype=view.dtype)
        sent = [end - begin for begin, end in zip(before, ends, strict=True)]
        rows = self._machines.all_to_all(answer, [len(part) for part in parts], sent)
        both = self._with_received(read.table, view, rows, before, ends, asked.ids.shape[1])
        found = gather_rows(both, places, out=read.out, dtype=read.dtype)
        if view.disk is not None:
            mine = parts[self._machines.rank]
            return GatheredRows(found, view, mine, len(rows) - len(mine))
        return GatheredRows(found, both, places, len(rows))

    def _with_received(
        self,
        table: RemoteTable,
        view: RowView,
        rows: torch.Tensor,
        before: list[int],
        ends: list[int],
        room: int,
    ) -> RowView:
        """Rows received of machines, each in a tier, and then those here.

        They are those of ids ``before`` to ``ends`` of the message to each machine.
        """
        device, first, size = view.tiers.device, len(ends) * room, len(ends)
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
        for begin, end in zip(before, ends, strict=True):
            addresses.append(address - begin * view.row_bytes)
            address += (end - begin) * view.row_bytes
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

    def sample_etype_neighbors(
        self,
        prob: str | None,
        views: Mapping[CanonicalEtype, GraphView],
        seeds: Mapping[CanonicalEtype, torch.Tensor],
        fanouts: Mapping[CanonicalEtype, int],
        key: SampleKey,
        *,
        replace: bool,
        weights: Mapping[CanonicalEtype, RowView],
    ) -> dict[CanonicalEtype, SampledNeighbors]:
        """As :func:`dgl_mgpu.ops.sample_etype_neighbors` of the whole graph; collective.

        ``weights`` are those of feature ``prob``, of all edges.
        """
        etypes = list(views)
        none = torch.empty(0, dtype=next(iter(views.values())).idtype, device=self._device)
        what = f"sample hop {key.hop}" + ("" if prob is None else f" by '{prob}'")
        with self._told(what):
            ids = [check_ids(seeds.get(etype, none), what, self._device) for etype in etypes]
            wanted = [fanout_of(fanouts, etype, what) if etype in seeds else 0 for etype in etypes]
        what += f": {', '.join(map(str, wanted))} neighbors" + (", with replacement" * replace)
        asked = self._ask(
            what,
            [
                _Wanted(of_type, view, etype[2])
                for (etype, view), of_type in zip(views.items(), ids, strict=True)
            ],
            key,
        )

        def sample(keys: Sequence[SampleKey], ids: Sequence[Sequence[torch.Tensor]]) -> _Edges:
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

        if asked.counts.to_others:
            by_machine = [asked.of_type(number) for number in range(len(etypes))]
            _, received = self._answered(
                what,
                lambda: (None, _Samples(asked, sample(asked.keys, by_machine))),
                asked.ids.shape[1],
                2,
            )
            ends = self._counts(received, len(etypes)).received
            found = _joined(asked, self._data(received), ends, none)
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
        size, notes = self._machines.size, _notes(_OK, what, key)
        with self._told(what):
            seeds = to_idtype(seeds, view, view.num_rows)
            raise_faults(self._device, wait=False)
        asked = self._ask(what, [_Wanted(seeds, view, etype[2])], key)
        num_seeds = max(sum(head[NOTES : NOTES + size]) for head in asked.heads)
        most_of_all = most_nodes(num_seeds, of_hops, view.num_rows)
        most = most_nodes(len(seeds), of_hops, view.num_rows)
        if most_of_all is None or most is None:
            return None
        network = Network(
            self._owners[etype[2]], self._head_words, self._dtype, size, self._machines.all_to_all
        )
        options = [
            [
                HopOptions(fanout, replace, with_fields(of, hop=key.hop + number).fold(), view.sms)
                for of in asked.keys
            ]
            for number, fanout in enumerate(of_hops)
        ]
        space = workspace(self._device)
        batch = MachineBatch(space, view, seeds, most, network)
        hops = _Hops(what, notes, self._messages, options, most_of_all)

        def launch() -> None:
            with space.lock:
                hops.launch(batch, asked)

        def finish() -> list[EtypeBlock]:
            heads, sampled = batch.finish()
            if hops.had_room(heads):
                return _blocks(etype, sampled)
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
        bounds = self._owners[ntype].bounds
        owners = torch.searchsorted(bounds[1:-1], nodes[there], right=True)
        there = there[owners.argsort(stable=True)]
        counts = owners.bincount(minlength=self._machines.size).tolist()
        # A draw has 64 bits, which are two elements where ids have 32.
        picks = draws[there][:, None].view(self._dtype)
        rows = torch.cat([nodes[there].to(self._dtype)[:, None], picks], 1)
        width = rows.shape[1]
        asked, lengths = self._ask_vectors(
            what, _Vectors(rows.flatten(), [count * width for count in counts])
        )

        def taken() -> _Vectors:
            of_others = asked.view(-1, width)
            picks = of_others[:, 1:].clone(memory_format=torch.contiguous_format)
            answer = torch.stack(step(of_others[:, 0].long(), picks.view(torch.int64)[:, 0]), 1)
            return _Vectors(answer.to(self._dtype).flatten(), [2 * n // width for n in lengths])

        mine, received = self._answered(what, lambda: (step(nodes[here], draws[here]), taken()))
        to, along = torch.full_like(nodes, -1), torch.full_like(nodes, -1)
        to[here], along[here] = mine
        to[there], along[there] = self._vectors(received).view(-1, 2).long().T
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

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Have all ranks told of an error before this one asks for anything."""
        try:
            yield
        except DGLMGPUError as error:
            self._exchange(("after", self._last), what, None)
            self._raise(what, error)

    def _ask(self, what: str, wanted: Sequence[_Wanted], key: SampleKey | None) -> _Asked:
        """Ask the owners of ids, and learn what they all ask for."""
        places: list[torch.Tensor] = []
        notes, size = _notes(_OK, what, key), self._machines.size

        def write(room: int) -> torch.Tensor:
            counts = torch.zeros(len(wanted), size + 2, dtype=torch.int64, device=self._device)
            to = RequestMessages(self._new_messages(room), counts, self._head_words)
            places[:] = [
                write_requests(
                    to,
                    each.ids,
                    each.view.position,
                    each.view.num_rows,
                    self._owners[each.ntype],
                    RequestOptions(notes, number, each.sends_own),
                )
                for number, each in enumerate(wanted)
            ]
            return to.messages

        received = self._messages.exchange(("after", self._last), write, self._longest(len(wanted)))
        bad_of = [
            [head[NOTES + number * (size + 1) + size] for number in range(len(wanted))]
            for head in received.heads
        ]
        try:
            for each, bad in zip(wanted, bad_of[self._machines.rank], strict=True):
                raise_at_bad_id([bad], each.ids, each.view.num_rows, what)
        except IdOutOfRangeError as error:
            self._raise(what, error)
        self._check_alike(what, received)
        if any(max(bad) >= 0 for bad in bad_of):
            self._raise_unlike(what)
        return _Asked(
            received.heads,
            received.messages,
            self._data(received),
            self._counts(received, len(wanted)),
            places,
        )

    def _ask_vectors(self, what: str, vectors: _Vectors) -> tuple[torch.Tensor, list[int]]:
        """The same in other terms than ids: what other machines ask for, and of what lengths."""
        received = self._exchange(("after", self._last), what, vectors)
        self._check_alike(what, received)
        return self._vectors(received), self._counts(received, 1).received[0]

    def _answered(
        self, what: str, answer: Callable[[], tuple[T, _Parts]], num_ids: int = 0, each: int = 1
    ) -> tuple[T, Received]:
        """What is found here for this rank, and what others send it; all raise if one cannot.

        Their messages have room for ``num_ids`` and ``each`` times what their heads count.
        """
        try:
            mine, parts = answer()
        except DGLMGPUError as error:
            self._exchange(what, what, None, num_ids, each)
            self._raise(what, error)
        received = self._exchange(what, what, parts, num_ids, each)
        self._check_alike(what, received)
        return mine, received

    def _exchange(
        self, like: Hashable, what: str, parts: _Parts | None, num_ids: int = 0, each: int = 1
    ) -> Received:
        """Send parts whose lengths are known here, or that this rank has failed."""
        state, ends = (_FAILED, []) if parts is None else (_OK, parts.ends)
        head = list(_notes(state, what, None))
        for of_machines in ends or [[0] * self._machines.size]:
            head += *of_machines, -1

        def write(room: int) -> torch.Tensor:
            messages = self._new_messages(num_ids + each * room)
            heads = messages[:, : self._head_elements].view(torch.int64)
            heads[:, : len(head)] = to_device(head, self._device)
            if parts is not None:
                parts.write(messages[:, self._head_elements :])
            return messages

        return self._messages.exchange(like, write, self._longest(len(ends)))

    def _new_messages(self, elements: int) -> torch.Tensor:
        shape = self._machines.size, self._head_elements + elements
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _longest(self, num_types: int) -> Callable[[list[list[int]]], int]:
        """The most that any rank sends to another, as heads tell."""
        first = NOTES + (num_types - 1) * (self._machines.size + 1)

        def longest(heads: list[list[int]]) -> int:
            if any(head[:2] != heads[0][:2] or head[0] != _OK for head in heads):
                return 0  # and all will raise
            return max(max(head[first : first + self._machines.size]) for head in heads)

        return longest

    def _counts(self, received: Received, num_types: int) -> _Counts:
        size, mine = self._machines.size, self._machines.rank
        firsts = [NOTES + number * (size + 1) for number in range(num_types)]
        last = firsts[-1]
        return _Counts(
            [received.heads[mine][first : first + size] for first in firsts],
            [[head[first + mine] for head in received.heads] for first in firsts],
            sum(
                sum(head[last : last + size]) - head[last + machine]
                for machine, head in enumerate(received.heads)
            ),
        )

    def _data(self, received: Received) -> torch.Tensor:
        """Messages without their heads."""
        return received.messages[:, self._head_elements :]

    def _vectors(self, received: Received) -> torch.Tensor:
        """What all ranks sent here, one after the other."""
        (lengths,) = self._counts(received, 1).received
        parts = zip(self._data(received), lengths, strict=True)
        return torch.cat([part[:length] for part, length in parts])

    def _check_alike(self, what: str, received: Received) -> None:
        """Raise if a rank has failed, or is to do something else than this one."""
        self._last = what
        mine = list(_notes(_OK, what, None)[:2])
        if any(head[:2] != mine for head in received.heads):
            self._raise_unlike(what)

    def _raise(self, what: str, error: DGLMGPUError) -> NoReturn:
        """Raise an error that all ranks have been told of."""
        self._last = ""
        self._machines.all_gather((what, error_text(error)))
        raise error

    def _raise_unlike(self, what: str) -> NoReturn:
        """Raise what is wrong on another rank: it failed, or is to do something else."""
        self._last = ""
        every = self._machines.all_gather((what, ""))
        for rank, (other, reason) in enumerate(every):
            if reason:
                raise rank_failed(other, rank, reason)
        rank, other = next((rank, other) for rank, (other, _) in enumerate(every) if other != what)
        raise InvalidInputError(
            f"{what}, which other machines keep as well",
            f"a rank of machine {rank} is to {other} meanwhile",
            "have all ranks of the job sample and read the same in the same order",
        )


@dataclass(frozen=True)
class _Hops:
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

    def launch(self, batch: MachineBatch, asked: _Asked) -> None:
        """Launch all hops; ``asked`` is what machines ask each other of the first one."""
        (places,), received, num_ids = asked.places, asked.messages, asked.ids.shape[1]
        for number, options in enumerate(self.options):
            if number:
                # At first it is taken that machines are asked for much the same.
                guess = min(self.most[number], 2 * self.most[number] // len(options))
                num_ids = self._room("ids", number, guess)
                places, received = batch.ask(num_ids, self.notes)
            num_edges = self._room("edges", number, num_ids * options[0].fanout)
            hop = MachineHop(options, Room(num_ids, num_edges))
            batch.sample(hop, places, received, self.notes)
        batch.expect_reports()

    def had_room(self, heads_of: Sequence[list[list[int]]]) -> bool:
        """Whether there was room for all; ``heads_of`` each round but the first."""
        for heads, (like, room) in zip(heads_of, self.rooms, strict=True):
            needed = max(max(head[NOTES : NOTES + len(heads)]) for head in heads)
            if not self.messages.learn(like, needed, room):
                return False  # and what came after is not true
        return True

    def _room(self, what: str, number: int, guess: int) -> int:
        like = self.what, what, number
        self.rooms.append((like, self.messages.room(like, guess)))
        return self.rooms[-1][1]


def _blocks(etype: CanonicalEtype, hops: MachineHops) -> list[EtypeBlock]:
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


def _joined(
    asked: _Asked, answers: torch.Tensor, ends: list[list[int]], none: torch.Tensor
) -> list[SampledNeighbors]:
    """The edges of all ids of each type, of which machines have sent as many as ``ends`` says.

    ``none`` are no ids.
    """
    degrees, neighbors, eids = _split(answers, asked.ids.shape[1])
    degrees = degrees.long()
    # Where each id's edges begin, and where each edge is.
    begins = degrees.cumsum(1) - degrees
    begins += torch.arange(len(answers), device=none.device)[:, None] * neighbors.shape[1]
    places = torch.cat(list(asked.places))
    lengths = degrees.flatten()[places]
    shift = begins.flatten()[places] - lengths.cumsum(0) + lengths
    total = sum(ends[-1])
    at = torch.arange(total, device=none.device) + shift.repeat_interleave(
        lengths, output_size=total
    )
    all_neighbors = neighbors.flatten()[at].to(none.dtype)
    all_eids = eids.flatten()[at].to(none.dtype)
    found, begin = [], 0
    sizes = [len(of_type) for of_type in asked.places]
    for of_type, end in zip(lengths.split(sizes), map(sum, ends), strict=True):
        indptr = torch.cat([of_type.new_zeros(1), of_type.cumsum(0)])
        found.append(SampledNeighbors(indptr, all_neighbors[begin:end], all_eids[begin:end]))
        begin = end
    return found


def _notes(state: int, what: str, key: SampleKey | None) -> tuple[int, ...]:
    """What is first in a head: how a rank comes to the round, and to which, and its key."""
    numbers = (0,) * 4 if key is None else (key.seed, key.epoch, key.batch, key.hop)
    # As int64, which a key's numbers exceed.
    signed = ((number ^ _TOP) - _TOP for number in numbers)
    return (state, zlib.crc32(what.encode()), *signed)
