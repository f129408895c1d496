"""Rows and neighbours that other machines keep, asked of them in rounds of all ranks.

In a round each rank sends the ids that it misses, distinct and in ascending order, so by owner, to
the rank at its own place of each machine; it answers what it is asked, and puts the answers where
they belong.  A hop is a round, of all edge types, and so are the rows of a feature.  Every rank
takes part in every round and asks for the same: one that misses nothing, or has no seeds at all,
asks for no ids.  A rank that cannot ask says so in its place.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import NoReturn, TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator, error_text, rank_failed
from dgl_mgpu.comm.messages import Messages, Received
from dgl_mgpu.errors import DGLMGPUError, InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import (
    GraphView,
    RowView,
    SampledNeighbors,
    SampleKey,
    gather_rows,
    sample_neighbors,
)
from dgl_mgpu.ops.check import check_ids, fanout_of, raise_at_id_outside
from dgl_mgpu.utils.rows import as_bytes
from dgl_mgpu.utils.types import CanonicalEtype

T = TypeVar("T")

#: How a rank comes to a round: with what it asks for, or with an error.
_OK, _FAILED = 0, 1
#: Nodes whose weights are looked at together.
_CHECKED = 1 << 20
#: The first of the numbers that int64 does not have.
_TOP = 1 << 63


@dataclass(frozen=True)
class _Missing:
    """Which of some ids are kept here, and the others as they are asked for.

    ``here`` and ``there`` are places among the ids; those ``there`` are ``ids[inverse]``, where
    ``ids`` are distinct and by machine, ``counts`` of each.
    """

    here: torch.Tensor
    there: torch.Tensor
    ids: torch.Tensor
    inverse: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class _Edges:
    """The edges of each type that this machine has, and weights of those types that have some."""

    views: Mapping[CanonicalEtype, GraphView]
    weights: Mapping[CanonicalEtype, RowView]


@dataclass(frozen=True)
class _Request:
    """Edges that a rank asks another one for, by edge type: of how many ids, and the fanouts.

    The key is that of whoever asks: a sample depends on it and on the node.
    """

    key: SampleKey
    replace: bool
    counts: list[int]
    fanouts: list[int]

    @staticmethod
    def num_words(num_etypes: int) -> int:
        return 5 + 2 * num_etypes

    def words(self) -> list[int]:
        """As int64, which a key's numbers exceed."""
        key = self.key
        numbers = [(number ^ _TOP) - _TOP for number in (key.seed, key.epoch, key.batch, key.hop)]
        return [*numbers, int(self.replace), *self.counts, *self.fanouts]

    @classmethod
    def read(cls, words: list[int]) -> _Request:
        counts_and_fanouts = words[5:]
        num_etypes = len(counts_and_fanouts) // 2
        return cls(
            SampleKey(*(number % (2 * _TOP) for number in words[:4])),
            bool(words[4]),
            counts_and_fanouts[:num_etypes],
            counts_and_fanouts[num_etypes:],
        )

    def sample(self, edges: _Edges, ids: torch.Tensor) -> list[SampledNeighbors]:
        """The edges of each type; ``ids`` has those of all types one after the other."""
        return [
            sample_neighbors(
                view,
                of_type,
                fanout,
                with_fields(self.key, etype=number),
                replace=self.replace,
                weights=edges.weights.get(etype),
            )
            for number, ((etype, view), of_type, fanout) in enumerate(
                zip(edges.views.items(), ids.split(self.counts), self.fanouts, strict=True)
            )
            if len(of_type)
        ]


