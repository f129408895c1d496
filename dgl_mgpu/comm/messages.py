"""Messages between ranks, of lengths that only their senders know."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.utils.streams import record_event

#: Elements that there is room for at least: lengths that are small vary most.
_SPARE = 64


class Received(NamedTuple):
    """What all ranks sent here."""

    heads: list[list[int]]  # of each rank
    messages: torch.Tensor  # with their heads, (ranks, elements)
    room: int


class Messages:
    """Messages between all ranks of a group, in one collective where their lengths were foreseen.

    All are equally long, so that nobody has to know how long another's is: a head of int64 words,
    and as much as there was room for.  The heads of a rank's messages are equal; from those of all
    ranks each knows how much room the longest message would need.  If that is more, all send again.
    """

    def __init__(self, group: Communicator, head_words: int) -> None:
        self._group, self._head_words = group, head_words
        self._rooms: dict[Hashable, int] = {}

    def start(
        self,
        like: Hashable,
        write: Callable[[int], torch.Tensor],
        longest: Callable[[list[list[int]]], int],
    ) -> MessagesInFlight:
        """Send each rank its message, without a wait for those of others; collective.

        ``like`` names the earlier messages that these are about as long as; it is the same on all
        ranks.  ``write`` gives the messages to all ranks, int32 or int64, shape (ranks, elements),
        with room for an even number; it is called again where that was too little.  ``longest``
        says from all heads how much room is needed, the same on all ranks.
        """
        return MessagesInFlight(self, like, write, longest)

    def send(self, messages: torch.Tensor) -> tuple[torch.Tensor, Callable[[], list[list[int]]]]:
        """Messages of all ranks, and what waits for their heads."""
        received = self._group.all_to_all(messages)
        words = received.view(torch.int64)[:, : self._head_words]
        return received, numbers_on_host(words)

    def room(self, like: Hashable, guess: int) -> int:
        """Room for messages like those before, or about ``guess`` where there was none yet."""
        return self._rooms.get(like, max(guess + guess % 2, _SPARE))

    def learn(self, like: Hashable, needed: int, room: int) -> bool:
        """Note how much room the longest of these messages needed; whether there was enough.

        Later ones have room for a little more than that, and for less and less of what was needed
        once.
        """
        next_room = needed + needed // 8 + _SPARE
        if like in self._rooms and needed <= room:
            next_room = room - room // 8 if 2 * needed < room else room
        self._rooms[like] = max(next_room + next_room % 2, _SPARE)
        return needed <= room


class MessagesInFlight:
    """Messages that all ranks have sent each other, maybe in vain: then they send again.

    All ranks ask for the result before they take part in another collective of the group.
    """

    def __init__(
        self,
        messages: Messages,
        like: Hashable,
        write: Callable[[int], torch.Tensor],
        longest: Callable[[list[list[int]]], int],
    ) -> None:
        self._messages, self._like, self._write, self._longest = messages, like, write, longest
        self._send()

    def _send(self) -> None:
        self._room = self._messages.room(self._like, _SPARE)
        self._received, self._heads = self._messages.send(self._write(self._room))

    def result(self) -> Received:
        """Wait for the messages of all ranks."""
        while True:
            heads = self._heads()
            if self._messages.learn(self._like, self._longest(heads), self._room):
                return Received(heads, self._received, self._room)
            self._send()


def head_elements(words: int, dtype: torch.dtype) -> int:
    """Elements of a message that a head of int64 words takes."""
    return words * torch.int64.itemsize // dtype.itemsize


def to_device(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
    """Numbers as int64; the copy does not wait for other work."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers_on_host(numbers: torch.Tensor) -> Callable[[], Any]:
    """Start to copy integers to the host; what waits for them gives lists."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    copied = record_event(numbers.device)

    def wait() -> Any:
        copied.synchronize()
        return on_host.tolist()

    return wait
