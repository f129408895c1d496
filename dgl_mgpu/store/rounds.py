"""Rounds in which all ranks at one place of several machines ask each other, and answer.

A round is one collective of requests and one of answers.  Whoever cannot take part in it, or is to
take part in another one, is told of by the heads of messages, of which all ranks have all: each
raises an error then.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from dgl_mgpu.comm.communicator import Communicator, error_text
from dgl_mgpu.comm.messages import (
    Messages,
    MessagesInFlight,
    Received,
    head_elements,
    to_device,
)
from dgl_mgpu.errors import (
    DGLMGPUError,
    IdOutOfRangeError,
    InvalidInputError,
    RankFailedError,
)
from dgl_mgpu.ops import GraphView, RowView, SampleKey
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.machine_hops import Network
from dgl_mgpu.ops.requests import (
    NOTES,
    Owners,
    RequestMessages,
    RequestOptions,
    first_word,
    head_words,
    write_requests,
)

T = TypeVar("T")

#: How a rank comes to a round: with what it asks for, or with an error.
_OK, _FAILED = 0, 1
#: The first of the numbers that int64 does not have.
_TOP = 1 << 63


@dataclass(frozen=True)
class Wanted:
    """Ids of a node type of which a round asks for something, and where what is here of it is."""

    ids: torch.Tensor
    view: RowView | GraphView
    ntype: str
    lists_own: bool = True  # whether a kernel cannot read what is here by its position


class Spans(NamedTuple):
    """Where elements of one type begin and end in a message, by machine."""

    begins: list[int]
    ends: list[int]

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]

    def of(self, messages: torch.Tensor) -> list[torch.Tensor]:
        """These elements of the messages of all machines."""
        spans = zip(messages, self.begins, self.ends, strict=True)
        return [message[begin:end] for message, begin, end in spans]


@dataclass(frozen=True)
class Arrived:
    """What all ranks have sent here, and what they were sent.

    ``data``, (machines, room), are their messages without heads.
    """

    heads: list[list[int]]
    messages: torch.Tensor  # with their heads
    data: torch.Tensor
    rank: int  # this one

    def received(self, number: int = 0) -> Spans:
        """Elements of a type, by its number, in the messages received."""
        return self._spans(number, lambda first: [head[first + self.rank] for head in self.heads])

    def sent(self, number: int = 0) -> Spans:
        """The same in the messages that this rank has sent."""
        size, mine = len(self.heads), self.heads[self.rank]
        return self._spans(number, lambda first: mine[first : first + size])

    def _spans(self, number: int, ends_at: Callable[[int], list[int]]) -> Spans:
        size = len(self.heads)
        ends = ends_at(first_word(number, size))
        before = ends_at(first_word(number - 1, size)) if number else [0] * size
        return Spans(before, ends)

    def sent_by_all(self, num_types: int) -> list[list[int]]:
        """Elements of all types that each rank has for each."""
        first = first_word(num_types - 1, len(self.heads))
        return [head[first : first + len(self.heads)] for head in self.heads]

    def joined(self) -> torch.Tensor:
        """The elements of all messages, one after the other; they are of one type."""
        return torch.cat(self.received().of(self.data))


@dataclass(frozen=True)
class Asked(Arrived):
    """What a round asks for.

    ``places`` are, for this rank's ids of each type, those of their answers, and ``own`` those ids
    whose answer is here, as :func:`dgl_mgpu.ops.requests.write_requests` gives them.
    """

    places: list[torch.Tensor]
    own: list[torch.Tensor | None]

    def ids(self, number: int) -> list[torch.Tensor]:
        """Ids of a type that each machine asks for, this one of itself those that are listed."""
        received = self.received(number)
        ids, own = received.of(self.data), self.own[number]
        if own is not None:
            ids[self.rank] = own[: received.lengths[self.rank]]
        return ids

    def of_others(self, number: int) -> tuple[torch.Tensor, list[int]]:
        """Ids of a type that other machines ask for, and how many each."""
        received = self.received(number)
        lengths = received.lengths
        lengths[self.rank] = 0
        ids = [of for of, count in zip(received.of(self.data), lengths, strict=True) if count]
        return torch.cat(ids) if len(ids) > 1 else ids[0] if ids else self.data[0, :0], lengths

    @property
    def keys(self) -> list[SampleKey]:
        """By machine: a sample depends on the key of whoever asks, and on the node."""
        return [
            SampleKey(*(number % (2 * _TOP) for number in head[2:NOTES])) for head in self.heads
        ]

    @property
    def is_needed(self) -> bool:
        """Whether any machine asks another one."""
        sent = self.sent_by_all(len(self.places))
        return any(sum(of) > of[machine] for machine, of in enumerate(sent))


class Parts(Protocol):
    """What a rank sends to each machine, but for the heads of its messages."""

    #: Whether it also sends something to itself.
    sends_own: ClassVar[bool]

    @property
    def ends(self) -> list[list[int]]:
        """How many elements, by type and by machine, of a type and of those before."""

    def write(self, messages: torch.Tensor) -> None:
        """Write what there is room for to the messages, (machines, elements)."""


@dataclass(frozen=True)
class Vectors:
    """Elements for each machine, one after the other."""

    data: torch.Tensor
    lengths: list[int]
    sends_own: ClassVar[bool] = True

    @property
    def ends(self) -> list[list[int]]:
        return [self.lengths]

    def write(self, messages: torch.Tensor) -> None:
        for message, part in zip(messages, self.data.split(self.lengths), strict=True):
            message[: len(part)] = part[: len(message)]


class Rounds:
    """The rounds of a store.

    ``machines`` are the ranks at this one's place of each, and ``bounds`` the first node of each
    machine, by node type.  Ids are sent as ``dtype``, of ``most_types`` at a time.
    """

    def __init__(
        self,
        machines: Communicator,
        bounds: Mapping[str, list[int]],
        dtype: torch.dtype,
        most_types: int,
        device: torch.device,
    ) -> None:
        self.machines, self.dtype, self._device = machines, dtype, device
        self.owners = {
            ntype: Owners(torch.tensor(firsts, device=device), machines.rank)
            for ntype, firsts in bounds.items()
        }
        self._head_words = head_words(machines.size, most_types)
        self._head_elements = head_elements(self._head_words, dtype)
        self.messages = Messages(machines, self._head_words)
        #: What the last round was for, which tells what the next is like.
        self._last = ""
        self._in_flight: RoundInFlight | None = None

    def network(self, ntype: str) -> Network:
        """What hops need that are launched at once, of a node type."""
        machines, owners = self.machines, self.owners[ntype]

        def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
            machines.all_to_all(sent, out=received)

        return Network(owners, self._head_words, self.dtype, machines.size, exchange)

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Have all ranks told of an error before this one asks for anything.

        Where it cannot be told, and by Ctrl-C, this rank leaves the others.
        """
        try:
            yield
        except Exception as error:
            # What another rank has to tell says less than this one's own.
            with self.machines.told_of_errors(), contextlib.suppress(RankFailedError):
                self._exchange(self._after_last(), what, None)
                self._tell(what, error)
            raise
        except BaseException:
            with self.machines.told_of_errors():
                raise

    def agree(self, what: str) -> None:
        """Have all raise unless all ranks are to do the same together; collective.

        It comes before what is done in other ways than rounds, whose heads tell ranks apart.
        """
        nothing = torch.empty(0, dtype=self.dtype, device=self._device)
        self.ask_vectors(what, Vectors(nothing, [0] * self.machines.size))

    def ask(self, what: str, wanted: Sequence[Wanted], key: SampleKey | None = None) -> Asked:
        """Ask the owners of ids, and learn what they all ask for; collective."""
        return self.start(what, wanted, key).result()

    def start(
        self, what: str, wanted: Sequence[Wanted], key: SampleKey | None = None
    ) -> RoundInFlight:
        """:meth:`ask` without a wait; collective.

        It is waited for at the next round at the latest: so ranks that are told of an error there
        all leave off at the same place, and so do those that have to send again.
        """
        places: list[torch.Tensor] = []
        own = [
            torch.empty(len(each.ids), dtype=self.dtype, device=self._device)
            if each.lists_own
            else None
            for each in wanted
        ]
        notes = notes_of(what, key)

        def write(room: int) -> torch.Tensor:
            to = RequestMessages(self._new_messages(room), self._head_words)
            places[:] = [
                write_requests(
                    to,
                    each.ids,
                    each.view.position,
                    each.view.num_rows,
                    self.owners[each.ntype],
                    RequestOptions(notes, number),
                    listed,
                )
                for number, (each, listed) in enumerate(zip(wanted, own, strict=True))
            ]
            return to.messages

        in_flight = self._send(self._after_last(), what, write, self._longest(len(wanted)))

        def asked() -> Asked:
            received = in_flight.result()
            self._check_ids(what, wanted, received)
            return Asked(received.heads, *self._data(received), places, own)

        self._in_flight = RoundInFlight(asked)
        return self._in_flight

    def settle(self) -> None:
        """Wait for a round that was started; its error is raised where its result is asked for."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.settle()

    def _check_ids(self, what: str, wanted: Sequence[Wanted], received: Received) -> None:
        """Raise if a rank has asked for an id that is none, or did something else."""
        size = self.machines.size
        bad_of = [
            [head[first_word(number, size) + size] for number in range(len(wanted))]
            for head in received.heads
        ]
        try:
            for each, bad in zip(wanted, bad_of[self.machines.rank], strict=True):
                raise_at_bad_id([bad], each.ids, each.view.num_rows, what)
        except IdOutOfRangeError as error:
            self._tell(what, error)
            raise
        self._check_alike(what, received)
        if any(max(bad) >= 0 for bad in bad_of):
            self._raise_unlike(what)

    def ask_vectors(self, what: str, vectors: Vectors) -> Arrived:
        """The same in other terms than ids; collective."""
        received = self._exchange(self._after_last(), what, vectors)
        self._check_alike(what, received)
        return Arrived(received.heads, *self._data(received))

    def answer(
        self, what: str, answer: Callable[[], tuple[T, Parts]], num_ids: int = 0, each: int = 1
    ) -> tuple[T, Arrived]:
        """What is found here for this rank, and what others send it; collective.

        All raise if one cannot answer.  The messages have room for ``num_ids`` and for ``each``
        times what their heads count.
        """
        try:
            mine, parts = answer()
        except DGLMGPUError as error:
            self._exchange(what, what, None, num_ids, each)
            self._tell(what, error)
            raise
        received = self._exchange(what, what, parts, num_ids, each)
        self._check_alike(what, received)
        return mine, Arrived(received.heads, *self._data(received))

    def _exchange(
        self, like: Hashable, what: str, parts: Parts | None, num_ids: int = 0, each: int = 1
    ) -> Received:
        """Send parts whose lengths are known here, or that this rank has failed."""
        head = list(notes_of(what, None, _OK if parts is not None else _FAILED))
        ends = [[0] * self.machines.size] if parts is None else parts.ends
        for of_machines in ends:
            head += *of_machines, -1

        def write(room: int) -> torch.Tensor:
            messages = self._new_messages(num_ids + each * room)
            heads = messages[:, : self._head_elements].view(torch.int64)
            heads[:, : len(head)] = to_device(head, self._device)
            if parts is not None:
                parts.write(messages[:, self._head_elements :])
            return messages

        sends_own = parts is not None and parts.sends_own
        return self._send(like, what, write, self._longest(len(ends), sends_own)).result()

    def _after_last(self) -> Hashable:
        """What messages of a next round are like."""
        self.settle()
        return "after", self._last

    def _send(
        self,
        like: Hashable,
        what: str,
        write: Callable[[int], torch.Tensor],
        longest: Callable[[list[list[int]]], int],
    ) -> MessagesInFlight:
        """Send the messages of a round, as all that this rank sends."""
        self._last = what
        return self.messages.start(like, write, longest)

    def _new_messages(self, elements: int) -> torch.Tensor:
        shape = self.machines.size, self._head_elements + elements
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def _data(self, received: Received) -> tuple[torch.Tensor, torch.Tensor, int]:
        messages = received.messages
        return messages, messages[:, self._head_elements :], self.machines.rank

    def _longest(self, num_types: int, sends_own: bool = False) -> Callable[[list[list[int]]], int]:
        """The most that any rank sends to another, and maybe to itself, as heads tell."""
        size = self.machines.size
        first = first_word(num_types - 1, size)

        def longest(heads: list[list[int]]) -> int:
            if any(head[:2] != heads[0][:2] or head[0] != _OK for head in heads):
                return 0  # and all will raise
            counts = [head[first : first + size] for head in heads]
            return max(map(max, counts)) if sends_own else longest_of(counts)

        return longest

    def _check_alike(self, what: str, received: Received) -> None:
        """Raise if a rank has failed, or is to do something else than this one."""
        mine = list(notes_of(what)[:2])
        if any(head[:2] != mine for head in received.heads):
            self._raise_unlike(what)

    def _tell(self, what: str, error: Exception) -> None:
        """Tell what is wrong here, which all ranks have learned that something is."""
        self._last = ""
        self.machines.all_gather((what, error_text(error)))

    def _raise_unlike(self, what: str) -> NoReturn:
        """Raise what is wrong on another rank: it failed, or is to do something else."""
        self._last = ""
        every = self.machines.all_gather((what, ""))
        for rank, (other, reason) in enumerate(every):
            if reason:
                raise self.machines.failed(other, rank, reason)
        rank, other = next((rank, other) for rank, (other, _) in enumerate(every) if other != what)
        raise InvalidInputError(
            f"{what}, which other machines keep as well",
            f"a rank of machine {rank} is to {other} meanwhile",
            "have all ranks of the job sample and read the same in the same order",
        )


class RoundInFlight:
    """A round that has been started; ``wait`` gives what all ranks ask for, or raises."""

    def __init__(self, wait: Callable[[], Asked]) -> None:
        self._wait: Callable[[], Asked] | None = wait
        self._asked: Asked | None = None
        self._error: Exception | None = None

    def settle(self) -> None:
        """Wait for it, and keep an error that all ranks have been told of for the result."""
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            self._asked = wait()
        except Exception as error:
            self._error = error
            if not isinstance(error, DGLMGPUError):
                raise

    def result(self) -> Asked:
        """Wait for it."""
        self.settle()
        if self._asked is None:
            assert self._error is not None
            raise self._error
        return self._asked


def longest_of(counts: Sequence[Sequence[int]]) -> int:
    """The most that any rank has for another, of what each has for each."""
    return max(
        (n for rank, of in enumerate(counts) for other, n in enumerate(of) if other != rank),
        default=0,
    )


def notes_of(what: str, key: SampleKey | None = None, state: int = _OK) -> tuple[int, ...]:
    """What is first in a head: how a rank comes to the round, and to which, and its key."""
    numbers = (0,) * 4 if key is None else (key.seed, key.epoch, key.batch, key.hop)
    # As int64, which a key's numbers exceed.
    signed = ((number ^ _TOP) - _TOP for number in numbers)
    return (state, zlib.crc32(what.encode()), *signed)