@dataclass(frozen=True)
class RemoteTable:
    """A feature of nodes, of which ``others`` have rows as well."""

    others: OtherMachines
    name: str
    ntype: str

    def gather(
        self, view: RowView, ids: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As :meth:`OtherMachines.gather`."""
        return self.others.gather(self.name, self.ntype, view, ids, dtype, out)


class OtherMachines:
    """The machines that have a store together, as one rank of one of them reads the others.

    ``machines`` are the ranks at this one's place of each, and ``bounds`` the first node of each
    machine, by node type (:mod:`dgl_mgpu.store.span`).  ``largest`` is the most that an id of a
    node or edge can be.
    """

    def __init__(
        self,
        machines: Communicator,
        bounds: Mapping[str, list[int]],
        largest: int,
        device: torch.device,
    ) -> None:
        self._machines, self._device = machines, device
        #: Of ids as they are sent.
        self._dtype = torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64
        self._messages = Messages(machines)
        self._owned = {
            ntype: range(*firsts[machines.rank : machines.rank + 2])
            for ntype, firsts in bounds.items()
        }
        #: What the last round was for, which tells what the next is like.
        self._last = ""
        self._bounds = {
            ntype: torch.tensor(firsts, dtype=self._dtype, device=device)
            for ntype, firsts in bounds.items()
        }

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
        what, owned = f"gather {name}", self._owned[ntype]
        with self._told(what):
            ids = check_ids(ids, what, self._device)
            raise_at_id_outside(ids, int(self._bounds[ntype][-1]), what)
        missing = self._elsewhere((ids >= owned.start) & (ids < owned.stop), ntype, ids)
        asked, is_needed = self._ask(what, missing.ids, missing.counts)

        def of(nodes: torch.Tensor) -> torch.Tensor:
            places = nodes.to(rows.device, torch.int64) - owned.start
            return rows.index_select(0, places).to(self._device)

        if not is_needed:
            return of(ids)
        received = self._machines.all_to_all(of(asked.data), asked.lengths, missing.counts)
        found = received.new_empty(len(ids), *rows.shape[1:])
        found[missing.here] = of(ids[missing.here])
        found[missing.there] = received[missing.inverse]
        return found

    def run_all(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` on all ranks, or have all raise where one does; collective."""
        return self._machines.run_all(what, step)

    def sum_over_machines(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the machines' tensors of integers, on the store's device; collective."""
        (every,) = self._machines.all_gather_cat("add up numbers of machines", [numbers[None]])
        return every.sum(0, dtype=numbers.dtype)

    def gather(
        self,
        name: str,
        ntype: str,
        view: RowView,
        ids: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rows of nodes, wherever they are; collective.

        ``view`` are those that this machine has; other parameters are those of
        :func:`dgl_mgpu.ops.gather_rows`, and the feature's name and its node type.

        Returns
        -------
        rows : Tensor, ``dtype``, shape (n, *row_shape)
        here : Tensor, shape (m,)
            The ids of those that this machine keeps.
        num_received : int
            Rows that other machines sent.
        """
        what = f"gather rows of '{name}'"
        with self._told(what):
            ids = check_ids(ids, what, view.tiers.device)
            missing = self._missing(view, ntype, ids, what)
        asked, is_needed = self._ask(what, missing.ids, missing.counts)
        here = ids[missing.here]
        if not is_needed:
            return gather_rows(view, ids, out=out, dtype=dtype), here, 0
        answer = gather_rows(view, asked.data, dtype=view.dtype)
        received = self._machines.all_to_all(answer, asked.lengths, missing.counts)
        if out is None:
            out = torch.empty(len(ids), *view.row_shape, dtype=dtype, device=ids.device)
        # As bytes, since torch does not index all types.
        into = as_bytes(out)
        into[missing.here] = as_bytes(gather_rows(view, here, dtype=dtype))
        into[missing.there] = as_bytes(received.to(dtype))[missing.inverse]
        return out, here, len(received)

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
        what = f"sample hop {key.hop}" + ("" if prob is None else f" by '{prob}'")
        etypes, edges = list(views), _Edges(views, weights)
        none = torch.empty(0, dtype=next(iter(views.values())).idtype, device=self._device)
        with self._told(what):
            ids = [check_ids(seeds.get(etype, none), what, self._device) for etype in etypes]
            wanted = [fanout_of(fanouts, etype, what) if etype in seeds else 0 for etype in etypes]
            missing = [
                self._missing(view, etype[2], of_type, what)
                for (etype, view), of_type in zip(views.items(), ids, strict=True)
            ]
        parts = [each.ids.split(each.counts) for each in missing]
        asking: list[list[int]] = []
        pieces: list[torch.Tensor] = []
        lengths: list[int] = []
        for of_machine in zip(*parts, strict=True):
            asking.append([len(part) for part in of_machine])
            count = sum(asking[-1])
            words = _Request(key, replace, asking[-1], wanted).words() if count else []
            head = torch.tensor(words, dtype=torch.int64).view(self._dtype)
            pieces += head.to(self._device), *of_machine
            lengths.append(len(head) + count)
        asked, is_needed = self._ask(what, torch.cat(pieces), lengths)
        here = [of_type[each.here] for of_type, each in zip(ids, missing, strict=True)]
        counts = [len(of_type) for of_type in here]
        request = _Request(key, replace, counts, wanted)
        received: Received | None = None
        if is_needed:
            mine, received = self._answered(
                what, lambda: (request.sample(edges, torch.cat(here)), self._answers(edges, asked))
            )
        else:
            mine = request.sample(edges, torch.cat(here))
        found = _joined(none, ids, missing, mine, asking, received)
        return {
            etype: sampled for etype, sampled in zip(etypes, found, strict=True) if etype in seeds
        }

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
        owners = torch.searchsorted(self._bounds[ntype][1:-1].long(), nodes[there], right=True)
        there = there[owners.argsort(stable=True)]
        counts = owners.bincount(minlength=self._machines.size).tolist()
        # A draw has 64 bits, which are two elements where ids have 32.
        picks = draws[there][:, None].view(self._dtype)
        width = 1 + torch.int64.itemsize // self._dtype.itemsize
        rows = torch.cat([nodes[there].to(self._dtype)[:, None], picks], 1)
        asked, _ = self._ask(what, rows.flatten(), [count * width for count in counts])

        def taken() -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
            mine, of_others = step(nodes[here], draws[here]), asked.data.view(-1, width)
            picks = of_others[:, 1:].clone(memory_format=torch.contiguous_format)
            answer = torch.stack(step(of_others[:, 0].long(), picks.view(torch.int64)[:, 0]), 1).to(
                self._dtype
            )
            lengths = [length // width for length in asked.lengths]
            return mine, [part.flatten() for part in answer.split(lengths)]

        to, along = torch.full_like(nodes, -1), torch.full_like(nodes, -1)
        (to[here], along[here]), received = self._answered(what, taken)
        to[there], along[there] = received.data.view(-1, 2).long().T
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

    def _answered(
        self, what: str, sample: Callable[[], tuple[T, list[torch.Tensor]]]
    ) -> tuple[T, Received]:
        """What is sampled here for this rank, and what others send it; all raise if one cannot."""
        try:
            mine, answers = sample()
        except DGLMGPUError as error:
            nothing = torch.empty(0, dtype=self._dtype, device=self._device)
            self._messages.exchange(what, (_FAILED,), nothing, [0] * self._machines.size)
            self._machines.all_gather((what, error_text(error)))
            raise
        lengths = [len(answer) for answer in answers]
        received = self._messages.exchange(what, (_OK,), torch.cat(answers), lengths)
        if any(state != _OK for (state,) in received.notes):
            self._raise_unlike(what)
        return mine, received

    def _answers(self, edges: _Edges, asked: Received) -> list[torch.Tensor]:
        """What each rank asks for: numbers of edges, neighbours and edge ids, of all types."""
        num_words = _Request.num_words(len(edges.views))
        width = num_words * torch.int64.itemsize // self._dtype.itemsize
        parts = asked.data.split(asked.lengths)
        words = torch.cat([part[:width] for part in parts]).view(torch.int64).tolist()
        answers = []
        for part in parts:
            if not len(part):
                answers.append(part)
                continue
            request, words = _Request.read(words[:num_words]), words[num_words:]
            sampled = request.sample(edges, part[width:])
            answers.append(
                torch.cat(
                    [
                        *(each.indptr.diff() for each in sampled),
                        *(each.neighbors for each in sampled),
                        *(each.eids for each in sampled),
                    ]
                ).to(self._dtype)
            )
        return answers

    def _missing(
        self, view: RowView | GraphView, ntype: str, ids: torch.Tensor, what: str
    ) -> _Missing:
        """Which ids are not kept here.  Raises IdOutOfRangeError."""
        raise_at_id_outside(ids, view.num_rows, what)
        position = view.position
        # Of rows that are all here there may be no positions.
        is_here = (
            position[ids.long()] >= 0 if len(position) else torch.ones_like(ids, dtype=torch.bool)
        )
        return self._elsewhere(is_here, ntype, ids)

    def _elsewhere(self, is_here: torch.Tensor, ntype: str, ids: torch.Tensor) -> _Missing:
        """Those of some nodes that are not here, as their owners are asked for them."""
        there = (~is_here).nonzero()[:, 0]
        distinct, inverse = torch.unique(ids[there].to(self._dtype), return_inverse=True)
        ends = torch.searchsorted(distinct, self._bounds[ntype])
        return _Missing(is_here.nonzero()[:, 0], there, distinct, inverse, ends.diff().tolist())

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Have all ranks told of an error before this one asks for anything."""
        try:
            yield
        except DGLMGPUError as error:
            nothing = torch.empty(0, dtype=self._dtype, device=self._device)
            self._exchange(what, _FAILED, nothing, [0] * self._machines.size)
            self._last = ""
            self._machines.all_gather((what, error_text(error)))
            raise

    def _ask(self, what: str, data: torch.Tensor, lengths: Sequence[int]) -> tuple[Received, bool]:
        """Tell all ranks what this one asks for, and learn what they do, and whether any does."""
        asked = self._exchange(what, _OK, data, lengths)
        mine = [_OK, _number(what)]
        self._last = what
        if any(note[:2] != mine for note in asked.notes):
            self._last = ""
            self._raise_unlike(what)
        return asked, any(length for _, _, length in asked.notes)

    def _exchange(
        self, what: str, state: int, data: torch.Tensor, lengths: Sequence[int]
    ) -> Received:
        # The round before tells about how long the requests of this one are; what this one is for
        # other ranks need not agree on.
        notes = state, _number(what), sum(lengths)
        return self._messages.exchange(("after", self._last), notes, data, lengths)

    def _raise_unlike(self, what: str) -> NoReturn:
        """Raise what is wrong on another rank: it failed, or is to do something else."""
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


def _joined(
    none: torch.Tensor,
    ids: Sequence[torch.Tensor],
    missing: Sequence[_Missing],
    mine: Sequence[SampledNeighbors],
    asking: Sequence[Sequence[int]],
    received: Received | None,
) -> list[SampledNeighbors]:
    """The edges of all ids of each type, of those sampled here and those received.

    ``none`` are no ids, ``asking`` says how many of each type were asked of each machine.
    """
    # Runs of edges, a run for each id, one after the other in `neighbors` and `eids`: of those
    # sampled here by type, then of those received by machine and type.
    degrees = [edges.indptr.diff() for edges in mine]
    neighbors = [edges.neighbors for edges in mine]
    eids = [edges.eids for edges in mine]
    if received is not None:
        for part, counts in zip(received.data.split(received.lengths), asking, strict=True):
            num_ids = sum(counts)
            num_edges = (len(part) - num_ids) // 2
            of_part = part.split([num_ids, num_edges, num_edges])
            degrees.append(of_part[0])
            neighbors.append(of_part[1].to(none.dtype))
            eids.append(of_part[2].to(none.dtype))
    all_degrees = torch.cat([none.long(), *degrees])
    begins = all_degrees.cumsum(0) - all_degrees
    # Numbers of runs: the first of each machine's, and of each type there.
    first_received = sum(len(each.here) for each in missing)
    run_of: list[torch.Tensor] = []
    first_here = 0
    for number, (of_type, each) in enumerate(zip(ids, missing, strict=True)):
        run = torch.empty_like(of_type, dtype=torch.int64)
        run[each.here] = first_here + torch.arange(len(each.here), device=none.device)
        first_here += len(each.here)
        if len(each.ids):
            begin, received_runs = first_received, []
            for counts in asking:
                first = begin + sum(counts[:number])
                of_machine = torch.arange(first, first + counts[number], device=none.device)
                received_runs.append(of_machine)
                begin += sum(counts)
            run[each.there] = torch.cat(received_runs)[each.inverse]
        run_of.append(run)
    runs = torch.cat(run_of)
    lengths = all_degrees[runs]
    ends = lengths.cumsum(0)
    # Where each edge is among those that were sampled.
    shift = (begins[runs] - ends + lengths).repeat_interleave(lengths)
    at = torch.arange(len(shift), device=none.device) + shift
    all_neighbors, all_eids = torch.cat([none, *neighbors])[at], torch.cat([none, *eids])[at]
    sizes = [len(of_type) for of_type in ids]
    found, done = [], 0
    for of_type in lengths.split(sizes):
        indptr = torch.cat([of_type.new_zeros(1), of_type.cumsum(0)])
        end = done + int(indptr[-1]) if len(ids) > 1 else len(at)
        found.append(SampledNeighbors(indptr, all_neighbors[done:end], all_eids[done:end]))
        done = end
    return found


def _number(what: str) -> int:
    """A number for what a round is for."""
    return zlib.crc32(what.encode())
